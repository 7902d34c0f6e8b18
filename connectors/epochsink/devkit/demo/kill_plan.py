"""At which steps a pipeline is killed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

ANY_MOMENT: Final = "any"


@dataclass(frozen=True, slots=True)
class Step:
    """A step at which a pipeline may be killed.

    ``reaches`` are the times of passing it that are worth a kill. Every plan has those that are ``always`` in it.
    """

    point: str
    title: str
    reaches: tuple[int, ...] = (1, 2)
    always: bool = False


_EVERYWHERE: Final = Step(ANY_MOMENT, "at a random moment")

EXACTLY_ONCE: Final = (
    Step("coordinator.recover.after", "recovered, before the first batch", reaches=(1,)),
    Step("coordinator.record.before", "prepared, before the ledger records it"),
    Step("coordinator.record.after", "recorded, before Spark's checkpoint decides"),
    Step("coordinator.commit.before", "decided by the checkpoint, before the commit"),
    Step("coordinator.commit.between", "one sink has committed, another has not", always=True),
    Step("coordinator.done.before", "committed, before the ledger says done"),
    _EVERYWHERE,
)
PLAIN: Final = (
    Step("coordinator.record.after", "written, before Spark's checkpoint decides", always=True),
    Step("coordinator.vote.between", "written to one place, not yet to the next", always=True),
    Step("coordinator.settle.before", "foreachBatch has begun"),
    _EVERYWHERE,
)
"""Where foreachBatch of the plain pipeline is at the like step."""


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL at the ``count``-th time that ``point`` is reached, or some time after that many epochs."""

    point: str
    title: str
    count: int
    delay_seconds: float

    @property
    def most_epochs(self) -> int:
        """Return how many epochs may pass until it strikes: each passes every step, and one more may have begun."""
        return self.count + 1


def plan(steps: Sequence[Step], kills: int, random: Random) -> list[Kill]:
    """Return so many kills in random order: every step once before any comes again, first those that are always in."""
    points: list[Step] = []
    while len(points) < kills:
        points += sorted(random.sample(steps, len(steps)), key=lambda step: not step.always)
    points = points[:kills]
    random.shuffle(points)
    return [Kill(step.point, step.title, random.choice(step.reaches), random.uniform(0, 0.8)) for step in points]
