"""Use a PostgreSQL table as a destination, without a unique key, which would hide duplicates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import psycopg
from psycopg import IsolationLevel, sql

from epochsink.postgres import Postgres
from epochsink_devkit.demo.destination import Copies, Offsets
from epochsink_devkit.demo.kill_plan import Step
from epochsink_devkit.history.readers.postgres import PostgresReader

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row


_COLUMNS = """
    order_id bigint, customer text, amount double precision, placed_at timestamptz,
    source_partition int, source_offset bigint
"""


@dataclass(frozen=True, slots=True)
class PostgresTable:
    """A table of orders. The plain pipeline uses ``jdbc_url`` and ``jdbc_driver``."""

    label: ClassVar[str] = "PostgreSQL"
    steps: ClassVar[Sequence[Step]] = (
        Step("postgres.copied", "the driver has copied the rows into PostgreSQL, and not prepared them"),
        Step("postgres.prepared", "PostgreSQL has prepared the transaction, the driver has not noted it"),
        Step("postgres.committed", "PostgreSQL has committed, the driver has not noted it"),
    )

    dsn: str
    jdbc_url: str
    jdbc_driver: str
    table: str

    def create(self) -> None:
        """Make the table, empty."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            connection.execute(self._sql("CREATE TABLE {} (" + self._columns() + ")"))
            # An index makes frequent looks cheap. It must not be unique.
            connection.execute(self._sql("CREATE INDEX ON {} (source_offset)"))

    def sink(self) -> Postgres:
        """Return the sink for `ExactlyOnce`."""
        return Postgres(self.dsn, table=self.table)

    def append(self, frame: DataFrame) -> None:
        """Append a batch with Spark's own JDBC writer."""
        frame.write.jdbc(self.jdbc_url, self.table, mode="append", properties={"driver": self.jdbc_driver})

    def eye(self) -> _Snapshots:
        """Connect a reader that reads repeatable-read snapshots."""
        connection = psycopg.connect(self.dsn)
        connection.isolation_level = IsolationLevel.REPEATABLE_READ
        connection.read_only = True
        return _Snapshots(connection, sql.Identifier(self.table))

    def copies(self) -> Copies:
        """Count the rows of each order."""
        with psycopg.connect(self.dsn) as connection:
            counted = connection.execute(self._sql("SELECT order_id, count(*) FROM {} GROUP BY order_id"))
            return Counter(dict(counted.fetchall()))

    def reader(self) -> PostgresReader:
        """Return a reader that finds prepared transactions and staging tables."""
        return PostgresReader(self.dsn, self.table)

    def _columns(self) -> str:
        return _COLUMNS

    def _sql(self, statement: str) -> sql.Composed:
        return sql.SQL(statement).format(sql.Identifier(self.table))


@dataclass(frozen=True, slots=True)
class UpsertedTable(PostgresTable):
    """A table with a primary key, which a pipeline without epochsink upserts into: no order is duplicated."""

    label: ClassVar[str] = "PostgreSQL"

    def append(self, frame: DataFrame) -> None:
        """Upsert a batch, each task in a transaction of its own."""
        frame.foreachPartition(partial(_upsert, self.dsn, self.table, frame.columns))

    def _columns(self) -> str:
        return _COLUMNS + ", PRIMARY KEY (order_id)"


def _upsert(dsn: str, table: str, columns: Sequence[str], rows: Iterable[Row]) -> None:
    names = [sql.Identifier(name) for name in columns]
    statement = sql.SQL("INSERT INTO {} ({}) VALUES ({}) ON CONFLICT (order_id) DO UPDATE SET ({}) = ROW ({})").format(
        sql.Identifier(table),
        sql.SQL(", ").join(names),
        sql.SQL(", ").join(sql.Placeholder() * len(names)),
        sql.SQL(", ").join(names),
        sql.SQL(", ").join(sql.SQL("EXCLUDED.{}").format(name) for name in names),
    )
    with psycopg.connect(dsn) as connection:
        connection.cursor().executemany(statement, rows)


class _Snapshots:
    def __init__(self, connection: psycopg.Connection[Any], table: sql.Identifier) -> None:
        self._connection = connection
        self._table = table

    def look(self) -> int:
        self._connection.rollback()
        # The first statement takes the snapshot.
        row = self._connection.execute(sql.SQL("SELECT count(*) FROM {}").format(self._table)).fetchone()
        return int(row[0]) if row else 0

    def beyond(self, decided: Offsets) -> set[int]:
        within: list[sql.Composable] = [
            sql.SQL("(source_partition = {} AND source_offset < {})").format(partition, end)
            for partition, end in decided.items()
        ]
        query = sql.SQL("SELECT order_id FROM {} WHERE source_offset >= {} AND NOT ({})").format(
            self._table, min(decided.values(), default=0), sql.SQL(" OR ").join(within or [sql.SQL("false")])
        )
        return {order for (order,) in self._connection.execute(query)}

    def close(self) -> None:
        self._connection.close()
