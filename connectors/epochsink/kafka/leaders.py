"""Ask the leaders of partitions, with one request to each broker for all partitions that it leads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from kafka.protocol.admin.transactions import DescribeProducersRequest
from kafka.protocol.consumer import FetchRequest, ListOffsetsRequest, OffsetForLeaderEpochRequest

from epochsink.kafka.cluster import raise_for
from epochsink.kafka.errors import LEADER_NOT_AVAILABLE, UNKNOWN_TOPIC

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from epochsink.kafka.cluster import Cluster, Topic

Partition = tuple[str, int]
"""A topic's name, and the number of one of its partitions."""

_OFFSET_OUT_OF_RANGE: Final = 1
_READ_UNCOMMITTED: Final = 0
_CONSUMER: Final = -1
_EARLIEST: Final = -2
_LATEST: Final = -1

# the newest versions that name topics; brokers from 3.0 to 4.1 take them
_NEWEST_FETCH: Final = 12
_NEWEST_LIST_OFFSETS: Final = 7
_OFFSETS_SETTLED: Final = 5
"""The first version of ListOffsets in which a new leader returns an error instead of an end that is too low."""
_NEWEST_EPOCH_ENDS: Final = 4

_ListedTopic: Final = ListOffsetsRequest.ListOffsetsTopic
_EpochsTopic: Final = OffsetForLeaderEpochRequest.OffsetForLeaderTopic


class Question(Protocol):
    """A question to leaders about their partitions."""

    def request(self, partitions: Collection[Partition]) -> Any:
        """Return the request for the partitions of one leader."""

    def read(self, answer: Any) -> Iterable[tuple[Partition, Any]]:
        """Return the answers of one leader, by partition. Raises what kafka-python raises."""


class Leaders:
    """The leaders of some topics' partitions, as of the last `look`.

    Every method raises what kafka-python raises. After an error, look again: another broker may be the leader now.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.topics: Mapping[str, Topic] = {}

    def look(
        self, names: Collection[str], partitions: Callable[[], Collection[Partition]], *questions: Question
    ) -> list[dict[Partition, Any]]:
        """Find the leaders, and ask about ``partitions``, which may depend on them; return the answers as `ask` does.

        The leaders of an earlier look are asked at the same time, which saves a round trip. If other brokers lead now,
        the questions are asked again.
        """
        self.topics = self._cluster.topics_known(names)
        # only if all topics are known: `partitions` may need each of them
        requests = self._requests(partitions(), questions) if len(self.topics) == len(names) else []
        topics, answers = self._cluster.topics_and(names, requests)
        # the answers count only if they come from the current leaders of the same topics
        if topics == self.topics and requests:
            return _read(questions, answers)
        self.topics = topics
        return self.ask(partitions(), *questions)

    def ids(self) -> dict[str, str]:
        """Return the id of each topic that exists, by name."""
        return {name: topic.id for name, topic in self.topics.items()}

    def partitions(self, names: Collection[str] | None = None) -> list[Partition]:
        """Return the partitions of these topics, or of all."""
        topics = sorted(self.topics.keys() if names is None else self.topics.keys() & names)
        return [(name, number) for name in topics for number in sorted(self.topics[name].leaders)]

    def ask(self, partitions: Collection[Partition], *questions: Question) -> list[dict[Partition, Any]]:
        """Return, for each question, the leaders' answers by partition.

        Each leader gets the questions in this order, all before its first answer.
        """
        return _read(questions, self._cluster.ask_all(self._requests(partitions, questions)))

    def ask_each(self, questions: Sequence[tuple[Partition, Question]]) -> list[Any]:
        """Return the answer to each question about one partition. All are sent before the first answer."""
        requests = [(self._leader(at), question.request([at])) for at, question in questions]
        answers = zip(questions, self._cluster.ask_all(requests), strict=True)
        return [told for (_, question), answer in answers for _, told in question.read(answer)]

    def _leader(self, partition: Partition) -> int:
        name, number = partition
        if name not in self.topics:
            raise_for(UNKNOWN_TOPIC, f"topic '{name}'")
        node = self.topics[name].leaders.get(number, -1)
        if node < 0:
            raise_for(LEADER_NOT_AVAILABLE, f"partition {number} of topic '{name}'")
        return node

    def _requests(self, partitions: Iterable[Partition], questions: Sequence[Question]) -> list[tuple[int, Any]]:
        brokers: dict[int, list[Partition]] = {}
        for partition in partitions:
            brokers.setdefault(self._leader(partition), []).append(partition)
        return [(node, question.request(mine)) for node, mine in brokers.items() for question in questions]


def _read(questions: Sequence[Question], answers: Sequence[Any]) -> list[dict[Partition, Any]]:
    """Read the answers to `Leaders._requests`: those of each leader are in the order of the questions."""
    return [
        {at: told for answer in answers[index :: len(questions)] for at, told in question.read(answer)}
        for index, question in enumerate(questions)
    ]


class End(NamedTuple):
    """An offset, and the epoch of the leader that reported it; -1 for any epoch."""

    offset: int
    leader_epoch: int = -1


class Offsets:
    """The first offset of each partition, or the offset after the last record that all in-sync replicas have."""

    def __init__(self, timestamp: int) -> None:
        self._timestamp = timestamp

    def request(self, partitions: Collection[Partition]) -> ListOffsetsRequest:
        """Return the request."""
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
                        listed(partition_index=number, current_leader_epoch=-1, timestamp=self._timestamp)
                        for number in numbers
                    ],
                )
                for topic, numbers in _by_topic(partitions)
            ],
            min_version=_OFFSETS_SETTLED,
            max_version=_NEWEST_LIST_OFFSETS,
        )

    def read(self, answer: Any) -> Iterator[tuple[Partition, End]]:
        """Return the offsets."""
        for topic in answer.topics:
            for told in topic.partitions:
                raise_for(told.error_code, f"the offsets of {topic.name}-{told.partition_index}")
                yield (topic.name, told.partition_index), End(told.offset, told.leader_epoch)


FIRST_OFFSETS: Final = Offsets(_EARLIEST)
END_OFFSETS: Final = Offsets(_LATEST)


class Producers:
    """The producers of each partition, in the states that kafka-python returns."""

    def request(self, partitions: Collection[Partition]) -> DescribeProducersRequest:
        """Return the request."""
        asked = DescribeProducersRequest.TopicRequest
        return DescribeProducersRequest(
            topics=[asked(name=topic, partition_indexes=numbers) for topic, numbers in _by_topic(partitions)]
        )

    def read(self, answer: Any) -> Iterator[tuple[Partition, Sequence[Any]]]:
        """Return the producers' states."""
        for topic in answer.topics:
            for told in topic.partitions:
                raise_for(told.error_code, f"the producers of {topic.name}-{told.partition_index}")
                yield (topic.name, told.partition_index), told.active_producers


