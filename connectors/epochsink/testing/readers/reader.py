"""What a reader does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import pyarrow as pa


class Unreachable(Exception):
    """The target could not be read now: note that nothing was read, and try again."""


class Reader(Protocol):
    """Reads one target. It keeps its connection, and makes a new one after a failure."""

    def read(self) -> pa.Table:
        """Return all rows that an ordinary consumer may see now. Raises `Unreachable`."""

    def leftovers(self) -> list[tuple[str, str]]:
        """Return what sinks have left in the target, as ("orphan" or "pin", what). Raises `Unreachable`."""

    def close(self) -> None:
        """Release the connection."""
