"""Say what is asked of a Kafka cluster: typed requests, values in and out, no decision.

Whatever decides stands above `KafkaServer`, and is run by the simulation over a cluster in memory.
"""

from __future__ import annotations

import enum
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kafka import errors as kafka_errors

from epochsink.kafka.committable import Producer, Transaction
from epochsink.kafka.errors import Refused, Unreachable, is_passing, refused
from epochsink.retry import Clock, retrying

if TYPE_CHECKING:
    from epochsink.kafka.committed_records import CommittedRecord
    from epochsink.kafka.producer import TransactionalProducer


_FIRST_PAUSE_SECONDS: Final = 0.05
_LONGEST_PAUSE_SECONDS: Final = 1.0


class TransactionState(enum.Enum):
    """The states of a transactional id, as DescribeTransactions names them, and one for an unknown id."""

    EMPTY = "Empty"
    ONGOING = "Ongoing"
    PREPARE_COMMIT = "PrepareCommit"
    PREPARE_ABORT = "PrepareAbort"
    COMPLETE_COMMIT = "CompleteCommit"
    COMPLETE_ABORT = "CompleteAbort"
    PREPARE_EPOCH_FENCE = "PrepareEpochFence"
    DEAD = "Dead"
    NOT_FOUND = "not found"


class Description(NamedTuple):
    """A coordinator's description of a transactional id."""

    state: TransactionState
    producer_id: int = -1
    producer_epoch: int = -1
    begun_ms: int = 0
    """When the transaction began, in milliseconds since 1970."""
    timeout_ms: int = 0
    """The brokers abort it after this many milliseconds."""
    partitions: Sequence[tuple[str, int]] = ()
    """Where it has records; the internal topic of its marker's group is among them."""

    def is_of(self, transaction: Transaction) -> bool:
        """Whether the id's newest producer is the producer of this transaction."""
        return (self.producer_id, self.producer_epoch) == transaction.producer


class Topic(NamedTuple):
    """A topic as the brokers have it now."""

    id: str
    """32 hex."""
    leaders: Mapping[int, int]
    """The number of each partition's leader; negative if there is none."""


class ListedTransaction(NamedTuple):
    """A transactional id in a coordinator's list, with its producer id."""

    transactional_id: str
    producer_id: int


class GroupOffset(NamedTuple):
    """A committed offset of a group: -1 for none; ``error_code`` is 0, or why it could not be read."""

    offset: int
    metadata: str
    error_code: int


class GroupOffsets(NamedTuple):
    """The committed offsets of a group, by topic; ``error_code`` is 0, or why they could not be read."""

    group: str
    error_code: int
    topics: Mapping[str, Sequence[GroupOffset]]


Partition = tuple[str, int]
"""A topic's name, and the number of one of its partitions."""


class End(NamedTuple):
    """An offset, and the epoch of the leader that reported it; -1 for any epoch."""

    offset: int
    leader_epoch: int = -1


class ProducerState(NamedTuple):
    """A producer that a partition knows; ``start`` is where its open transaction begins there, -1 without one."""

    producer_id: int
    producer_epoch: int
    last_sequence: int
    start: int
    coordinator_epoch: int = -1
    """That of the coordinator that wrote the producer's last end there; -1 without one."""


class Fetched(NamedTuple):
    """The answer about one partition; ``records`` is None if the leader does not have the position."""

    records: bytes | None
    first: int
    """The first offset that the log still has; -1 without records."""
    end: int
    """The offset after the last record that all in-sync replicas have."""


# ---- the questions


@dataclass(frozen=True)
class Offsets:
    """The first offset of each partition, or the offset after the last record that all in-sync replicas have."""

    are_first: bool


FIRST_OFFSETS: Final = Offsets(are_first=True)
END_OFFSETS: Final = Offsets(are_first=False)


@dataclass(frozen=True)
class Producers:
    """The `ProducerState` of each producer of each partition."""


@dataclass(frozen=True)
class EpochEnds:
    """The offset at which a leader epoch ends in the leader's log; each partition has an epoch of its own.

    Negative for an epoch that the leader has not reached.
    """

    leader_epochs: Mapping[Partition, int]


@dataclass(frozen=True, kw_only=True)
class Records:
    """The record batches from these positions on, committed or not: at least one if one arrives within ``wait_ms``.

    A position with a leader epoch also counts as missing if the log has lost records of that epoch before it.
    """

    positions: Mapping[Partition, End]
    wait_ms: int
    bytes_each: int
    bytes_in_all: int


