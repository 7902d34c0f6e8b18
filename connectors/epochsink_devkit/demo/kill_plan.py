"""Choose the steps at which a pipeline is killed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

ANY_MOMENT: Final = "any"


@dataclass(frozen=True, slots=True)
class Step:
    """A step at which a pipeline may be killed.

    ``reaches`` are the passes at which a kill is useful: 1 for the first. ``always`` puts the step in every plan of
    a pipeline with at least ``destinations`` destinations; others never reach it.
    """

    point: str
    title: str
    reaches: tuple[int, ...] = (1, 2)
    always: bool = False
    destinations: int = 1


_EVERYWHERE: Final = Step(ANY_MOMENT, "at a random moment")

EXACTLY_ONCE: Final = (
    Step("coordinator.recover.after", "recovered, before the first batch", reaches=(1,)),
    Step("coordinator.record.before", "prepared, before the ledger records it"),
    Step("coordinator.record.after", "recorded, before Spark's checkpoint decides"),
    Step("coordinator.commit.before", "decided by the checkpoint, before the commit"),
    Step("coordinator.commit.between", "one sink has committed, another has not", always=True, destinations=2),
    Step("coordinator.done.before", "committed, before the ledger says done"),
    _EVERYWHERE,
)
PLAIN: Final = (
    Step("coordinator.record.after", "written, before Spark's checkpoint decides", always=True),
    Step("coordinator.vote.between", "written to one place, not yet to the next", always=True, destinations=2),
    Step("coordinator.settle.before", "foreachBatch has begun"),
    _EVERYWHERE,
)
"""The corresponding steps of the plain pipeline's foreachBatch."""


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL when ``point`` is reached for the ``count``-th time, or at a random time after that many epochs."""

    point: str
    title: str
    count: int
    delay_seconds: float

    @property
    def most_epochs(self) -> int:
        """Return the largest number of epochs until the kill: each passes every step, and one more may have begun."""
        return self.count + 1


def plan(steps: Sequence[Step], kills: int, random: Random) -> list[Kill]:
    """Return ``kills`` kills in random order: first the steps with ``always``, and each once before any is repeated."""
    points: list[Step] = []
    while len(points) < kills:
        points += sorted(random.sample(steps, len(steps)), key=lambda step: not step.always)
    points = points[:kills]
    random.shuffle(points)
    return [Kill(step.point, step.title, random.choice(step.reaches), random.uniform(0, 0.8)) for step in points]
