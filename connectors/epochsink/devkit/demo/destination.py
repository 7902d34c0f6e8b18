"""What the demo asks of a place that its pipeline writes to, and the count of its rows at the end.

A new kind of destination is a class, and an entry in `settings`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol, Self

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import DataFrame

    from epochsink.devkit.demo.kill_plan import Step
    from epochsink.sink import Sink
    from epochsink.testing.readers import Reader

Offsets = dict[int, int]
"""For each partition of the topic of orders, the offset after the last order meant."""
Copies = Counter[int]
"""How many rows there are of each order, by its id."""


class Eye(Protocol):
    """A reader's connection to a destination."""

    def look(self) -> int:
        """Return how many rows are visible now; what is asked next is asked of the same instant."""

    def beyond(self, decided: Offsets) -> set[int]:
        """Return the ids of orders at or after these offsets of the topic that the look saw.

        May leave out what an earlier look saw, too.
        """

    def close(self) -> None:
        """Release the connection."""


class Destination(Protocol):
    """One table, topic or index. A frozen dataclass of plain values: it crosses to the pipeline's process as JSON."""

    label: ClassVar[str]
    """What the display calls it."""
    steps: ClassVar[Sequence[Step]]
    """Steps of its own sink at which to kill."""

    def create(self) -> None:
        """Make it, empty, and without anything that would hide duplicates."""

    def sink(self) -> Sink:
        """Return its sink for `ExactlyOnce`."""

    def eye(self) -> Eye:
        """Connect as any reader would."""

    def copies(self) -> Copies:
        """Count the rows of each order, after everything has ended."""

    def reader(self) -> Reader:
        """Return the reader for tests, which knows what a sink may leave behind."""


class Appendable(Destination, Protocol):
    """A destination for the plain pipeline, too: one that Spark has a writer for."""

    def append(self, frame: DataFrame) -> None:
        """Write a batch the way that pipelines do it without epochsink."""


@dataclass(frozen=True, slots=True)
class RowCount:
    """What a destination holds in the end, against the orders 0 to n - 1 that went in."""

    rows_out: int
    lost: int
    duplicated: int

    @classmethod
    def of(cls, copies: Copies, orders: int) -> Self:
        """Count; a row that is not an order is one too many."""
        rows = copies.total()
        there = sum(order in copies for order in range(orders))
        return cls(rows_out=rows, lost=orders - there, duplicated=rows - there)


def divergent(destinations: Sequence[Copies]) -> int:
    """Return the number of orders of which some destination holds more rows than another."""
    every = set().union(*destinations)
    return sum(len({copies[order] for copies in destinations}) > 1 for order in every)
