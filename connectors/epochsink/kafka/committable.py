"""Name transactions: the id that a task attempt uses, and the committable that the ledger records.

A task returns the committable. Any later driver can end the transaction with it.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Self

from epochsink.errors import LedgerCorrupt
from epochsink.identity import TransactionalId, identity_label
from epochsink.kafka.dead_letter import Rules
from epochsink.sink import Committable, Task, identity_key

VERSION: Final = 1

NO_ID: Final = uuid.UUID(int=0).hex
"""The topic id that brokers return if they do not know one yet; it does not identify a topic."""

ATTEMPTS: Final = 16
"""The number of ids that the attempts of one Spark partition and parity share.

Two attempts of one task may run at the same time (a retry or a speculative copy). If they use the same id, the later
one aborts what the earlier one prepared. With this number they collide one time in sixteen. A collision costs time and
never rows. If it happens before the vote, the vote notices it, and the rows are written again. If it happens after the
vote, the marker of the Spark partition proves that the transaction was not applied, and its rows are prepared again.
"""


def transactional_id(task: Task, *, bounded: bool) -> TransactionalId:
    """Return the id that one attempt at one Spark partition of an epoch uses.

    It contains the epoch's parity, because epoch N may be uncommitted while N+1 is written. If rows are not kept,
    nothing can repair a collision. The id is not ``bounded`` then: it contains the whole uuid and is used once.
    """
    return TransactionalId(
        key=identity_key(task.identity),
        generation=task.identity.generation,
        partition=task.partition,
        parity=task.epoch.number % 2,
        attempt=int(task.uuid, 16) % ATTEMPTS,
        nonce="" if bounded else task.uuid,
        label=identity_label(task.identity),
    )


class Producer(NamedTuple):
    """One use of a transactional id: brokers give the id's producer another epoch each time."""

    producer_id: int
    producer_epoch: int


class Transaction(NamedTuple):
    """The unique name of one transaction: each use of an id has another producer epoch."""

    transactional_id: str
    producer_id: int
    producer_epoch: int

    @property
    def producer(self) -> Producer:
        """The producer that began it."""
        return Producer(self.producer_id, self.producer_epoch)


class WrittenPartition(NamedTuple):
    """A partition in which a transaction has rows, as the vote found it.

    ``start`` is the offset of the first row. ``end`` is the end of the log after the last row, and ``leader_epoch`` is
    the epoch of the leader that reported it; both are -1 before the vote. If that leader epoch later ends before
    ``end``, the log has lost rows.
    """

    topic: str
    partition: int
    start: int
    end: int = -1
    leader_epoch: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaCommittable:
    """One open transaction with the rows of one Spark partition.

    ``task`` is the uuid under which the rows are spooled. ``prepared_at`` is in seconds since 1970. ``topics`` holds
    the id of each topic written to, read before the first row: a topic with another id is another topic.
    ``kept_in_topic`` says that the topic itself keeps the rows until the epoch is done. ``places`` is complete from
    the vote on. ``letters`` of the rows are dead letters, chosen by ``rules`` (None: the rows had none to fear);
    ``why`` is the reason of the first.
    """

    transaction: Transaction
    partition: int
    task: str
    rows: int
    prepared_at: int
    topics: Mapping[str, str] = field(hash=False)
    kept_in_topic: bool = False
    places: tuple[WrittenPartition, ...] = ()
    rules: Rules | None = None
    letters: int = 0
    why: str = ""

    def rows_in(self, topic: str) -> int:
        """Return how many of the rows are in a topic, if the sink has one topic."""
        return self.letters if self.rules is not None and topic == self.rules.topic else self.rows - self.letters

    def to_json(self) -> Committable:
        """Return the form that the ledger records."""
        places: dict[str, list[list[int]]] = {}
        for topic, *numbers in self.places:
            places.setdefault(topic, []).append(numbers)
        return {
            "version": VERSION,
            "transactional_id": self.transaction.transactional_id,
            "producer_id": self.transaction.producer_id,
            "producer_epoch": self.transaction.producer_epoch,
            "partition": self.partition,
            "task": self.task,
            "rows": self.rows,
            "prepared_at": self.prepared_at,
            "topics": dict(self.topics),
            "kept_in_topic": self.kept_in_topic,
            "places": places,
            "rules": None if self.rules is None else self.rules.to_json(),
            "letters": self.letters,
            "why": self.why,
        }

    def recreated(self, now: Mapping[str, str]) -> list[str]:
        """Return the topics that were deleted or have another id since the rows were written; ``now`` holds the ids."""
        # an unknown id proves nothing
        topic_ids = ((topic, was, now.get(topic)) for topic, was in self.topics.items())
        return [topic for topic, was, known in topic_ids if known != was and NO_ID not in (was, known)]

    def is_reopened(self, partitions: Iterable[tuple[str, int]]) -> bool:
        """Whether a duplicate of the marker's request has come after the commit, and opened the transaction again.

        ``partitions`` are those that the open transaction lists. The rows came before the marker: a coordinator that
        has lost the commit still lists their partitions.
        """
        topics = {topic for topic, _ in partitions}
        return bool(topics and self.topics) and topics.isdisjoint(self.topics)

    @classmethod
    def from_json(cls, part: Committable) -> Self:
        """Return the committable that ``to_json`` wrote. Raises `LedgerCorrupt`."""
        version = part.get("version")
        if version != VERSION:
            raise LedgerCorrupt(
                f"a Kafka committable of version {version!r} is recorded, and this epochsink reads version {VERSION}",
                hint="finish the epoch with the version of epochsink that wrote it",
            )
        try:
            return cls(
                transaction=Transaction(
                    str(part["transactional_id"]), int(part["producer_id"]), int(part["producer_epoch"])
                ),
                partition=int(part["partition"]),
                task=str(part["task"]),
                rows=int(part["rows"]),
                prepared_at=int(part["prepared_at"]),
                topics=dict(part["topics"]),
                kept_in_topic=bool(part["kept_in_topic"]),
                places=tuple(
                    WrittenPartition(topic, *map(int, place))
                    for topic, places in part["places"].items()
                    for place in places
                ),
                rules=Rules.from_json(part["rules"] or {}),
                letters=int(part["letters"]),
                why=str(part["why"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as failure:
            raise LedgerCorrupt(
                f"a Kafka committable with the fields {', '.join(sorted(part))} cannot be read: {failure!r}",
                hint="a newer epochsink may have written it: start with that version; or look which epoch it is of: "
                "epochsink status CHECKPOINT",
            ) from failure
