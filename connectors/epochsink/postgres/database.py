"""What is asked of a PostgreSQL server, in one session: each request a method, values in and out.

Whatever decides takes a `Database`. So it also runs over a server in memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Final, NamedTuple, Self

import psycopg
from psycopg import errors, sql

from epochsink.identity import PREFIX, PreparedName
from epochsink.postgres import catalog, merge, prepared_transaction, sessions
from epochsink.postgres.catalog import TargetTable
from epochsink.postgres.committable import Member, Relation
from epochsink.postgres.dead_letter import EpochLetters, RefusedRow
from epochsink.postgres.incoming import Incoming
from epochsink.postgres.marker_table import MarkerTable
from epochsink.postgres.place import Place
from epochsink.postgres.server import PING_SECONDS, Connection, Server, deadline
from epochsink.postgres.sessions import SessionName
from epochsink.postgres.sink_table import SinkTable
from epochsink.postgres.spooled import AcceptedRows
from epochsink.postgres.staging import Note

# Names and operators are qualified, because a transaction of a vote has the user's search_path.
_PREPARED: Final = """
SELECT x.gid, x.owner::pg_catalog.text, pg_catalog.date_part('epoch', x.prepared)
FROM pg_catalog.pg_prepared_xacts x WHERE x.database OPERATOR(pg_catalog.=) pg_catalog.current_database()
"""
_OF_PATTERN: Final = _PREPARED + "AND x.gid OPERATOR(pg_catalog.~~) %s ORDER BY x.prepared"
_OF_NAMES: Final = _PREPARED + "AND x.gid OPERATOR(pg_catalog.=) ANY (%s::pg_catalog.text[])"
# A prepared transaction has no process. Its lock on its own transaction id leads to its virtual transaction in
# pg_locks, and that to its other locks.
_LOCKS: Final = """
SELECT x.gid, pg_catalog.date_part('epoch', x.prepared), n.nspname::pg_catalog.text, c.relname::pg_catalog.text,
       pg_catalog.concat(held.relation::pg_catalog.regclass, ' ', held.mode)
FROM pg_catalog.pg_prepared_xacts x
JOIN pg_catalog.pg_locks own ON own.locktype OPERATOR(pg_catalog.=) 'transactionid' AND own.pid IS NULL
  AND own.transactionid OPERATOR(pg_catalog.=) x.transaction
JOIN pg_catalog.pg_locks held ON held.virtualtransaction OPERATOR(pg_catalog.=) own.virtualtransaction
  AND held.pid IS NULL AND held.locktype OPERATOR(pg_catalog.=) 'relation'
LEFT JOIN pg_catalog.pg_class c ON c.oid OPERATOR(pg_catalog.=) held.relation
LEFT JOIN pg_catalog.pg_namespace n ON n.oid OPERATOR(pg_catalog.=) c.relnamespace
WHERE x.database OPERATOR(pg_catalog.=) pg_catalog.current_database()
  AND (%(tables)s::pg_catalog.name[] IS NULL OR c.relname OPERATOR(pg_catalog.=) ANY (%(tables)s::pg_catalog.name[]))
ORDER BY x.prepared
"""
# the size only if it is wanted: to measure it waits for the table's lock, which a sweep must not do
_STAGING: Final = """
SELECT n.nspname::pg_catalog.text, c.relname::pg_catalog.text, pg_catalog.pg_get_userbyid(c.relowner)::pg_catalog.text,
       pg_catalog.obj_description(c.oid, 'pg_class'),
       CASE WHEN %(is_measured)s THEN pg_catalog.pg_total_relation_size(c.oid) END
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid OPERATOR(pg_catalog.=) c.relnamespace
WHERE c.relkind OPERATOR(pg_catalog.=) 'r' AND c.relname OPERATOR(pg_catalog.~~) %(pattern)s ORDER BY 1, 2
"""
_SESSIONS: Final = """
SELECT pid, application_name FROM pg_catalog.pg_stat_activity
WHERE datname OPERATOR(pg_catalog.=) pg_catalog.current_database() AND application_name OPERATOR(pg_catalog.~~) %s
  AND pid OPERATOR(pg_catalog.<>) pg_catalog.pg_backend_pid()
