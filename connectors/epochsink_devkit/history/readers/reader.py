"""The interface of a reader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import pyarrow as pa


def nothing() -> None:
    """Do nothing when it is settled what a read returns."""


class TargetUnreachable(Exception):
    """The target cannot be read now: try again."""


class TargetReader(Protocol):
    """Reads one target. It keeps its connection, and reconnects after a failure."""

    def read(self, fixed: Callable[[], None] = nothing) -> pa.Table:
        """Return all rows that an ordinary consumer can see now. Raises `TargetUnreachable`.

        ``fixed`` is called as soon as it is settled what is returned: what becomes visible later is not in it.
        """

    def leftovers(self) -> list[tuple[str, str]]:
        """Return what sinks left in the target, as ("orphan" or "pin", what). Raises `TargetUnreachable`."""

    def close(self) -> None:
        """Release the connection."""
