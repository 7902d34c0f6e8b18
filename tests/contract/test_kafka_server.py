"""The cluster that the simulation has in memory answers each request as a real one does."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from kafka.errors import KafkaError
from kafka_kit import create_topic

from epochsink.kafka import record_batch
from epochsink.kafka.cluster import Cluster
from epochsink.kafka.committable import Transaction
from epochsink.kafka.errors import FENCED
from epochsink.kafka.librdkafka import NativeError
from epochsink.kafka.producer import TransactionalProducer
from epochsink.kafka.record_batch import Batch
from epochsink.kafka.server import (
    END_OFFSETS,
    FIRST_OFFSETS,
    Append,
    Description,
    End,
    EpochEnds,
    Fetched,
    KafkaServer,
    LeaderRequest,
    Producers,
    ProducerState,
    Question,
    Records,
    TransactionEnds,
    TransactionState,
)
from epochsink.kafka.transactions import ENDING
from epochsink.kafka.writer import fill
from epochsink_devkit.services import KafkaService
from simulation.kafka_brokers import LETTER, TOPIC
from simulation.kafka_server import MemoryKafka
from simulation.kafka_sink import batch_of
from simulation.readers import Row
from simulation.steps import at_once
from simulation.world import World

if TYPE_CHECKING:
    from fix_services import FreshName

SECONDS = 30.0
NONE, INVALID_PRODUCER_EPOCH, CONCURRENT, UNSTABLE = 0, 47, 51, 88
REFUSED = {47, 48, 49, 90}
"""What EndTxn answers about a transaction that this producer does not have open."""


class Asked(NamedTuple):
    """A cluster, in memory or real, with a topic of two partitions, and names that nobody else uses."""

    server: KafkaServer
    topic: str
    name: str
    group: str

    def at(self, question: Question, partition: int = 0) -> Any:
        """Ask the leader of a partition."""
        at = (self.topic, partition)

        def attempt() -> Any:
            topics, _ = self.server.topics_and([self.topic], [])
            [answer] = self.server.ask_leaders([LeaderRequest(topics[self.topic].leaders[partition], question, [at])])
            return answer[at]

        return self.server.until(self.server.deadline(), attempt)

    def fetched(self, offset: int, leader_epoch: int = -1) -> Fetched:
        """Fetch from partition 0."""
        positions = {(self.topic, 0): End(offset, leader_epoch)}
        found: Fetched = self.at(Records(positions=positions, wait_ms=100, bytes_each=1 << 20, bytes_in_all=1 << 20))
        return found

    def batches(self, offset: int = 0) -> list[Batch]:
        """Return the batches of partition 0."""
        return [batch for _, batch in record_batch.split(self.fetched(offset).records or b"") if batch is not None]

    def producer(self, of: Transaction) -> ProducerState | None:
        """Return what partition 0 knows of a producer."""
        states: list[ProducerState] = self.at(Producers())
        return next((each for each in states if each.producer_id == of.producer_id), None)

    def opened(self, rows: int = 2, *, marker: int | None = None) -> Transaction:
        """Produce rows to partition 0, and a marker, and leave the transaction open."""
        producer = self.server.producer({}, self.name, 60_000)
        producer.begin()
        self.send(producer, rows)
        if marker is not None:
            producer.mark(self.group, self.topic, marker, "attempt")
        transaction = Transaction(self.name, *producer.identity())
        producer.release()
        return transaction

    def send(self, producer: TransactionalProducer, rows: int) -> None:
        """Produce rows to partition 0, where those go whose source is a multiple of 8."""
        batch = batch_of(tuple(Row("q", 0, 8 * number, "a") for number in range(rows)))
        producer.produce(self.topic, fill(batch))
        producer.flush()

    def described(self) -> Description:
        """Describe the id."""
        ask = partial(self.server.describe_transactions, [self.name])
        found: Description = self.server.until(self.server.deadline(), ask)[self.name]
        return found

    def ended(self) -> Description:
        """Describe the id once its end is written to all partitions."""
        found: Description = until(lambda: self.described().state not in ENDING, self.described)
        return found


def until(holds: Callable[[], bool], then: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return then()


@pytest.fixture(params=["in memory", "real"])
def asked(request: pytest.FixtureRequest, fresh_topic: FreshName) -> Iterator[Asked]:
    unique = uuid.uuid4().hex[:10]
    name, group = f"epochsink.contract.{unique}", f"epochsink.contract.group.{unique}"
    if request.param == "in memory":
        yield Asked(MemoryKafka(World(LETTER), at_once), TOPIC, name, group)
        return
    kafka: KafkaService = request.getfixturevalue("kafka")
    topic = create_topic(kafka.bootstrap_servers, fresh_topic(), partitions=2)
    server = Cluster(kafka.bootstrap_servers, {}, SECONDS)
    try:
        yield Asked(server, topic, name, group)
    finally:
        server.close()


def test_an_id_that_nobody_has_used(asked: Asked) -> None:
    assert asked.described().state is TransactionState.NOT_FOUND
    assert asked.server.end_transaction(Transaction(asked.name, 7, 0), commit=True) in REFUSED


def test_an_open_transaction(asked: Asked) -> None:
    transaction = asked.opened(rows=3)
    now = asked.described()
    assert (now.state, now.is_of(transaction)) == (TransactionState.ONGOING, True)
    assert (asked.topic, 0) in now.partitions
    assert asked.producer(transaction) == ProducerState(*transaction.producer, 2, 0)
    assert asked.at(FIRST_OFFSETS).offset == 0
    assert asked.at(END_OFFSETS).offset == 3
    first = asked.batches()[0]
    assert (first.base_sequence, first.producer_id, first.is_control) == (0, transaction.producer_id, False)
    assert sum(batch.records for batch in asked.batches()) == 3
    listed = asked.server.list_transactions([TransactionState.ONGOING], [])
    assert (asked.name, transaction.producer_id) in listed
    assert (asked.name, transaction.producer_id) not in asked.server.list_transactions([TransactionState.EMPTY], [])


@pytest.mark.parametrize("commit", [True, False], ids=["commit", "abort"])
def test_an_end(asked: Asked, *, commit: bool) -> None:
    transaction = asked.opened()
    assert asked.server.end_transaction(transaction, commit=commit) == NONE
    now = asked.ended()
    assert now.state is (TransactionState.COMPLETE_COMMIT if commit else TransactionState.COMPLETE_ABORT)
    assert now.is_of(transaction), "the older protocol's EndTxn leaves the producer epoch as it is"
    end = asked.batches()[-1]
    assert (end.is_control, end.is_abort) == (True, not commit)
    assert asked.at(END_OFFSETS).offset == 3, "the end takes an offset"
    state = asked.producer(transaction)
    assert state is None or state.start == -1
    # the same once more, and the other way
    assert asked.server.end_transaction(transaction, commit=commit) == NONE
    assert asked.server.end_transaction(transaction, commit=not commit) in REFUSED


def test_the_marker_is_there_with_the_commit(asked: Asked) -> None:
    transaction = asked.opened(marker=5)
    assert {topic for topic, _ in asked.described().partitions} == {asked.topic, "__consumer_offsets"}
    [before] = asked.server.group_offsets([asked.group], None, stable=False)
    assert before.error_code == NONE
    assert [offset for offsets in before.topics.values() for offset in offsets if offset.offset >= 0] == []
    [stable] = asked.server.group_offsets([asked.group], [asked.topic], stable=True)
    assert [each.error_code for each in stable.topics[asked.topic]] == [UNSTABLE]
    asked.server.end_transaction(transaction, commit=True)
    asked.ended()

    def marker() -> Any:
        [group] = asked.server.group_offsets([asked.group], [asked.topic], stable=False)
        return group.topics[asked.topic][0]

    assert until(lambda: marker().offset >= 0, marker) == (5, "attempt", NONE)
    assert asked.group in asked.server.list_groups()


def test_a_marker_of_an_aborted_transaction_is_not_there(asked: Asked) -> None:
    asked.server.end_transaction(asked.opened(marker=5), commit=False)
    asked.ended()
    [group] = asked.server.group_offsets([asked.group], [asked.topic], stable=True)
    assert [each.offset for each in group.topics[asked.topic]] == [-1]


def test_a_producer_that_is_fenced_off(asked: Asked) -> None:
    transaction = asked.opened()
    assert asked.server.fence_producers([transaction]) == {asked.name: CONCURRENT}
    now = asked.ended()
    assert now.state is TransactionState.COMPLETE_ABORT
    assert (now.producer_id, now.producer_epoch) == (transaction.producer_id, transaction.producer_epoch + 1)
    assert asked.server.end_transaction(transaction, commit=True) in REFUSED
    # asked again with the epoch before the raised one, as after a lost answer: no other producer has the id

    def again() -> int:
        return asked.server.fence_producers([transaction])[asked.name]

    answer = until(lambda: again() != CONCURRENT, again)
    now = asked.described()
    assert now.producer_epoch == transaction.producer_epoch + 1
    # Kafka 3.5 says that the producer is fenced off
    assert (answer, now.state) in {(NONE, TransactionState.EMPTY), (90, TransactionState.COMPLETE_ABORT)}


def test_fencing_off_ends_whatever_is_open_under_the_producer_id(asked: Asked) -> None:
    """Whichever epoch is named: who fences off must know that the id is not used again meanwhile."""
    before = asked.opened()
    newer = asked.opened()
    assert newer.producer_id == before.producer_id
    assert asked.server.fence_producers([before]) == {asked.name: CONCURRENT}
    assert asked.ended().state is TransactionState.COMPLETE_ABORT
    assert asked.server.end_transaction(newer, commit=True) in REFUSED


def test_an_id_that_is_initialised_again(asked: Asked) -> None:
    first = asked.server.initialise_producer(asked.name)
    second = asked.server.initialise_producer(asked.name)
    assert (second.producer_id, second.producer_epoch) == (first.producer_id, first.producer_epoch + 1)
    assert asked.described().state is TransactionState.EMPTY
    assert asked.server.end_transaction(Transaction(asked.name, *second), commit=True) in REFUSED, "it is empty"


def test_the_next_producer_under_an_id_aborts_what_is_open(asked: Asked) -> None:
    lost = asked.opened()
    asked.opened()
    assert [batch.is_abort for batch in asked.batches() if batch.is_control] == [True]
    assert asked.server.end_transaction(lost, commit=True) in REFUSED


def test_a_producer_that_another_has_fenced(asked: Asked) -> None:
    zombie = asked.server.producer({}, asked.name, 60_000)
    zombie.begin()
    asked.send(zombie, 1)
    asked.opened()
    with pytest.raises(NativeError) as fenced:
        zombie.mark(asked.group, asked.topic, 1)
    assert fenced.value.code in FENCED
    zombie.release()


def test_batches_that_are_copied(asked: Asked) -> None:
    lost = asked.opened()
    asked.server.end_transaction(lost, commit=False)
    asked.ended()
    copied = next(batch for batch in asked.batches() if not batch.is_control)
    producer = asked.server.producer({}, f"{asked.name}.copy", 60_000)
    producer.begin()
    ours = Transaction(f"{asked.name}.copy", *producer.identity())
    batch = copied.under(*ours.producer, 0)
    asked.server.until(asked.server.deadline(), lambda: asked.server.add_partitions(ours, asked.topic, [0]))
    end = asked.at(END_OFFSETS).offset
    assert asked.at(Append(ours, batch, 10_000)) == end
    assert asked.at(END_OFFSETS).offset == end + copied.records
    assert asked.at(Append(ours, batch, 10_000)) in (end, -1), "it is there already"
    assert asked.at(END_OFFSETS).offset == end + copied.records
    assert asked.producer(ours) == ProducerState(*ours.producer, copied.records - 1, end)
    with pytest.raises(KafkaError):
        asked.server.ask_leaders(
            [LeaderRequest(1, Append(ours, copied.under(*ours.producer, 99), 10_000), [(asked.topic, 0)])]
        )
    producer.abort()


@pytest.mark.parametrize("is_commit", [True, False])
def test_an_end_that_is_written_in_place_of_the_coordinator(asked: Asked, *, is_commit: bool) -> None:
    transaction = asked.opened()
    opened = asked.producer(transaction)
    assert opened is not None
    written = TransactionEnds({(asked.topic, 0): [opened]}, are_commits=is_commit)
    for _ in range(2):
        assert asked.at(written) == NONE
        end = asked.batches()[-1]
        assert (end.is_control, end.is_abort, end.producer_epoch) == (True, not is_commit, transaction.producer_epoch)
        state = asked.producer(transaction)
        assert state is None or state.start == -1
    assert asked.described().state is TransactionState.ONGOING, "the coordinator is not told"
    asked.opened()
    assert asked.at(written) == INVALID_PRODUCER_EPOCH, "the producer was initialised since"


def test_records_that_a_log_does_not_have(asked: Asked) -> None:
    asked.opened()
    end = asked.at(END_OFFSETS)
    assert asked.fetched(end.offset) == Fetched(b"", 0, end.offset)
    assert asked.fetched(end.offset + 1).records is None
    assert asked.fetched(0, end.leader_epoch).records
    assert asked.at(EpochEnds({(asked.topic, 0): end.leader_epoch})) == end.offset
    assert asked.at(EpochEnds({(asked.topic, 0): end.leader_epoch + 1})) < 0


def test_a_topic_that_is_not_there(asked: Asked) -> None:
    topics, _ = asked.server.topics_and([asked.topic, f"{asked.topic}.other"], [])
    assert topics.keys() == {asked.topic}
    assert topics[asked.topic].leaders.keys() == {0, 1}
    assert asked.server.ask_topic_settings(f"{asked.topic}.other") == {}
    assert asked.server.ask_topic_settings(asked.topic)["cleanup.policy"] == "delete"
