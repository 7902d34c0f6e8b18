"""The marker: a row that is committed with an epoch's rows, and proves later that the epoch is applied.

Its primary key makes a second application of the same epoch fail, so it is only ever inserted, never updated. A
part is "all" for an epoch that is committed as a whole, else the uuid of the task whose rows it covers.

A query that joins leaves a row before its first epoch: of epoch -1, with a uuid that the ledger holds (its origin). So
a missing marker was removed; it never means that nothing was applied.

Another row beside the markers says which table the epochs are in. A table keeps its oid until it is dropped. If it is
restored on its own (``pg_restore --clean --table``), it lacks the epochs since its backup, and the markers still name
them.

A crash empties an UNLOGGED table, which looks like any other once it is logged again. But to become UNLOGGED and to
become logged the table is written to new files, and a crash resets the server's statistics. So the row notes the files
and the time of that reset. If both have changed since the last look, the table may have been UNLOGGED in the crash.

That row is not part of an epoch's transaction. It changes only while nothing is lost, or when an operator says so.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from psycopg import errors, sql

from epochsink.errors import WentBack
from epochsink.identity import identity_key
from epochsink.postgres.committable import read_part
from epochsink.postgres.prepared_transaction import LOCAL
from epochsink.sink import Mark, verify_marks

if TYPE_CHECKING:
    from collections.abc import Iterable

    from epochsink.postgres.committable import Relation
    from epochsink.postgres.server import Connection
    from epochsink.sink import Identity, LastDone

TABLE: Final = "marker"
KEY: Final = ("key", "epoch", "part")
KEPT_EPOCHS: Final = 1000
JOINED: Final = -1
"""The epoch of the row that a query leaves as it joins."""

_CREATE: Final = """
CREATE TABLE IF NOT EXISTS {marker} (
    key text, epoch bigint, part text,
    attempt text NOT NULL, query_id text NOT NULL, sink text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (key, epoch, part)
)
"""


class Marker:
    """The marker rows of one identity, in the schema ``schema``; ``base`` is None until it has joined.

    Raises `psycopg.Error`.
    """

    def __init__(self, schema: str, identity: Identity) -> None:
        self._table = sql.Identifier(schema, TABLE)
        self._identity = identity
        self._key = identity_key(identity)
        self.base: str | None = identity.origin.get("base")

    def join(self, connection: Connection, base: str) -> None:
        """Insert the row that precedes the first epoch. May be repeated."""
        with suppress(errors.UniqueViolation), connection.transaction():
            connection.execute(LOCAL)
            self.insert(connection, JOINED, base, base)

    def insert(self, connection: Connection, epoch: int, part: str, attempt: str) -> None:
        """Mark a part as applied by the transaction under way; `errors.UniqueViolation` if it is marked already."""
        connection.execute(
            sql.SQL(
                "INSERT INTO {} (key, epoch, part, attempt, query_id, sink) VALUES (%s, %s, %s, %s, %s, %s)"
            ).format(self._table),
            [self._key, epoch, part, attempt, self._identity.query_id, self._identity.sink],
        )

    def attempt(self, connection: Connection, epoch: int, part: str) -> str | None:
        """Return the attempt that applied a part, or None."""
        found = self._fetch(
            connection, "SELECT attempt FROM {} WHERE key = %s AND epoch = %s AND part = %s", epoch, part
        )
        return None if found is None else str(found)

    def other_attempt(self, connection: Connection, epoch: int, attempts: list[str]) -> str | None:
        """Return an attempt, except ``attempts``, that has applied a part of this epoch; or None."""
        query = "SELECT attempt FROM {} WHERE key = %s AND epoch = %s AND attempt <> ALL (%s) LIMIT 1"
        found = self._fetch(connection, query, epoch, attempts)
        return None if found is None else str(found)

    def newest(self, connection: Connection) -> int | None:
        """Return the newest epoch that is applied, or None."""
        found = self._fetch(connection, "SELECT max(epoch) FROM {} WHERE key = %s AND epoch >= 0")
        return None if found is None else int(str(found))

    def verify(self, connection: Connection, table: Relation, done: LastDone | None, pending: LastDone | None) -> None:
        """Raise `WentBack` unless the marker rows and the ledger agree."""
        found = self._newest_of(connection, done.epoch if done else None, marks_of(done) if done else {})
        base = {} if self.base is None else {self.base: Mark(JOINED, self.base)}
        verify_marks(f"table {table}", found, done, pending, marks_of, base=base)

    def _newest_of(self, connection: Connection, epoch: int | None, parts: Iterable[str]) -> dict[str, Mark]:
        """Return the newest mark of each part applied at ``epoch`` (None: whatever is newest) or later.

        If nothing of that epoch is left, the table was set back: ``parts`` get the mark of the newest older epoch.
        """
        # this also runs in transactions on the target, whose search path is the user's
        query = (
            "SELECT part, epoch, attempt FROM {0} WHERE key OPERATOR(pg_catalog.=) %s "
            "AND (epoch OPERATOR(pg_catalog.>=) "
            "least(%s, (SELECT pg_catalog.max(epoch) FROM {0} WHERE key OPERATOR(pg_catalog.=) %s)) "
            "OR part OPERATOR(pg_catalog.=) %s) ORDER BY epoch"
        )
        try:
            statement = sql.SQL(query).format(self._table)
            rows = connection.execute(statement, [self._key, epoch, self._key, self.base]).fetchall()
        except (errors.UndefinedTable, errors.InvalidSchemaName):
            return {}
        # a start that failed after its row of joining has left a row that means nothing
        marks = {part: Mark(int(number), attempt) for part, number, attempt in rows}
        found = {part: mark for part, mark in marks.items() if mark.epoch > JOINED or part == self.base}
        newest = max(found.values(), key=lambda mark: mark.epoch, default=None)
        if newest is not None and epoch is not None and newest.epoch < epoch:
            found |= dict.fromkeys(parts, newest)
        return found

    def purge(self, connection: Connection, epoch: int) -> None:
        """Delete the marks of epochs that are too old to be needed."""
        statement = sql.SQL("DELETE FROM {} WHERE key = {} AND epoch BETWEEN 0 AND {}").format(
            self._table, sql.Literal(self._key), sql.Literal(epoch - KEPT_EPOCHS - 1)
        )
        connection.execute(LOCAL + statement)

    def _fetch(self, connection: Connection, query: str, *values: object) -> object:
        """Return the first value of the first row; None if there is no row or no marker table yet."""
        try:
            row = connection.execute(sql.SQL(query).format(self._table), [self._key, *values]).fetchone()
        except (errors.UndefinedTable, errors.InvalidSchemaName):
            return None
        return row[0] if row else None


def marks_of(last: LastDone) -> dict[str, Mark]:
    """Return the mark that each part of an epoch leaves."""
    return {part.name: Mark(last.epoch, part.attempt) for part in map(read_part, last.parts)}


def create(connection: Connection, schema: str) -> None:
    """Create the schema and the marker table if they do not exist. Raises `psycopg.Error`."""
    for exists, statement in (("to_regnamespace", schema_ddl(schema)), ("to_regclass", table_ddl(schema))):
        name = sql.Identifier(schema) if exists == "to_regnamespace" else sql.Identifier(schema, TABLE)
        query = sql.SQL("SELECT {}(%s) IS NULL").format(sql.SQL(exists))
        missing = connection.execute(query, [name.as_string(connection)]).fetchone()
        if missing and missing[0]:
            try:
                connection.execute(LOCAL + statement)
            except (errors.UniqueViolation, errors.DuplicateSchema, errors.DuplicateTable):
                continue  # another query has created it at the same moment


def schema_ddl(schema: str) -> sql.Composed:
    """Return what creates the schema."""
    return sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(sql.Identifier(schema))


def table_ddl(schema: str) -> sql.Composed:
    """Return what creates the marker table."""
    return sql.SQL(_CREATE).format(marker=sql.Identifier(schema, TABLE))


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


class _Look(NamedTuple):
    """A table's oid; the file of each of its partitions, by oid; when a crash last reset the server's statistics."""

    oid: str
    files: dict[str, int]
    crash: str | None

    def may_be_emptied(self, before: _Look) -> bool:
        """Whether there was a crash since a look before, and a file was replaced."""
        return self.crash != before.crash and any(
            before.files.get(oid, file) != file for oid, file in self.files.items()
        )


def require_same_table(
    connection: Connection,
    schema: str,
    identity: Identity,
    table: Relation,
    *,
    done: LastDone | None,
    pending: LastDone | None,
) -> None:
    """Raise `WentBack` if the table is another one than at the last look, or a crash may have emptied it.

    The look is noted unless it shows a loss. ``schema`` is that of the markers. Raises `psycopg.Error`.
    """
    path = list(connection.schemas) if table.schema is None else [table.schema]
    oid, unlogged, files, crash = connection.execute(_LOOK, [path, table.name]).fetchone() or (None, False, {}, None)
    marker, key = sql.Identifier(schema, TABLE), f"{identity_key(identity)}.table"
    try:
        query = sql.SQL("SELECT part, attempt FROM {} WHERE key = %s").format(marker)
        row = connection.execute(query, [key]).fetchone()
    except (errors.UndefinedTable, errors.InvalidSchemaName):
        # the markers are gone: `Marker.verify` reports that
        return
    # a look noted while the table is UNLOGGED would hide a later crash; the next epoch refuses such a table
    if oid is None or unlogged:
        return
    now, before = _Look(oid, files, crash), None if row is None else _Look(row[0], **json.loads(row[1]))
    if now == before:
        return
    if before is not None and done is not None and done.parts and oid != before.oid:
        raise _is_another_table(table, done, oid, before.oid)
    if before is not None and oid == before.oid and now.may_be_emptied(before):
        if done is not None and done.parts:
            raise _may_be_emptied(table, done.epoch)
        if done is None and pending is not None:
            raise _may_be_emptied(table, -1)
    with connection.transaction():
        connection.execute(LOCAL)
        connection.execute(sql.SQL("DELETE FROM {} WHERE key = %s").format(marker), [key])
        note: dict[str, Any] = {"files": files, "crash": crash}
        connection.execute(
            sql.SQL(
                "INSERT INTO {} (key, epoch, part, attempt, query_id, sink) VALUES (%s, -1, %s, %s, %s, %s)"
            ).format(marker),
            [key, oid, json.dumps(note), identity.query_id, identity.sink],
        )


def _is_another_table(table: Relation, done: LastDone, oid: str, known: str) -> WentBack:
    return WentBack(
        f"table {table} is not the one that epoch {done.epoch} was written to (oid {oid}, formerly {known}): it was "
        "dropped and created again, restored on its own, or another one was renamed to it",
        hint=f"if it holds every row of this query up to epoch {done.epoch}, or need not, say so: epochsink accept "
        f"CHECKPOINT {done.epoch} --sink NAME; else load what it lacks first (the input is in offsets/ of the "
        "checkpoint), or put the newer table back",
    )


def _may_be_emptied(table: Relation, epoch: int) -> WentBack:
    which = str(epoch) if epoch >= 0 else "none"
    return WentBack(
        f"table {table} was rewritten, and the server has crashed or failed over, since this query last looked: if "
        "the table was UNLOGGED at that moment, the crash has emptied it",
        hint=f"look whether it holds every row of this query up to epoch {which}; TRUNCATE, VACUUM FULL and ALTER "
        f"TABLE rewrite a table too. If it does, or need not: epochsink accept CHECKPOINT {which} --sink NAME. Else "
        "load what it lacks first (the input is in offsets/ of the checkpoint)",
    )
