"""In a log, rows stand in the order in which they were written: a lost epoch's must not come behind later ones'."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from epochsink.errors import PrepareFailed
from epochsink.kafka.committable import KafkaCommittable
from epochsink.kafka.server import TransactionState
from epochsink.protocol.coordinator import Plan
from simulation.by_hand import Query
from simulation.kafka_brokers import OK
from simulation.world import World


@pytest.fixture
def query() -> Query:
    return Query(World("K"))


def lose(query: Query, task: tuple[str, Any]) -> None:
    """Abort a task's transaction as a time-out does."""
    transaction = KafkaCommittable.from_json(task[1]).transaction
    assert query.world.brokers.end(*transaction, commit=False) == OK
    query.world.brokers.finish()


def test_an_attempt_that_a_replay_has_overtaken_is_not_recorded_and_the_next_one_is(query: Query) -> None:
    first = query.begin(0)
    written = query.task(first)
    query.coordinator.record(first, {"K": [written]})
    query.decide_only(0)
    second = query.begin(1)
    too_early = query.task(second)
    lose(query, written)
    assert query.coordinator.commit_decided()
    with pytest.raises(PrepareFailed, match="prepared again"):
        query.coordinator.record(second, {"K": [too_early]})
    assert query.open_transactions() == 0
    assert query.coordinator.settle(1) is Plan.WRITE
    again = query.coordinator.begin(1)
    query.coordinator.record(again, {"K": [query.task(again)]})
    query.decide(again)
    assert not query.world.readers.anomalies


def test_the_first_attempt_of_a_run_waits_for_what_an_earlier_run_has_recorded(query: Query) -> None:
    """That may be lost by now: its replay comes first, and no attempt has to fail for it."""
    first = query.begin(0)
    written = query.task(first)
    query.coordinator.record(first, {"K": [written]})
    lose(query, written)

    later = Query(query.world)
    assert later.coordinator.settle(0) is Plan.RUN_FOR_STATE
    later.decide_only(0)
    stream = threading.Thread(target=later.epoch, args=(1,))
    stream.start()
    stream.join(0.2)
    assert stream.is_alive(), "epoch 0 is not committed yet"
    assert later.coordinator.commit_decided()
    stream.join(30)
    assert not stream.is_alive()
    later.decide_only(1)
    assert later.coordinator.commit_decided()
    assert not later.coordinator.queue.pending
    assert not query.world.readers.anomalies


def test_several_lost_parts_are_each_replayed_once(query: Query) -> None:
    """The second replay is built from the parts of the newest entry, in which the first stands."""
    first = query.begin(0)
    written = [query.task(first), query.task(first, partition=1)]
    query.coordinator.record(first, {"K": written})
    for task in written:
        lose(query, task)
    query.decide_only(0)
    assert query.coordinator.commit_decided()
    assert query.open_transactions() == 0
    query.world.brokers.finish()
    states = [each.state for each in query.world.brokers.ids.values()]
    assert states.count(TransactionState.COMPLETE_COMMIT) == 2
    assert not query.world.readers.anomalies
