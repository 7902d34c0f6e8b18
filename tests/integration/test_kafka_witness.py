"""Rows that their partitions lose, or abort, while the transaction coordinator says that all is well."""

from __future__ import annotations

import dataclasses
import os
import uuid
from typing import TYPE_CHECKING, Any, Final

import pytest
from kafka.structs import TopicPartition
from kafka_kit import (
    NO_ROWS,
    ListRows,
    Reader,
    abort_at_partitions,
    admin,
    await_visible,
    commit,
    committed,
    committing,
    create_topic,
    epoch,
    identity,
    prepare,
    read_all,
    rows,
    task,
    transaction,
    vote,
)

from epochsink.errors import LogIncomplete, OutcomeUnknown, PrepareFailed, SpoolMissing
from epochsink.kafka import Kafka
from epochsink.kafka.committable import KafkaCommittable
from epochsink.sink import COMMITTED, Keeping, Outcome
from epochsink_devkit.services import LocalKafka

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fix_services import FreshName

    from epochsink.sink import Committable, Epoch, Identity, Rows
    from epochsink.testing.sink_rig import OneSink

VALUES: Final = [str(number).zfill(3) for number in range(60)]
"""Rows of a task: both partitions get some."""


@pytest.fixture(scope="module")
def broker() -> Iterator[LocalKafka]:
    """Start a broker whose files can be reached."""
    with LocalKafka(short_lived=True) as service:
        yield service


def lose_files(broker: LocalKafka, topic: str, part: Committable) -> None:
    """Have the broker come back without what it kept of a partition, as after a disk was lost."""
    del part
    broker.kill()
    for file in (broker.data / f"{topic}-1").iterdir():
        if file.name != "partition.metadata":
            file.unlink()
    broker.start()


def truncate(broker: LocalKafka, topic: str, part: Committable) -> None:
    """Have the broker come back without the end of a partition's log, as after an unclean leader election."""
    del part
    broker.kill()
    [segment] = (broker.data / f"{topic}-1").glob("*.log")
    os.truncate(segment, segment.stat().st_size - 1)
    for snapshot in (broker.data / f"{topic}-1").glob("*.snapshot"):
        snapshot.unlink()
    broker.start()


def delete_first_rows(broker: LocalKafka, topic: str, part: Committable) -> None:
    """Delete the first batches of a partition, and keep the others."""
    [first] = [start for partition, start, *_ in part["places"][topic] if partition == 1]
    with admin(broker.bootstrap_servers) as client:
        client.delete_records({TopicPartition(topic, 1): first + 12})


def delete_rows(broker: LocalKafka, topic: str, part: Committable) -> None:
    """Delete all that a partition has."""
    del part
    with admin(broker.bootstrap_servers) as client:
        client.delete_records({TopicPartition(topic, 1): -1})


LOSSES: Final = [lose_files, truncate, abort_at_partitions, delete_first_rows]


class Prepared:
    """One task's epoch, voted on."""

    def __init__(self, broker: LocalKafka, topic: str, *, spool: bool | None) -> None:
        self.topic = create_topic(broker.bootstrap_servers, topic)
        self.config = Kafka(
            bootstrap_servers=broker.bootstrap_servers,
            topic=topic,
            spool=spool,
            transaction_timeout=600,
            timeout=30,
            # a batch for some rows, so that a part of them can be lost
            options={"batch.num.messages": 5, "linger.ms": 0},
        )
        self.who: Identity = identity()
        self.at: Epoch = epoch(4)
        name = uuid.uuid4().hex
        self.rows: Rows = ListRows({name: [rows(*VALUES)]}) if spool else NO_ROWS
        self.of = dataclasses.replace(
            task(self.who, self.at, name=name), keeping=Keeping.IN_SPOOL if spool else Keeping.IN_TARGET
        )

    def vote(self, committer: OneSink) -> Committable:
        """Write and vote; the topic keeps the rows where it is asked to."""
        if self.config.spool is None:
            assert committer.begin(self.at, rows("a").schema).keeping is Keeping.IN_TARGET
        [part] = committer.vote(self.at, [prepare(self.config, self.of, *[rows(*VALUES)])], self.rows)
        return part


