"""The three targets with the semantics that matter for exactly-once.

No I/O steps and no faults here: `simulation.ports` turns each method into a step, `simulation.scheduler` applies
faults to the steps. Every method returns its answer and never raises: a delayed request has nobody to raise to.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from epochsink.identity import PreparedName, TransactionalId
from epochsink.sink import Mark

if TYPE_CHECKING:
    from collections.abc import Iterator

    from simulation.readers import Readers, Row


# the same few names are looked at in nearly every step
id_of = lru_cache(4096)(TransactionalId.parse)
gid_of = lru_cache(4096)(PreparedName.parse)


class Transaction(NamedTuple):
    """A Kafka transactional id's state: producer epoch, transaction state, rows, and the marker it carries.

    ``place`` is where its first row stands in the log, ``held`` the rows that its partition has in the transaction.
    A value, so that all copies of the broker's state have it in common.
    """

    epoch: int = 0
    state: str = "Empty"
    place: int = 0
    rows: tuple[Row, ...] = ()
    held: tuple[Row, ...] = ()
    marker: Marked | None = None


class Marked(NamedTuple):
    """The marker that a Kafka transaction carries."""

    key: str
    partition: int
    number: int
    attempt: str


@dataclass(slots=True)
class Kafka:
    """Transactional ids with producer epochs; marks by (identity key, partition, parity of the epoch).

    ``log`` has, by query, the place and the epoch of each committed transaction, ``records`` each row with the id and
    producer epoch that it was sent under, whatever became of its transaction.
    """

    readers: Readers
    transactions: dict[str, Transaction] = field(default_factory=dict)
    markers: dict[tuple[str, int, int], Mark] = field(default_factory=dict)
    bumps_on_commit: bool = True
    log: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    fences: dict[str, int] = field(default_factory=dict)
    """By identity key, the producer epoch of the transactional id that each driver takes as it starts."""
    torn: set[tuple[str, int]] = field(default_factory=set)
    """(id, producer epoch) of transactions that were committed though their partition did not hold all of them."""
    records: list[tuple[str, int, Row]] = field(default_factory=list)
    committed: list[tuple[str, int, int]] = field(default_factory=list)
    """(id, producer epoch, place) of each committed transaction."""
    _end: int = 0

    def fence(self, key: str) -> int:
        """Take the fence of an identity; return its producer epoch."""
        self.fences[key] = self.fences.get(key, 0) + 1
        return self.fences[key]

    def initialise(self, name: str) -> int:
        """Fence every earlier producer of an id, aborting what it left open; return the new producer epoch."""
        known = self.transactions.get(name) or Transaction()
        self.transactions[name] = Transaction(known.epoch + 1, place=known.place)
        return known.epoch + 1

    def send(self, name: str, epoch: int, rows: list[Row], marker: Marked | None) -> str:
        """Add rows, and a marker, to the open transaction."""
        transaction = self.transactions.get(name)
        if transaction is None or transaction.epoch != epoch:
            return "FENCED"
        if transaction.state != "Ongoing":
            self._end += 1
            transaction = transaction._replace(state="Ongoing", place=self._end)
        # sequence numbers: a produce request that arrives twice is one
        new = tuple(row for row in rows if row not in transaction.rows)
        self.records += [(name, epoch, row) for row in new]
        self.transactions[name] = transaction._replace(
            rows=transaction.rows + new, held=transaction.held + new, marker=marker
        )
        return "OK"

    def end(self, name: str, epoch: int, *, commit: bool) -> str:
        """End a transaction: OK, FENCED (the producer epoch moved on) or INVALID (it is in another state)."""
        transaction = self.transactions.get(name)
        if transaction is None or transaction.epoch != epoch:
            return "FENCED"
        if transaction.state != "Ongoing":
            return "INVALID"
        if commit:
            self.readers.before_commit("K")
            if transaction.held != transaction.rows:
                self.torn.add((name, epoch))
            self.committed.append((name, epoch, transaction.place))
        self._complete(name, transaction, commit=commit)
        return "OK"

    def records_of(self, name: str, epoch: int | None = None) -> list[Row]:
        """Return what the log holds of one producer, or of all that have used an id."""
        return [row for sender, sent_in, row in self.records if sender == name and epoch in (None, sent_in)]

    def lose_records(self, how: str) -> bool:
        """Let retention take the oldest record of the newest transaction ("cut") or all records ("gone")."""
        if not self.records:
            return False
        newest = self.records[-1][:2]
        first = next(at for at, record in enumerate(self.records) if record[:2] == newest)
        del self.records[: first + 1 if how == "cut" else None]
        return True

    def holds(self, name: str, epoch: int, count: int) -> bool:
        """Whether the partition has all rows of a transaction, and has it open."""
        transaction = self.transactions.get(name)
        is_open = transaction is not None and (transaction.epoch, transaction.state) == (epoch, "Ongoing")
        return transaction is not None and is_open and len(transaction.held) == count

    def lose_at_partition(self, how: str) -> bool:
        """Let the partition lose a row of the newest open transaction ("lost"), or abort it ("aborted").

        The coordinator is not told. Return whether there was one.
        """
        newest = [(name, one) for name, one in self.transactions.items() if one.state == "Ongoing" and one.held][-1:]
        for name, transaction in newest:
            kept: list[Row] = []
            if how == "lost":
                *kept, last = transaction.held
                self.records.remove((name, transaction.epoch, last))
            self.transactions[name] = transaction._replace(held=tuple(kept))
        return bool(newest)

    def _complete(self, name: str, transaction: Transaction, *, commit: bool) -> None:
        # a commit and a time-out both bump the producer epoch, so that the epoch alone does not tell them apart
        bumped = transaction.epoch + (1 if self.bumps_on_commit or not commit else 0)
        state = "CompleteCommit" if commit else "CompleteAbort"
        self.transactions[name] = transaction._replace(epoch=bumped, state=state)
        if not commit:
            return
        self.readers.publish("K", transaction.held)
        self._keep_order(transaction)
        if transaction.marker is not None:
            self.mark(transaction.marker)

    def mark(self, marked: Marked) -> None:
        """Overwrite the offset of a marker's group."""
        self.markers[marked.key, marked.partition, marked.number % 2] = Mark(marked.number, marked.attempt)

    def _keep_order(self, transaction: Transaction) -> None:
        """Flag rows that stand behind those of a later epoch: a key's older value would be the last one."""
        for row in transaction.held[:1]:
            others = self.log.setdefault(row.query, [])
            turned = any((at < transaction.place) == (epoch > row.epoch) for at, epoch in others if epoch != row.epoch)
            if turned and not self.readers.went_back:
                self.readers.flag("OUT OF ORDER K")
            others.append((transaction.place, row.epoch))

    def describe(self, name: str) -> tuple[int, str]:
        """Return producer epoch and state of an id."""
        transaction = self.transactions.get(name) or Transaction()
        return transaction.epoch, transaction.state

    def ongoing(self, key: str, generation: int) -> list[tuple[str, int]]:
        """Return (id, producer epoch) of the open transactions of an identity, up to a generation."""
        return [one for one, made_by in self._ongoing(key) if made_by <= generation]

    def before(self, key: str, generation: int, place: int) -> list[tuple[str, int]]:
        """Return (id, producer epoch) of those whose rows stand before a place: readers wait for them."""
        return [one for one in self.ongoing(key, generation) if self.transactions[one[0]].place < place]

    def place_of(self, name: str) -> int:
        """Return where the first row of an id's transaction stands."""
        return self.transactions[name].place

    def newer(self, key: str, generation: int) -> list[str]:
        """Return the ids of the open transactions of an identity that later generations have begun."""
        return [name for (name, _), made_by in self._ongoing(key) if made_by > generation]

    def _ongoing(self, key: str) -> Iterator[tuple[tuple[str, int], int]]:
        for name, transaction in self.transactions.items():
            if transaction.state == "Ongoing" and (parsed := id_of(name)) and parsed.key == key:
                yield (name, transaction.epoch), parsed.generation

    def marker(self, key: str, partition: int) -> int:
        """Return the newest epoch committed for a partition, -1 if none."""
        return max(
            (self.markers[key, partition, side].epoch for side in (0, 1) if (key, partition, side) in self.markers),
            default=-1,
        )

    def alter_marker(self, by: Mark) -> bool:
        """Overwrite the newest marker, its epoch counted on; return whether there was one."""
        for key, partition, _ in list(self.markers)[-1:]:
            self.mark(Marked(key, partition, self.marker(key, partition) + by.epoch, by.attempt))
        return bool(self.markers)

    def marks(self, key: str) -> dict[tuple[int, int], Mark]:
        """Return the marks by (partition, parity)."""
        return {(at, parity): mark for (owner, at, parity), mark in self.markers.items() if owner == key}

    def newest(self, key: str) -> int:
        """Return the newest epoch committed for any partition, -1 if none."""
        return max((mark.epoch for (owner, _, _), mark in self.markers.items() if owner == key), default=-1)

    def time_out(self) -> bool:
        """Abort every open transaction, as the coordinator does at transaction.timeout.ms; return whether any was."""
        expired = [(name, one) for name, one in self.transactions.items() if one.state == "Ongoing"]
        for name, transaction in expired:
            self._complete(name, transaction, commit=False)
        return bool(expired)


