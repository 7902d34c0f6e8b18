"""What readers see of every target, and the anomalies that are noticed while it becomes visible."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


OUTSIDER = "~outside"
"""The query of a row that somebody else has written; it sorts behind those of the real ones."""


class Row(NamedTuple):
    """One source row as one attempt at one epoch has written it."""

    query: str
    epoch: int
    source: int
    attempt: str


@dataclass(slots=True)
class Readers:
    """What has become visible, and every anomaly seen while it did. ``decided`` is what Spark has decided.

    ``before_commit`` is called with a sink's letter before each of its commits.
    """

    decided: set[tuple[str, int]] = field(default_factory=set)
    visible: dict[str, dict[tuple[str, int], Row]] = field(default_factory=dict)
    anomalies: list[str] = field(default_factory=list)
    went_back: bool = False
    before_commit: Callable[[str], None] = lambda _sink: None
    clients: dict[str, dict[int, Any]] = field(default_factory=dict)
    """The sessions of each PostgreSQL server, by process id."""
    _pids: int = 0
    _attempts: dict[tuple[str, int], str] = field(default_factory=dict)

    def next_pid(self) -> int:
        """Return a process id."""
        self._pids += 1
        return self._pids

    def flag(self, anomaly: str) -> None:
        """Remember an anomaly once."""
        if anomaly not in self.anomalies:
            self.anomalies.append(anomaly)

    def publish(self, sink: str, rows: Sequence[Row]) -> None:
        """Show rows to the readers of a sink that appends."""
        seen = self.visible.setdefault(sink, {})
        for row in rows:
            if (row.query, row.epoch) not in self.decided:
                self.flag(f"EARLY {sink}")
            if (row.query, row.source) in seen:
                self.flag(f"DUPLICATE {sink}")
            seen[row.query, row.source] = row
            if self._attempts.setdefault((row.query, row.epoch), row.attempt) != row.attempt and not self.went_back:
                self.flag(f"MIXED ATTEMPTS {sink}")