@pytest.mark.parametrize("meanwhile", LOSSES)
def test_rows_that_partitions_have_lost_since_the_vote_are_written_again_from_the_spool(
    broker: LocalKafka, fresh_topic: FreshName, meanwhile: Callable[..., None]
) -> None:
    prepared = Prepared(broker, fresh_topic(), spool=True)
    at, spool = prepared.at, prepared.rows
    with committing(prepared.config, prepared.who) as committer:
        part = prepared.vote(committer)
        meanwhile(broker, prepared.topic, part)
        verdict = commit(committer, at, part, spool)
        assert verdict.outcome is Outcome.ABORTED, verdict
        assert f"do not hold transaction {part['transactional_id']} whole" in verdict.evidence
        replayed = committer.replay(at, part, spool, uuid.uuid4().hex)
        assert commit(committer, at, replayed, spool) == COMMITTED
        assert committer.leftovers() == []
    assert read_all(broker.bootstrap_servers, prepared.topic, len(VALUES)) == VALUES


def test_a_transaction_that_an_operator_has_aborted_is_written_again_from_the_topic(
    broker: LocalKafka, fresh_topic: FreshName
) -> None:
    prepared = Prepared(broker, fresh_topic(), spool=None)
    at = prepared.at
    with committing(prepared.config, prepared.who) as committer:
        part = prepared.vote(committer)
        abort_at_partitions(broker, prepared.topic, part)
        assert commit(committer, at, part).outcome is Outcome.ABORTED
        replayed = committer.replay(at, part, NO_ROWS, uuid.uuid4().hex)
        assert commit(committer, at, replayed) == COMMITTED
    assert read_all(broker.bootstrap_servers, prepared.topic, len(VALUES)) == VALUES


@pytest.mark.parametrize(
    ("spool", "meanwhile", "error"),
    [
        *((None, meanwhile, LogIncomplete) for meanwhile in (lose_files, truncate, delete_first_rows)),
        *((False, meanwhile, SpoolMissing) for meanwhile in LOSSES),
    ],
)
def test_rows_that_partitions_have_lost_and_nobody_keeps_stop_the_query_and_none_is_applied(
    broker: LocalKafka, fresh_topic: FreshName, *, spool: bool | None, meanwhile: Callable[..., None], error: Any
) -> None:
    prepared = Prepared(broker, fresh_topic(), spool=spool)
    at = prepared.at
    with committing(prepared.config, prepared.who) as committer:
        part = prepared.vote(committer)
        meanwhile(broker, prepared.topic, part)
    for _ in range(2):  # the next start says the same
        with committing(prepared.config, prepared.who) as committer:
            assert commit(committer, at, part).outcome is Outcome.ABORTED
            with pytest.raises(error):
                committer.replay(at, part, NO_ROWS, uuid.uuid4().hex)
            assert committer.leftovers() == []
    with Reader(broker.bootstrap_servers, prepared.topic) as reader:
        assert reader.poll(1.0) == []


@pytest.mark.parametrize("meanwhile", [lose_files, truncate, delete_rows])
def test_rows_that_partitions_have_lost_before_the_vote_are_written_again_by_the_vote(
    broker: LocalKafka, fresh_topic: FreshName, meanwhile: Callable[..., None]
) -> None:
    prepared = Prepared(broker, fresh_topic(), spool=True)
    written = prepare(prepared.config, prepared.of, rows(*VALUES))
    meanwhile(broker, prepared.topic, written)
    with committing(prepared.config, prepared.who) as committer:
        [part] = committer.vote(prepared.at, [written], prepared.rows)
        assert transaction(part) != transaction(written)
        assert commit(committer, prepared.at, part, prepared.rows) == COMMITTED
        committer.abort_orphans([])
    assert read_all(broker.bootstrap_servers, prepared.topic, len(VALUES)) == VALUES