class PreparedRows(NamedTuple):
    """A prepared PostgreSQL transaction: the marker row that it inserts, with its attempt, and its rows."""

    marker: tuple[Any, ...]
    attempt: str
    rows: list[Row]

    def marks(self, marker: tuple[Any, ...]) -> bool:
        """Whether it inserts this marker row."""
        return self.marker == marker


class Staged(NamedTuple):
    """Names a staging table: identity key, generation that made it, attempt."""

    key: str
    generation: int
    attempt: str


@dataclass(slots=True)
class Postgres:
    """Staging tables, prepared transactions by gid, and marker rows: (identity key, epoch) -> attempt."""

    readers: Readers
    sink: str
    staging: dict[Staged, dict[str, list[Row]]] = field(default_factory=dict)
    prepared: dict[str, Any] = field(default_factory=dict)
    markers: dict[Any, str] = field(default_factory=dict)
    shape: int = 0
    """Counts how often somebody has altered the target's columns."""
    staged_for: dict[tuple[Staged, str], int] = field(default_factory=dict)
    """The shape that a task's rows were staged for."""

    def stage(self, table: Staged, task: str, rows: list[Row]) -> int:
        """COPY a task's rows into a staging table, making it if it does not exist; return the shape they are for."""
        self.staging.setdefault(table, {})[task] = rows
        self.staged_for[table, task] = self.shape
        return self.shape

    def alter(self) -> bool:
        """Give a column another type; return whether it was possible: what is prepared holds locks."""
        self.shape += not self.prepared
        return not self.prepared

    def staged_rows(self, table: Staged, tasks: list[str]) -> list[Row] | None:
        """Return the rows of some tasks, None if the table or a task's rows are gone."""
        stored = self.staging.get(table, {})
        if any(task not in stored for task in tasks):
            return None
        return [row for task in tasks for row in stored[task]]

    def verify_shape(self, table: Staged, tasks: list[str]) -> None:
        """Flag rows that go into other columns than they were staged for."""
        if any(self.staged_for[table, task] != self.shape for task in tasks):
            self.readers.flag(f"CAST {self.sink}: rows that were staged for other columns")

    def mark(self, key: str) -> Mark | None:
        """Return the newest marker row."""
        newest = self.newest(key)
        return None if newest < 0 else Mark(newest, self.markers[key, newest])

    def prepare(self, gid: str, prepared: PreparedRows, after: Mark | None = None) -> str:
        """PREPARE TRANSACTION: OK, BEHIND, or the SQLSTATE of what stands in the way."""
        refused = self.refusal(gid, prepared, after)
        if not refused:
            self.prepared[gid] = prepared
        return refused or "OK"

    def refusal(self, gid: str, prepared: PreparedRows, after: Mark | None) -> str:
        """Return why rows cannot be prepared, "" if they can."""
        if after is not None and self.mark(prepared.marker[0]) != after:
            return "23505" if prepared.marker in self.markers else "BEHIND"
        if gid in self.prepared:
            return "42710"
        if prepared.marker in self.markers:
            return "23505"
        return "55P03" if any(other.marks(prepared.marker) for other in self.prepared.values()) else ""

    def commit_prepared(self, gid: str) -> str:
        """COMMIT PREPARED: OK or 42704 (no such gid, for whatever reason)."""
        if gid not in self.prepared:
            return "42704"
        self.readers.before_commit(self.sink)
        transaction = self.prepared.pop(gid)
        self.readers.publish(self.sink, transaction.rows)
        self.markers[transaction.marker] = transaction.attempt
        return "OK"

    def rollback_prepared(self, gid: str) -> str:
        """ROLLBACK PREPARED: OK or 42704."""
        return "42704" if self.prepared.pop(gid, None) is None else "OK"

    def merge(
        self, table: Staged, tasks: list[str], marker: tuple[str, int], attempt: str, after: Mark | None = None
    ) -> str:
        """Merge staged rows and the marker in one transaction: OK, 23505 (marker exists), BEHIND or NOROWS."""
        if marker in self.markers:
            return "23505"
        if after is not None and self.mark(marker[0]) != after:
            return "BEHIND"
        rows = self.staged_rows(table, tasks)
        if rows is None:
            return "NOROWS"
        self.verify_shape(table, tasks)
        self.readers.before_commit(self.sink)
        self.readers.publish(self.sink, rows)
        self.markers[marker] = attempt
        return "OK"

    def drop_staging(self, table: Staged) -> str:
        """DROP TABLE IF EXISTS."""
        self.staging.pop(table, None)
        return "OK"

    def staging_of(self, key: str, generation: int) -> list[Staged]:
        """Return the staging tables of an identity, up to a generation."""
        return [table for table in self.staging if table.key == key and table.generation <= generation]

    def prepared_of(self, key: str, generation: int) -> list[str]:
        """Return the gids of an identity, up to a generation."""
        names = {gid: gid_of(gid) for gid in self.prepared}
        return [gid for gid, name in names.items() if name and name.key == key and name.generation <= generation]

    def alter_marker(self, by: Mark) -> bool:
        """Write a marker row at the newest or above; return whether it was possible.

        One of an epoch that is prepared waits for that, as any insert of the same key does.
        """
        for key, number in sorted(self.markers)[-1:]:
            marker = key, number + by.epoch
            if any(one.marks(marker) for one in self.prepared.values()):
                return False
            self.markers[marker] = by.attempt
        return bool(self.markers)

    def marker(self, key: str, number: int) -> str | None:
        """Return the attempt in an epoch's marker row, None if there is no such row."""
        return self.markers.get((key, number))

    def newest(self, key: str) -> int:
        """Return the newest epoch with a marker row, -1 if none."""
        return max((number for owner, number in self.markers if owner == key), default=-1)

    def roll_back_all(self) -> bool:
        """Roll back every prepared transaction, as a DBA might; return whether there was any."""
        found = bool(self.prepared)
        self.prepared.clear()
        return found
