"""At which steps a pipeline is killed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping
    from random import Random

ANY_MOMENT: Final = "any"

_EVERYWHERE: Final = {ANY_MOMENT: "at a random moment"}

EXACTLY_ONCE: Final = {
    "coordinator.recover.after": "recovered, before the first batch",
    "coordinator.record.before": "prepared, before the ledger records it",
    "coordinator.record.after": "recorded, before Spark's checkpoint decides",
    "coordinator.commit.before": "decided by the checkpoint, before the commit",
    "coordinator.done.before": "committed, before the ledger says done",
    **_EVERYWHERE,
}
PLAIN: Final = {
    "coordinator.record.after": "written, before Spark's checkpoint decides",
    "coordinator.settle.before": "foreachBatch has begun",
    **_EVERYWHERE,
}
MOST_REACHES: Final = 3


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL at the ``count``-th time that ``point`` is reached, or some time after that many epochs."""

    point: str
    title: str
    count: int
    delay_seconds: float

    @property
    def most_epochs(self) -> int:
        """Return how many epochs may pass until it strikes: tasks of one epoch may share a Python worker or not."""
        return 2 * self.count + 2


def plan(steps: Mapping[str, str], kills: int, random: Random) -> list[Kill]:
    """Return so many kills: every step once, in random order, before any comes again."""
    points: list[str] = []
    while len(points) < kills:
        points += random.sample(list(steps), len(steps))
    return [_kill(point, steps[point], random) for point in points[:kills]]


def _kill(point: str, title: str, random: Random) -> Kill:
    once = point == "coordinator.recover.after"
    return Kill(point, title, 1 if once else random.randint(1, MOST_REACHES), random.uniform(0, 0.8))
