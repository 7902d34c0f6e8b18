"""Read a PostgreSQL table."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import psycopg
import pyarrow as pa
from psycopg import errors, sql
from pyarrow import csv

from epochsink.identity import PREFIX, staging_owner
from epochsink_devkit.history.readers.reader import TargetUnreachable, nothing
from epochsink_devkit.history.rows import SCHEMA

if TYPE_CHECKING:
    Connection = psycopg.Connection[Any]

_TYPES: Final = csv.ConvertOptions(column_types={field.name: field.type for field in SCHEMA}, strings_can_be_null=True)
_TABLES: Final = (
    "SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
    "WHERE n.nspname = %s AND c.relkind = 'r'"
)


class PostgresReader:
    """Reads a table in one repeatable-read snapshot. ``schema`` holds the markers and the staging tables."""

    def __init__(self, dsn: str, table: str, *, schema: str = "epochsink") -> None:
        self._dsn = dsn
        self._table = table
        self._schema = schema
        self._connection: Connection | None = None

    def read(self, fixed: Callable[[], None] = nothing) -> pa.Table:
        """Return the table's rows; none while the table does not exist."""
        query = sql.SQL("COPY (SELECT {} FROM {}) TO STDOUT (FORMAT csv, HEADER)").format(
            sql.SQL(", ").join(map(sql.Identifier, SCHEMA.names)), sql.Identifier(*self._table.split("."))
        )
        try:
            with self._connected() as connection, connection.transaction():
                # the transaction's first statement takes its snapshot
                connection.execute("SELECT 1")
                fixed()
                with connection.cursor().copy(query) as copy:
                    text = b"".join(copy)
        except errors.UndefinedTable:
            return SCHEMA.empty_table()
        return csv.read_csv(io.BytesIO(text), convert_options=_TYPES)

    def leftovers(self) -> list[tuple[str, str]]:
        """Return prepared transactions and staging tables."""
        with self._connected() as connection:
            ours = connection.execute("SELECT gid FROM pg_prepared_xacts WHERE gid LIKE %s", [f"{PREFIX}:%"])
            leftovers = [("orphan", f"prepared transaction {gid}") for (gid,) in ours.fetchall()]
            tables = connection.execute(_TABLES, [self._schema]).fetchall()
        return leftovers + [("orphan", f"staging table {name}") for (name,) in tables if staging_owner(name)]

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @contextmanager
    def _connected(self) -> Iterator[Connection]:
        try:
            if self._connection is None:
                self._connection = psycopg.connect(self._dsn, autocommit=True, connect_timeout=5)
                self._connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
                self._connection.read_only = True
            yield self._connection
        except psycopg.OperationalError as failure:
            self.close()
            raise TargetUnreachable(str(failure)) from failure
