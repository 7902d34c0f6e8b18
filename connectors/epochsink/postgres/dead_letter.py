"""Keep rows that the target permanently refuses in a table of their own, in the transaction of their epoch.

The rows are written as if none was refused. Only if the server refuses them, the wrong ones are found by halves, under
savepoints. So an epoch whose rows are all taken pays for at most one look at the staged rows.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Final, Self, TypeVar

import psycopg
import pyarrow as pa
from psycopg import errors, sql

from epochsink.errors import RowsRejected
from epochsink.postgres.errors import describe, rule_of
from epochsink.postgres.prepared_transaction import create_unless_seen
from epochsink.postgres.staging import DELETED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import LiteralString

    from epochsink.postgres.committable import Member, Merge, Relation
    from epochsink.postgres.server import Connection
    from epochsink.sink import Epoch, Identity

TABLE: Final = "dead_letter"

_CREATE: Final = """
CREATE TABLE IF NOT EXISTS {letters} (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    key text NOT NULL, query_id text NOT NULL, sink text NOT NULL, target text NOT NULL,
    epoch bigint NOT NULL, attempt text NOT NULL,
    sqlstate text, error text NOT NULL, "row" jsonb NOT NULL,
    set_aside_at timestamptz NOT NULL DEFAULT now()
)
"""

Part = TypeVar("Part")


@dataclass(frozen=True, slots=True)
class Letters:
    """The dead letters of one attempt at an epoch. Methods raise `psycopg.Error`."""

    query_id: str
    epoch: int
    attempt: str

    @classmethod
    def of(cls, identity: Identity, epoch: Epoch) -> Self:
        """Return the letters of an attempt."""
        return cls(identity.query_id, epoch.number, epoch.attempt)

    def keep(
        self, connection: Connection, sink: str, member: Member, rows: sql.Composed, *constants: str | None
    ) -> int:
        """Insert letters in the transaction under way; return how many.

        ``rows`` is a SELECT of sqlstate, error and row, or of the row alone: then ``constants`` are the other two.
        """
        values = [member.key, self.query_id, sink, str(member.merge.target), self.epoch, self.attempt, *constants]
        statement = sql.SQL(
            'INSERT INTO {} (key, query_id, sink, target, epoch, attempt, sqlstate, error, "row") SELECT {}, found.* '
            "FROM ({}) AS found"
        ).format(sql.Identifier(member.schema, TABLE), sql.SQL(", ").join(map(sql.Literal, values)), rows)
        return int(connection.execute(statement).rowcount)

    def rendered(self, plan: Merge, table: Relation, condition: sql.Composable) -> sql.Composed:
        """Select staged rows as JSON, with `DELETED` if they delete; values of JSON columns as text, for a retry."""
        columns: list[sql.Composable] = [
            sql.SQL("{0}::text AS {0}" if plan.columns[name] in {"json", "jsonb"} else "{}").format(
                sql.Identifier(name)
            )
            for name in plan.columns
        ]
        row: sql.Composable = sql.SQL("pg_catalog.to_jsonb(staged)")
        if plan.deletes:
            columns.append(sql.Identifier(DELETED))
            row = sql.SQL("CASE WHEN {0} THEN {1} ELSE {1} OPERATOR(pg_catalog.-) {2}::text END").format(
                sql.Identifier(DELETED), row, sql.Literal(DELETED)
            )
        return sql.SQL("SELECT {} FROM (SELECT {} FROM {} WHERE {}) AS staged").format(
            row, sql.SQL(", ").join(columns), table.quoted, condition
        )

    def count(self, connection: Connection, member: Member) -> int:
        """Return how many letters the attempt has left for a sink."""
        return int(str(self._asked(connection, member, "pg_catalog.count(*)")))

    def refuse_more(self, connection: Connection, member: Member, limit: float) -> None:
        """Raise `RowsRejected` if more than the share ``limit`` of a sink's rows have become letters."""
        found = self.count(connection, member)
        if found > limit * member.rows:
            raise RowsRejected(
                f"{member.merge.target} refuses {found} of {member.rows} rows, more than letters_limit={limit}: "
                f"{self._asked(connection, member, 'pg_catalog.mode() WITHIN GROUP (ORDER BY error)')}",
                hint="correct the table or the stream, and start again; or raise letters_limit=",
            )

    def _asked(self, connection: Connection, member: Member, what: LiteralString) -> object:
        found = connection.execute(
            sql.SQL(
                "SELECT {} FROM {} WHERE key OPERATOR(pg_catalog.=) %s "
                "AND epoch OPERATOR(pg_catalog.=) %s AND attempt OPERATOR(pg_catalog.=) %s"
            ).format(sql.SQL(what), sql.Identifier(member.schema, TABLE)),
            [member.key, self.epoch, self.attempt],
        ).fetchone()
        return found[0] if found else None


