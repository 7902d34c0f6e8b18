"""Define a place that the demo's pipeline writes to, and count its rows at the end.

A new kind of destination needs a class and an entry in `settings`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol, Self

from epochsink.sink import Sink
from epochsink_devkit.demo.kill_plan import Step
from epochsink_devkit.history.readers import TargetReader

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


Offsets = dict[int, int]
"""For each partition of the topic of orders, the offset after the last included order."""
Copies = Counter[int]
"""The number of rows of each order, by its id."""


class Eye(Protocol):
    """A reader's connection to a destination."""

    def look(self) -> int:
        """Return how many rows are visible now. The following questions are answered for the same point in time."""

    def beyond(self, decided: Offsets) -> set[int]:
        """Return the ids of visible orders at or after these offsets of the topic.

        May leave out orders that were already visible at an earlier look.
        """

    def close(self) -> None:
        """Release the connection."""


class Destination(Protocol):
    """One table, topic or index. A frozen dataclass of plain values, sent to the pipeline's process as JSON."""

    label: ClassVar[str]
    """Its name in the display."""
    steps: ClassVar[Sequence[Step]]
    """Steps of its sink at which to kill."""

    def create(self) -> None:
        """Create it empty, without unique keys, which would hide duplicates."""

    def sink(self) -> Sink:
        """Return its sink for `ExactlyOnce`."""

    def eye(self) -> Eye:
        """Connect a reader."""

    def copies(self) -> Copies:
        """Count the rows of each order, after the pipeline has ended."""

    def reader(self) -> TargetReader:
        """Return the reader for tests, which also finds what a sink may leave behind."""


class Appendable(Destination, Protocol):
    """A destination that Spark has a writer for, so that the plain pipeline can use it too."""

    def append(self, frame: DataFrame) -> None:
        """Write a batch as pipelines without epochsink do."""


@dataclass(frozen=True, slots=True)
class Tally:
    """The rows of a destination at the end, compared with the produced orders 0 to n - 1."""

    rows_out: int
    lost: int
    duplicated: int

    @classmethod
    def of(cls, copies: Copies, orders: int) -> Self:
        """Count. A row that is not an order counts as duplicated."""
        rows = copies.total()
        there = sum(order in copies for order in range(orders))
        return cls(rows_out=rows, lost=orders - there, duplicated=rows - there)


def divergent(destinations: Sequence[Copies]) -> int:
    """Return the number of orders that have more rows in one destination than in another."""
    every = set().union(*destinations)
    return sum(len({copies[order] for copies in destinations}) > 1 for order in every)
