"""Whether an epoch has rows, found out by Spark alone, which keeps them meanwhile.

Tasks in Python take longer to start than all else does in an epoch without rows. And only the plan's run tells that
there are none.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from epochsink.spark import compat

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from pyspark.sql import DataFrame

KEPT_ROWS: Final = 100_000
"""After an epoch of more rows that were kept, which takes memory or local disk as they do, none is looked at first."""


class ExpectedRows:
    """What earlier epochs make one expect of the next."""

    def __init__(self) -> None:
        self._had_rows = True
        self._most_kept = 0

    @property
    def rows(self) -> bool:
        """Whether there will be rows, for all that is known: then it is not worth looking first."""
        return self._had_rows or self._most_kept > KEPT_ROWS

    def learn(self, written: Collection[str]) -> None:
        """Hear which sinks an epoch has written to."""
        self._had_rows = bool(written)

    def learn_kept(self, rows: int) -> None:
        """Hear how many rows were kept in an epoch that was looked at first."""
        self._most_kept = max(self._most_kept, rows)


@contextmanager
def kept(frame: DataFrame) -> Iterator[int]:
    """Run a frame's plan, once; give how many rows come out of it. Who reads the frame in the body reads these.

    A frame that the user keeps is kept before and after.
    """
    if compat.is_kept(frame):
        yield compat.count_kept(frame)
        return
    frame.persist()
    try:
        yield compat.count_kept(frame)
    finally:
        frame.unpersist()
