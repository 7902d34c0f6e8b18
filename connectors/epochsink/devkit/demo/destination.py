"""What the demo asks of a place that its pipeline writes to. A new kind is a class, and an entry in `settings`."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import DataFrame

    from epochsink.devkit.demo.kill_plan import Step
    from epochsink.devkit.demo.row_count import Copies
    from epochsink.sink import Sink
    from epochsink.testing.readers import Reader

Offsets = dict[int, int]
"""For each partition of the topic of orders, the offset after the last order meant."""


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
