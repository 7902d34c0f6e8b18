"""Rows that reach a broker after the end of their transaction: of living tasks, and in requests that are late.

The brokers do not ask the coordinator about rows that arrive, as before Kafka 3.6.
"""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Producer
from kafka_kit import (
    NO_ROWS,
    commit,
    committing,
    epoch,
    id_state,
    identity,
    prepare,
    prepare_kept,
    read_all,
    rows,
    sink_on_new_topic,
    take_over,
    task,
    transaction,
    vote,
)
from kafka_proxy import Api, Fate, KafkaProxy
from waiting import wait_until

from epochsink.errors import PrepareFailed
from epochsink.kafka import producer
from epochsink.kafka.committable import Transaction, transactional_id
from epochsink.kafka.errors import FENCED, Refused, Unreachable
from epochsink.kafka.librdkafka import NativeError
from epochsink.kafka.remnants import Brokers
from epochsink.kafka.server import TransactionState
from epochsink.kafka.topic_log import TopicLog
from epochsink.sink import COMMITTED, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fix_services import FreshName

    from epochsink.kafka import Kafka
    from epochsink.sink import Task
    from epochsink.testing.sink_rig import OneSink
    from epochsink_devkit.services import KafkaService


@pytest.fixture(scope="module")
def proxy() -> Iterator[KafkaProxy]:
    with KafkaProxy() as before:
        yield before


@pytest.fixture(scope="module")
def trusting(make_kafka: Callable[..., KafkaService], proxy: KafkaProxy) -> Iterator[KafkaService]:
    with make_kafka({"transaction.partition.verification.enable": False} | proxy.listener) as service:
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


def state_of(committer: OneSink, of: Task) -> TransactionState:
    return id_state(committer, str(transactional_id(of, bounded=True)))


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
        wait_until(lambda: state_of(committer, of) is TransactionState.COMPLETE_ABORT, "it is ended")
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


