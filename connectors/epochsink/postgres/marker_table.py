"""The table of markers in one schema: what `epochsink.postgres.applied_epochs` asks of it."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from psycopg import errors, sql

from epochsink.postgres.prepared_transaction import LOCAL, create_unless_seen
from epochsink.postgres.server import Connection

TABLE: Final = "marker"
KEY: Final = ("key", "epoch", "part")

_CREATE: Final = """
CREATE TABLE IF NOT EXISTS {marker} (
    key text, epoch bigint, part text,
    attempt text NOT NULL, query_id text NOT NULL, sink text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (key, epoch, part)
)
"""


class MarkerRow(NamedTuple):
    """A row of the table: a part of an epoch that an attempt has applied."""

    key: str
    epoch: int
    part: str
    attempt: str
    query_id: str
    sink: str


class MarkerTable:
    """The rows of all identities in a schema. A table that does not exist has none. Raises `psycopg.Error`."""

    def __init__(self, connection: Connection, schema: str) -> None:
        self._connection = connection
        self._schema = schema
        self._table = sql.Identifier(schema, TABLE)

    def create(self) -> None:
        """Create the schema and the table if they do not exist."""
        create_unless_seen(self._connection, "to_regnamespace", sql.Identifier(self._schema), schema_ddl(self._schema))
        create_unless_seen(self._connection, "to_regclass", self._table, table_ddl(self._schema))

    def insert(self, row: MarkerRow) -> int:
        """Insert a row in the transaction under way; return how many rows the table took.

        Raises `errors.UniqueViolation` if the part of this epoch has one.
        """
        return self._connection.execute(self._insert(row)).rowcount

    def insert_alone(self, row: MarkerRow) -> int:
        """Like `insert`, and commit."""
        # In one request: the session of a driver that dies between two, and stays open at the server, would keep the
        # next start waiting for its row, and no sweep comes before that.
        done = self._connection.execute(LOCAL + self._insert(row))
        done.nextset()
        return done.rowcount

    def replace_alone(self, row: MarkerRow) -> None:
        """Put a row in the place of all of its key, and commit."""
        # in one request, as `insert_alone`
        self._connection.execute(
            LOCAL
            + sql.SQL("DELETE FROM {} WHERE key = {}; ").format(self._table, sql.Literal(row.key))
            + self._insert(row)
        )

    def _insert(self, row: MarkerRow) -> sql.Composed:
        return sql.SQL("INSERT INTO {} (key, epoch, part, attempt, query_id, sink) VALUES ({})").format(
            self._table, sql.SQL(", ").join(map(sql.Literal, row))
        )

    def has_any(self, key: str) -> bool:
        """Return whether there is any row of a key."""
        return self._fetch("SELECT 1 FROM {} WHERE key = %s LIMIT 1", key) is not None

    def attempt(self, key: str, epoch: int, part: str) -> str | None:
        """Return the attempt that applied a part, or None."""
        row = self._fetch("SELECT attempt FROM {} WHERE key = %s AND epoch = %s AND part = %s", key, epoch, part)
        return None if row is None else str(row[0])

    def other_attempt(self, key: str, epoch: int, attempts: list[str]) -> str | None:
        """Return an attempt, except ``attempts``, that has applied a part of this epoch; or None."""
        query = "SELECT attempt FROM {} WHERE key = %s AND epoch = %s AND attempt <> ALL (%s) LIMIT 1"
        row = self._fetch(query, key, epoch, attempts)
        return None if row is None else str(row[0])

    def sink_of(self, key: str, query_id: str) -> str | None:
        """Return the sink of a query that has left rows of a key; None if there is no such sink."""
        query = sql.SQL("SELECT sink FROM {} WHERE key = %s AND query_id = %s LIMIT 1").format(self._table)
        row = self._connection.execute(query, [key, query_id]).fetchone()
        return row[0] if row else None

    def single(self, key: str) -> tuple[str, str] | None:
        """Return part and attempt of the only row of a key, or None.

        Raises `errors.UndefinedTable`, `errors.InvalidSchemaName` if there is no table.
        """
        query = sql.SQL("SELECT part, attempt FROM {} WHERE key = %s").format(self._table)
        return self._connection.execute(query, [key]).fetchone()

    def since(self, key: str, epoch: int | None, base: str | None) -> list[tuple[str, int, str]]:
        """Return part, epoch and attempt of the rows at ``epoch`` (None: whatever is newest) or later, oldest first.

        If there is none, those of the newest older epoch; in any case those of the part ``base``.
        """
        # this also runs in transactions on the target, whose search path is the user's
        query = (
            "SELECT part, epoch, attempt FROM {0} WHERE key OPERATOR(pg_catalog.=) %s "
            "AND (epoch OPERATOR(pg_catalog.>=) "
            "least(%s, (SELECT pg_catalog.max(epoch) FROM {0} WHERE key OPERATOR(pg_catalog.=) %s)) "
            "OR part OPERATOR(pg_catalog.=) %s) ORDER BY epoch"
        )
        try:
            rows = self._connection.execute(sql.SQL(query).format(self._table), [key, epoch, key, base]).fetchall()
        except (errors.UndefinedTable, errors.InvalidSchemaName):
            return []
        return [(part, int(number), attempt) for part, number, attempt in rows]

    def purge(self, key: str, epoch: int) -> None:
        """Delete the rows of epochs up to ``epoch``, and commit."""
        statement = sql.SQL("DELETE FROM {} WHERE key = {} AND epoch BETWEEN 0 AND {}").format(
            self._table, sql.Literal(key), sql.Literal(epoch)
        )
        self._connection.execute(LOCAL + statement)

    def _fetch(self, query: str, *values: object) -> tuple[Any, ...] | None:
        """Return the first row; None if there is no row or no table yet."""
        try:
            return self._connection.execute(sql.SQL(query).format(self._table), list(values)).fetchone()
        except (errors.UndefinedTable, errors.InvalidSchemaName):
            return None


def schema_ddl(schema: str) -> sql.Composed:
    """Return what creates the schema."""
    return sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(sql.Identifier(schema))


def table_ddl(schema: str) -> sql.Composed:
    """Return what creates the marker table."""
    return sql.SQL(_CREATE).format(marker=sql.Identifier(schema, TABLE))
