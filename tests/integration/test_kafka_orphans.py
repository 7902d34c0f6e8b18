"""Transactions of tasks that still live when a sweep or an operator ends them.

The brokers do not ask the coordinator about rows that arrive, as before Kafka 3.6.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from kafka_kit import (
    NO_ROWS,
    commit,
    committing,
    epoch,
    identity,
    prepare,
    read_all,
    rows,
    sink_on_new_topic,
    task,
    transaction,
    vote,
    wait_for,
)

from epochsink.kafka.committable import transactional_id
from epochsink.kafka.librdkafka import NativeError
from epochsink.kafka.remnants import Brokers
from epochsink.kafka.transactions import State
from epochsink.sink import COMMITTED, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fix_services import FreshName

    from epochsink.devkit.services import KafkaService
    from epochsink.kafka import Kafka
    from epochsink.sink import Task
    from epochsink.testing.sink_rig import OneSink


@pytest.fixture(scope="module")
def trusting(make_kafka: Callable[..., KafkaService]) -> Iterator[KafkaService]:
    with make_kafka({"transaction.partition.verification.enable": False}) as service:
        yield service


@pytest.fixture
def sink(trusting: KafkaService, fresh_topic: FreshName) -> Kafka:
    return sink_on_new_topic(trusting.bootstrap_servers, fresh_topic(), partitions=1)


def sweep(committer: OneSink, sink: Kafka) -> None:
    del sink
    assert len(committer.abort_orphans([])) == 1


def end_as_an_operator(committer: OneSink, sink: Kafka) -> None:
    [name] = committer.leftovers()
    brokers = Brokers(sink.bootstrap_servers, {})
    [remnant] = [each for each in brokers.remnants() if each.name == name]
    brokers.end(remnant)
    brokers.close()


def state_of(committer: OneSink, of: Task) -> State:
    name = str(transactional_id(of, bounded=True))
    found: State = committer.participant._transactions.describe([name], time.monotonic() + 5)[name].state
    return found


@pytest.mark.parametrize("end", [sweep, end_as_an_operator])
def test_rows_that_a_living_task_writes_after_the_end_of_its_transaction_are_refused(
    sink: Kafka, end: Callable[[OneSink, Kafka], None]
) -> None:
    """They would hold readers back for good, or be committed with the next use of the id."""
    who, at = identity(), epoch(0)
    of = task(who, at)
    living = sink.writer(of)
    living.write(rows("early"))
    living._producer.flush()  # type: ignore[attr-defined] # of this sink
    with committing(sink, who) as committer:
        committer.fence()
        end(committer, sink)
        # until the partition has the end: what comes before that is aborted with the rest
        wait_for(lambda: state_of(committer, of) is State.COMPLETE_ABORT, "it is ended")
        living.write(rows("late"))
        with pytest.raises(NativeError, match="INVALID_PRODUCER_EPOCH"):
            living._producer.flush()  # type: ignore[attr-defined] # likewise
        [part] = vote(committer, at, prepare(sink, of, rows("again")))
        assert commit(committer, at, part) == COMMITTED
    assert read_all(sink.bootstrap_servers, str(sink.topic), 1) == ["again"]


def test_many_are_fenced_off_side_by_side_and_those_that_have_ended_meanwhile_are_left_alone(sink: Kafka) -> None:
    who, at = identity(), epoch(0)
    parts = [prepare(sink, task(who, at, partition=number), rows("a")) for number in range(3)]
    with committing(sink, who) as committer:
        transactions, deadline = committer.participant._transactions, committer.participant._cluster.deadline()
        committed, open_one, aborted = map(transaction, parts)
        assert commit(committer, at, parts[0]) == COMMITTED
        transactions.end(aborted, deadline, commit=False)
        # the id of the third is in use again
        again = prepare(sink, task(who, at, partition=2, name=parts[2]["task"]), rows("b"))
        transactions.fence_off([committed, open_one, aborted._replace(producer_id=aborted.producer_id + 1)], deadline)
        assert committer.commit(at, parts[1], NO_ROWS).outcome is Outcome.ABORTED
        assert commit(committer, at, again) == COMMITTED
    assert read_all(sink.bootstrap_servers, str(sink.topic), 2) == ["a", "b"]