@pytest.mark.parametrize("fate", [Fate.HOLD, Fate.STALL], ids=["waiting for the next try", "in flight"])
def test_a_task_that_fails_leaves_the_end_to_the_sweep_if_a_broker_may_still_read_its_rows(
    sink: Kafka, proxy: KafkaProxy, fate: Fate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an abort they would open a transaction that no coordinator knows: readers wait for it for good."""
    monkeypatch.setattr(producer, "_ABORT_SECONDS", 3.0)
    who, at = identity(), epoch(0)
    of = task(who, at)
    # the second try is to come after the abort, on a slow machine too
    slow = {"retry.backoff.ms": 30_000, "retry.backoff.max.ms": 30_000, "linger.ms": 0}
    failing: Any = replace(sink, bootstrap_servers=proxy.bootstrap_servers, options=slow).writer(of)
    caught = proxy.catch(Api.PRODUCE, fate)
    failing.write(rows("late"))
    caught.wait()
    if fate is Fate.HOLD:
        events = failing._producer._events
        wait_until(lambda: events.serve(10) or events.trouble is not None, "the client has lost its connection")
    failing.abort()
    with committing(sink, who) as committer:
        committer.fence()
        assert state_of(committer, of) is TransactionState.ONGOING
        assert len(committer.abort_orphans([])) == 1
        wait_until(lambda: state_of(committer, of) is TransactionState.COMPLETE_ABORT, "it is ended")
        caught.deliver()
        [part] = vote(committer, at, prepare(sink, of, rows("again")))
        assert commit(committer, at, part) == COMMITTED
    assert read_all(sink.bootstrap_servers, str(sink.topic), 1) == ["again"]


def test_a_task_whose_marker_is_not_answered_leaves_the_end_to_the_sweep(sink: Kafka, proxy: KafkaProxy) -> None:
    who, at = identity(), epoch(0)
    of = task(who, at)
    failing = replace(sink, bootstrap_servers=proxy.bootstrap_servers, timeout=2).writer(of)
    failing.write(rows("late"))
    proxy.catch(Api.TXN_OFFSET_COMMIT, Fate.STALL)
    with pytest.raises(PrepareFailed):
        failing.prepare()
    failing.abort()
    with committing(sink, who) as committer:
        committer.fence()
        assert state_of(committer, of) is TransactionState.ONGOING
        assert len(committer.abort_orphans([])) == 1


def test_a_task_that_fails_aborts_what_the_brokers_have_answered(sink: Kafka) -> None:
    who, at = identity(), epoch(0)
    of = task(who, at)
    failing = sink.writer(of)
    failing.write(rows("early"))
    failing._producer.flush()  # type: ignore[attr-defined] # of this sink
    failing.abort()
    with committing(sink, who) as committer:
        wait_until(lambda: state_of(committer, of) is TransactionState.COMPLETE_ABORT, "it is ended")


def test_rows_that_are_copied_late_are_refused_once_their_transaction_was_given_up(
    sink: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver's own request was not answered in time, and is on its way."""
    who, at = identity(), epoch(0)
    late: list[tuple[TopicLog, tuple[Any, ...]]] = []
    append = TopicLog.append

    def append_late(log: TopicLog, *arguments: Any) -> None:
        late.append((log, arguments))
        raise Unreachable("no answer in time", hint="none: a test's")

    with committing(sink, who) as committer:
        part = prepare_kept(committer, sink, at, rows("a"))
        take_over(sink.bootstrap_servers, part)
        assert committer.commit(at, part, NO_ROWS).outcome is Outcome.ABORTED
        monkeypatch.setattr(TopicLog, "append", append_late)
        with pytest.raises(Unreachable):
            committer.replay(at, part, NO_ROWS, uuid.uuid4().hex)
        monkeypatch.setattr(TopicLog, "append", append)
        [(log, arguments)] = late
        # the end is written to the partition soon after the answer
        wait_until(lambda: not committer.leftovers(), "it is ended")
        with pytest.raises(Refused) as refused:
            wait_until(lambda: append(log, *arguments) is not None, "it is refused")
        assert refused.value.code in FENCED
        part = committer.replay(at, part, NO_ROWS, uuid.uuid4().hex)
        assert commit(committer, at, part) == COMMITTED
    assert read_all(sink.bootstrap_servers, str(sink.topic), 1) == ["a"]


@pytest.mark.parametrize("used_again", [False, True])
def test_a_transaction_that_no_coordinator_has_open_is_ended_or_told_of_once(
    sink: Kafka, caplog: pytest.LogCaptureFixture, *, used_again: bool
) -> None:
    """Readers of the done epoch wait for it. Whether it was aborted is not known once its id was used again."""
    who, at = identity(), epoch(0)
    lost = task(who, at, partition=1)
    living: Any = sink.writer(lost)
    living.write(rows("early"))
    living._producer.flush()
    with committing(sink, who) as committer:
        transactions, deadline = committer.participant._transactions, committer.participant._cluster.deadline()
        before = Transaction(living.transactional_id, *living._producer.identity())
        transactions.end(before, deadline, commit=False)
        wait_until(lambda: state_of(committer, lost) is TransactionState.COMPLETE_ABORT, "it is ended")
        living.write(rows("late"))
        living._producer.flush()
        if used_again:
            # so that the coordinator does not tell any more how the transaction has ended
            transactions.initialise(living.transactional_id, deadline)
        lines = []
        for number in range(2):
            now = epoch(number)
            [part] = vote(committer, now, prepare(sink, task(who, now), rows("a")))
            assert committer.commit(now, part, NO_ROWS) == COMMITTED
            lines += committer.visible(now, [part])
    living._producer.release()
    warnings = [each for each in caplog.messages if "no coordinator" in each]
    if used_again:
        assert (len(warnings), lines) == (1, [])
        assert f"readers of {sink.topic}-0 wait" in warnings[0]
        assert f"(producer {before.producer_id}, epoch {before.producer_epoch})" in warnings[0]
    else:
        assert (warnings, len(lines)) == ([], 1)
        assert living.transactional_id in lines[0]
        assert read_all(sink.bootstrap_servers, str(sink.topic), 2) == ["a", "a"]


def test_a_transaction_of_another_program_is_not_taken_for_one_that_nobody_knows(
    sink: Kafka, caplog: pytest.LogCaptureFixture
) -> None:
    who, at = identity(), epoch(0)
    other = Producer({"bootstrap.servers": sink.bootstrap_servers, "transactional.id": uuid.uuid4().hex})
    other.init_transactions(10)
    other.begin_transaction()
    other.produce(str(sink.topic), "theirs")
    other.flush(10)
    with committing(sink, who) as committer:
        [part] = vote(committer, at, prepare(sink, task(who, at), rows("a")))
        assert committer.commit(at, part, NO_ROWS) == COMMITTED
        assert committer.visible(at, [part]) == []
    other.abort_transaction(10)
    assert not [each for each in caplog.messages if "no coordinator" in each]
