"""Request by request, the PostgreSQL server in memory answers as the real one does."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow as pa
import pytest
from psycopg import errors

from epochsink.errors import PrepareFailed, RowsRejected
from epochsink.identity import PreparedName
from epochsink.postgres import Postgres
from epochsink.postgres.catalog import TableChanged, require_unchanged
from epochsink.postgres.committable import WHOLE, Member, Relation
from epochsink.postgres.database import Database
from epochsink.postgres.dead_letter import EpochLetters
from epochsink.postgres.marker_table import MarkerRow
from epochsink.postgres.server import Server
from epochsink.postgres.sessions import SessionName
from epochsink.postgres.spooled import AcceptedRows
from epochsink.postgres.table import Table
from epochsink.sink import Epoch, Identity
from epochsink_devkit.services import PostgresService
from simulation.postgres_database import MemoryDatabase
from simulation.postgres_sink import PostgresSink
from simulation.readers import Row
from simulation.steps import at_once
from simulation.world import World

if TYPE_CHECKING:
    from fix_postgres import Truth

TASK = "7" * 32


class Held(ABC):
    """A server with one table, and sessions on it."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self._opened: list[Database] = []

    @abstractmethod
    def connect(self, name: str) -> Database:
        """Open a session."""

    @abstractmethod
    def batches(self, rows: list[int]) -> list[Any]:
        """Return rows as they come from the spool."""

    @abstractmethod
    def visible(self) -> list[int]:
        """Return the rows that readers see."""

    @abstractmethod
    def alter(self) -> None:
        """Give the column another type."""

    def open(self, attempt: str = "driver") -> Database:
        identity = self.table.identity
        opened = self.connect(str(SessionName(self.table.key, identity.generation, attempt)))
        self._opened.append(opened)
        return opened

    def rows(self, *rows: int) -> AcceptedRows:
        return AcceptedRows((TASK,), len(rows), Spooled(self.batches(list(rows))))

    def mark(self, database: Database, epoch: Epoch) -> None:
        self.table.marker.insert(database, epoch.number, WHOLE, epoch.attempt)

    def name(self, epoch: Epoch) -> PreparedName:
        return PreparedName.of(self.table.identity, epoch, WHOLE)

    def prepare(self, database: Database, epoch: Epoch, *rows: int) -> str:
        with database.transaction():
            self.mark(database, epoch)
            if rows:
                database.incoming(self.table, self.rows(*rows)).copy()
            database.prepare(self.name(epoch))
        return str(self.name(epoch))

    def close(self) -> None:
        for database in self._opened:
            database.close()


class Spooled:
    """Rows in place of the spool."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def tasks(self) -> list[str]:
        return [TASK]

    def read(self, task: str) -> Iterator[Any]:
        del task
        yield from self._batches

    def verify(self) -> None:
        pass


class InMemory(Held):
    """The simulation's."""

    def __init__(self, commit: Any) -> None:
        self._world = World("P")
        self._world.readers.decided.update(("q", number) for number in range(9))
        sink = PostgresSink(self._world, at_once)
        sink.config = Postgres("host=localhost", table="target", commit=commit)
        super().__init__(Table(sink.config, Identity("q", "P", 1)))

    def connect(self, name: str) -> Database:
        return MemoryDatabase(self._world, at_once, "P", name)

    def batches(self, rows: list[int]) -> list[Any]:
        return [Row("q", 0, row, "a" * 32) for row in rows]

    def visible(self) -> list[int]:
        return sorted(row.source for row in self._world.readers.visible.get("P", {}).values())

    def alter(self) -> None:
        assert self._world.postgres["P"].alter()


class Real(Held):
    """PostgreSQL."""

    def __init__(self, commit: Any, dsn: str, schema: str, truth: Truth) -> None:
        truth.execute(f'CREATE TABLE "{schema}".target (value bigint)')
        self._truth, self._name = truth, f'"{schema}".target'
        sink = Postgres(dsn, table=(schema, "target"), marker_schema=schema, commit=commit, timeout=0.2)
        self._server = Server.of(sink)
        super().__init__(Table(sink, Identity(uuid.uuid4().hex, "P", 1)))

    def connect(self, name: str) -> Database:
        return Database.connect(self._server, name)

    def batches(self, rows: list[int]) -> list[Any]:
        return [pa.record_batch({"value": pa.array(rows, pa.int64())})]

    def visible(self) -> list[int]:
        return [int(value) for (value,) in sorted(self._truth.rows(self._name))]

    def alter(self) -> None:
        self._truth.execute(f"ALTER TABLE {self._name} ALTER COLUMN value TYPE numeric")


