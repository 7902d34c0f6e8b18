"""Ask the leaders of the partitions whether they hold an epoch's rows.

The transaction coordinator does not know. It accepts a commit even if an operator has aborted the transaction at the
partitions, or if a lost disk or an unclean election has removed its rows.

Before the commit, each partition must show the transaction as open, with all of its rows. A producer numbers a
transaction's rows from 0 in each partition, so the last sequence numbers give the count, if the first row is there.
After a loss it may not be: a partition that has no state of a producer accepts any first number. So in the vote the
first batches are read. After the commit, no partition may have lost records that it had at the vote, and none may have
aborted the transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, NamedTuple

from kafka.errors import RetriableError

from epochsink.kafka import record_batch
from epochsink.kafka.committable import NO_ID, KafkaCommittable, Producer, Transaction, WrittenPartition
from epochsink.kafka.errors import Unreachable
from epochsink.kafka.leaders import Leaders
from epochsink.kafka.record_batch import SEQUENCES, Batch
from epochsink.kafka.server import (
    END_OFFSETS,
    FIRST_OFFSETS,
    End,
    EpochEnds,
    Fetched,
    KafkaServer,
    Partition,
    Producers,
    ProducerState,
    Records,
    TransactionEnds,
)
from epochsink.retry import Clock

Ends = Mapping[Transaction, Mapping[Partition, End]]
"""Where partitions ended when a transaction was complete."""

_NOT_OPEN: Final = -1
"""The start offset that the leader gives for a producer without an open transaction."""
_OFFSETS_TOPIC: Final = "__consumer_offsets"
_WAIT_MS: Final = 100
_MARKERS_SECONDS: Final = 0.1
"""How long the partitions are read for the ends of transactions before the coordinator is asked."""
_BYTES_EACH: Final = 64 << 10
_BYTES_IN_ALL: Final = 16 << 20
_FIRST_BATCHES: Final = 64
"""How many first batches are read at once: each has at most about a megabyte."""


class Seen(NamedTuple):
    """The leaders' answers before a commit.

    ``topics`` holds the ids of the topics, by name. ``whole`` holds the complete parts, with their places, by index.
    ``missing`` says what the others lack. ``ends`` holds the ends of the partitions. ``before`` is what
    `Witness.open_before` returns.
    """

    topics: Mapping[str, str]
    whole: Mapping[int, KafkaCommittable]
    missing: Mapping[int, str]
    ends: Mapping[Partition, End]
    before: Mapping[Producer, Partition]


class Loss(NamedTuple):
    """The loss of committed rows in words, or None, and the transactions whose end some partition does not show."""

    words: str | None
    unseen: Sequence[Transaction] = ()


class Witness:
    """Asks the leaders of an epoch's partitions. Deadlines are monotonic seconds.

    Raises `Unreachable`, `Refused`.
    """

    def __init__(self, cluster: KafkaServer) -> None:
        self._cluster = cluster

    def look(
        self,
        parts: Sequence[KafkaCommittable],
        others: Iterable[str],
        deadline: float,
        before: Seen | None = None,
    ) -> Seen:
        """Return which parts are complete; ``others`` are further topics whose ids are wanted.

        A part whose topic has another id now is in neither ``whole`` nor ``missing``. ``before`` is a look that found
        every part complete, and that is older than the first row of each part that it did not find. It saves the read
        of the first batches in partitions whose leader has not changed since: only with the leader do acknowledged
        records change.
        """
        seen: Seen = self._cluster.until(deadline, partial(self._look_once, parts, others, before))
        return seen

    def _look_once(self, parts: Sequence[KafkaCommittable], others: Iterable[str], before: Seen | None) -> Seen:
        written_to = {topic for part in parts for topic in part.topics}
        # the ends first: an abort that the producers do not show yet is then behind the end, where `lost` looks
        leaders = Leaders(self._cluster)
        ends, producers, starts = leaders.look(
            {*others, *written_to}, lambda: leaders.partitions(written_to), END_OFFSETS, Producers(), FIRST_OFFSETS
        )
        topics = leaders.ids()
        present = {index: part for index, part in enumerate(parts) if not part.recreated(topics)}
        opened = _open_places(present.values(), producers, ends)
        # their first row was not read since the leader last changed, and only a read shows whether it is there
        doubtful = [
            (part.transaction, place)
            for part in present.values()
            for place, _ in opened[part.transaction.producer_id]
            if not _was_voted_on(part) and _may_have_changed(place, topics, before)
        ]
        cut = _without_first_row(leaders, doubtful)
        whole, missing = {}, {}
        for index, part in present.items():
            places = opened[part.transaction.producer_id]
            if why := _why_missing(part, places, starts, cut):
                missing[index] = why
            else:
                whole[index] = replace(part, places=tuple(place for place, _ in places))
        return Seen(topics, whole, missing, ends, _open_before(present.values(), producers))

    def open_before(self, parts: Sequence[KafkaCommittable], deadline: float) -> Mapping[Producer, Partition]:
        """Return the other producers whose open transactions began before the end of the parts' rows, with a place.

        Readers get these rows when those transactions have ended. No new ones come: a transaction that begins after the
        vote, as those of the next epoch do, is behind the rows.
        """

        def attempt() -> Mapping[Producer, Partition]:
            leaders = Leaders(self._cluster)
            names = {topic for part in parts for topic in part.topics}
            [producers] = leaders.look(names, leaders.partitions, Producers())
            return _open_before([part for part in parts if not part.recreated(leaders.ids())], producers)

        open_producers: Mapping[Producer, Partition] = self._cluster.until(deadline, attempt)
        return open_producers

    def lost(
        self,
        parts: Sequence[KafkaCommittable],
        ends: Ends,
        deadline: float,
        *,
        ended: bool,
        decided: Collection[Transaction] = (),
    ) -> Loss:
        """Look for the ends of committed parts, and for rows that partitions have lost.

        ``ends`` holds the ends of partitions when transactions were seen whole; for other transactions the vote noted
        them. ``ended`` says that the coordinator has written all ends: an end that is missing then was deleted.
        ``decided`` are those that a coordinator has told this process that it commits.
        """

        def attempt() -> Loss:
            leaders, endings = Leaders(self._cluster), _Endings(parts, ends, decided, self._cluster.clock)
            names = {topic for part in parts for topic in part.topics}
            ahead = endings.ahead()
            [first] = leaders.look(names, lambda: [at for at in ahead if at[0] in leaders.topics], endings.records())
            if topics := sorted({topic for part in parts for topic in part.recreated(leaders.ids())}):
                return Loss(f"topic(s) {', '.join(topics)} were deleted, and perhaps created again")
            # a leader without these records has lost them, or retention has deleted them: `_cut_off` tells which
            gone = {at for at, evidence in first.items() if evidence.records is None}
            if cut := _cut_off(leaders, parts, gone | endings.mixed()):
                return Loss(cut)
            # the records of the vote were there: read from behind them, or from what is left
            endings.again_from_vote(leaders.ask(gone, FIRST_OFFSETS)[0] if gone else {})
            shown = {at: evidence for at, evidence in first.items() if at not in gone}
            words = endings.loss(leaders, shown, deadline, ended=ended)
            return Loss(words, () if words else endings.unseen())

        evidence: Loss = self._cluster.until(deadline, attempt)
        return evidence

    def left_open(self, parts: Sequence[KafkaCommittable], deadline: float) -> dict[Partition, list[ProducerState]]:
        """Return where committed parts are open, though their coordinator has written all ends.

        Where a partition has no leader when its end is to be written, Kafka from 4.2 on leaves it out (KAFKA-20734).
        What the producer writes there afterwards, with a later epoch, becomes a part of the same transaction.
        """
        rows = {
            ((place.topic, place.partition), part.transaction.producer_id, place.start)
            for part in parts
            for place in part.places
        }
        return self._producers(
            {topic for part in parts for topic in part.topics},
            lambda at, each: (at, each.producer_id, each.start) in rows,
            deadline,
        )

    def markers_left_open(
        self, parts: Sequence[KafkaCommittable], deadline: float
    ) -> dict[Partition, list[ProducerState]]:
        """Return the partitions of groups' offsets where committed parts are open; see `left_open`."""
        return self.open_in({_OFFSETS_TOPIC}, {part.transaction.producer for part in parts}, deadline)

    def open_in(
        self, topics: Collection[str], producers: Collection[Producer], deadline: float
    ) -> dict[Partition, list[ProducerState]]:
        """Return the partitions of topics where transactions of these producers are open."""
        return self._producers(
            topics,
            lambda _, each: each.start != _NOT_OPEN and (each.producer_id, each.producer_epoch) in producers,
            deadline,
        )

    def _producers(
        self, topics: Collection[str], is_meant: Callable[[Partition, ProducerState], bool], deadline: float
    ) -> dict[Partition, list[ProducerState]]:
        def attempt() -> dict[Partition, list[ProducerState]]:
            leaders = Leaders(self._cluster)
            [producers] = leaders.look(topics, leaders.partitions, Producers())
            meant = {at: [each for each in states if is_meant(at, each)] for at, states in producers.items()}
            return {at: states for at, states in meant.items() if states}

        by_partition: dict[Partition, list[ProducerState]] = self._cluster.until(deadline, attempt)
        return by_partition

    def write_ends(
        self, opened: Mapping[Partition, Sequence[ProducerState]], deadline: float, *, are_commits: bool = True
    ) -> None:
        """Write the ends of committed or aborted transactions to the partitions where they are open."""

        def attempt() -> None:
            leaders = Leaders(self._cluster)
            leaders.look({topic for topic, _ in opened}, opened.keys, TransactionEnds(opened, are_commits))

        self._cluster.until(deadline, attempt)