def test_rows_that_are_deleted_before_the_vote_fail_the_attempt_alone_if_the_topic_kept_them(
    broker: LocalKafka, fresh_topic: FreshName
) -> None:
    prepared = Prepared(broker, fresh_topic(), spool=None)
    with committing(prepared.config, prepared.who) as committer:
        assert committer.begin(prepared.at, rows("x").schema).keeping is Keeping.IN_TARGET
        written = prepare(prepared.config, prepared.of, rows(*VALUES))
        delete_rows(broker, prepared.topic, written)
        with pytest.raises(PrepareFailed, match="Spark runs the epoch again"):
            committer.vote(prepared.at, [written], NO_ROWS)


def half_lost(broker: LocalKafka, prepared: Prepared) -> Committable:
    """Write a task's rows, while a partition loses the first half of its share: the producer goes on."""
    writer: Any = prepared.config.writer(prepared.of)
    writer.write(rows(*VALUES[:30]))
    writer._producer.flush()
    lose_files(broker, prepared.topic, {})
    writer.write(rows(*VALUES[30:]))
    written: Committable = writer.prepare()
    return written


@pytest.mark.parametrize("voted", [False, True], ids=["in the first epoch", "in a later epoch"])
def test_rows_that_a_partition_loses_while_their_task_writes_on_are_written_again_by_the_vote(
    broker: LocalKafka, fresh_topic: FreshName, *, voted: bool
) -> None:
    """The last sequence numbers tell of all rows: a partition without state accepts any first number."""
    prepared = Prepared(broker, fresh_topic(), spool=True)
    with committing(prepared.config, prepared.who) as committer:
        if voted:
            before = epoch(3)
            [part] = vote(committer, before, prepare(prepared.config, task(prepared.who, before), rows("before")))
            assert commit(committer, before, part) == COMMITTED
        written = half_lost(broker, prepared)
        [part] = committer.vote(prepared.at, [written], prepared.rows)
        assert transaction(part) != transaction(written)
        assert commit(committer, prepared.at, part, prepared.rows) == COMMITTED
        committer.abort_orphans([])
    # what is lost of a done epoch is not written again
    found = read_all(broker.bootstrap_servers, prepared.topic, len(VALUES))
    assert [value for value in found if value != "before"] == VALUES


def test_an_attempt_whose_first_rows_are_lost_is_refused_however_often_it_is_voted_on(
    broker: LocalKafka, fresh_topic: FreshName
) -> None:
    prepared = Prepared(broker, fresh_topic(), spool=False)
    with committing(prepared.config, prepared.who) as committer:
        written = half_lost(broker, prepared)
        for _ in range(2):
            with pytest.raises(PrepareFailed, match=f"its first rows were lost from {prepared.topic}-1"):
                committer.vote(prepared.at, [written], NO_ROWS)


@pytest.mark.parametrize("meanwhile", [*LOSSES, delete_rows])
def test_rows_that_are_lost_between_the_look_and_the_commit_stop_the_query_before_the_epoch_is_done(
    broker: LocalKafka, fresh_topic: FreshName, meanwhile: Callable[..., None]
) -> None:
    """They are not written again, with the copy at hand: the other partition has its rows. A restart says the same."""
    prepared = Prepared(broker, fresh_topic(), spool=True)
    at = prepared.at
    with committing(prepared.config, prepared.who) as committer:
        part = prepared.vote(committer)
        end = committer.participant._transactions.end

        def end_late(*arguments: Any, **settings: Any) -> Any:
            meanwhile(broker, prepared.topic, part)
            return end(*arguments, **settings)

        committer.participant._transactions.end = end_late
        assert committer.commit(at, part, prepared.rows) == COMMITTED
        with pytest.raises(OutcomeUnknown, match=r"rows are not all in .*(.|\n)*--sink topic --as committed"):
            await_visible(committer, at, [part])
    with committing(prepared.config, prepared.who) as committer:
        assert committer.commit(at, part, prepared.rows) == COMMITTED
        with pytest.raises(OutcomeUnknown, match=f"{prepared.topic}-[01]"):
            await_visible(committer, at, [part])


