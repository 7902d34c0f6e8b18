"""Compare receipts with the topics: count each transaction's records in the log, and look for its commit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from epochsink.kafka import record_batch
from epochsink.kafka.applied_epochs import committables, topics_of
from epochsink.kafka.committable import KafkaCommittable, Transaction, WrittenPartition
from epochsink.kafka.errors import Unreachable
from epochsink.kafka.record_batch import Batch
from epochsink.kafka.server import KafkaServer
from epochsink.kafka.topic_log import TopicLog
from epochsink.sink import Comparison, LastDone, Receipt

COMMITTED: Final = "committed"
OTHERS: Final = "records of others"


@dataclass(slots=True)
class TransactionTally:
    """The records of one transaction in one partition, as far as the log was read.

    ``end`` is its outcome, `OTHERS` if its first offset has other records; "" if the log ends before that is known.
    """

    place: WrittenPartition
    producer_epoch: int
    records: int = 0
    end: str = ""
    is_deleted: bool = False

    def add(self, batch: Batch) -> None:
        """Take the next batch of this producer into account."""
        if self.end or batch.base_offset < self.place.start:
            return
        # a cluster that was set back gives producer ids a second time: by its id alone a batch may be anybody's
        if not self.records and (batch.is_control or batch.base_offset != self.place.start):
            return
        if batch.is_control and batch.producer_epoch >= self.producer_epoch:
            self.end = "aborted" if batch.is_abort else COMMITTED
        elif not batch.is_control and batch.producer_epoch == self.producer_epoch:
            self.records += batch.records

    def read_to(self, position: int) -> None:
        """Take into account that all batches before a position were added."""
        if not self.records and not self.end and self.place.start < position:
            self.end = OTHERS


def audit(cluster: KafkaServer, receipts: Sequence[Receipt]) -> list[Comparison]:
    """Return how each receipt compares with its topics. Raises `Unreachable`, `Refused`."""
    parts = {receipt.epoch: committables(LastDone(receipt.epoch, "", tuple(receipt.parts))) for receipt in receipts}
    every = [part for each in parts.values() for part in each]
    ids = cluster.topic_ids(topics_of(every), cluster.deadline())
    why_not = {topic: why_uncounted(cluster, topic) for topic in ids}
    same = [part for part in every if not part.recreated(ids)]
    tally = tallies(cluster, same, [topic for topic, why in why_not.items() if not why])
    return [_compared(receipt, parts[receipt.epoch], ids, why_not, tally) for receipt in receipts]


def tallies(
    cluster: KafkaServer, parts: Sequence[KafkaCommittable], topics: Iterable[str]
) -> dict[Transaction, list[TransactionTally]]:
    """Return what the logs of topics hold of parts, for each place. Raises `Unreachable`, `Refused`."""
    tally = {
        part.transaction: [TransactionTally(place, part.transaction.producer_epoch) for place in part.places]
        for part in parts
    }
    for topic in topics:
        wanted = [(part, tally[part.transaction]) for part in parts if topic in part.topics]
        _Search(TopicLog(cluster, topic), wanted).run(cluster.timeout)
    return tally


def why_uncounted(cluster: KafkaServer, topic: str) -> str:
    """Return why the records of a transaction in a topic cannot be counted; "" if they can."""
    policy = cluster.topic_settings(topic).get("cleanup.policy")
    return (
        ""
        if policy == "delete"
        else f"cleanup.policy of topic '{topic}' is {policy or 'not known'}: older records of a key may go"
    )


class _Search:
    """The search for transactions' records in one topic."""

    def __init__(self, log: TopicLog, wanted: Iterable[tuple[KafkaCommittable, list[TransactionTally]]]) -> None:
        self._log = log
        self._tallies: dict[int, dict[int, list[TransactionTally]]] = {}
        for part, tallies in wanted:
            for tally in (tally for tally in tallies if tally.place.topic == log.topic):
                by_producer = self._tallies.setdefault(tally.place.partition, {})
                by_producer.setdefault(part.transaction.producer_id, []).append(tally)
        self._positions: dict[int, int] = {}

    def run(self, timeout: float) -> None:
        """Read the log from the first row of the transactions on, until each of them has ended.

        Raises `Unreachable` if nothing arrives for ``timeout`` seconds.
        """
        starts, ends = self._log.starts(), self._log.ends()
        for partition in self._tallies:
            places = self._open(partition)
            for tally in places:
                tally.is_deleted = tally.place.start < starts.get(partition, 0)
            first = min(tally.place.start for tally in places)
            self._positions[partition] = max(first, starts.get(partition, 0))
        arrived = self._log.clock.monotonic()
        while left := {at: offset for at, offset in self._positions.items() if offset < ends.get(at, 0)}:
            before = dict(self._positions)
            for partition, data in self._log.fetch(left).items():
                self._positions[partition] = self._read(partition, data, ends[partition])
            if self._positions != before:
                arrived = self._log.clock.monotonic()
            elif self._log.clock.monotonic() - arrived > timeout:
                raise Unreachable(f"topic '{self._log.topic}' gives no more records before the end of its log")

    def _open(self, partition: int) -> list[TransactionTally]:
        return [tally for tallies in self._tallies[partition].values() for tally in tallies if not tally.end]

    def _read(self, partition: int, data: bytes | None, end: int) -> int:
        """Take fetched records into account; return the next position, ``end`` if there is nothing more to read."""
        if data is None:
            for tally in self._open(partition):
                tally.is_deleted = True
            return end
        position = self._positions[partition]
        for after, batch in record_batch.split(data):
            # a fetch begins with the batch that contains the position
            if after <= position:
                continue
            position = after
            if batch is not None:
                for tally in self._tallies[partition].get(batch.producer_id, ()):
                    tally.add(batch)
        for tally in self._open(partition):
            tally.read_to(position)
        return position if self._open(partition) else end


def _compared(
    receipt: Receipt,
    parts: Sequence[KafkaCommittable],
    ids: Mapping[str, str],
    why_not: Mapping[str, str],
    found: Mapping[Transaction, Sequence[TransactionTally]],
) -> Comparison:
    if not parts:
        return receipt.not_compared("the ledger keeps the offsets of the newest epochs only")
    if gone := sorted({topic for part in parts for topic in part.recreated(ids)}):
        return receipt.differs(f"topic(s) {', '.join(gone)} were deleted, and perhaps created again")
    if why := next((why_not[topic] for part in parts for topic in part.topics if why_not.get(topic)), ""):
        return receipt.not_compared(why)
    own = [tally for part in parts for tally in found[part.transaction]]
    if any(tally.is_deleted for tally in own):
        return receipt.not_compared("retention has deleted some of its records")
    if other := next((tally for tally in own if tally.end != COMMITTED), None):
        place = f"{other.place.topic}-{other.place.partition}"
        return receipt.differs(f"{place} has no commit of its transaction, but: {other.end or 'nothing'}")
    records = sum(tally.records for tally in own)
    return receipt.counted(records, sum(part.rows for part in parts), "the log has lost or doubled records")
