"""A session of a PostgreSQL server in memory: each request of `Database` is a step, at which a fault may strike."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, Final

import psycopg
from psycopg import errors

from epochsink.errors import PrepareFailed, RowsRejected
from epochsink.identity import PreparedName, staging_owner, staging_table
from epochsink.postgres.catalog import Column, TargetTable, require_unchanged
from epochsink.postgres.committable import Member, Relation
from epochsink.postgres.database import Database, Lock, PreparedTransaction, StagingTable, TableLook
from epochsink.postgres.marker_table import TABLE, MarkerRow
from epochsink.postgres.place import Place
from epochsink.postgres.row_mapping import merge_of
from epochsink.postgres.sessions import SessionName
from epochsink.postgres.sink_table import SinkTable
from epochsink.postgres.spooled import AcceptedRows
from epochsink.postgres.staging import Note
from epochsink.sink import Epoch
from simulation.postgres_server import Client, Marker, PostgresServer, Staged, Work
from simulation.readers import Row
from simulation.steps import Stepper
from simulation.world import World

SCHEMA: Final = "epochsink"
COLUMN: Final = "value"


class Diagnosis:
    """What the server says of a marker row that exists, beside the code."""

    schema_name, table_name = SCHEMA, TABLE

    def __getattr__(self, name: str) -> None:
        return None


class MarkerExists(errors.UniqueViolation):
    """A marker row is there already."""

    diag = Diagnosis()  # type: ignore[assignment]


@cache
def target_of(relation: Relation, shape: int) -> TargetTable:
    """Return the target as it looks after so many alterations."""
    declared = f"type{shape}"
    column = Column(COLUMN, declared, declared, "", "=", "recv", None, -1, False, False, "", "")  # noqa: FBT003
    return TargetTable(relation, "r", 10, False, False, (), ({COLUMN: ""},), {COLUMN: column})  # noqa: FBT003


class MemoryDatabase(Database):
    """One session. ``letter`` is that of the sink whose steps these are."""

    def __init__(self, world: World, step: Stepper, letter: str, name: str) -> None:
        self._world = world
        self._make_step = step
        self._letter = letter
        self.server: PostgresServer = world.postgres[letter]
        self._client = Client(name)
        self.pid = world.readers.next_pid()
        self.server.clients[self.pid] = self._client

    def request(self, name: str, apply: Callable[[], Any], *, reads: bool = False) -> Any:
        """Make a request; raise what it returns if that is an error."""
        client = self._client

        def carried_out() -> Any:
            return errors.AdminShutdown("terminating connection") if client.is_ended else apply()

        if self.closed:
            raise psycopg.OperationalError("the connection is closed")
        try:
            answer = self._make_step(f"{self._letter} {name}", carried_out, reads=reads)
        except OSError as lost:
            # the server may still carry it out
            client.is_lost, client.work = True, None
            raise psycopg.OperationalError(str(lost)) from lost
        if isinstance(answer, errors.AdminShutdown):
            client.is_lost = True
        if isinstance(answer, Exception):
            raise answer
        return answer

    # ---- the session

    @property
    def closed(self) -> bool:
        return self._client.is_lost

    def close(self) -> None:
        self._client.is_lost, self._client.work = True, None
        self.server.clients.pop(self.pid, None)

    def is_of_primary(self) -> bool:
        self.rollback()
        return not self._client.is_lost and not self._client.is_ended

    @contextmanager
    def watched(self, limit: float | None = None) -> Iterator[None]:
        self.server.watched += 1
        try:
            yield
        finally:
            self.server.watched -= 1

    def unblocked(self, table: str, seconds: float) -> AbstractContextManager[None]:
        return nullcontext()

    def place(self) -> Place:
        return self.server.place

    # ---- transactions

    @property
    def work(self) -> Work:
        """The transaction under way."""
        if self._client.work is None:
            self._client.is_lost = True
            raise psycopg.OperationalError("the session is lost, and its transaction with it")
        return self._client.work

    @contextmanager
    def transaction(self) -> Iterator[None]:
        self._client.work = Work()
        try:
            yield
        except BaseException:
            self.rollback()
            raise

    def commit(self) -> None:
        self._end("merge", self.server.commit)

    def rollback(self) -> None:
        self._client.work = None

    def prepare(self, name: PreparedName) -> None:
        gid = str(name)
        self._end("prepare", lambda work: self.server.prepare(gid, work))

    def _end(self, name: str, end: Callable[[Work], str]) -> None:
        work = self.work

        def apply() -> Exception | None:
            refused = end(work)
            return errors.lookup(refused)(name) if refused else None

        self.request(name, apply)
        self._client.work = None

    def commit_prepared(self, gid: str) -> None:
        def apply() -> Exception | None:
            return None if self.server.commit_prepared(gid) else errors.UndefinedObject(gid)

        self.request("commit", apply)

    def rollback_prepared(self, gid: str) -> bool:
        def apply() -> bool:
            was_there = self.server.prepared.pop(gid, None) is not None
            if was_there:
                self._world.ended(self._letter, gid)
            return was_there

        return bool(self.request("roll back", apply))

    # ---- what sinks have in the database

    def prepared_transactions(self, key: str | None = None) -> list[PreparedTransaction]:
        def apply() -> list[PreparedTransaction]:
            found = [PreparedTransaction(gid, "owner", 0.0) for gid in self.server.prepared]
            return [each for each in found if each.name and key in (None, each.name.key)]

        return self.request("list prepared", apply, reads=True)  # type: ignore[no-any-return]

    def still_prepared(self, gids: Collection[str]) -> set[str]:
        if not gids:
            return set()
        return self.request("look", lambda: self.server.prepared.keys() & set(gids), reads=True)  # type: ignore[no-any-return]

    def prepared_locks(self, tables: Collection[str] | None = None) -> list[Lock]:
        def apply() -> list[Lock]:
            return [
                Lock(gid, 0.0, SCHEMA, name, f"{SCHEMA}.{name} AccessShareLock")
                for gid, prepared in self.server.prepared.items()
                for table in sorted(prepared.staging)
                if tables is None or (name := staging_table(table.key, table.attempt)) in tables
            ]

        return self.request("list locks", apply, reads=True)  # type: ignore[no-any-return]

    def staging_tables(self, key: str | None = None, *, is_measured: bool = False) -> list[StagingTable]:
        def apply() -> list[StagingTable]:
            return [
                StagingTable(
                    SCHEMA, staging_table(*table[::2]), "owner", str(Note(table.generation, 0, "pipeline/sink")), None
                )
                for table in self.server.staging
                if key in (None, table.key)
            ]

        return self.request("list staging", apply, reads=True)  # type: ignore[no-any-return]

    def sessions(self, key: str | None = None) -> list[tuple[int, SessionName]]:
        # idle ones can do no harm, and are left out: they end with their process
        pattern = "*" if key is None else SessionName.pattern(key).replace("%", "*")
        named = {
            pid: SessionName.parse(client.name)
            for pid, client in self.server.clients.items()
            if client is not self._client and (client.work is not None or client.is_lost)
            if fnmatchcase(client.name, pattern)
        }
        return [(pid, name) for pid, name in named.items() if name]

    def terminate(self, pid: int) -> bool:
        def apply() -> bool:
            client = self.server.clients.pop(pid, None)
            if client is not None:
                client.is_ended, client.work = True, None
            return client is not None

        return bool(self.request("terminate", apply))

    def drop_staging(self, table: Relation) -> None:
        key, attempt = staging_owner(table.name) or ("", "")

        def apply() -> Exception | None:
            staged = self.server.staging_of(key, attempt)
            if staged is not None and self.server.is_read(staged, self._client.work):
                return errors.LockNotAvailable(table.name)
            if staged is not None:
                del self.server.staging[staged]
            return None

        self.request("drop", apply)

    def exists(self, table: Relation) -> bool:
        return self.server.staging_of(*(staging_owner(table.name) or ("", ""))) is not None

    # ---- the markers and the target

    def markers(self, schema: str) -> MemoryMarkers:  # type: ignore[override] # the same methods
        assert schema == SCHEMA
        return MemoryMarkers(self)

    def located(self, table: Relation) -> Relation:
        return Relation(table.schema or self.server.path, table.name)

    def read_target(self, table: Relation) -> TargetTable | None:
        return target_of(table, self.server.shape)

    def look(self, table: Relation) -> TableLook | None:
        return TableLook(self.server.table, {}, None)

    # ---- rows

    def incoming(self, table: SinkTable, rows: AcceptedRows) -> MemoryIncoming:  # type: ignore[override] # the same methods
        return MemoryIncoming(self, table, rows)

    def merge(
        self, members: Mapping[str, Member], letters: object, *, careful: bool = False, known: object = None
    ) -> dict[str, list[Any]]:
        work = self.work

        def apply() -> Exception | None:
            for sink, member in members.items():
                staged = self.server.staging_of(*(staging_owner(member.staging.name) or ("", "")))
                if staged is None:
                    # the real one finds that the statement without rows goes through, and takes it for a refusal
                    return RowsRejected(f"relation {member.staging.name} does not exist")
                rows = self.server.staging[staged]
                accepted = tuple(row for task in member.tasks for row in rows.get(task, ()))
                if len(accepted) != member.rows:
                    return PrepareFailed(f"{staged} holds {len(accepted)} rows, not {member.rows}")
                self.write(work, sink, member, accepted, self.server.staged_for[staged])
                work.staging.add(staged)
            return None

        self.request("write", apply)
        for member in members.values():
            require_unchanged(self.read_target(member.merge.target), member.merge)
        return {sink: [] for sink in members}

    def write(self, work: Work, sink: str, member: Member, rows: tuple[Row, ...], shape: int) -> None:
        """Write rows in a transaction under way; flag options that are not those of the attempt that wrote them."""
        for attempt in {row.attempt for row in rows}:
            self._world.apply_with(sink, attempt, options_of(member))
        if member.merge.target.schema != "public":
            self.server.readers.flag(f"ANOTHER TABLE {sink}")
        work.rows_of[sink], work.shapes[sink] = rows, shape

    def require_deferred(self) -> None:
        """Do nothing: no constraint is deferred."""

    def verify_staged(self, member: Member) -> None:
        def apply() -> Exception | None:
            staged = self.server.staging_of(*(staging_owner(member.staging.name) or ("", "")))
            count = 0 if staged is None else sum(map(len, self.server.staging[staged].values()))
            return None if count == member.rows else PrepareFailed(f"{count} rows are staged, not {member.rows}")

        self.request("count", apply, reads=True)

    def verify_casts(self, member: Member) -> None:
        """Do nothing: nothing is cast."""

    def letters_of(self, letters: object, member: Member) -> int:
        return 0


def options_of(member: Member) -> int:
    """Return the number of the options with which rows are merged: each with a key or without, setting aside or not."""
    return len(member.merge.key) + 2 * member.merge.sets_aside


class MemoryMarkers:
    """The methods of `MarkerTable`."""

    def __init__(self, database: MemoryDatabase) -> None:
        self._database = database
        self._server = database.server

    def create(self) -> None:
        """Do nothing: it is there."""

    def insert(self, row: MarkerRow) -> int:
        """Wait for whoever holds the key: not at all, in a server without time."""
        work, marker = self._database.work, row[:3]

        def apply() -> Exception | int:
            if refused := self._refusal(marker, work):
                return refused
            work.markers |= {} if self._server.swallows else {marker: row}
            return int(not self._server.swallows)

        return int(self._database.request("mark", apply))

    def _refusal(self, marker: Marker, work: Work | None) -> Exception | None:
        if marker in self._server.markers:
            return MarkerExists(str(marker))
        return errors.LockNotAvailable(str(marker)) if self._server.is_locked(marker, work) else None

    def insert_alone(self, row: MarkerRow) -> int:
        """Insert and commit."""

        def apply() -> Exception | int:
            if refused := self._refusal(row[:3], None):
                return refused
            self._server.markers[row[:3]] = row
            return 1

        return int(self._database.request("mark alone", apply))

    def replace_alone(self, row: MarkerRow) -> None:
        """Delete, insert and commit."""

        def apply() -> None:
            for marker in [marker for marker in self._server.markers if marker[0] == row.key]:
                del self._server.markers[marker]
            self._server.markers[row[:3]] = row

        self._database.request("note", apply)

    def _rows(self, key: str) -> list[MarkerRow]:
        own = self._database._client.work
        rows = {**self._server.markers, **(own.markers if own else {})}
        return sorted(row for row in rows.values() if row.key == key)

    def has_any(self, key: str) -> bool:
        """Look."""
        return bool(self._read("markers", lambda: self._rows(key)))

    def _read(self, name: str, apply: Callable[[], Any]) -> Any:
        return self._database.request(name, apply, reads=True)

    def attempt(self, key: str, epoch: int, part: str) -> str | None:
        """Look for one row."""

        def apply() -> str | None:
            return next((row.attempt for row in self._rows(key) if (row.epoch, row.part) == (epoch, part)), None)

        return self._read("marker", apply)  # type: ignore[no-any-return]

    def other_attempt(self, key: str, epoch: int, attempts: list[str]) -> str | None:
        """Look at an epoch's rows."""

        def apply() -> str | None:
            rows = (row for row in self._rows(key) if row.epoch == epoch and row.attempt not in attempts)
            return next((row.attempt for row in rows), None)

        return self._read("attempts", apply)  # type: ignore[no-any-return]

    def sink_of(self, key: str, query_id: str) -> str | None:
        """Look for any row."""
        rows = (row for row in self._rows(key) if row.query_id == query_id)
        return next((row.sink for row in rows), None)

    def single(self, key: str) -> tuple[str, str] | None:
        """Look for the row."""

        def apply() -> tuple[str, str] | None:
            return next(((row.part, row.attempt) for row in self._rows(key)), None)

        return self._read("note of the table", apply)  # type: ignore[no-any-return]

    def since(self, key: str, epoch: int | None, base: str | None) -> list[tuple[str, int, str]]:
        """Look at the newest rows."""

        def apply() -> list[tuple[str, int, str]]:
            rows = self._rows(key)
            newest = max((row.epoch for row in rows), default=-1)
            least = newest if epoch is None else min(epoch, newest)
            found = [row for row in rows if row.epoch >= least or row.part == base]
            return [(row.part, row.epoch, row.attempt) for row in sorted(found, key=lambda row: row.epoch)]

        return self._read("applied", apply)  # type: ignore[no-any-return]

    def purge(self, key: str, epoch: int) -> None:
        """Delete those of old epochs; not a step, as it decides nothing."""
        for marker in [each for each in self._server.markers if each[0] == key and 0 <= each[1] <= epoch]:
            del self._server.markers[marker]


