"""A PostgreSQL server in memory: what `epochsink.postgres.database.Database` asks, with the locks that matter.

A session that its client has lost may still carry out what is under way to it. So it is listed until it is ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from epochsink.postgres.marker_table import MarkerRow
from epochsink.postgres.place import Place
from epochsink.sink import Mark
from simulation.readers import Readers, Row

HERE: Final = Place("simulated", 1, "1", 1)
Marker = tuple[str, int, str]
"""The primary key of a marker row: identity key, epoch, part."""


class Staged(NamedTuple):
    """Names a staging table: identity key, generation that made it, attempt."""

    key: str
    generation: int
    attempt: str


class PreparedRows(NamedTuple):
    """A prepared transaction: rows by sink, marker rows, and the staging tables that it has read."""

    rows_of: dict[str, tuple[Row, ...]]
    markers: dict[Marker, MarkerRow]
    staging: frozenset[Staged]

    @property
    def rows(self) -> list[Row]:
        """All rows."""
        return [row for rows in self.rows_of.values() for row in rows]


@dataclass(slots=True)
class Work:
    """A transaction under way."""

    rows_of: dict[str, tuple[Row, ...]] = field(default_factory=dict)
    markers: dict[Marker, MarkerRow] = field(default_factory=dict)
    staging: set[Staged] = field(default_factory=set)
    shapes: dict[str, int] = field(default_factory=dict)
    """The shape of each table that has been written to, and is locked, as its rows were encoded for it."""
    is_over: bool = False


@dataclass(slots=True)
class Client:
    """One session: its name, the transaction under way, and whether the server has ended it."""

    name: str
    work: Work | None = None
    is_lost: bool = False
    is_ended: bool = False


@dataclass(slots=True)
class PostgresServer:
    """One database. ``sinks`` are the letters of those that have their tables in it."""

    readers: Readers
    sinks: str
    staging: dict[Staged, dict[str, tuple[Row, ...]]] = field(default_factory=dict)
    prepared: dict[str, PreparedRows] = field(default_factory=dict)
    markers: dict[Marker, MarkerRow] = field(default_factory=dict)
    shape: int = 0
    """Counts how often somebody has altered the target's columns."""
    staged_for: dict[Staged, int] = field(default_factory=dict)
    """The shape that the rows of a staging table are encoded for."""
    place: Place = HERE
    table: str = "1"
    """The target's oid."""
    path: str = "public"
    """The schema of a table that is named without one."""
    swallows: bool = False
    """Whether a trigger of the marker table swallows rows."""
    watched: int = 0
    """How many requests a watch would end, if the server froze."""

    @property
    def clients(self) -> dict[int, Client]:
        """The sessions, by process id: no part of what a restore brings back."""
        return self.readers.clients.setdefault(self.sinks, {})

    # ---- locks

    def open_works(self, besides: Work | None = None) -> Iterator[Work]:
        """Yield the transactions under way."""
        for client in self.clients.values():
            if client.work is not None and client.work is not besides:
                yield client.work

    def is_locked(self, marker: Marker, besides: Work | None) -> bool:
        """Whether another transaction has inserted a marker row, and is not yet committed."""
        return any(marker in one.markers for one in self.prepared.values()) or any(
            marker in work.markers for work in self.open_works(besides)
        )

    def is_read(self, table: Staged, besides: Work | None) -> bool:
        """Whether another transaction holds a lock on a staging table."""
        return any(table in one.staging for one in self.prepared.values()) or any(
            table in work.staging for work in self.open_works(besides)
        )

    def staging_of(self, key: str, attempt: str) -> Staged | None:
        """Return the staging table of an attempt."""
        return next((table for table in self.staging if (table.key, table.attempt) == (key, attempt)), None)

    # ---- what ends a transaction

    def prepare(self, gid: str, work: Work) -> str:
        """PREPARE TRANSACTION; return "" or the SQLSTATE of what stands in the way, for one that arrives late."""
        if gid in self.prepared:
            return "42710"
        if refused := self._end(work):
            return refused
        self.prepared[gid] = PreparedRows(dict(work.rows_of), dict(work.markers), frozenset(work.staging))
        return ""

    def commit(self, work: Work) -> str:
        """COMMIT; return as `prepare` does."""
        refused = self._end(work)
        if not refused:
            self._show(work.rows_of, work.markers)
        return refused

    def _end(self, work: Work) -> str:
        if work.is_over:
            return "25P01"
        work.is_over = True
        if any(marker in self.markers or self.is_locked(marker, work) for marker in work.markers):
            return "23505"
        if any(shape != self.shape for shape in work.shapes.values()):
            self.readers.flag(f"CAST {self.sinks[0]}: rows that were written for other columns")
        return ""

    def commit_prepared(self, gid: str) -> bool:
        """COMMIT PREPARED; return whether there is one of that name."""
        work = self.prepared.pop(gid, None)
        if work is not None:
            self._show(work.rows_of, work.markers)
        return work is not None

    def _show(self, rows_of: dict[str, tuple[Row, ...]], markers: dict[Marker, MarkerRow]) -> None:
        self.readers.before_commit(self.sinks[0])
        for sink, rows in rows_of.items():
            self.readers.publish(sink, rows)
        self.markers.update(markers)
        shown = {frozenset(self.readers.visible.get(sink, {})) for sink in self.sinks if rows_of}
        if len(shown) > 1:
            self.readers.flag("TORN: one table of a database is ahead of the other")

    # ---- what others do

    def end_clients(self) -> None:
        """End all sessions, as a restart does."""
        for client in self.clients.values():
            client.is_ended, client.work = True, None
        self.clients.clear()

    def alter(self) -> bool:
        """Give a column another type; return whether it was possible: whoever has written holds locks."""
        is_free = not self.prepared and not any(work.shapes for work in self.open_works())
        self.shape += is_free
        return is_free

    def roll_back_all(self) -> bool:
        """Roll back every prepared transaction, as a DBA might; return whether there was any."""
        found = bool(self.prepared)
        self.prepared.clear()
        return found

    def alter_marker(self, by: Mark) -> bool:
        """Write a marker row at the newest or above; return whether it was possible.

        One of an epoch that is prepared waits for that, as any insert of the same key does.
        """
        for marker in sorted(each for each in self.markers if each[1] >= 0)[-1:]:
            key, number, part = marker
            other = key, number + by.epoch, part
            if self.is_locked(other, None):
                return False
            self.markers[other] = self.markers[marker]._replace(epoch=number + by.epoch, attempt=by.attempt)
            return True
        return False
