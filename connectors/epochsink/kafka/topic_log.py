"""Read and append to the log of one topic: where its partitions begin and end, and their records, committed or not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kafka.errors import KafkaError
from kafka.protocol.metadata import CoordinatorType
from kafka.protocol.producer import AddPartitionsToTxnRequest, ProduceRequest

from epochsink.kafka.cluster import raise_for
from epochsink.kafka.committable import NO_ID
from epochsink.kafka.errors import UNKNOWN_TOPIC, Refused
from epochsink.kafka.leaders import END_OFFSETS, FIRST_OFFSETS, End, Leaders, Records

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from epochsink.kafka.cluster import Cluster
    from epochsink.kafka.committable import Transaction
    from epochsink.kafka.leaders import Question

_ALL_REPLICAS: Final = -1
_DUPLICATE_SEQUENCE: Final = 46

# the newest versions that belong to the protocol by which our transactions are begun (see
# `epochsink.kafka.transactions`); brokers from 3.0 to 4.1 take them
_NEWEST_PRODUCE: Final = 11
_NEWEST_ADD_PARTITIONS: Final = 3

_WAIT_MS: Final = 500
_FETCHED_BYTES: Final = 32 << 20
_PARTITION_BYTES: Final = 4 << 20


class TopicLog:
    """Reads and writes one topic by the driver's client. Every method may raise `Unreachable`, `Refused`.

    Each request is repeated while it fails in passing, for as long as ``Cluster.timeout``. Used by one thread.
    """

    def __init__(self, cluster: Cluster, topic: str) -> None:
        self._cluster = cluster
        self.topic = topic
        self._leaders = Leaders(cluster)
        self.topic_id = NO_ID
        """As the last answer about the partitions had it."""

    def starts(self) -> dict[int, int]:
        """Return the first offset that is kept of each partition."""
        return self._offsets(FIRST_OFFSETS)

    def ends(self) -> dict[int, int]:
        """Return the offset after the last record of each partition that all in-sync replicas have."""
        return self._offsets(END_OFFSETS)

    def fetch(self, positions: Mapping[int, int]) -> dict[int, bytes | None]:
        """Return what is in some partitions from these offsets on: a part, of at least one batch, or none in time.

        None means that the partition does not hold the offset.
        """
        asked = {(self.topic, number): End(offset) for number, offset in positions.items()}
        records = Records(asked, wait_ms=_WAIT_MS, bytes_each=_PARTITION_BYTES, bytes_in_all=_FETCHED_BYTES)

        def attempt() -> dict[int, bytes | None]:
            [found] = self._leaders.ask(asked, records)
            return {number: fetched.records for (_, number), fetched in found.items()}

        fetched: dict[int, bytes | None] = self._retried(attempt)
        return fetched

    def join(self, transaction: Transaction, partitions: Collection[int]) -> None:
        """Make partitions part of a transaction: before anything of it is appended to them."""

        def attempt() -> None:
            request = AddPartitionsToTxnRequest(
                v3_and_below_transactional_id=transaction.transactional_id,
                v3_and_below_producer_id=transaction.producer_id,
                v3_and_below_producer_epoch=transaction.producer_epoch,
                v3_and_below_topics=[_JoinedTopic(name=self.topic, partitions=sorted(partitions))],
                max_version=_NEWEST_ADD_PARTITIONS,
            )
            kind = CoordinatorType.TRANSACTION
            [answer] = self._cluster.ask_coordinators(kind, [transaction.transactional_id], lambda _: request)
            for topic in answer.results_by_topic_v3_and_below:
                for told in topic.results_by_partition:
                    if told.partition_error_code:
                        self._cluster.forget(kind, [transaction.transactional_id])
                    raise_for(told.partition_error_code, f"adding {self.topic}-{told.partition_index}")

        self._retried(attempt)

    def append(self, transaction: Transaction, partition: int, batch: bytes, after: int) -> None:
        """Append one batch to a partition: once, however often it is sent, by its producer and sequence number.

        ``after`` is where the partition ended before the transaction's first one. Raises `Refused` if the broker takes
        the batch for an earlier one.
        """

        def attempt() -> int:
            request = ProduceRequest(
                transactional_id=transaction.transactional_id,
                acks=_ALL_REPLICAS,
                timeout_ms=int(min(self._cluster.timeout, 30.0) * 1000),
                topic_data=[
                    ProduceRequest.TopicProduceData(
                        name=self.topic,
                        partition_data=[
                            ProduceRequest.TopicProduceData.PartitionProduceData(index=partition, records=batch)
                        ],
                    )
                ],
                max_version=_NEWEST_PRODUCE,
            )
            answer = self._cluster.ask(request, self._leaders.leader((self.topic, partition)))
            [told] = answer.responses[0].partition_responses
            if told.error_code != _DUPLICATE_SEQUENCE:
                raise_for(told.error_code, f"appending to {self.topic}-{partition}: {told.error_message or ''}")
            return int(told.base_offset)

        # the answer to a batch that was sent twice has the offset of the first one
        if 0 <= (at := self._retried(attempt)) < after:
            raise Refused(
                f"a batch for {self.topic}-{partition} was not appended: the broker takes it for one of the same "
                f"producer ({transaction.producer_id}, epoch {transaction.producer_epoch}) at offset {at}, so the "
                "cluster has given this producer epoch twice",
                hint="the topic __transaction_state has lost acknowledged records: check its replicas; nothing of this "
                "transaction is committed, and the next attempt has another producer epoch",
            )

    # ---- steps

    def _offsets(self, which: Question) -> dict[int, int]:
        def attempt() -> dict[int, int]:
            # because partitions may have been added since
            [found] = self._leaders.look([self.topic], self._leaders.partitions, which)
            if self.topic not in self._leaders.topics:
                raise_for(UNKNOWN_TOPIC, f"topic '{self.topic}'")
            self.topic_id = self._leaders.topics[self.topic].id
            return {number: end.offset for (_, number), end in found.items()}

        offsets: dict[int, int] = self._cluster.until(self._cluster.deadline(), attempt)
        return offsets

    def _retried(self, attempt: Callable[[], Any]) -> Any:
        def once() -> Any:
            try:
                if not self._leaders.topics:
                    self._leaders.learn([self.topic])
                return attempt()
            except (KafkaError, OSError):
                # because another broker may lead the partition by now
                self._leaders.topics = {}
                raise

        return self._cluster.until(self._cluster.deadline(), once)


_JoinedTopic: Final = AddPartitionsToTxnRequest.AddPartitionsToTxnTransaction.AddPartitionsToTxnTopic
