"""Whether an epoch has rows, found out by Spark alone, which keeps them meanwhile.

Tasks in Python take longer to start than all else does in an epoch without rows. And only the plan's run tells that
there are none.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812 - its usual name

from epochsink.sink.sql_name import quoted
from epochsink.spark import compat

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructField

_INTERVAL: Final = '"interval"'
"""What the JSON of a schema calls the type."""

BATCHES_OF_TASK: Final = 5
"""How many batches (of 10,000 rows by default) of each task may be kept, which takes memory or local disk.

After an epoch that had more, none is looked at first.
"""


class ExpectedRows:
    """What earlier epochs make one expect of the next."""

    def __init__(self) -> None:
        self._had_rows = True
        self._were_many = False
        self._kept: dict[str, bool] = {}

    def look_first(self, frame: DataFrame) -> bool:
        """Return whether it is worth looking whether there are any, in a frame that Spark can keep meanwhile."""
        return not self.rows and self.can_keep(frame)

    def can_keep(self, frame: DataFrame) -> bool:
        """Return whether Spark can keep a frame; asked once for each schema."""
        schema = compat.schema_text(frame)
        if schema not in self._kept:
            self._kept[schema] = compat.can_be_kept(frame)
        return self._kept[schema]

    @property
    def rows(self) -> bool:
        """Whether there will be rows, for all that is known: then it is not worth looking first."""
        return self._had_rows or self._were_many

    def learn(self, written: Collection[str]) -> None:
        """Hear which sinks an epoch has written to."""
        self._had_rows = bool(written)

    def learn_kept(self, batches: int, tasks: int) -> None:
        """Hear how much was kept in an epoch that was looked at first."""
        self._were_many = self._were_many or batches > BATCHES_OF_TASK * tasks


@contextmanager
def kept(frame: DataFrame) -> Iterator[tuple[int, int]]:
    """Run a frame's plan, once; give `compat.batches_kept`. Who reads the frame in the body reads these.

    A frame that the user keeps is kept before and after.
    """
    if compat.is_kept(frame):
        yield compat.batches_kept(frame)
        return
    frame.persist()
    try:
        yield compat.batches_kept(frame)
    finally:
        frame.unpersist()


def run(frame: DataFrame) -> None:
    """Run the whole plan of a frame, and nothing else: an action that writes no row anywhere."""
    # the place that takes all rows takes no column with a calendar's interval in it, at whatever depth
    if _INTERVAL in compat.schema_text(frame):
        frame = frame.select([_written(field) for field in frame.schema])
    frame.write.format("noop").mode("overwrite").save()


def _written(field: StructField) -> Column:
    column = F.col(quoted(field.name))
    return column.cast("string").alias(field.name) if _INTERVAL in field.json() else column


def tell_observers(frame: DataFrame) -> None:
    """Have Spark tell what a function of the user's observes in a frame that is kept, and that nobody reads.

    Spark tells it at the end of an action (``Observation.get`` waits for that), and `kept` runs the plan without one.
    """
    if compat.is_observed(frame):
        run(frame)
