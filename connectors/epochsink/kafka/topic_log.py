"""Read the log of one topic, with records that are not committed, and append batches to it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

from epochsink.kafka.committable import NO_ID, Transaction
from epochsink.kafka.errors import UNKNOWN_TOPIC, Refused
from epochsink.kafka.leaders import Leaders
from epochsink.kafka.server import END_OFFSETS, FIRST_OFFSETS, Append, End, KafkaServer, Question, Records, raise_for

_LONGEST_APPEND_SECONDS: Final = 30.0
_WAIT_MS: Final = 500
_FETCHED_BYTES: Final = 32 << 20
_PARTITION_BYTES: Final = 4 << 20


class TopicLog:
    """Reads and writes one topic with the driver's client. Every method may raise `Unreachable`, `Refused`.

    Each request is retried for at most ``KafkaServer.timeout`` seconds. Used by one thread.
    """

    def __init__(self, cluster: KafkaServer, topic: str) -> None:
        self._cluster = cluster
        self.topic = topic
        self.clock = cluster.clock
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
        positions_by_partition = {(self.topic, number): End(offset) for number, offset in positions.items()}
        records = Records(
            positions=positions_by_partition, wait_ms=_WAIT_MS, bytes_each=_PARTITION_BYTES, bytes_in_all=_FETCHED_BYTES
        )
        return {number: fetched.records for number, fetched in self._ask(records, positions).items()}

    def join(self, transaction: Transaction, partitions: Collection[int]) -> None:
        """Add partitions to a transaction; must be called before `append`."""
        self._cluster.until(
            self._cluster.deadline(), lambda: self._cluster.add_partitions(transaction, self.topic, partitions)
        )

    def append(self, transaction: Transaction, partition: int, batch: bytes, after: int, topic_id: str) -> None:
        """Append one batch to a partition. A retry appends no second copy, because of its sequence number.

        ``after`` is the end of the partition before the first batch of the transaction, and ``topic_id`` the topic's id
        then. Raises `Refused` if the topic is another one by now, or if the broker mistakes the batch for an
        earlier one.
        """
        timeout_ms = int(min(self._cluster.timeout, _LONGEST_APPEND_SECONDS) * 1000)
        at = self._ask(Append(transaction, batch, timeout_ms), [partition])[partition]
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
        wanted = None if partitions is None else [(self.topic, number) for number in partitions]

        def attempt() -> dict[int, Any]:
            leaders = Leaders(self._cluster)
            [by_partition] = leaders.look(
                [self.topic], lambda: leaders.partitions() if wanted is None else wanted, question
            )
            if self.topic not in leaders.topics:
                raise_for(UNKNOWN_TOPIC, f"topic '{self.topic}'")
            self.topic_id = leaders.topics[self.topic].id
            return {number: answer for (_, number), answer in by_partition.items()}

        answers: dict[int, Any] = self._cluster.until(self._cluster.deadline(), attempt)
        return answers
