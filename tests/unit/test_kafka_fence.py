"""A driver that has taken the fence waits for the commits of those before it."""

from __future__ import annotations

import time
from typing import Any

import pytest

from epochsink.kafka.committable import Producer
from epochsink.kafka.errors import Unreachable
from epochsink.kafka.fence import Fence
from epochsink.kafka.transactions import State
from epochsink.sink import Identity


class Coordinator:
    """Gives out producer epochs; ``ending`` are the transactions that it still writes to their partitions, by look."""

    def __init__(self, *ending: list[str]) -> None:
        self.ending = list(ending)

    def initialise(self, name: str, deadline: float) -> Producer:
        del name, deadline
        return Producer(7, 3)

    def open_ids(self, prefix: str, deadline: float) -> list[str]:
        return self.ids(prefix, (State.ONGOING,), deadline)

    def ids(self, prefix: str, states: tuple[State, ...], deadline: float) -> list[str]:
        del prefix, deadline
        return self.ending.pop(0) if State.PREPARE_COMMIT in states and self.ending else []


def fence(coordinator: Any) -> Fence:
    taken = Fence(coordinator, Identity("query", "topic", 1), "Kafka")
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