"""
_DATABASE: Final = "SELECT oid, datname, pg_is_in_recovery() FROM pg_database WHERE datname = current_database()"
_CLUSTER: Final = (
    # the timeline is the first part of a WAL file's name: pg_control_checkpoint() tells that of the last checkpoint,
    # which a promotion may not have made yet
    "SELECT system_identifier::text, ('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::int "
    "FROM pg_control_system()"
)
_UNTOLD: Final = (
    errors.InsufficientPrivilege,
    errors.UndefinedFunction,
    errors.FeatureNotSupported,
)
"""Some hosted servers refuse the question."""
_LOOK: Final = """
WITH RECURSIVE found AS (
    SELECT c.oid FROM unnest(%s::text[]) WITH ORDINALITY AS path (schema, place)
    JOIN pg_catalog.pg_namespace n ON n.nspname = path.schema
    JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = %s
    ORDER BY path.place LIMIT 1
), tree (oid) AS (
    SELECT oid FROM found
    UNION ALL
    SELECT i.inhrelid FROM tree
    JOIN pg_catalog.pg_class p ON p.oid = tree.oid AND p.relkind = 'p'
    JOIN pg_catalog.pg_inherits i ON i.inhparent = p.oid
)
SELECT (SELECT oid FROM found)::text, coalesce(bool_or(c.relpersistence = 'u'), false),
       coalesce(jsonb_object_agg(c.oid, pg_relation_filenode(c.oid)) FILTER (WHERE c.relkind = 'r'), '{}'),
       (SELECT stats_reset::text FROM pg_catalog.pg_stat_bgwriter)
