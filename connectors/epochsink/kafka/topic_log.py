"""Read the log of one topic, with records that are not committed, and append batches to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kafka.protocol.metadata import CoordinatorType
from kafka.protocol.producer import AddPartitionsToTxnRequest, ProduceRequest

from epochsink.kafka.cluster import raise_for
from epochsink.kafka.committable import NO_ID
from epochsink.kafka.errors import UNKNOWN_TOPIC, Refused
from epochsink.kafka.leaders import END_OFFSETS, FIRST_OFFSETS, End, Leaders, Records

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from epochsink.kafka.cluster import Cluster
    from epochsink.kafka.committable import Transaction
    from epochsink.kafka.leaders import Partition, Question

_ALL_REPLICAS: Final = -1
_DUPLICATE_SEQUENCE: Final = 46

# the newest versions for transactions of the older protocol (see `epochsink.kafka.transactions`); brokers from 3.0 to
# 4.1 take them
_NEWEST_PRODUCE: Final = 11
_NEWEST_ADD_PARTITIONS: Final = 3

_WAIT_MS: Final = 500
_FETCHED_BYTES: Final = 32 << 20
_PARTITION_BYTES: Final = 4 << 20


class TopicLog:
    """Reads and writes one topic with the driver's client. Every method may raise `Unreachable`, `Refused`.

    Each request is retried for at most ``Cluster.timeout`` seconds. Used by one thread.
    """

    def __init__(self, cluster: Cluster, topic: str) -> None:
        self._cluster = cluster
        self.topic = topic
        self.topic_id = NO_ID
        """The topic's id in the last answer about its partitions."""

    def starts(self) -> dict[int, int]:
        """Return the first offset that each partition keeps."""
        return {number: start.offset for number, start in self._ask(FIRST_OFFSETS).items()}

    def ends(self) -> dict[int, int]:
        """Return, for each partition, the offset after the last record that all in-sync replicas have."""
        return {number: end.offset for number, end in self._ask(END_OFFSETS).items()}

    def fetch(self, positions: Mapping[int, int]) -> dict[int, bytes | None]:
        """Return some of the records of partitions from these offsets on: whole batches, or nothing if none arrives.

        None means that the partition does not have the offset.
        """
        asked = {(self.topic, number): End(offset) for number, offset in positions.items()}
        records = Records(asked, wait_ms=_WAIT_MS, bytes_each=_PARTITION_BYTES, bytes_in_all=_FETCHED_BYTES)
        return {number: fetched.records for number, fetched in self._ask(records, positions).items()}

    def join(self, transaction: Transaction, partitions: Collection[int]) -> None:
        """Add partitions to a transaction; must be called before `append`."""
        request = AddPartitionsToTxnRequest(
            v3_and_below_transactional_id=transaction.transactional_id,
            v3_and_below_producer_id=transaction.producer_id,
            v3_and_below_producer_epoch=transaction.producer_epoch,
            v3_and_below_topics=[_JoinedTopic(name=self.topic, partitions=sorted(partitions))],
            max_version=_NEWEST_ADD_PARTITIONS,
        )

        def attempt() -> None:
            kind = CoordinatorType.TRANSACTION
            [answer] = self._cluster.ask_coordinators(kind, [transaction.transactional_id], lambda _: request)
            for topic in answer.results_by_topic_v3_and_below:
                for told in topic.results_by_partition:
                    raise_for(told.partition_error_code, f"adding {self.topic}-{told.partition_index}")

        self._cluster.until(self._cluster.deadline(), attempt)

    def append(self, transaction: Transaction, partition: int, batch: bytes, after: int, topic_id: str) -> None:
        """Append one batch to a partition. A retry appends no second copy, because of its sequence number.

        ``after`` is the end of the partition before the first batch of the transaction, and ``topic_id`` the topic's id
        then. Raises `Refused` if the topic is another one by now, or the broker mistakes the batch for an earlier one.
        """
        at = self._ask(_Appended(transaction, batch, self._cluster.timeout), [partition])[partition]
        if self.topic_id != topic_id:
            raise Refused(
                f"topic '{self.topic}' was deleted and created again while rows of a lost transaction were copied in "
                "it, so it no longer has all of them",
                hint="nothing of the new transaction is committed; start the query again: it says which epochs the "
                "topic lacks",
            )
        # for a batch that it already has, the broker returns the offset of the first copy
        if 0 <= at < after:
            raise Refused(
                f"a batch for {self.topic}-{partition} was not appended: the broker mistakes it for an earlier one of "
                f"producer ({transaction.producer_id}, epoch {transaction.producer_epoch}) at offset {at}, so the "
                "cluster has given this producer epoch twice",
                hint="the topic __transaction_state has lost acknowledged records: check its replicas; nothing of this "
                "transaction is committed, and the next attempt has another producer epoch",
            )

    def _ask(self, question: Question, partitions: Iterable[int] | None = None) -> dict[int, Any]:
        """Return the leaders' answers about some partitions, or about all of the topic."""
        asked = None if partitions is None else [(self.topic, number) for number in partitions]

        def attempt() -> dict[int, Any]:
            leaders = Leaders(self._cluster)
            [found] = leaders.look([self.topic], lambda: leaders.partitions() if asked is None else asked, question)
            if self.topic not in leaders.topics:
                raise_for(UNKNOWN_TOPIC, f"topic '{self.topic}'")
            self.topic_id = leaders.topics[self.topic].id
            return {number: told for (_, number), told in found.items()}

        answers: dict[int, Any] = self._cluster.until(self._cluster.deadline(), attempt)
        return answers


class _Appended:
    """Appends one batch, and reads its offset: -1 if the broker already had it and does not say where."""

    def __init__(self, transaction: Transaction, batch: bytes, timeout: float) -> None:
        self._transaction = transaction
        self._batch = batch
        self._timeout_ms = int(min(timeout, 30.0) * 1000)

    def request(self, partitions: Collection[Partition]) -> ProduceRequest:
        """Return the request for one partition."""
        [(topic, number)] = partitions
        data = ProduceRequest.TopicProduceData
        return ProduceRequest(
            transactional_id=self._transaction.transactional_id,
            acks=_ALL_REPLICAS,
            timeout_ms=self._timeout_ms,
            topic_data=[
                data(name=topic, partition_data=[data.PartitionProduceData(index=number, records=self._batch)])
            ],
            max_version=_NEWEST_PRODUCE,
        )

    def read(self, answer: Any) -> Iterator[tuple[Partition, int]]:
        """Return the offset."""
        [topic] = answer.responses
        [told] = topic.partition_responses
        # a duplicate is in the log already: the answer to its first copy was lost
        if told.error_code != _DUPLICATE_SEQUENCE:
            raise_for(told.error_code, f"appending to {topic.name}-{told.index}: {told.error_message or ''}")
        yield (topic.name, told.index), told.base_offset


_JoinedTopic: Final = AddPartitionsToTxnRequest.AddPartitionsToTxnTransaction.AddPartitionsToTxnTopic
