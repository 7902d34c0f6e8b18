"""A driver that has taken the fence waits for the commits of those before it."""

from __future__ import annotations

import time
from typing import Any

import pytest

from epochsink.errors import WentBack
from epochsink.kafka.cluster import Cluster
from epochsink.kafka.committable import Producer, transactional_id
from epochsink.kafka.errors import Unreachable
from epochsink.kafka.fence import Fence
from epochsink.kafka.server import Description, TransactionState
from epochsink.sink import Epoch, Identity, Task

OURS = Producer(7, 3)


class Coordinator:
    """Gives out producer epochs; ``ending`` are the transactions that it still writes to their partitions, by look.

    ``ongoing`` are those that are open, and ``initialised`` the ids that were given a producer epoch.
    """

    def __init__(self, *ending: list[str]) -> None:
        self.ending = list(ending)
        self.ongoing: list[str] = []
        self.initialised: list[str] = []

    def initialise(self, name: str, deadline: float) -> Producer:
        del deadline
        self.initialised.append(name)
        return OURS

    def open_ids(self, prefix: str, deadline: float) -> list[str]:
        return self.ids(prefix, (TransactionState.ONGOING,), deadline)

    def ids(self, prefix: str, states: tuple[TransactionState, ...], deadline: float) -> list[str]:
        del prefix, deadline
        if states == (TransactionState.ONGOING,):
            return self.ongoing
        return self.ending.pop(0) if TransactionState.PREPARE_COMMIT in states and self.ending else []


def fence(coordinator: Any) -> Fence:
    taken = Fence(Cluster("broker:9092", {}, 1.0), coordinator, Identity("query", "topic", 1))
    taken.take(time.monotonic() + 1)
    return taken


def test_markers_are_compared_when_what_others_commit_has_ended() -> None:
    coordinator = Coordinator(["epochsink.x"], ["epochsink.x"])
    fence(coordinator).await_others(time.monotonic() + 10)
    assert coordinator.ending == []


def test_a_commit_that_does_not_end_stops_the_start() -> None:
    coordinator = Coordinator(*[["epochsink.x"]] * 1000)
    with pytest.raises(Unreachable, match="has not ended transactions of this query in time"):
        fence(coordinator).await_others(time.monotonic() + 0.05)


def begun(generation: int) -> str:
    task = Task(Identity("query", "topic", generation), Epoch(5, "a" * 32), 0, "b" * 32)
    return str(transactional_id(task, bounded=True))


def test_a_driver_of_a_later_generation_is_not_fenced() -> None:
    coordinator = Coordinator()
    coordinator.ongoing = [begun(generation=2)]
    with pytest.raises(WentBack, match="a driver on another copy of this checkpoint has started later"):
        fence(coordinator)
    assert coordinator.initialised == []


def test_a_driver_of_a_later_generation_that_begins_during_the_wait_stops_the_start() -> None:
    coordinator = Coordinator()
    taken = fence(coordinator)
    coordinator.ongoing = [begun(generation=1)]
    taken.await_others(time.monotonic() + 10)
    coordinator.ongoing = [begun(generation=2)]
    with pytest.raises(WentBack, match="a driver on another copy of this checkpoint has started later"):
        taken.await_others(time.monotonic() + 10)


@pytest.mark.parametrize(
    ("now", "lost"),
    [
        (Description(TransactionState.EMPTY, 7, 3), False),
        (Description(TransactionState.EMPTY, 7, 4), True),
        (Description(TransactionState.EMPTY, 8, 0), True),
        (Description(TransactionState.EMPTY, 7, 2), False),
        (Description(TransactionState.NOT_FOUND), False),
    ],
    ids=["ours", "taken again", "taken after it was forgotten", "set back", "forgotten"],
)
def test_a_fence_that_another_driver_has_taken_since_is_lost(now: Description, *, lost: bool) -> None:
    assert fence(Coordinator()).is_lost(now) is lost