@pytest.fixture(params=["prepared", "staged"])
def commit(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["in memory", "real"])
def held(request: pytest.FixtureRequest, commit: str) -> Iterator[Held]:
    one: Held
    if request.param == "in memory":
        one = InMemory(commit)
    else:
        service: PostgresService = request.getfixturevalue("postgres")
        schema: str = request.getfixturevalue("pg_schema")
        one = Real(commit, service.dsn, schema, request.getfixturevalue("pg_truth"))
    with closing(one):
        one.open().markers(one.table.config.marker_schema).create()
        yield one


FIRST, SECOND = Epoch(0, "a" * 32), Epoch(1, "b" * 32)
AGAIN = Epoch(0, "c" * 32)
ONE = pytest.mark.parametrize("commit", ["prepared"])


@ONE
def test_markers_are_found_by_what_is_asked(held: Held) -> None:
    database, marker, key = held.open(), held.table.marker, held.table.key
    markers = database.markers(held.table.config.marker_schema)
    assert not marker.has_joined(database)
    assert (markers.single(key), markers.since(key, None, None)) == (None, [])
    marker.join(database, "d" * 32)
    marker.join(database, "d" * 32)
    assert marker.has_joined(database)
    assert markers.single(key) == ("d" * 32, "d" * 32)
    for epoch in (FIRST, SECOND):
        database.commit_prepared(held.prepare(database, epoch))
    assert markers.attempt(key, 0, WHOLE) == FIRST.attempt
    assert markers.attempt(key, 0, TASK) is None
    assert markers.other_attempt(key, 1, [SECOND.attempt]) is None
    assert markers.other_attempt(key, 1, []) == SECOND.attempt
    base, first, second = ("d" * 32, -1, "d" * 32), (WHOLE, 0, FIRST.attempt), (WHOLE, 1, SECOND.attempt)
    assert markers.since(key, None, None) == [second]
    assert markers.since(key, 0, "d" * 32) == [base, first, second]
    assert markers.since(key, 1, "d" * 32) == [base, second]
    assert markers.since(key, 7, None) == [second]
    note = MarkerRow(f"{key}.table", -1, "7", "{}", "q", "P")
    markers.replace_alone(note)
    markers.replace_alone(note._replace(part="8"))
    assert markers.single(note.key) == ("8", "{}")


@ONE
def test_a_marker_is_there_once_and_its_inserts_wait_for_each_other(held: Held) -> None:
    one, other = held.open(), held.open()
    with one.transaction():
        held.mark(one, FIRST)
        with pytest.raises(errors.LockNotAvailable), other.transaction():
            held.mark(other, AGAIN)
        one.prepare(held.name(FIRST))
    with pytest.raises(errors.LockNotAvailable), other.transaction():
        held.mark(other, AGAIN)
    one.commit_prepared(str(held.name(FIRST)))
    with pytest.raises(errors.UniqueViolation) as refused, other.transaction():
        held.mark(other, AGAIN)
    assert (refused.value.diag.schema_name, refused.value.diag.table_name) == (
        held.table.config.marker_schema,
        "marker",
    )


@ONE
def test_what_is_prepared_is_listed_and_ends_once(held: Held) -> None:
    one, other = held.open(), held.open()
    gid = held.prepare(one, FIRST, 1, 2)
    assert held.visible() == []
    assert [each.gid for each in other.prepared_transactions(held.table.key)] == [gid]
    assert other.prepared_transactions("0" * 20) == []
    assert other.still_prepared({gid, "another"}) == {gid}
    with other.transaction():
        held.table.marker.insert(other, 7, WHOLE, FIRST.attempt)
        with pytest.raises(errors.DuplicateObject):
            other.prepare(held.name(FIRST))
        other.rollback()
    other.commit_prepared(gid)
    assert held.visible() == [1, 2]
    with pytest.raises(errors.UndefinedObject):
        other.commit_prepared(gid)
    assert not other.rollback_prepared(gid)
    gid = held.prepare(one, SECOND, 3)
    assert other.rollback_prepared(gid)
    assert other.still_prepared({gid}) == set()
    assert held.visible() == [1, 2]
    assert held.table.marker.attempt(other, 0, WHOLE) == FIRST.attempt


