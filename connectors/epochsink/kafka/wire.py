"""Build the requests of Kafka's protocol, and read their answers; `epochsink.kafka.cluster` sends them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Final, assert_never

from kafka.protocol.admin.transactions import DescribeProducersRequest, DescribeTransactionsRequest
from kafka.protocol.consumer import FetchRequest, ListOffsetsRequest, OffsetFetchRequest, OffsetForLeaderEpochRequest
from kafka.protocol.producer import AddPartitionsToTxnRequest, ProduceRequest
from kafka.protocol.producer.transaction import EndTxnRequest, InitProducerIdRequest, WriteTxnMarkersRequest

from epochsink.kafka.committable import Transaction
from epochsink.kafka.server import (
    Append,
    Description,
    End,
    EpochEnds,
    Fetched,
    GroupOffset,
    GroupOffsets,
    Offsets,
    Partition,
    Producers,
    ProducerState,
    Question,
    Records,
    TransactionEnds,
    TransactionState,
    raise_for,
    require_all,
)

_ID_NOT_FOUND: Final = 105
_INVALID_PRODUCER_EPOCH: Final = 47

# ---- transactions

_NEWEST_END_TXN = 4
"""The last version of EndTxn for transactions of the older protocol, which librdkafka uses.

Brokers accept it at every level of transaction.version. Version 5 is for the protocol of level 2, and brokers offer it
at every level: below level 2 it can leave a transaction open, beyond every timeout, until the broker restarts
(docs/explanation/decisions.md).
"""

_NEWEST_INIT_PRODUCER_ID = 4
"""Later versions are for the protocol of level 2."""
_NAMES_PRODUCER = 3
"""The first version of InitProducerId that names the producer which had the id."""
_NO_TRANSACTION_MS = 1000
"""The timeout for ids under which no transaction is begun: below any broker's limit."""
_NEWEST_ADD_PARTITIONS: Final = 3
"""The last version for transactions of the older protocol; brokers from 3.0 to 4.1 take it."""


def initialise(name: str, had: Transaction | None) -> InitProducerIdRequest:
    """Return the request for a new producer epoch; ``had`` is the producer that must have the id, None for any."""
    request = InitProducerIdRequest(
        transactional_id=name,
        transaction_timeout_ms=_NO_TRANSACTION_MS,
        min_version=_NAMES_PRODUCER,
        max_version=_NEWEST_INIT_PRODUCER_ID,
    )
    if had is not None:
        request.producer_id, request.producer_epoch = had.producer
    return request


def end(transaction: Transaction, *, commit: bool) -> EndTxnRequest:
    """Return the request that commits or aborts."""
    return EndTxnRequest(
        transactional_id=transaction.transactional_id,
        producer_id=transaction.producer_id,
        producer_epoch=transaction.producer_epoch,
        committed=commit,
        max_version=_NEWEST_END_TXN,
    )


def described(ids: Sequence[str], answers: Sequence[Any]) -> dict[str, Description]:
    """Read the answers to DescribeTransactions."""
    descriptions: dict[str, Description] = {}
    states = [state for answer in answers for state in answer.transaction_states]
    require_all(ids, (state.transactional_id for state in states), "transactional ids")
    for state in states:
        if state.error_code == _ID_NOT_FOUND:
            descriptions[state.transactional_id] = Description(TransactionState.NOT_FOUND)
            continue
        raise_for(state.error_code, f"describing {state.transactional_id}")
        descriptions[state.transactional_id] = Description(
            TransactionState(state.transaction_state),
            state.producer_id,
            state.producer_epoch,
            state.transaction_start_time_ms,
            state.transaction_timeout_ms,
            [(at.topic, number) for at in state.topics for number in at.partitions],
        )
    return descriptions


def describe(ids: list[str]) -> DescribeTransactionsRequest:
    """Return the request for the states of ids."""
    return DescribeTransactionsRequest(transactional_ids=ids)


_JoinedTopic: Final = AddPartitionsToTxnRequest.AddPartitionsToTxnTransaction.AddPartitionsToTxnTopic


def add_partitions(transaction: Transaction, topic: str, partitions: Collection[int]) -> AddPartitionsToTxnRequest:
    """Return the request that adds partitions of a topic to a transaction."""
    return AddPartitionsToTxnRequest(
        v3_and_below_transactional_id=transaction.transactional_id,
        v3_and_below_producer_id=transaction.producer_id,
        v3_and_below_producer_epoch=transaction.producer_epoch,
        v3_and_below_topics=[_JoinedTopic(name=topic, partitions=sorted(partitions))],
        max_version=_NEWEST_ADD_PARTITIONS,
    )


# ---- the offsets of groups

MARKED_PARTITION: Final = 0
"""The partition of a topic under which a task's producer stores the marker."""
_SEVERAL_GROUPS: Final = 8
"""The first version of OffsetFetch that takes many groups, in brokers since 3.0."""