class EpochEnds:
    """The offset at which a leader epoch ends in the leader's log; each partition has an epoch of its own."""

    def __init__(self, leader_epochs: Mapping[Partition, int]) -> None:
        self._leader_epochs = leader_epochs

    def request(self, partitions: Collection[Partition]) -> OffsetForLeaderEpochRequest:
        """Return the request."""
        return OffsetForLeaderEpochRequest(
            replica_id=_CONSUMER,
            topics=[
                _EpochsTopic(
                    topic=topic,
                    partitions=[
                        _EpochsTopic.OffsetForLeaderPartition(
                            partition=number, current_leader_epoch=-1, leader_epoch=self._leader_epochs[topic, number]
                        )
                        for number in numbers
                    ],
                )
                for topic, numbers in _by_topic(partitions)
            ],
            max_version=_NEWEST_EPOCH_ENDS,
        )

    def read(self, answer: Any) -> Iterator[tuple[Partition, int]]:
        """Return the offsets; negative for an epoch that the leader has not reached."""
        for topic in answer.topics:
            for told in topic.partitions:
                raise_for(told.error_code, f"the leader epochs of {topic.topic}-{told.partition}")
                yield (topic.topic, told.partition), told.end_offset


class Fetched(NamedTuple):
    """The answer about one partition; ``records`` is None if the leader does not have the position."""

    records: bytes | None
    end: int
    """The offset after the last record that all in-sync replicas have."""


class Records:
    """The record batches from these positions on, committed or not: at least one if one arrives within ``wait_ms``.

    A position with a leader epoch also counts as missing if the log has lost records of that epoch before it.
    """

    def __init__(self, positions: Mapping[Partition, End], *, wait_ms: int, bytes_each: int, bytes_in_all: int) -> None:
        self._positions = positions
        self._wait_ms = wait_ms
        self._bytes_each = bytes_each
        self._bytes_in_all = bytes_in_all

    def request(self, partitions: Collection[Partition]) -> FetchRequest:
        """Return the request."""
        return FetchRequest(
            replica_id=_CONSUMER,
            max_wait_ms=self._wait_ms,
            min_bytes=1,
            max_bytes=self._bytes_in_all,
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
                            fetch_offset=self._positions[topic, number].offset,
                            last_fetched_epoch=self._positions[topic, number].leader_epoch,
                            log_start_offset=-1,
                            partition_max_bytes=self._bytes_each,
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

    def read(self, answer: Any) -> Iterator[tuple[Partition, Fetched]]:
        """Return the records."""
        raise_for(answer.error_code, "fetching")
        for topic in answer.responses:
            for told in topic.partitions:
                partition = (topic.topic, told.partition_index)
                # retention deleted the position, or the log was cut off before it
                if told.error_code == _OFFSET_OUT_OF_RANGE or told.diverging_epoch is not None:
                    yield partition, Fetched(None, told.high_watermark)
                    continue
                raise_for(told.error_code, f"fetching from {topic.topic}-{told.partition_index}")
                yield partition, Fetched(bytes(told.records or b""), told.high_watermark)


def _by_topic(partitions: Iterable[Partition]) -> Iterable[tuple[str, list[int]]]:
    topics: dict[str, list[int]] = {}
    for topic, number in partitions:
        topics.setdefault(topic, []).append(number)
    return topics.items()