FROM tree JOIN pg_catalog.pg_class c ON c.oid = tree.oid
"""
_DROP_TIMEOUT: Final = "100ms"
"""A reader that locks a staging table for longer (pg_dump) must not delay each epoch."""
_TERMINATE_MILLISECONDS: Final = 2000


class PreparedTransaction(NamedTuple):
    """A prepared transaction. ``since`` is the Unix time at which it was prepared."""

    gid: str
    owner: str
    since: float

    @property
    def name(self) -> PreparedName | None:
        """The parsed gid, or None if no sink of this version prepared it."""
        return PreparedName.parse(self.gid)


class Lock(NamedTuple):
    """A lock that a prepared transaction holds on a table or index. ``words`` has the qualified name and the mode."""

    gid: str
    since: float
    schema: str | None
    table: str | None
    words: str


class StagingTable(NamedTuple):
    """A table with the name of a staging table. ``size`` is in bytes, or None if it was not asked for."""

    schema: str
    name: str
    owner: str
    comment: str | None
    size: int | None

    @property
    def note(self) -> Note | None:
        """Who made the table, or None if its comment does not say."""
        return Note.parse(self.comment)


class TableLook(NamedTuple):
    """A table's oid; the file of each of its partitions, by oid; when a crash last reset the server's statistics."""

    oid: str
    files: dict[str, int]
    crash: str | None
    unlogged: bool = False

    def may_be_emptied(self, before: TableLook) -> bool:
        """Whether there was a crash since a look before, and a file was replaced."""
        return self.crash != before.crash and any(
            before.files.get(oid, file) != file for oid, file in self.files.items()
        )


class Database:
    """One session of a database. Methods raise `psycopg.Error`; SQL that is none of an epoch's uses ``connection``."""

    def __init__(self, connection: Connection, server: Server) -> None:
        self.connection = connection
        self._server = server

    @classmethod
    def connect(cls, server: Server, name: str, retry_seconds: float = 0.0) -> Self:
        """Open a session; see `Server.connect`."""
        return cls(server.connect(name, retry_seconds), server)

    # ---- the session

    @property
    def closed(self) -> bool:
        """Whether the session is known to be lost."""
        return bool(self.connection.closed)

    def close(self) -> None:
        """End the session."""
        self.connection.close()

    def is_of_primary(self) -> bool:
        """Return whether a server that takes writes answers. What the session had under way is rolled back."""
        try:
            with deadline(self.connection, PING_SECONDS):
                self.connection.rollback()
                row = self.connection.execute("SELECT pg_catalog.pg_is_in_recovery()").fetchone()
        except psycopg.Error:
            return False
        return row == (False,)

    def watched(self, limit: float | None = None) -> AbstractContextManager[None]:
        """Cut the session if the server stops answering; see `sessions.watched`."""
        return sessions.watched(self.connection, self._server, limit)

    def unblocked(self, table: str, seconds: float) -> AbstractContextManager[None]:
        """Limit the wait for a table; see `sessions.unblocked`."""
        return sessions.unblocked(self.connection, self._server, table, seconds)

    def place(self) -> Place:
        """Return where the session is; asked once. Raises `errors.ReadOnlySqlTransaction` on a standby, and closes."""
        connection = self.connection
        if connection.place is None:
            oid, name, is_standby = connection.execute(_DATABASE).fetchone() or (0, "", False)
            if is_standby:
                # the next try opens a session anew, perhaps on another host of the dsn
                connection.close()
                raise errors.ReadOnlySqlTransaction(
                    "the server is a standby (pg_is_in_recovery), and what it has not replayed yet would look lost"
                )
            try:
                cluster, timeline = connection.execute(_CLUSTER).fetchone() or (None, 0)
            except _UNTOLD:
                cluster, timeline = None, 0
            connection.place = {"database": name, "oid": oid, "cluster": cluster, "timeline": timeline}
        return Place(**connection.place)

    # ---- transactions

    def transaction(self) -> AbstractContextManager[None]:
        """Run the body in a transaction that it ends itself; see `prepared_transaction.transaction`."""
        return prepared_transaction.transaction(self.connection)

    def commit(self) -> None:
        """Commit the transaction under way. Raises `PrepareFailed` if the server rolled it back."""
        prepared_transaction.commit(self.connection)

    def rollback(self) -> None:
        """Roll the transaction under way back."""
        self.connection.rollback()

    def prepare(self, name: PreparedName) -> None:
        """Prepare the transaction under way. Raises `PrepareFailed`."""
        prepared_transaction.prepare(self.connection, name)

    def commit_prepared(self, gid: str) -> None:
        """Commit a prepared transaction. Raises `errors.UndefinedObject` if there is none of that name."""
        prepared_transaction.commit_prepared(self.connection, gid)

    def rollback_prepared(self, gid: str) -> bool:
        """Roll a prepared transaction back; return whether there was one of that name."""
        return prepared_transaction.rollback_prepared(self.connection, gid)

    # ---- what sinks have in the database

    def prepared_transactions(self, key: str | None = None) -> list[PreparedTransaction]:
        """Return the prepared transactions of an identity, or of every sink, oldest first."""
        pattern = f"{PREFIX}:%" if key is None else PreparedName.pattern(key)
        return list(map(PreparedTransaction._make, self.connection.execute(_OF_PATTERN, [pattern])))

    def still_prepared(self, gids: Collection[str]) -> set[str]:
        """Return those of ``gids`` that are prepared, including those named after another sink."""
        if not gids:
            return set()
        return {gid for gid, *_ in self.connection.execute(_OF_NAMES, [list(gids)])}

    def prepared_locks(self, tables: Collection[str] | None = None) -> list[Lock]:
        """Return the locks of all prepared transactions, or of tables of these names, oldest first."""
        rows = self.connection.execute(_LOCKS, {"tables": None if tables is None else list(tables)})
        return list(map(Lock._make, rows))

    def staging_tables(self, key: str | None = None, *, is_measured: bool = False) -> list[StagingTable]:
        """Return the staging tables of an identity, or of every sink, in all schemas; with their sizes on demand."""
        pattern = r"s\_%" if key is None else rf"s\_{key}\_%"
        parameters = {"is_measured": is_measured, "pattern": pattern}
        return list(map(StagingTable._make, self.connection.execute(_STAGING, parameters)))

    def sessions(self, key: str | None = None) -> list[tuple[int, SessionName]]:
        """Return the process ids and names of the sessions of an identity, or of every sink, without this one."""
        rows = self.connection.execute(_SESSIONS, [f"{PREFIX}:%" if key is None else SessionName.pattern(key)])
        return [(pid, name) for pid, application in rows if (name := SessionName.parse(application))]

    def terminate(self, pid: int) -> bool:
        """End another session, and wait for its end; return whether it has ended."""
        # one that is only told to end may prepare one more transaction
        statement = "SELECT pg_terminate_backend(%s, %s)"
        done = self.connection.execute(statement, [pid, _TERMINATE_MILLISECONDS]).fetchone()
        return bool(done and done[0])

    def drop_staging(self, table: Relation) -> None:
        """Drop a staging table, unless it is locked for longer than a moment."""
        # not durable: if a crash brings the table back, the next sweep drops it again
        statement = "SET LOCAL lock_timeout = {}; SET LOCAL synchronous_commit = off; DROP TABLE IF EXISTS {}"
        self.connection.execute(sql.SQL(statement).format(sql.Literal(_DROP_TIMEOUT), table.quoted))

    def exists(self, table: Relation) -> bool:
        """Return whether the table exists."""
        row = self.connection.execute("SELECT pg_catalog.to_regclass(%s) IS NOT NULL", [str(table)]).fetchone()
        return bool(row and row[0])

    # ---- the markers and the target

    def markers(self, schema: str) -> MarkerTable:
        """Return the marker table of a schema."""
        return MarkerTable(self.connection, schema)

    def located(self, table: Relation) -> Relation:
        """Return the table with its schema; see `catalog.located`."""
        return catalog.located(self.connection, table)

    def read_target(self, table: Relation) -> TargetTable | None:
        """Return the table as it is now, or None if this user sees no such table."""
        return catalog.read_target(self.connection, table)

    def look(self, table: Relation) -> TableLook | None:
        """Return what tells whether a table was replaced or emptied; None if it does not exist."""
        path = list(self.connection.schemas) if table.schema is None else [table.schema]
        row = self.connection.execute(_LOOK, [path, table.name]).fetchone()
        oid, unlogged, files, crash = row or (None, False, {}, None)
        return None if oid is None else TableLook(oid, files, crash, unlogged)

    # ---- rows

    def incoming(self, table: SinkTable, rows: AcceptedRows) -> Incoming:
        """Return an epoch's rows on their way into a table."""
        return Incoming(self.connection, table, rows)

    def merge(
        self,
        members: Mapping[str, Member],
        letters: EpochLetters,
        *,
        careful: bool = False,
        known: Mapping[str, Sequence[RefusedRow]] = MappingProxyType({}),
    ) -> dict[str, list[RefusedRow]]:
        """Apply staged rows to their targets, in the transaction under way; see `epochsink.postgres.merge.merge`."""
        return merge.merge(self.connection, members, letters, careful=careful, known=known)

    def require_deferred(self) -> None:
        """Check the constraints that the transaction under way has deferred."""
        self.connection.execute("SET CONSTRAINTS ALL IMMEDIATE")

    def verify_staged(self, member: Member) -> None:
        """Check staged rows before they are merged; see `epochsink.postgres.merge.verify`."""
        merge.verify(self.connection, member)

    def verify_casts(self, member: Member) -> None:
        """Try the casts of staged rows, in a transaction that is rolled back; see `merge.verify_casts`."""
        with merge.writing_rows(self.connection, member.merge):
            merge.verify_casts(self.connection, member)

    def letters_of(self, letters: EpochLetters, member: Member) -> int:
        """Return how many dead letters an attempt has left for a sink."""
        return letters.count(self.connection, member)