def staged(held: Held, database: Database, epoch: Epoch, *rows: int) -> Member:
    return database.incoming(held.table, held.rows(*rows)).stage(epoch)


def test_staged_rows_are_merged_once_whole_and_unseen_before(held: Held, commit: str) -> None:
    one, other = held.open(), held.open()
    assert one.incoming(held.table, held.rows(1)).is_copied() == (commit == "prepared")
    member = staged(held, one, FIRST, 1, 2)
    assert staged(held, one, FIRST, 1, 2) == member
    assert member.logged == (commit == "staged")
    one.verify_staged(member)
    assert one.exists(member.staging)
    (table,) = other.staging_tables(held.table.key)
    assert Relation(table.schema, table.name) == member.staging
    assert table.note is not None
    assert table.note.generation == 1
    letters = EpochLetters("q", 0, FIRST.attempt)
    with pytest.raises(PrepareFailed), one.transaction():
        one.merge({"P": Member(**{name: getattr(member, name) for name in Member.__slots__} | {"rows": 3})}, letters)
    with one.transaction():
        held.mark(one, FIRST)
        one.merge({"P": member}, letters)
        one.rollback()
    assert held.table.marker.attempt(other, 0, WHOLE) is None
    with one.transaction():
        held.mark(one, FIRST)
        one.merge({"P": member}, letters)
        assert held.visible() == []
        one.commit()
    assert held.visible() == [1, 2]
    assert held.table.marker.attempt(other, 0, WHOLE) == FIRST.attempt
    other.drop_staging(member.staging)
    assert other.staging_tables(held.table.key) == []
    assert not one.exists(member.staging)
    other.drop_staging(member.staging)
    with pytest.raises(RowsRejected), one.transaction():
        one.merge({"P": member}, letters)


@ONE
def test_what_is_prepared_locks_its_staging_table(held: Held) -> None:
    one, other = held.open(), held.open()
    member = staged(held, one, FIRST, 1)
    with one.transaction():
        held.mark(one, FIRST)
        one.merge({"P": member}, EpochLetters("q", 0, FIRST.attempt))
        one.prepare(held.name(FIRST))
    (lock,) = other.prepared_locks([member.staging.name])
    assert (lock.gid, lock.schema, lock.table) == (str(held.name(FIRST)), *member.staging)
    with pytest.raises(errors.LockNotAvailable):
        other.drop_staging(member.staging)
    other.commit_prepared(str(held.name(FIRST)))
    assert other.prepared_locks([member.staging.name]) == []
    other.drop_staging(member.staging)


@ONE
def test_a_session_that_is_ended_leaves_nothing(held: Held) -> None:
    one, other = held.open(), held.open()
    with one.transaction():
        held.mark(one, FIRST)
        ((pid, name),) = [each for each in other.sessions(held.table.key) if each[0] == pid_of(one)]
        assert name.generation == 1
        assert other.terminate(pid)
        with pytest.raises(psycopg.OperationalError):
            one.prepare(held.name(FIRST))
    assert one.closed
    assert not one.is_of_primary()
    assert other.is_of_primary()
    assert other.prepared_transactions(held.table.key) == []
    held.prepare(other, AGAIN, 1)


def pid_of(database: Database) -> int:
    return database.pid if isinstance(database, MemoryDatabase) else database.connection.backend


def test_a_table_that_was_altered_is_seen_by_who_has_written(held: Held) -> None:
    one = held.open()
    member = staged(held, one, FIRST, 1)
    require_unchanged(one.read_target(member.merge.target), member.merge)
    held.alter()
    with pytest.raises(TableChanged), one.transaction():
        one.merge({"P": member}, EpochLetters("q", 0, FIRST.attempt))
    with pytest.raises(TableChanged):
        require_unchanged(one.read_target(member.merge.target), member.merge)


@ONE
def test_a_table_is_the_same_at_every_look(held: Held) -> None:
    one, other = held.open(), held.open()
    assert one.place() == other.place()
    assert one.look(held.table.relation) == other.look(held.table.relation) is not None
    assert one.located(held.table.relation).schema is not None