def _open_places(
    parts: Iterable[KafkaCommittable],
    producers: Mapping[Partition, Iterable[ProducerState]],
    ends: Mapping[Partition, End],
) -> dict[int, list[tuple[WrittenPartition, int]]]:
    """Return the places where the parts' transactions are open, with their row counts, by producer id."""
    epochs = {part.transaction.producer_id: part.transaction.producer_epoch for part in parts}
    places: dict[int, list[tuple[WrittenPartition, int]]] = {producer_id: [] for producer_id in epochs}
    for (topic, number), states in producers.items():
        for state in states:
            start = state.start
            if start != _NOT_OPEN and epochs.get(state.producer_id) == state.producer_epoch:
                place = WrittenPartition(topic, number, start, *ends[topic, number])
                places[state.producer_id].append((place, state.last_sequence + 1))
    return places


def _open_before(
    parts: Iterable[KafkaCommittable], producers: Mapping[Partition, Iterable[ProducerState]]
) -> dict[Producer, Partition]:
    ends: dict[Partition, int] = {}
    own = set()
    for part in parts:
        own.add(part.transaction.producer)
        for place in part.places:
            at = (place.topic, place.partition)
            ends[at] = max(place.end, ends.get(at, place.end))
    # a broker does not know new partitions yet, so their producers were not looked up
    if unasked := sorted(ends.keys() - producers.keys()):
        raise RetriableError(f"the brokers do not show {_named(unasked[0])} yet")
    opened = {
        Producer(state.producer_id, state.producer_epoch): at
        for at, end in ends.items()
        for state in producers[at]
        if _NOT_OPEN < state.start < end
    }
    return {producer: at for producer, at in opened.items() if producer not in own}


