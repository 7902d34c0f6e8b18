"""Kafka in memory: coordinators, partitions and groups, as far as they matter for exactly-once. No steps, no faults.

A decided transaction is carried out bit by bit: each later request writes one of its ends, to a partition or a group.
What a method of a request cannot do, it answers with the brokers' error code: a delayed request has nobody to raise to.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Final, NamedTuple

from epochsink.identity import TransactionalId
from epochsink.kafka import record_batch
from epochsink.kafka.committable import Transaction
from epochsink.kafka.server import Description, End, Fetched, GroupOffset, GroupOffsets, ProducerState, TransactionState
from epochsink.kafka.transactions import ENDING
from epochsink.sink import Mark
from simulation.readers import Readers, Row

LETTER: Final = "K"
TOPIC: Final = "t"
TOPIC_ID: Final = "f" * 32
OFFSETS_AT: Final = ("__consumer_offsets", 0)
"""Where all groups' offsets are."""
PARTITIONS: Final = 2
At = tuple[str, int]

OK, OUT_OF_RANGE, NOT_AUTHORIZED, INVALID_PRODUCER_EPOCH, INVALID_TXN_STATE, UNKNOWN_MAPPING = 0, 1, 31, 47, 48, 49
CONCURRENT, OUT_OF_ORDER, UNSTABLE = 51, 45, 88
ONGOING, EMPTY = TransactionState.ONGOING, TransactionState.EMPTY
PREPARED: Final = {True: TransactionState.PREPARE_COMMIT, False: TransactionState.PREPARE_ABORT}
COMPLETE: Final = {
    TransactionState.PREPARE_COMMIT: TransactionState.COMPLETE_COMMIT,
    TransactionState.PREPARE_ABORT: TransactionState.COMPLETE_ABORT,
    TransactionState.PREPARE_EPOCH_FENCE: TransactionState.COMPLETE_ABORT,
}

_BATCH: Final = struct.Struct(">qiibIhiqqqhii")
_CRC_AT, _COVERED_FROM = 17, 21
_TRANSACTIONAL, _CONTROL = 0x10, 0x20
_CONTROL_KEY: Final = struct.Struct(">7xh")

# in a tuple, members are compared by identity: to hash one takes ten times as long, and each request looks for them
_ENDING: Final = tuple(ENDING)
_OPEN: Final = (ONGOING, *_ENDING)

parsed_id = lru_cache(4096)(TransactionalId.parse)


class Id(NamedTuple):
    """A transactional id at its coordinator. ``left`` are the places where a decided end is still to be written."""

    producer_id: int
    epoch: int = 0
    state: TransactionState = EMPTY
    partitions: tuple[At, ...] = ()
    offsets: tuple[tuple[str, str, GroupOffset], ...] = ()
    left: tuple[At | str, ...] = ()
    last_epoch: int = -1
    """The epoch before the newest one: who asks again with it gets the newest."""


class Batch(NamedTuple):
    """A record batch in a partition: rows, or with ``end`` the end of a transaction ("commit", "abort")."""

    base: int
    producer_id: int
    epoch: int
    sequence: int
    rows: tuple[Row, ...] = ()
    end: str = ""

    @property
    def after(self) -> int:
        """The offset after it."""
        return self.base + max(1, len(self.rows))


class Log(NamedTuple):
    """A partition's log; ``epochs`` has the first offset of each leader epoch."""

    batches: tuple[Batch, ...] = ()
    start: int = 0
    end: int = 0
    epochs: tuple[int, ...] = (0,)

    def with_leader(self) -> Log:
        """Return it under a new leader."""
        return self._replace(epochs=(*self.epochs, self.end))


@lru_cache(4096)
def encoded(batch: Batch) -> bytes:
    """Return the bytes of a batch."""
    if batch.end:
        payload = _CONTROL_KEY.pack(batch.end == "commit")
        attributes, count = _TRANSACTIONAL | _CONTROL, 1
    else:
        payload, attributes, count = json.dumps(batch.rows).encode(), _TRANSACTIONAL, len(batch.rows)
    size = _BATCH.size - 12 + len(payload)
    epoch, first, times = batch.epoch, batch.sequence, (0, 0)
    fields = (batch.base, size, 0, 2, 0, attributes, count - 1, *times, batch.producer_id, epoch, first, count)
    data = _BATCH.pack(*fields) + payload
    return data if batch.end else data[:_CRC_AT] + checksum(data).to_bytes(4) + data[_COVERED_FROM:]