def test_of_many_transactions_the_one_that_is_lost_is_written_again(broker: LocalKafka, fresh_topic: FreshName) -> None:
    prepared = Prepared(broker, fresh_topic(), spool=True)
    at, names = prepared.at, [uuid.uuid4().hex for _ in range(10)]
    spool = ListRows({name: [rows(*[f"{value}-{index}" for value in VALUES])] for index, name in enumerate(names)})
    with committing(prepared.config, prepared.who) as committer:
        written = [
            prepare(prepared.config, task(prepared.who, at, index, name), *spool.read(name))
            for index, name in enumerate(names)
        ]
        parts = committer.vote(at, written, spool)
        abort_at_partitions(broker, prepared.topic, parts[3])
        assert committed(committer, at, parts) == set(range(10)) - {3}
        assert committer.commit(at, parts[3], spool).outcome is Outcome.ABORTED
        parts[3] = committer.replay(at, parts[3], spool, uuid.uuid4().hex)
        assert committer.commit(at, parts[3], spool) == COMMITTED
        await_visible(committer, at, parts)
    found = read_all(broker.bootstrap_servers, prepared.topic, 600)
    assert found == sorted(f"{value}-{index}" for value in VALUES for index in range(10))


def test_what_becomes_of_rows_after_their_commit_is_no_loss(broker: LocalKafka, fresh_topic: FreshName) -> None:
    """The broker was restarted, and retention has deleted, between the commit and a later start that looks again."""
    prepared = Prepared(broker, fresh_topic(), spool=None)
    at = prepared.at
    with committing(prepared.config, prepared.who) as committer:
        part = prepared.vote(committer)
        assert committer.commit(at, part, NO_ROWS) == COMMITTED
    broker.kill()
    broker.start()
    ends = {at: end for at, (_, end, _) in places(part).items()}
    for deletes in (False, True):
        if deletes:
            with admin(broker.bootstrap_servers) as client:
                # with their ends, which are one record each: rows that went alone were gone before readers had them
                client.delete_records({partition: end + 1 for partition, end in ends.items()})
        with committing(prepared.config, prepared.who) as committer:
            assert commit(committer, at, part) == COMMITTED


def test_an_open_transaction_that_is_taken_for_committed_stays_open(broker: LocalKafka, fresh_topic: FreshName) -> None:
    """As an operator may do who resolves an epoch: its end was not left out, and is not written."""
    prepared = Prepared(broker, fresh_topic(), spool=True)
    with committing(prepared.config, prepared.who) as committer:
        part = prepared.vote(committer)
        with pytest.raises(OutcomeUnknown, match="has not shown it to readers"):
            await_visible(committer, prepared.at, [part])
        assert committer.leftovers() == [part["transactional_id"]]
    with Reader(broker.bootstrap_servers, prepared.topic) as reader:
        assert reader.poll(1.0) == []


def test_rows_of_others_that_follow_hide_neither_a_loss_nor_an_abort(
    broker: LocalKafka, fresh_topic: FreshName
) -> None:
    """The log is as long again as it was, and longer, with the rows of the epoch that is being written."""
    prepared = Prepared(broker, fresh_topic(), spool=True)
    at, later = prepared.at, epoch(5)
    with committing(prepared.config, prepared.who) as committer:
        part = prepared.vote(committer)
        lose_files(broker, prepared.topic, part)
        for partition in range(1, 4):
            prepare(prepared.config, task(prepared.who, later, partition), rows(*VALUES))
        assert committer.commit(at, part, prepared.rows).outcome is Outcome.ABORTED
        committer.participant._transactions.end(
            KafkaCommittable.from_json(part).transaction, committer.participant._cluster.deadline(), commit=True
        )
        with pytest.raises(OutcomeUnknown, match=f"{prepared.topic}-1 has lost its records from offset 0 on"):
            await_visible(committer, at, [part])
        committer.abort_orphans([])


def places(part: Committable) -> dict[TopicPartition, tuple[int, int, int]]:
    """Return (start, end, leader epoch) by partition."""
    found = KafkaCommittable.from_json(part).places
    return {TopicPartition(at.topic, at.partition): (at.start, at.end, at.leader_epoch) for at in found}