def group_offsets(groups: list[str], topics: Collection[str] | None, *, stable: bool) -> OffsetFetchRequest:
    """Return the request for markers under these topics, or under all."""
    group_request = OffsetFetchRequest.OffsetFetchRequestGroup
    named = (
        None
        if topics is None
        else [
            group_request.OffsetFetchRequestTopics(name=topic, partition_indexes=[MARKED_PARTITION]) for topic in topics
        ]
    )
    return OffsetFetchRequest(
        groups=[group_request(group_id=group, topics=named) for group in groups],
        require_stable=stable,
        min_version=_SEVERAL_GROUPS,
        max_version=_SEVERAL_GROUPS,
    )


def offsets_of_groups(answers: Sequence[Any]) -> list[GroupOffsets]:
    """Read the answers to OffsetFetch."""
    return [
        GroupOffsets(
            group.group_id,
            group.error_code,
            {
                topic.name: [
                    GroupOffset(kept.committed_offset, kept.metadata or "", kept.error_code)
                    for kept in topic.partitions
                ]
                for topic in group.topics
            },
        )
        for answer in answers
        for group in answer.groups
    ]


# ---- leaders

_OFFSET_OUT_OF_RANGE: Final = 1
_DUPLICATE_SEQUENCE: Final = 46
_ALL_REPLICAS: Final = -1
_READ_UNCOMMITTED: Final = 0
_CONSUMER: Final = -1
_EARLIEST: Final = -2
_LATEST: Final = -1

# the newest versions that name topics, and for transactions of the older protocol; brokers from 3.0 to 4.1 take them
_NEWEST_FETCH: Final = 12
_NEWEST_PRODUCE: Final = 11
_NEWEST_LIST_OFFSETS: Final = 7
_OFFSETS_SETTLED: Final = 5
"""The first version of ListOffsets in which a new leader returns an error instead of an end that is too low."""
_NEWEST_EPOCH_ENDS: Final = 4
_NEWEST_WRITE_MARKERS: Final = 1
"""The last version for transactions of the older protocol."""

_ListedTopic: Final = ListOffsetsRequest.ListOffsetsTopic
_EpochsTopic: Final = OffsetForLeaderEpochRequest.OffsetForLeaderTopic


def ask(question: Question, partitions: Collection[Partition]) -> Any:
    """Return the request of a question for the partitions of one leader."""
    match question:
        case Offsets():
            return _offsets(question, partitions)
        case Producers():
            topic_request = DescribeProducersRequest.TopicRequest
            return DescribeProducersRequest(
                topics=[
                    topic_request(name=topic, partition_indexes=numbers) for topic, numbers in _by_topic(partitions)
                ]
            )
        case EpochEnds():
            return _epoch_ends(question, partitions)
        case Records():
            return _fetch(question, partitions)
        case Append():
            return _produce(question, partitions)
        case TransactionEnds():
            return _ends(question, partitions)
        case _:
            assert_never(question)


def read(question: Question, answer: Any) -> dict[Partition, Any]:
    """Return one leader's answers to a question, by partition. Raises what kafka-python raises."""
    match question:
        case Offsets():
            return dict(_read_offsets(answer))
        case Producers():
            return dict(_read_producers(answer))
        case EpochEnds():
            return dict(_read_epoch_ends(answer))
        case Records():
            return dict(_read_records(answer))
        case Append():
            return dict(_read_offset(answer))
        case TransactionEnds():
            return dict(_read_codes(answer))
        case _:
            assert_never(question)


def _offsets(question: Offsets, partitions: Collection[Partition]) -> ListOffsetsRequest:
    listed = _ListedTopic.ListOffsetsPartition
    return ListOffsetsRequest(
        replica_id=_CONSUMER,
        # not the last stable offset: that stays before the rows of a transaction that is still open, such as our
        # own
        isolation_level=_READ_UNCOMMITTED,
        topics=[
            _ListedTopic(
                name=topic,
                partitions=[
                    listed(
                        partition_index=number,
                        current_leader_epoch=-1,
                        timestamp=_EARLIEST if question.are_first else _LATEST,
                    )
                    for number in numbers
                ],
            )
            for topic, numbers in _by_topic(partitions)
        ],
        min_version=_OFFSETS_SETTLED,
        max_version=_NEWEST_LIST_OFFSETS,
    )


def _read_offsets(answer: Any) -> Iterator[tuple[Partition, End]]:
    for topic in answer.topics:
        for partition in topic.partitions:
            raise_for(partition.error_code, f"the offsets of {topic.name}-{partition.partition_index}")
            yield (topic.name, partition.partition_index), End(partition.offset, partition.leader_epoch)


def _read_producers(answer: Any) -> Iterator[tuple[Partition, Sequence[ProducerState]]]:
    for topic in answer.topics:
        for partition in topic.partitions:
            raise_for(partition.error_code, f"the producers of {topic.name}-{partition.partition_index}")
            yield (
                (topic.name, partition.partition_index),
                [
                    ProducerState(
                        each.producer_id,
                        each.producer_epoch,
                        each.last_sequence,
                        each.current_txn_start_offset,
                        each.coordinator_epoch,
                    )
                    for each in partition.active_producers
                ],
            )