def _may_have_changed(place: WrittenPartition, topics: Mapping[str, str], before: Seen | None) -> bool:
    """Whether a partition may have lost acknowledged records since a look; True if unknown."""
    known = None if before is None else before.ends.get((place.topic, place.partition))
    if before is None or known is None:
        return True
    same_topic = before.topics.get(place.topic) == topics[place.topic] != NO_ID
    # before the end that it had then: an earlier transaction of this producer, whose end was left out, is still open
    is_older = place.start < known.offset
    return not same_topic or known.leader_epoch != place.leader_epoch or known.leader_epoch < 0 or is_older


def _without_first_row(
    leaders: Leaders, places: Sequence[tuple[Transaction, WrittenPartition]]
) -> set[tuple[Transaction, Partition]]:
    """Return where the first row of a transaction is missing, as after a disk was lost while its task was writing."""
    cut = set()
    for first in range(0, len(places), _FIRST_BATCHES):
        some = [(each, (place.topic, place.partition), place.start) for each, place in places[first:][:_FIRST_BATCHES]]
        # one request for each: an answer has one batch that is larger than the limit, and no second one
        limits = {"wait_ms": _WAIT_MS, "bytes_each": 1, "bytes_in_all": 1}
        questions = [(at, Records(positions={at: End(start)}, **limits)) for _, at, start in some]
        for (transaction, at, start), fetched in zip(some, leaders.ask_each(questions), strict=True):
            if fetched.records == b"":
                raise RetriableError(f"{_named(at)} does not show its records from offset {start} on yet")
            _, batch = next(record_batch.split(fetched.records or b""), (0, None))
            if (
                batch is None
                or batch.base_sequence != 0
                or (batch.producer_id, batch.producer_epoch) != transaction.producer
            ):
                cut.add((transaction, at))
    return cut


