"""The interface of a reader."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import pyarrow as pa


class Unreachable(Exception):
    """The target cannot be read now: try again."""


class Reader(Protocol):
    """Reads one target. It keeps its connection, and reconnects after a failure."""

    def read(self) -> pa.Table:
        """Return all rows that an ordinary consumer can see now. Raises `Unreachable`."""

    def leftovers(self) -> list[tuple[str, str]]:
        """Return what sinks left in the target, as ("orphan" or "pin", what). Raises `Unreachable`."""

    def close(self) -> None:
        """Release the connection."""
