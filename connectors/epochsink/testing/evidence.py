"""What a history shows, ready to be judged: its timeline, and each read compared with the source rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from epochsink.testing.timeline import Timeline
from epochsink.testing.views import View, scan

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

    from epochsink.testing.history import History, Target


@dataclass(frozen=True, slots=True)
class Anomaly:
    """A violation. ``name`` is a key of `ANOMALIES`; ``count`` is in the message's terms."""

    name: str
    target: str
    message: str
    count: int = 1

    def __str__(self) -> str:
        return f"{self.name}: {self.target}: {self.message}" if self.target else f"{self.name}: {self.message}"


@dataclass(slots=True)
class Evidence:
    """A history with every read already compared with the source rows."""

    history: History
    timeline: Timeline
    progress_within: float
    views: dict[str, list[View]] = field(default_factory=dict)

    @classmethod
    def of(cls, history: History, progress_within: float) -> Evidence:
        """Judge every read. Raises ValueError if nothing can be concluded: no final read, offsets not dense."""
        timeline = Timeline(history)
        return cls(history, timeline, progress_within, scan(history, timeline))

    def targets(self) -> Iterator[tuple[Target, list[View]]]:
        """Yield each target with its views, oldest first."""
        for name, views in self.views.items():
            yield self.history.targets[name], views

    def finals(self) -> Iterator[tuple[Target, View]]:
        """Yield each target with its final read."""
        for target, views in self.targets():
            yield target, [view for view in views if view.read.final][-1]

    def first_seen(self) -> Iterator[tuple[Target, list[View], dict[tuple[int, str], int]]]:
        """Yield each target with its views and, for each (epoch's position, attempt), the first view that shows it."""
        for target, views in self.targets():
            first: dict[tuple[int, str], int] = {}
            for place, view in enumerate(views):
                for pair in view.attempts:
                    first.setdefault(pair, place)
            yield target, views, dict(sorted(first.items()))

    def name(self, position: int | np.integer[Any]) -> str:
        """Return an epoch's name for people."""
        return self.timeline.name(int(position))