def _why_missing(
    part: KafkaCommittable,
    opened_at: Sequence[tuple[WrittenPartition, int]],
    starts: Mapping[Partition, End],
    cut_off: Collection[tuple[Transaction, Partition]],
) -> str | None:
    opened = {(place.topic, place.partition): place.start for place, _ in opened_at}
    voted = {(place.topic, place.partition): place.start for place in part.places if _was_voted_on(part)}
    rows = sum(count for _, count in opened_at)
    if gone := [_named(at) for at, start in voted.items() if opened.get(at) != start]:
        why = f"it is not open any more in {', '.join(gone)}"
    # modulo, because sequence numbers wrap around to 0
    elif not opened_at or (rows - part.rows) % SEQUENCES:
        why = f"they hold {rows} of its {part.rows} row(s)"
    elif cut := [_named(at) for at, start in opened.items() if start < starts[at].offset]:
        why = f"its first rows were deleted from {', '.join(cut)}"
    elif lost := [_named(at) for at in opened if (part.transaction, at) in cut_off]:
        why = f"its first rows were lost from {', '.join(lost)} while the others were written"
    else:
        return None
    return f"the partitions do not hold transaction {part.transaction.transactional_id} whole: {why}"


def _was_voted_on(part: KafkaCommittable) -> bool:
    return any(place.end >= 0 for place in part.places)


def _cut_off(leaders: Leaders, parts: Sequence[KafkaCommittable], doubtful: Collection[Partition]) -> str | None:
    """Return, in words, which of the partitions has lost records that it had at the vote; None if none has."""
    left = {place for part in parts for place in part.places if (place.topic, place.partition) in doubtful}
    while left:
        # a request takes one place of each partition; after a replay there may be several
        now = {(place.topic, place.partition): place for place in left}
        [ends] = leaders.ask(now, EpochEnds({at: place.leader_epoch for at, place in now.items()}))
        for at, end in ends.items():
            if end < now[at].end:
                return f"{_named(at)} has lost its records from offset {max(end, 0)} on"
        left -= set(now.values())
    return None