def create(connection: Connection, schema: str) -> None:
    """Create the table of letters if it does not exist. Raises `psycopg.Error`."""
    create_unless_seen(connection, "to_regclass", sql.Identifier(schema, TABLE), table_ddl(schema))


def check(connection: Connection, schema: str, user: str) -> Iterator[str]:
    """Yield why the table of letters cannot take them, or would lose them. Raises `psycopg.Error`."""
    table = sql.Identifier(schema, TABLE).as_string(connection)
    may, persistence = connection.execute(
        "SELECT has_table_privilege(c.oid, 'SELECT') AND has_table_privilege(c.oid, 'INSERT'), c.relpersistence "
        "FROM pg_class c WHERE c.oid = to_regclass(%s)",
        [table],
    ).fetchone() or (False, "p")
    if not may:
        yield (
            f"user {user} may not use the table of dead letters {table}; let its owner run: "
            f"GRANT SELECT, INSERT ON {table} TO {user};"
        )
    if persistence != "p":
        yield f"the table of dead letters {table} is UNLOGGED: a crash would empty it; ALTER TABLE {table} SET LOGGED"


def table_ddl(schema: str) -> sql.Composed:
    """Return what creates the table of letters."""
    return sql.SQL(_CREATE).format(letters=sql.Identifier(schema, TABLE))


def is_refusal(error: BaseException) -> bool:
    """Return whether an error says that a row is refused for good, and not that the statement failed."""
    if isinstance(error, psycopg.Error):
        return rule_of(error).raises is RowsRejected or isinstance(error, errors.RaiseException)
    return isinstance(error, (RowsRejected, pa.ArrowInvalid))


def refused(
    connection: Connection,
    rows: Part,
    halve: Callable[[Part], tuple[Part, Part] | None],
    write: Callable[[Part], object],
) -> Iterator[tuple[Part, Exception]]:
    """Write rows, in order; yield each single row that is refused, with the error.

    ``halve`` splits rows in two, or returns None for a single row. Each call of ``write`` is undone if it raises.
    """
    waiting = [rows]
    while waiting:
        part = waiting.pop()
        try:
            with connection.transaction():  # a savepoint, in the transaction under way
                write(part)
        except Exception as error:
            if not is_refusal(error):
                raise
            halves = halve(part)
            if halves is None:
                yield part, error
            else:
                waiting += reversed(halves)


def halves_of_batch(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.RecordBatch] | None:
    """Split a record batch in two."""
    middle = batch.num_rows // 2
    return (batch.slice(0, middle), batch.slice(middle)) if middle else None


def halves_of_range(numbers: range) -> tuple[range, range] | None:
    """Split consecutive numbers in two."""
    middle = len(numbers) // 2
    return (numbers[:middle], numbers[middle:]) if middle else None


def told(error: Exception) -> tuple[str | None, str]:
    """Return the SQLSTATE, if the server refused, and the reason without values of rows."""
    if isinstance(error, psycopg.Error):
        return error.sqlstate, describe(error)
    return None, error.message if isinstance(error, RowsRejected) else "a value does not fit its column"


def as_letter(batch: pa.RecordBatch, error: Exception, names: Sequence[str]) -> str:
    """Return a single row and its error, as JSON for the staged column `REFUSED`."""
    (row,) = batch.select([name for name in batch.schema.names if name in {*names, DELETED}]).to_pylist()
    sqlstate, reason = told(error)
    letter = {name: _plain(value) for name, value in row.items() if name != DELETED or value}
    return json.dumps({"sqlstate": sqlstate, "error": reason, "row": letter})


def _plain(value: object) -> object:
    """Return a value that jsonb can hold, as text that a retry can cast; it has no NUL, no infinity, no other types."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, bytes):
        return f"\\x{value.hex()}"
    if value is None or isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    # a Decimal's str() may have an exponent
    text = f"{value:f}" if isinstance(value, Decimal) else str(value)
    return text.replace("\x00", "\ufffd")
