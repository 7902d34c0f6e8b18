"""What the demo asks of a place that its pipeline writes to. A new kind is a class, and an entry in `settings`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import DataFrame

    from epochsink.protocol import Sink

Offsets = dict[int, int]
"""For each partition of the topic of orders, the offset after the last order meant."""


@dataclass(frozen=True, slots=True)
class Tally:
    """What a destination holds in the end, against the orders 0 to n - 1 that went in."""

    rows_out: int
    lost: int
    duplicated: int


class Eye(Protocol):
    """A reader's connection to a destination."""

    def look(self) -> int:
        """Return how many rows are visible now; what is asked next is asked of the same instant."""

    def beyond(self, decided: Offsets) -> set[int]:
        """Return the ids of orders that were visible and lie at or after these offsets of the topic."""

    def close(self) -> None:
        """Release the connection."""


class Destination(Protocol):
    """One table, topic or index. A frozen dataclass of plain values: it crosses to the pipeline's process as JSON."""

    label: ClassVar[str]
    """What the display calls it."""
    points: ClassVar[Mapping[str, str]]
    """Crash points of its own sink, each with what is going on there."""
    plain_writer: ClassVar[str]
    """What `append` uses, in words."""

    def create(self) -> None:
        """Make it, empty, and without anything that would hide duplicates."""

    def sink(self) -> Sink:
        """Return its sink for `ExactlyOnce`."""

    def append(self, frame: DataFrame) -> None:
        """Write a batch the way that pipelines do it without epochsink."""

    def eye(self) -> Eye:
        """Connect as any reader would."""

    def tally(self, orders: int) -> Tally:
        """Count, after everything has ended."""
