"""Tidying an idle stream: what losing tasks leave late must not hold readers back until the next batch."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from epochsink.errors import Fenced
from epochsink.sink import Epoch, Recorded, Remnant
from simulation.by_hand import Query
from simulation.world import World


@pytest.fixture
def query() -> Query:
    return Query(World("K"))


def test_a_late_loser_is_ended_while_the_stream_is_idle(query: Query) -> None:
    epoch = query.begin(0)
    query.coordinator.record(epoch, {"K": [query.task(epoch)]})
    query.decide(epoch)
    query.task(epoch, number=1)
    assert query.open_transactions() == 1
    query.coordinator.tidy()
    assert query.open_transactions() == 0


def test_an_attempt_under_way_is_left_alone(query: Query) -> None:
    epoch = query.begin(0)
    written = {"K": [query.task(epoch)]}
    query.coordinator.tidy()
    assert query.open_transactions() == 1
    query.coordinator.record(epoch, written)
    query.coordinator.tidy()
    assert query.open_transactions() == 1
    query.decide(epoch)
    assert not query.world.readers.anomalies


def test_an_attempt_that_may_be_recorded_is_left_alone(query: Query, monkeypatch: pytest.MonkeyPatch) -> None:
    """The append has raised: nobody knows, so nothing of it is ended, by this run."""
    epoch = query.begin(0)
    written = {"K": [query.task(epoch)]}

    def unknown(*_: object) -> bool:
        raise OSError("no reply")

    with monkeypatch.context() as patched:
        patched.setattr(query.files, "create", unknown)
        with pytest.raises(OSError, match="no reply"):
            query.coordinator.record(epoch, written)
    query.coordinator.tidy()
    assert query.open_transactions() == 1


def test_an_abandoned_attempt_is_tidied(query: Query) -> None:
    epoch = query.begin(0)
    query.coordinator.abandon(epoch)
    query.task(epoch)
    query.coordinator.tidy()
    assert query.open_transactions() == 0


def test_an_unreachable_target_is_no_failure(query: Query, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(_recorded: object) -> list[Remnant]:
        raise ConnectionError("broker down")

    monkeypatch.setattr(query.participant, "remnants", unreachable)
    query.coordinator.tidy()
    query.coordinator.queue.raise_failure()


def test_a_superseded_driver_learns_it_by_tidying(query: Query) -> None:
    Query(query.world)
    with pytest.raises(Fenced):
        query.coordinator.tidy()


def test_an_attempt_waits_for_the_tidying_to_end(query: Query, monkeypatch: pytest.MonkeyPatch) -> None:
    """With real threads: begin() returns only after the sweep, so the sweep cannot see what it writes."""
    sweeping, go_on, begun = threading.Event(), threading.Event(), threading.Event()
    look = query.participant.remnants

    def slow(recorded: Recorded) -> Sequence[Remnant]:
        sweeping.set()
        assert go_on.wait(10)
        return look(recorded)

    query.begin(0)
    query.coordinator.abandon(Epoch(0, "0" * 32))
    monkeypatch.setattr(query.participant, "remnants", slow)
    tidier = threading.Thread(target=query.coordinator.tidy)
    tidier.start()
    assert sweeping.wait(10)

    def stream() -> None:
        query.coordinator.begin(0)
        begun.set()

    other = threading.Thread(target=stream)
    other.start()
    assert not begun.wait(0.2)
    go_on.set()
    assert begun.wait(10)
    tidier.join(10)
    other.join(10)
    assert not tidier.is_alive()