def checksum(data: bytes) -> int:
    """Return the CRC-32C of a batch."""
    table, value = _table(), 0xFFFFFFFF
    for byte in data[_COVERED_FROM:]:
        value = table[(value ^ byte) & 0xFF] ^ value >> 8
    return value ^ 0xFFFFFFFF


@cache
def _table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)  # noqa: PLW2901 - bit by bit
        table.append(value)
    return table


def decoded(data: bytes) -> Batch:
    """Return the batch of some bytes that a producer has sent."""
    [(_, batch)] = record_batch.split(data)
    assert batch is not None
    assert int.from_bytes(data[_CRC_AT:_COVERED_FROM]) == checksum(data), "CORRUPT_MESSAGE"
    rows = tuple(Row(*row) for row in json.loads(bytes(batch.data[_BATCH.size :])))
    return Batch(batch.base_offset, batch.producer_id, batch.producer_epoch, batch.base_sequence, rows)


@dataclass(slots=True)
class Brokers:
    """The state of a cluster with one topic; `World` copies it before each change, and sets it back."""

    readers: Readers
    ids: dict[str, Id] = field(default_factory=dict)
    logs: dict[At, Log] = field(default_factory=lambda: {(TOPIC, number): Log() for number in range(PARTITIONS)})
    producers: dict[At, dict[int, ProducerState]] = field(
        default_factory=lambda: {(TOPIC, number): {} for number in range(PARTITIONS)}
    )
    markers: dict[str, dict[str, GroupOffset]] = field(default_factory=dict)
    """The committed offsets, by group and topic."""
    order: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)
    """(partition, offset, epoch) of committed rows, by query."""
    deleted: dict[At, dict[tuple[int, int], tuple[Row, ...]]] = field(default_factory=dict)
    """What retention has deleted of transactions that were not committed yet: readers have not missed it."""
    leaves_out: bool = False
    """Whether the partition of the next end has no leader, so that the end is left out."""
    unended: dict[str, Id] = field(default_factory=dict)
    """The transactions whose end was left out of the partition of a group's offsets, by group."""
    may_alter: bool = True
    """Whether our user may write ends itself."""
    ids_given: int = 0
    set_backs: int = 0
    """How often they were set back."""
    is_fenced_off: Callable[[str, str, int], None] = lambda *_: None
    """Called with what a sweep aborts, under the letter of its sink."""

    # ---- coordinators

    def write_ends(self, most: int = 1) -> None:
        """Go on with what is decided."""
        for name, each in [(name, each) for name, each in self.ids.items() if each.state in _ENDING]:
            for _ in range(most):
                if not self.ids[name].left:
                    break
                self._write_end(name)
            if not self.ids[name].left:
                self.ids[name] = self.ids[name]._replace(state=COMPLETE[each.state], partitions=(), offsets=())

    def finish(self) -> None:
        """Write all ends."""
        self.write_ends(100)

    def _write_end(self, name: str) -> None:
        each = self.ids[name]
        at, *left = each.left
        self.ids[name] = each._replace(left=tuple(left))
        commits = each.state is TransactionState.PREPARE_COMMIT
        if self.leaves_out:
            self.leaves_out = False
            if isinstance(at, tuple):
                self.logs[at] = self.logs[at].with_leader()
            elif commits:
                self.unended[at] = each
        elif isinstance(at, tuple):
            self._end_at(at, each.producer_id, each.epoch, commits=commits)
        elif commits:
            self._store_offsets(at, each)

    def _store_offsets(self, at: str, of: Id) -> None:
        for group, topic, offset in of.offsets:
            if group == at:
                self.markers.setdefault(group, {})[topic] = offset

    def write_markers(self, at: At, producers: Collection[ProducerState], *, commits: bool) -> int:
        """WriteTxnMarkers; return the error code."""
        if not self.may_alter:
            return NOT_AUTHORIZED
        for each in producers:
            if at != OFFSETS_AT:
                known = self.producers[at].get(each.producer_id)
                if known is not None and known.producer_epoch > each.producer_epoch:
                    return INVALID_PRODUCER_EPOCH
                self._end_at(at, each.producer_id, each.producer_epoch, commits=commits)
                continue
            for group, of in list(self.unended.items()):
                if (of.producer_id, of.epoch) == (each.producer_id, each.producer_epoch):
                    self._store_offsets(group, self.unended.pop(group))
        return OK

    def producers_at(self, at: At) -> list[ProducerState]:
        """DescribeProducers."""
        if at == OFFSETS_AT:
            return [ProducerState(each.producer_id, each.epoch, -1, 0) for each in self.unended.values()]
        return list(self.producers[at].values())

    def _end_at(self, at: At, producer_id: int, epoch: int, *, commits: bool) -> None:
        log = self.logs[at]
        known = self.producers[at].get(producer_id)
        if commits and known is not None and known.start >= 0:
            # of each epoch: an earlier transaction whose end was left out has become a part of this one
            own = [each for each in log.batches if each.base >= known.start and each.producer_id == producer_id]
            deleted = self.deleted.get(at, {}).get((producer_id, known.producer_epoch), ())
            self.readers.publish(LETTER, [*deleted, *(row for each in own for row in each.rows)])
            self._keep_order(at, own)
        self._append(at, Batch(log.end, producer_id, epoch, -1, end="commit" if commits else "abort"))
        sequence = known.last_sequence if known is not None and known.producer_epoch == epoch else -1
        self.producers[at][producer_id] = ProducerState(producer_id, epoch, sequence, -1)

    def _keep_order(self, at: At, batches: Sequence[Batch]) -> None:
        """Flag rows that are behind those of a later epoch."""
        for batch in batches:
            for row in batch.rows[:1]:
                others = self.order.setdefault(row.query, [])
                turned = any(
                    number == at[1] and (offset < batch.base) == (epoch > row.epoch)
                    for number, offset, epoch in others
                    if epoch != row.epoch
                )
                if turned and not self.readers.went_back:
                    self.readers.flag(f"OUT OF ORDER {LETTER}")
                others.append((at[1], batch.base, row.epoch))

    def initialise(
        self, name: str, had: tuple[int, int] | None = None, *, is_known: bool = True
    ) -> tuple[int, int, int]:
        """InitProducerId: return the error code, and the producer.

        ``is_known`` says that who asks has seen what is open since the cluster was set back: no request can name it.
        """
        each = self.ids.get(name)
        if each is None:
            self.ids_given += 1
            each = Id(1000 + self.ids_given, -1)
        elif had is not None and had[0] != each.producer_id:
            return INVALID_PRODUCER_EPOCH, -1, -1
        again = had is not None and had[1] == each.last_epoch
        # whichever epoch is named
        if each.state is ONGOING:
            self._decide(name, each._replace(epoch=each.epoch + 1, last_epoch=each.epoch), commit=False)
            # one that the duplicate of a request has opened again, after its commit, holds no rows
            if had is not None and is_known and self._holds_rows(each):
                self.is_fenced_off(LETTER, name, each.epoch)
            return CONCURRENT, -1, -1
        if each.state in _ENDING:
            return CONCURRENT, -1, -1
        if had is not None and had[1] != each.epoch and not again:
            return INVALID_PRODUCER_EPOCH, -1, -1
        epoch = each.epoch if again else each.epoch + 1
        self.ids[name] = Id(each.producer_id, epoch, last_epoch=each.last_epoch if again else each.epoch)
        return OK, each.producer_id, epoch

    def _holds_rows(self, each: Id) -> bool:
        known = [self.producers[at].get(each.producer_id) for at in each.partitions]
        return any(state is not None and state.start >= 0 for state in known)

    def end(self, name: str, producer_id: int, epoch: int, *, commit: bool) -> int:
        """EndTxn."""
        each = self.ids.get(name)
        if each is None or each.producer_id != producer_id:
            return UNKNOWN_MAPPING
        if each.epoch != epoch:
            return INVALID_PRODUCER_EPOCH
        if each.state is ONGOING:
            if commit:
                self.readers.before_commit(LETTER)
            self._decide(name, each, commit=commit)
            return OK
        if each.state in _ENDING:
            return CONCURRENT if each.state is PREPARED[commit] else INVALID_TXN_STATE
        return OK if each.state is COMPLETE[PREPARED[commit]] else INVALID_TXN_STATE

    def _decide(self, name: str, each: Id, *, commit: bool) -> None:
        groups = sorted({group for group, _, _ in each.offsets})
        self.ids[name] = each._replace(state=PREPARED[commit], left=(*sorted(each.partitions), *groups))

    def describe(self, name: str) -> Description:
        """DescribeTransactions."""
        each = self.ids.get(name)
        if each is None:
            return Description(TransactionState.NOT_FOUND)
        groups = (("__consumer_offsets", 0),) if each.offsets else ()
        return Description(each.state, each.producer_id, each.epoch, 0, 60_000, (*each.partitions, *groups))

    def add(self, name: str, producer_id: int, epoch: int, partitions: Collection[At]) -> int:
        """AddPartitionsToTxn."""
        each = self.ids.get(name)
        if each is None or each.producer_id != producer_id:
            return UNKNOWN_MAPPING
        if each.epoch != epoch:
            return INVALID_PRODUCER_EPOCH
        if each.state in _ENDING:
            return CONCURRENT
        joined = each.partitions if each.state is ONGOING else ()
        self.ids[name] = each._replace(state=ONGOING, partitions=tuple(sorted({*joined, *partitions})))
        return OK

    def add_offset(self, of: Transaction, group: str, topic: str, offset: GroupOffset) -> int:
        """AddOffsetsToTxn and TxnOffsetCommit."""
        if code := self.add(*of, ()):
            return code
        each = self.ids[of.transactional_id]
        self.ids[of.transactional_id] = each._replace(offsets=(*each.offsets, (group, topic, offset)))
        return OK

    # ---- partitions

    def append(self, at: At, name: str, batch: Batch) -> tuple[int, int]:
        """Produce: return the error code, and the offset."""
        each = self.ids.get(name)
        known = self.producers[at].get(batch.producer_id)
        if known is not None and batch.epoch < known.producer_epoch:
            return INVALID_PRODUCER_EPOCH, -1
        if each is None or each.state is not ONGOING or at not in each.partitions or each.epoch != batch.epoch:
            return INVALID_TXN_STATE, -1
        last = known.last_sequence if known is not None and known.producer_epoch == batch.epoch else -1
        if batch.sequence <= last:
            twin = (batch.producer_id, batch.epoch, batch.sequence)
            kept = [one.base for one in self.logs[at].batches if (one.producer_id, one.epoch, one.sequence) == twin]
            return OK, kept[-1] if kept else -1
        # a partition without the producer's state accepts any first number
        if batch.sequence != last + 1 and known is not None and known.producer_epoch == batch.epoch:
            return OUT_OF_ORDER, -1
        base = self.logs[at].end
        start = known.start if known is not None and known.start >= 0 else base
        self._append(at, batch._replace(base=base))
        last = batch.sequence + len(batch.rows) - 1
        self.producers[at][batch.producer_id] = ProducerState(batch.producer_id, batch.epoch, last, start)
        return OK, base

    def _append(self, at: At, batch: Batch) -> None:
        log = self.logs[at]
        self.logs[at] = log._replace(batches=(*log.batches, batch), end=batch.after)

    def fetch(self, at: At, position: End, size: int) -> Fetched:
        """Fetch at least one batch from a position on."""
        log = self.logs[at]
        lost = position.leader_epoch >= 0 and self.epoch_end(at, position.leader_epoch) < position.offset
        if lost or not log.start <= position.offset <= log.end:
            return Fetched(None, -1, log.end)
        data = b""
        for batch in log.batches:
            if batch.after > position.offset and (not data or len(data) < size):
                data += encoded(batch)
        return Fetched(data, log.start, log.end)

    def epoch_end(self, at: At, leader_epoch: int) -> int:
        """OffsetForLeaderEpoch."""
        log = self.logs[at]
        if leader_epoch >= len(log.epochs):
            return -1
        return log.epochs[leader_epoch + 1] if leader_epoch + 1 < len(log.epochs) else log.end

    # ---- groups

    def offsets(self, group: str, topics: Collection[str] | None, *, stable: bool) -> GroupOffsets:
        """OffsetFetch."""
        kept = self.markers.get(group, {})
        doubtful = {
            topic
            for each in self.ids.values()
            if each.state in _OPEN
            for owner, topic, _ in each.offsets
            if owner == group
        }
        nothing = GroupOffset(-1, "", OK)
        named = kept if topics is None else {topic: kept.get(topic, nothing) for topic in topics}
        found = {
            topic: [GroupOffset(-1, "", UNSTABLE) if stable and topic in doubtful else offset]
            for topic, offset in named.items()
        }
        return GroupOffsets(group, OK, found)

    # ---- what happens to them

    def time_out(self) -> bool:
        """Abort every open transaction, as the coordinator does at its timeout; return whether any was."""
        expired = [(name, each) for name, each in self.ids.items() if each.state is ONGOING]
        for name, each in expired:
            self._decide(name, each._replace(epoch=each.epoch + 1, last_epoch=each.epoch), commit=False)
        self.finish()
        return bool(expired)

    def lose_records(self, how: str) -> bool:
        """Let retention take the first record of the newest transaction, and all before ("cut"), or all ("gone")."""
        struck = False
        for at, log in self.logs.items():
            rows = [each for each in log.batches if each.rows]
            if not rows:
                continue
            newest = (rows[-1].producer_id, rows[-1].epoch)
            first = next(each for each in rows if (each.producer_id, each.epoch) == newest)
            start = log.end if how == "gone" else first.after
            self.logs[at] = log._replace(batches=tuple(each for each in log.batches if each.base >= start), start=start)
            opened = {
                (each.producer_id, each.producer_epoch) for each in self.producers[at].values() if each.start >= 0
            }
            for batch in rows:
                if batch.base < start and (of := (batch.producer_id, batch.epoch)) in opened:
                    gone = self.deleted.setdefault(at, {})
                    gone[of] = gone.get(of, ()) + batch.rows
            struck = True
        return struck

    def lose_at_partition(self, how: str) -> bool:
        """Let a partition lose the newest batch of an open transaction ("lost"), or abort one ("aborted").

        The coordinator is not told. Return whether there was one.
        """
        opened = [(at, state) for at, states in self.producers.items() for state in states.values() if state.start >= 0]
        for at, state in opened[-1:]:
            if how == "aborted":
                self._end_at(at, state.producer_id, state.producer_epoch, commits=False)
                continue
            log = self.logs[at]
            kept = log.batches[:-1] if log.batches and log.batches[-1].producer_id == state.producer_id else log.batches
            if kept == log.batches:
                return False
            end = log.batches[-1].base
            self.logs[at] = log._replace(batches=kept, end=end).with_leader()
            own = [each for each in kept if (each.producer_id, each.epoch) == (state.producer_id, state.producer_epoch)]
            if own:
                last = own[-1].sequence + len(own[-1].rows) - 1
                self.producers[at][state.producer_id] = state._replace(last_sequence=last)
            else:
                del self.producers[at][state.producer_id]
        return bool(opened)

    def restored(self) -> None:
        """Take note that the state was set back: the partitions have new leaders."""
        self.set_backs += 1
        for at, log in self.logs.items():
            self.logs[at] = log.with_leader()

    def alter_marker(self, by: Mark) -> bool:
        """Overwrite the newest marker, its epoch counted on; return whether there was one."""
        for group, kept in list(self.markers.items())[-1:]:
            for topic, offset in kept.items():
                self.markers[group] = {**kept, topic: GroupOffset(offset.offset + by.epoch, by.attempt, OK)}
        return bool(self.markers)

    # ---- what is there

    def open_ids(self) -> set[tuple[str, int]]:
        """Return (id, producer epoch) of the open transactions."""
        return {(name, each.epoch) for name, each in self.ids.items() if each.state is ONGOING}

    def rows(self, *, open_only: bool) -> set[tuple[str, int]]:
        """Return (query, source) of the rows in the logs, or of those of open transactions."""
        opened = {(each.producer_id, each.epoch) for each in self.ids.values() if each.state is ONGOING}
        return {
            (row.query, row.source)
            for log in self.logs.values()
            for batch in log.batches
            if not open_only or (batch.producer_id, batch.epoch) in opened
            for row in batch.rows
        }