class MemoryIncoming:
    """The methods of `Incoming`."""

    sets_aside = False

    def __init__(self, database: MemoryDatabase, table: SinkTable, rows: AcceptedRows) -> None:
        self._database, self._table, self._rows = database, table, rows
        self._read: dict[str, list[Row]] = {}
        for task, row in rows.read():
            self._read.setdefault(task, []).append(row)
        self._shape = database.server.shape
        target = database.read_target(database.located(table.relation))
        assert target is not None
        self._merge = merge_of(
            table.config, target, [COLUMN], casts={}, deletes=False, sets_aside=table.config.sets_aside
        )

    def is_copied(self) -> bool:
        """Decide as `Incoming` does."""
        return not self._table.config.key and self._table.config.mode(10) == "prepared"

    def member(self, staging: str | None = None) -> Member:
        """Return what is recorded of the rows."""
        is_logged = staging is not None and self._table.config.mode(10) == "staged"
        return Member(
            self._table.key, SCHEMA, staging, self._rows.tasks, self._rows.count, self._merge, logged=is_logged
        )

    def copy(self) -> None:
        """COPY into the target, in the transaction under way."""
        database, work = self._database, self._database.work
        rows = tuple(row for some in self._read.values() for row in some)
        if len(rows) != self._rows.count:
            raise PrepareFailed(f"the spool holds {len(rows)} rows, and the accepted tasks wrote {self._rows.count}")
        sink, member = self._table.identity.sink, self.member()
        database.request("copy", lambda: database.write(work, sink, member, rows, self._shape))
        require_unchanged(database.read_target(self._merge.target), self._merge, copied=True)

    def stage(self, epoch: Epoch) -> Member:
        """COPY into the attempt's staging table, and commit that."""
        server, key = self._database.server, self._table.key
        table = Staged(key, self._table.identity.generation, epoch.attempt)
        rows = {task: tuple(some) for task, some in self._read.items()}

        def apply() -> None:
            staged = server.staging_of(key, epoch.attempt) or table
            server.staging[staged], server.staged_for[staged] = rows, self._shape

        self._database.request("stage", apply)
        return self.member(staging_table(key, epoch.attempt))
