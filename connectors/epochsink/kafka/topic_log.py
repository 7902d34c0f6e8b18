"""The partitions of one topic as the brokers keep them: where they begin and end, what is in them, committed or not."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kafka.errors import KafkaError
from kafka.protocol.consumer import FetchRequest, ListOffsetsRequest
from kafka.protocol.metadata import CoordinatorType, MetadataRequest
from kafka.protocol.producer import AddPartitionsToTxnRequest, ProduceRequest

from epochsink.kafka.cluster import raise_for
from epochsink.kafka.errors import Refused
from epochsink.kafka.topic_id import NO_ID

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from epochsink.kafka.cluster import Cluster
    from epochsink.kafka.transactional_id import Transaction

_EARLIEST: Final = -2
_LATEST: Final = -1
_READ_UNCOMMITTED: Final = 0
_ALL_REPLICAS: Final = -1
_LEADER_NOT_AVAILABLE: Final = 5
_DUPLICATE_SEQUENCE: Final = 46

# the newest versions that name topics, and that belong to the protocol by which our transactions are begun (see
# `epochsink.kafka.transactions`); brokers from 3.0 to 4.1 take them
_NEWEST_FETCH: Final = 12
_NEWEST_LIST_OFFSETS: Final = 7
_OFFSETS_SETTLED: Final = 5
"""The first version of ListOffsets in which a leader that has just taken over says so, in place of an end too low."""
_NEWEST_PRODUCE: Final = 11
_NEWEST_ADD_PARTITIONS: Final = 3

_WAIT_MS: Final = 500
_FETCHED_BYTES: Final = 32 << 20
_PARTITION_BYTES: Final = 4 << 20


class Fetched(NamedTuple):
    """What one request has brought from one partition; ``records`` is None if what was asked for is not there."""

    partition: int
    records: bytes | None


class TopicLog:
    """Reads and writes one topic by the driver's client. Every method may raise `Unreachable`, `Refused`.

    Each request is repeated while it fails in passing, for as long as ``Cluster.timeout``. Used by one thread.
    """

    def __init__(self, cluster: Cluster, topic: str) -> None:
        self._cluster = cluster
        self.topic = topic
        self._leaders: dict[int, int] = {}
        self.topic_id = NO_ID
        """As the last answer about the partitions had it."""

    def starts(self) -> dict[int, int]:
        """Return the first offset that is kept of each partition."""
        return self._offsets(_EARLIEST)

    def ends(self) -> dict[int, int]:
        """Return the offset after the last record of each partition that all in-sync replicas have."""
        return self._offsets(_LATEST)

    def fetch(self, positions: Mapping[int, int]) -> list[Fetched]:
        """Return what is in some partitions from these offsets on: a part, of at least one batch, or none in time."""

        def attempt() -> list[Fetched]:
            found = []
            for node, partitions in self._by_leader(positions):
                answer = self._cluster.ask(self._fetch_request(positions, partitions), node)
                raise_for(answer.error_code, f"fetching from topic '{self.topic}'")
                told = answer.responses[0].partitions if answer.responses else ()
                found += [self._fetched(partition) for partition in told]
            return found

        fetched: list[Fetched] = self._retried(attempt)
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
            [(node, _)] = self._by_leader([partition])
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
            answer = self._cluster.ask(request, node)
            [told] = answer.responses[0].partition_responses
            if told.error_code != _DUPLICATE_SEQUENCE:
                raise_for(told.error_code, f"appending to {self.topic}-{partition}: {told.error_message or ''}")
            return int(told.base_offset)

        # a batch that was sent twice is answered with the place of the first one
        if 0 <= (at := self._retried(attempt)) < after:
            raise Refused(
                f"a batch for {self.topic}-{partition} was not appended: the broker takes it for one of the same "
                f"producer ({transaction.producer_id}, epoch {transaction.producer_epoch}) at offset {at}, so the "
                "cluster has given this producer epoch twice",
                hint="the topic __transaction_state has lost acknowledged records: see its replicas; nothing of the "
                "transaction is committed, and the next attempt has another producer epoch",
            )

    # ---- steps

    def _offsets(self, which: int) -> dict[int, int]:
        def attempt() -> dict[int, int]:
            self._learn_leaders()
            found = {}
            for node, partitions in self._by_leader(self._leaders):
                request = ListOffsetsRequest(
                    replica_id=-1,
                    isolation_level=_READ_UNCOMMITTED,
                    topics=[
                        _ListedTopic(
                            name=self.topic,
                            partitions=[
                                _ListedTopic.ListOffsetsPartition(
                                    partition_index=partition, current_leader_epoch=-1, timestamp=which
                                )
                                for partition in partitions
                            ],
                        )
                    ],
                    min_version=_OFFSETS_SETTLED,
                    max_version=_NEWEST_LIST_OFFSETS,
                )
                [topic] = self._cluster.ask(request, node).topics
                for told in topic.partitions:
                    raise_for(told.error_code, f"the offsets of {self.topic}-{told.partition_index}")
                    found[told.partition_index] = told.offset
            return found

        offsets: dict[int, int] = self._retried(attempt)
        return offsets

    def _fetch_request(self, positions: Mapping[int, int], partitions: Iterable[int]) -> FetchRequest:
        return FetchRequest(
            replica_id=-1,
            max_wait_ms=_WAIT_MS,
            min_bytes=1,
            max_bytes=_FETCHED_BYTES,
            isolation_level=_READ_UNCOMMITTED,
            session_id=0,
            session_epoch=-1,
            topics=[
                FetchRequest.FetchTopic(
                    topic=self.topic,
                    partitions=[
                        FetchRequest.FetchTopic.FetchPartition(
                            partition=partition,
                            current_leader_epoch=-1,
                            fetch_offset=positions[partition],
                            last_fetched_epoch=-1,
                            log_start_offset=-1,
                            partition_max_bytes=_PARTITION_BYTES,
                        )
                        for partition in partitions
                    ],
                )
            ],
            forgotten_topics_data=[],
            rack_id="",
            max_version=_NEWEST_FETCH,
        )

    def _fetched(self, told: Any) -> Fetched:
        if told.error_code == _OFFSET_OUT_OF_RANGE:
            return Fetched(told.partition_index, None)
        raise_for(told.error_code, f"fetching from {self.topic}-{told.partition_index}")
        return Fetched(told.partition_index, bytes(told.records or b""))

    def _by_leader(self, partitions: Iterable[int]) -> Iterator[tuple[int, list[int]]]:
        if not self._leaders:
            self._learn_leaders()
        for partition in partitions:
            if partition not in self._leaders:
                raise_for(_LEADER_NOT_AVAILABLE, f"partition {partition} of topic '{self.topic}'")
        ordered = sorted(partitions, key=lambda partition: (self._leaders[partition], partition))
        for node, mine in itertools.groupby(ordered, key=self._leaders.__getitem__):
            yield node, list(mine)

    def _learn_leaders(self) -> None:
        wanted = [MetadataRequest.MetadataRequestTopic(name=self.topic)]
        answer = self._cluster.ask(MetadataRequest(topics=wanted, allow_auto_topic_creation=False), None)
        [topic] = answer.topics
        raise_for(topic.error_code, f"topic '{self.topic}'")
        for partition in topic.partitions:
            raise_for(partition.error_code, f"partition {partition.partition_index} of topic '{self.topic}'")
        self.topic_id = topic.topic_id.hex
        self._leaders = {partition.partition_index: partition.leader_id for partition in topic.partitions}

    def _retried(self, attempt: Callable[[], Any]) -> Any:
        def once() -> Any:
            try:
                return attempt()
            except (KafkaError, OSError):
                # another broker may lead the partition by now, and this one be gone from the cluster
                self._leaders = {}
                raise

        return self._cluster.until(self._cluster.deadline(), once)


_OFFSET_OUT_OF_RANGE: Final = 1
_JoinedTopic: Final = AddPartitionsToTxnRequest.AddPartitionsToTxnTransaction.AddPartitionsToTxnTopic
_ListedTopic: Final = ListOffsetsRequest.ListOffsetsTopic