class _Endings:
    """Looks for the ends of transactions in the logs, from the ends of the partitions when these were seen whole.

    A missing end proves nothing: retention and compaction delete ends too. But an end without its rows does: they were
    deleted before readers could see them. Or retention has deleted them alone, which is taken for a loss.
    """

    def __init__(
        self, parts: Sequence[KafkaCommittable], ends: Ends, decided: Collection[Transaction], clock: Clock
    ) -> None:
        self._clock = clock
        self._waiting: dict[Partition, dict[int, _Ending]] = {}
        self._voted: dict[Partition, int] = {}
        self._ends: dict[Partition, set[End]] = {}
        for part in parts:
            for place in part.places:
                at = (place.topic, place.partition)
                self._waiting.setdefault(at, {})[part.transaction.producer_id] = _Ending(
                    part.transaction, place.start, part.transaction in decided
                )
                self._voted[at] = min(place.end, self._voted.get(at, place.end))
                noted = End(place.end, place.leader_epoch)
                self._ends.setdefault(at, set()).add(ends.get(part.transaction, {}).get(at, noted))
        self._positions = {at: min(offsets) for at, offsets in self._ends.items()}
        self._deleted: set[Partition] = set()

    def mixed(self) -> set[Partition]:
        """Return the partitions with several noted ends: a fetch from the first one proves nothing about the others."""
        return {at for at, offsets in self._ends.items() if len(offsets) > 1}

    def again_from_vote(self, starts: Mapping[Partition, End]) -> None:
        """Read on from the ends that the vote noted, or from what is left; without the check for cut-off records."""
        self._positions |= {at: End(max(self._voted[at], start.offset)) for at, start in starts.items()}

    def ahead(self) -> list[Partition]:
        """Return the partitions that have to be read further."""
        return [at for at, waiting in self._waiting.items() if waiting and at not in self._deleted]

    def records(self) -> Records:
        """Return the next question to the leaders."""
        return Records(positions=self._positions, wait_ms=_WAIT_MS, bytes_each=_BYTES_EACH, bytes_in_all=_BYTES_IN_ALL)

    def unseen(self) -> list[Transaction]:
        """Return the transactions whose end is missing from a partition."""
        return list({ending.transaction for waiting in self._waiting.values() for ending in waiting.values()})

    def loss(
        self, leaders: Leaders, fetched: Mapping[Partition, Fetched], deadline: float, *, ended: bool
    ) -> str | None:
        """Return, in words, which partition had aborted a transaction before its commit, or lacks its rows; or None.

        ``fetched`` is the answer to the first `records`.
        """
        # not for long at first: the coordinator knows whether the ends are still being written
        patience = deadline if ended else self._clock.monotonic() + _MARKERS_SECONDS
        while True:
            for at, records in fetched.items():
                if lost := self._read(at, records.records or b"", records.first):
                    return lost
                # the position is gone, or the whole log was read: the ends were deleted
                if records.records is None or (ended and self._positions[at].offset >= records.end):
                    self._deleted.add(at)
            late = self._clock.monotonic() > patience
            if not (ahead := self.ahead()) or (late and not ended):
                return None
            if late:
                raise Unreachable(
                    f"{_named(ahead[0])} does not show the end of a transaction in time",
                    hint="check that all brokers run; no row is lost",
                )
            [fetched] = leaders.ask(ahead, self.records())

    def _read(self, at: Partition, records: bytes, first: int) -> str | None:
        for after, batch in record_batch.split(records):
            # a fetch begins with the batch that contains the position
            if after <= self._positions[at].offset:
                continue
            self._positions[at] = End(after)
            ending = None if batch is None or not batch.is_control else self._waiting[at].get(batch.producer_id)
            if batch is None or ending is None or not ending.is_over(batch):
                continue
            if ending.was_aborted:
                return f"{_named(at)} had aborted {ending.transaction.transactional_id} before"
            if ending.start < first and not batch.is_abort:
                rows = f"rows of {ending.transaction.transactional_id}, from offset {ending.start} on"
                return f"{_named(at)} begins at offset {first} now, and {rows}, were deleted"
            del self._waiting[at][batch.producer_id]
        return None


@dataclass
class _Ending:
    """The search for the end of one transaction, whose rows begin at ``start``, in one partition."""

    transaction: Transaction
    start: int
    is_decided: bool
    was_aborted: bool = False

    def is_over(self, end: Batch) -> bool:
        """Take in an end of this producer; return whether the search is over.

        After an operator's abort, the commit of the same transaction follows. An abort without that commit is the
        coordinator's: another driver has found the transaction lost, and has prepared its rows again. If its commit was
        decided, its end was left out (see `Witness.left_open`), and a later abort of its producer has taken the rows.
        """
        is_later = end.producer_epoch > self.transaction.producer_epoch
        if end.producer_epoch == self.transaction.producer_epoch and end.is_abort:
            self.was_aborted = True
            return False
        if is_later:
            self.was_aborted = end.is_abort and self.is_decided
        return end.producer_epoch >= self.transaction.producer_epoch


def _named(partition: Partition) -> str:
    return "{}-{}".format(*partition)
