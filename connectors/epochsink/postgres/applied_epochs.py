"""The marker: a row that is committed with an epoch's rows, and proves later that the epoch is applied.

Its primary key makes a second application of the same epoch fail, so it is only ever inserted, never updated. A
part is "all" for an epoch that is committed as a whole, else the uuid of the task whose rows it covers.

A query that joins leaves a row before its first epoch: of epoch -1, with a uuid that the ledger holds (its origin). So
a missing marker was removed; it never means that nothing was applied.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final

from psycopg import errors, sql

from epochsink.identity import identity_key
from epochsink.postgres.committable import read_part
from epochsink.postgres.prepared_transaction import LOCAL, create_unless_seen
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

    def __str__(self) -> str:
        """Return the table as SQL."""
        return self._table.as_string()

    def join(self, connection: Connection, base: str) -> None:
        """Insert the row that precedes the first epoch. May be repeated."""
        # In one request: the session of a driver that dies between two, and stays open at the server, would keep the
        # next start waiting for its row, and no sweep comes before that.
        with suppress(errors.UniqueViolation):
            connection.execute(LOCAL + self._insert(JOINED, base, base))

    def insert(self, connection: Connection, epoch: int, part: str, attempt: str) -> None:
        """Mark a part as applied by the transaction under way; `errors.UniqueViolation` if it is marked already."""
        connection.execute(self._insert(epoch, part, attempt))

    def _insert(self, epoch: int, part: str, attempt: str) -> sql.Composed:
        values = self._key, epoch, part, attempt, self._identity.query_id, self._identity.sink
        return sql.SQL("INSERT INTO {} (key, epoch, part, attempt, query_id, sink) VALUES ({})").format(
            self._table, sql.SQL(", ").join(map(sql.Literal, values))
        )

    def has_joined(self, connection: Connection) -> bool:
        """Return whether there is any row of this identity."""
        return self._fetch(connection, "SELECT 1 FROM {} WHERE key = %s LIMIT 1") is not None

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

    def sink_of(self, connection: Connection, key: str) -> str | None:
        """Return the sink of the same query that has left marks under ``key``; None if there is no such sink."""
        query = sql.SQL("SELECT sink FROM {} WHERE key = %s AND query_id = %s LIMIT 1").format(self._table)
        row = connection.execute(query, [key, self._identity.query_id]).fetchone()
        return row[0] if row else None

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
    create_unless_seen(connection, "to_regnamespace", sql.Identifier(schema), schema_ddl(schema))
    create_unless_seen(connection, "to_regclass", sql.Identifier(schema, TABLE), table_ddl(schema))


def schema_ddl(schema: str) -> sql.Composed:
    """Return what creates the schema."""
    return sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(sql.Identifier(schema))


def table_ddl(schema: str) -> sql.Composed:
    """Return what creates the marker table."""
    return sql.SQL(_CREATE).format(marker=sql.Identifier(schema, TABLE))