def _epoch_ends(question: EpochEnds, partitions: Collection[Partition]) -> OffsetForLeaderEpochRequest:
    return OffsetForLeaderEpochRequest(
        replica_id=_CONSUMER,
        topics=[
            _EpochsTopic(
                topic=topic,
                partitions=[
                    _EpochsTopic.OffsetForLeaderPartition(
                        partition=number, current_leader_epoch=-1, leader_epoch=question.leader_epochs[topic, number]
                    )
                    for number in numbers
                ],
            )
            for topic, numbers in _by_topic(partitions)
        ],
        max_version=_NEWEST_EPOCH_ENDS,
    )


def _read_epoch_ends(answer: Any) -> Iterator[tuple[Partition, int]]:
    for topic in answer.topics:
        for partition in topic.partitions:
            raise_for(partition.error_code, f"the leader epochs of {topic.topic}-{partition.partition}")
            yield (topic.topic, partition.partition), partition.end_offset


def _fetch(question: Records, partitions: Collection[Partition]) -> FetchRequest:
    return FetchRequest(
        replica_id=_CONSUMER,
        max_wait_ms=question.wait_ms,
        min_bytes=1,
        max_bytes=question.bytes_in_all,
        isolation_level=_READ_UNCOMMITTED,
        # without a fetch session: positions change with every request
        session_id=0,
        session_epoch=-1,
        topics=[
            FetchRequest.FetchTopic(
                topic=topic,
                partitions=[
                    FetchRequest.FetchTopic.FetchPartition(
                        partition=number,
                        current_leader_epoch=-1,
                        fetch_offset=question.positions[topic, number].offset,
                        last_fetched_epoch=question.positions[topic, number].leader_epoch,
                        log_start_offset=-1,
                        partition_max_bytes=question.bytes_each,
                    )
                    for number in numbers
                ],
            )
            for topic, numbers in _by_topic(partitions)
        ],
        forgotten_topics_data=[],
        rack_id="",
        max_version=_NEWEST_FETCH,
    )


def _read_records(answer: Any) -> Iterator[tuple[Partition, Fetched]]:
    raise_for(answer.error_code, "fetching")
    for topic in answer.responses:
        for fetched in topic.partitions:
            partition = (topic.topic, fetched.partition_index)
            # retention deleted the position, or the log was cut off before it
            if fetched.error_code == _OFFSET_OUT_OF_RANGE or fetched.diverging_epoch is not None:
                yield partition, Fetched(None, -1, fetched.high_watermark)
                continue
            raise_for(fetched.error_code, f"fetching from {topic.topic}-{fetched.partition_index}")
            yield partition, Fetched(bytes(fetched.records or b""), fetched.log_start_offset, fetched.high_watermark)


def _produce(question: Append, partitions: Collection[Partition]) -> ProduceRequest:
    [(topic, number)] = partitions
    data = ProduceRequest.TopicProduceData
    return ProduceRequest(
        transactional_id=question.transaction.transactional_id,
        acks=_ALL_REPLICAS,
        timeout_ms=question.timeout_ms,
        topic_data=[data(name=topic, partition_data=[data.PartitionProduceData(index=number, records=question.batch)])],
        max_version=_NEWEST_PRODUCE,
    )


def _read_offset(answer: Any) -> Iterator[tuple[Partition, int]]:
    [topic] = answer.responses
    [partition] = topic.partition_responses
    # a duplicate is in the log already: the answer to its first copy was lost
    if partition.error_code != _DUPLICATE_SEQUENCE:
        raise_for(partition.error_code, f"appending to {topic.name}-{partition.index}: {partition.error_message or ''}")
    yield (topic.name, partition.index), partition.base_offset


def _ends(question: TransactionEnds, partitions: Collection[Partition]) -> WriteTxnMarkersRequest:
    marker = WriteTxnMarkersRequest.WritableTxnMarker
    return WriteTxnMarkersRequest(
        markers=[
            marker(
                producer_id=each.producer_id,
                producer_epoch=each.producer_epoch,
                transaction_result=question.are_commits,
                topics=[marker.WritableTxnMarkerTopic(name=topic, partition_indexes=[number])],
                # not a higher one: the partition would then refuse the coordinator's own ends of this producer
                coordinator_epoch=max(0, each.coordinator_epoch),
            )
            for topic, number in partitions
            for each in question.producers[topic, number]
        ],
        max_version=_NEWEST_WRITE_MARKERS,
    )


def _read_codes(answer: Any) -> Iterator[tuple[Partition, int]]:
    for marker in answer.markers:
        for topic in marker.topics:
            for partition in topic.partitions:
                # somebody has initialised the producer since: who asks has to look again
                if partition.error_code != _INVALID_PRODUCER_EPOCH:
                    raise_for(partition.error_code, f"writing an end to {topic.name}-{partition.partition_index}")
                yield (topic.name, partition.partition_index), partition.error_code


def _by_topic(partitions: Iterable[Partition]) -> Iterable[tuple[str, list[int]]]:
    topics: dict[str, list[int]] = {}
    for topic, number in partitions:
        topics.setdefault(topic, []).append(number)
    return topics.items()