@dataclass(frozen=True)
class Append:
    """Appends one batch to one partition; the answer is its offset.

    For a batch that the broker already has, the answer is the offset of the first copy, or -1.
    """

    transaction: Transaction
    batch: bytes
    timeout_ms: int


@dataclass(frozen=True)
class TransactionEnds:
    """Writes the end of decided transactions as their coordinator does; each partition has producers of its own.

    The answer is 0, or 47 (INVALID_PRODUCER_EPOCH) if the producer has a later epoch by now. May be repeated. Needs the
    right to alter the cluster.
    """

    producers: Mapping[Partition, Sequence[ProducerState]]
    are_commits: bool


Question = Offsets | Producers | EpochEnds | Records | Append | TransactionEnds


class LeaderRequest(NamedTuple):
    """A question to one broker about partitions that it leads."""

    node: int
    question: Question
    partitions: Collection[Partition]


class KafkaServer(ABC):
    """One cluster. May be used by several threads.

    The requests raise what kafka-python raises, and OSError, if the answer is an error or does not come: the cluster
    may have carried them out. `until` repeats them. ``timeout`` (seconds) bounds each method above, with its retries.
    """

    def __init__(self, servers: str, timeout: float, clock: Clock = time) -> None:
        self.servers = servers
        self.target = f"Kafka at {servers}"
        """The name of the cluster in messages."""
        self.timeout = timeout
        self.clock = clock

    # ---- repeated requests; raise `Unreachable` or `Refused`, never an exception of kafka-python

    def deadline(self) -> float:
        """Return the deadline (monotonic seconds) of a method that is called now."""
        return self.clock.monotonic() + self.timeout

    def until(self, deadline: float, attempt: Callable[[], Any]) -> Any:
        """Repeat ``attempt`` while a retry may help, until the deadline (monotonic seconds).

        After each failure, brokers, leaders and coordinators are looked up again: other brokers may have these roles.
        """
        policy = retrying(
            is_passing,
            seconds=max(0.0, deadline - self.clock.monotonic()),
            first_pause=_FIRST_PAUSE_SECONDS,
            longest_pause=_LONGEST_PAUSE_SECONDS,
            clock=self.clock,
        )

        def once() -> Any:
            try:
                return attempt()
            except (kafka_errors.KafkaError, OSError):
                self.look_again()
                raise

        try:
            return policy(once)
        except (Unreachable, Refused):
            raise
        except (kafka_errors.KafkaError, OSError) as failure:
            raise self._translated(failure) from failure

    def beside(self, *questions: Callable[[], Any]) -> list[Any]:
        """Return the answers to questions none of which depends on another's answer, in their order.

        They may be asked at the same time. If one fails, that is raised when the others have ended.
        """
        return [question() for question in questions]

    def _translated(self, failure: Exception) -> Unreachable | Refused:
        if not is_passing(failure):
            return refused(f"{self.target} refuses a request", failure)
        return Unreachable(
            f"{self.target} did not answer within {self.timeout:g} s: {type(failure).__name__}: {failure}",
            hint="check that the brokers run and that the driver can reach them; no row is lost",
        )

    def broker_setting(self, name: str) -> str | None:
        """Return a setting of one broker; None without the right to read it."""
        value: str | None = self.until(self.deadline(), lambda: self.ask_broker_setting(name))
        return value

    def topic_settings(self, topic: str) -> Mapping[str, str]:
        """Return the settings of a topic, by name; empty if it does not exist, or without the right to read them."""
        settings: Mapping[str, str] = self.until(self.deadline(), lambda: self.ask_topic_settings(topic))
        return settings

    def topic_ids(self, names: Collection[str], deadline: float) -> dict[str, str]:
        """Return the id (32 hex) of each of these topics that exists."""
        topics, _ = self.until(deadline, lambda: self.topics_and(names, [])) if names else ({}, [])
        return {name: topic.id for name, topic in topics.items()}

    # ---- requests to the coordinators of transactional ids

    @abstractmethod
    def end_transaction(self, transaction: Transaction, *, commit: bool) -> int:
        """Ask the coordinator to commit or abort; return its error code, see `epochsink.kafka.transactions`."""

    @abstractmethod
    def commit_transactions(self, transactions: Sequence[Transaction]) -> dict[str, int]:
        """Ask for commits without waiting for each answer; return the error codes that arrived, by id."""

    @abstractmethod
    def fence_producers(self, transactions: Collection[Transaction]) -> dict[str, int]:
        """Initialise ids that these producers must have; return the error codes that arrived, by id."""

    @abstractmethod
    def initialise_producer(self, transactional_id: str) -> Producer:
        """Initialise an id, as a producer does; return its new producer."""

    @abstractmethod
    def describe_transactions(self, ids: Sequence[str]) -> dict[str, Description]:
        """Return the state of each id."""

    @abstractmethod
    def list_transactions(
        self, states: Sequence[TransactionState], producer_ids: Collection[int]
    ) -> list[ListedTransaction]:
        """Return what all brokers list in these states, of these producers; empty for any."""

    @abstractmethod
    def add_partitions(self, transaction: Transaction, topic: str, partitions: Collection[int]) -> None:
        """Add partitions to a transaction."""

    # ---- requests to the coordinators of groups

    @abstractmethod
    def list_groups(self) -> list[str]:
        """Return the names of all groups."""

    @abstractmethod
    def group_offsets(
        self, groups: Sequence[str], topics: Collection[str] | None, *, stable: bool
    ) -> list[GroupOffsets]:
        """Return the offsets of groups under these topics, or under all; if ``stable``, an error for those in doubt."""

    # ---- requests to any broker, and to the leaders of partitions

    @abstractmethod
    def ask_broker_setting(self, name: str) -> str | None:
        """Return a setting of one broker; None without the right to read it."""

    @abstractmethod
    def ask_topic_settings(self, topic: str) -> Mapping[str, str]:
        """Return the settings of a topic; empty if it does not exist, or without the right to read them."""

    @abstractmethod
    def topics_known(self, names: Iterable[str]) -> dict[str, Topic]:
        """Return the topics that earlier answers described, as they were then."""

    @abstractmethod
    def topics_and(
        self, names: Iterable[str], requests: Sequence[LeaderRequest]
    ) -> tuple[dict[str, Topic], list[dict[Partition, Any]]]:
        """Return the topics that exist, by name, and the answers to requests that are sent at the same time."""

    @abstractmethod
    def ask_leaders(self, requests: Sequence[LeaderRequest]) -> list[dict[Partition, Any]]:
        """Send requests at once, each broker's in this order; return the answers by partition."""

    @abstractmethod
    def look_again(self) -> None:
        """Forget brokers, leaders and coordinators, so that the next request looks them up."""

    @abstractmethod
    def version(self) -> str:
        """Return the brokers' version as derived from their protocol."""

    @abstractmethod
    def describes_transactions(self) -> bool:
        """Whether the brokers support the requests that describe producers and transactions."""

    @abstractmethod
    def describe_topic(self, topic: str) -> dict[str, Any]:
        """Return a topic's error code, partitions with their replicas, and the rights of this user."""

    @abstractmethod
    def create_topic(self, topic: str, how: Mapping[str, Any]) -> None:
        """Create a topic. Raises BrokerResponseError, ValueError."""

    # ---- other clients

    @abstractmethod
    def producer(
        self, options: Mapping[str, str], transactional_id: str, transaction_timeout_ms: int
    ) -> TransactionalProducer:
        """Return a producer for one transaction. Raises `NativeError`, `ConfigurationError`."""

    @abstractmethod
    def committed_records(self, topic: str, ends: Mapping[int, int] | None) -> Iterator[CommittedRecord]:
        """Yield the committed records of all partitions of a topic; see `epochsink.kafka.committed_records`."""

    @abstractmethod
    def close(self) -> None:
        """Close the connections. May be repeated."""


def raise_for(code: int, what: str) -> None:
    """Raise kafka-python's exception for an error code of the protocol; do nothing for 0."""
    kind = kafka_errors.for_code(code)
    if kind is not kafka_errors.NoError:
        raise kind(what)


def require_all(names: Iterable[Any], answered: Iterable[Any], what: str) -> None:
    """Raise RetriableError unless the answers name all that was asked for.

    What an answer leaves out would look like a partition without rows, a group without a marker, or a topic that is
    gone.
    """
    if missing := set(names).difference(answered):
        raise kafka_errors.RetriableError(f"the brokers' answers about {what} leave out {sorted(missing)}")
