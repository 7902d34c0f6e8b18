"""Keep rows that the target permanently refuses in a table of their own, in the transaction of their epoch.

The rows are written as if none was refused. Only if the server refuses them, the transaction begins again, and the
wrong rows are found by halves, under savepoints. So an epoch whose rows are all taken pays nothing. What is prepared
has no savepoints (see `epochsink.postgres.vote`).

A letter has the row as the sink's writer was given it, as Arrow, which a retry writes like any other row. The JSON
beside it is for people.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, NamedTuple, Self, TypeVar

import psycopg
import pyarrow as pa
from psycopg import sql

from epochsink.errors import PrepareFailed, RowsRejected
from epochsink.postgres.committable import Member
from epochsink.postgres.errors import describe, describe_unfit, is_known_refusal, may_be_refusal
from epochsink.postgres.prepared_transaction import create_unless_seen
from epochsink.postgres.server import Connection
from epochsink.postgres.spooled import AcceptedRows
from epochsink.postgres.staging import DELETED
from epochsink.sink import Epoch, Identity, over_limit
from epochsink.sink.letter_row import encode_row, render_row

TABLE: Final = "dead_letter"
ARROW: Final = "row_arrow"
"""The column of the row itself; the one beside it is a rendering that may lose values."""

_CREATE: Final = """
CREATE TABLE IF NOT EXISTS {letters} (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    key text NOT NULL, query_id text NOT NULL, sink text NOT NULL, target text NOT NULL,
    epoch bigint NOT NULL, attempt text NOT NULL,
    sqlstate text, error text NOT NULL, "row" jsonb NOT NULL, row_arrow bytea NOT NULL,
    set_aside_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX IF NOT EXISTS dead_letter_of_attempt ON {letters} (key, epoch, attempt)
"""
_AT_ONCE: Final = 1000
"""How many letters are rendered before they are sent."""

Part = TypeVar("Part")


class RefusedRow(NamedTuple):
    """A refused row: its number among the rows of its epoch, and why.

    ``by_target``: the target refuses it, which was the newest of its key; others leave before that is chosen.
    """

    number: int
    sqlstate: str | None
    error: str
    by_target: bool = False


@dataclass(frozen=True, slots=True)
class EpochLetters:
    """The dead letters of one attempt at an epoch. Methods raise `psycopg.Error`.

    ``rows`` are those of each sink, ``limits`` the share of them that may become letters.
    """

    query_id: str
    epoch: int
    attempt: str
    rows: Mapping[str, AcceptedRows] = field(default_factory=dict)
    limits: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        identity: Identity,
        epoch: Epoch,
        rows: Mapping[str, AcceptedRows] | None = None,
        limits: Mapping[str, float] | None = None,
    ) -> Self:
        """Return the letters of an attempt."""
        return cls(identity.query_id, epoch.number, epoch.attempt, rows or {}, limits or {})

    def keep(self, connection: Connection, sink: str, member: Member, refusals: Sequence[RefusedRow]) -> None:
        """Insert letters in the transaction under way.

        Raises `RowsRejected` if they are too many, `PrepareFailed` if the table does not take all of them.
        """
        if not refusals:
            return
        self._refuse_more(sink, member, refusals)
        reasons = {each.number: each for each in refusals}
        table = sql.Identifier(member.schema, TABLE)
        names = ("key", "query_id", "sink", "target", "epoch", "attempt", "sqlstate", "error", "row", ARROW)
        statement = sql.SQL("INSERT INTO {} ({}) VALUES ({})").format(
            table,
            sql.SQL(", ").join(map(sql.Identifier, names)),
            sql.SQL(", ").join(sql.Placeholder() * len(names)),
        )
        of_all = (member.key, self.query_id, sink, str(member.merge.target), self.epoch, self.attempt)
        kept = 0
        with connection.cursor() as cursor:
            picked = self._picked(sink, reasons)
            while some := list(islice(picked, _AT_ONCE)):
                cursor.executemany(
                    statement,
                    [
                        (*of_all, why.sqlstate, why.error, _rendered(connection, member, row), encode_row(row))
                        for why, row in some
                    ],
                )
                kept += cursor.rowcount
        if kept != len(refusals):
            raise PrepareFailed(
                f"the table of dead letters {table.as_string(connection)} took {kept} of {len(refusals)} rows that "
                f"{member.merge.target} refuses",
                hint="see whether a trigger or rule of the table of dead letters swallows rows, and drop it",
                may_pass=False,
            )

    def count(self, connection: Connection, member: Member) -> int:
        """Return how many letters the attempt has left for a sink."""
        statement = sql.SQL(
            "SELECT pg_catalog.count(*) FROM {} WHERE key OPERATOR(pg_catalog.=) %s "
            "AND epoch OPERATOR(pg_catalog.=) %s AND attempt OPERATOR(pg_catalog.=) %s"
        ).format(sql.Identifier(member.schema, TABLE))
        row = connection.execute(statement, [member.key, self.epoch, self.attempt]).fetchone()
        return int(row[0]) if row else 0

    def _refuse_more(self, sink: str, member: Member, refusals: Sequence[RefusedRow]) -> None:
        limit = self.limits.get(sink, 1.0)
        if over_limit(len(refusals), member.rows, limit):
            [(reason, _)] = Counter(each.error for each in refusals).most_common(1)
            raise RowsRejected(
                f"{member.merge.target} refuses {len(refusals)} of {member.rows} rows, more than "
                f"letters_limit={limit}: {reason}",
                hint="correct the table or the stream, and start again; or raise letters_limit=",
            )

    def _picked(self, sink: str, reasons: Mapping[int, RefusedRow]) -> Iterator[tuple[RefusedRow, pa.RecordBatch]]:
        """Yield each refused row with its reason, in order."""
        if sink not in self.rows:
            raise PrepareFailed(
                f"sink {sink!r} has rows of epoch {self.epoch} that its table refuses, and they cannot be set aside "
                "without that sink",
                hint="start the query with that sink once more",
                may_pass=False,
            )
        numbers = sorted(reasons)
        first, place = 1, 0
        for _, batch in self.rows[sink].read():
            while place < len(numbers) and numbers[place] < first + batch.num_rows:
                yield reasons[numbers[place]], batch.slice(numbers[place] - first, 1)
                place += 1
            first += batch.num_rows


def _rendered(connection: Connection, member: Member, row: pa.RecordBatch) -> str:
    """Return the columns of a row for people, with `DELETED` if it deletes, as JSON that any database can hold."""
    shown = render_row(row)
    values = {name: shown[name] for name in shown if name in member.merge.columns or (name == DELETED and shown[name])}
    if connection.info.parameter_status("server_encoding") != "UTF8":
        values = {name: _plain(value) for name, value in values.items()}
    return json.dumps(values, ensure_ascii=False)


def _plain(value: Any) -> Any:
    """Return a value without the characters that a database of another encoding may lack."""
    if isinstance(value, str):
        return value.encode("ascii", "backslashreplace").decode()
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return {name: _plain(each) for name, each in value.items()} if isinstance(value, dict) else value


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


def refused(
    connection: Connection,
    rows: Part,
    halve: Callable[[Part], tuple[Part, Part] | None],
    write: Callable[[Part], object],
    *,
    none: Part,
) -> Iterator[tuple[Part, Exception]]:
    """Write rows, in order; yield each single row that is refused, with the error.

    ``halve`` splits rows in two, or returns None for a single row; ``none`` is an empty set of rows. Each call of
    ``write`` is undone if it raises. An error that ``none`` meets too is raised: the rows are not its cause.
    """
    depends_on_rows = False
    waiting = [rows]
    while waiting:
        part = waiting.pop()
        try:
            with connection.transaction():  # a savepoint, in the transaction under way
                write(part)
        except Exception as error:
            if not may_be_refusal(error):
                raise
            if not depends_on_rows and not is_known_refusal(error):
                _raise_unless_taken(connection, write, none, error)
                depends_on_rows = True
            halves = halve(part)
            if halves is None:
                yield part, error
            else:
                waiting += reversed(halves)


def _raise_unless_taken(connection: Connection, write: Callable[[Part], object], none: Part, error: Exception) -> None:
    try:
        with connection.transaction():
            write(none)
    except psycopg.Error:
        raise error from None


def require_a_row_taken(error: Exception, missing: int, rows: int) -> None:
    """Raise ``error`` if each of several rows met one that says that something is missing: no row is the reason.

    A statement without rows fires no trigger for each row, so it goes through although the trigger's own table is gone.
    ``missing``: how many of ``rows`` met such an error. A single row is set aside: nothing tells whether others would
    be taken.
    """
    if missing == rows > 1:
        raise error


def halves_of_range(numbers: range) -> tuple[range, range] | None:
    """Split consecutive numbers in two."""
    middle = len(numbers) // 2
    return (numbers[:middle], numbers[middle:]) if middle else None


def told(error: Exception) -> tuple[str | None, str]:
    """Return the SQLSTATE, if the server refused, and the reason without values of rows."""
    if isinstance(error, psycopg.Error):
        return error.sqlstate, describe(error, is_refusal=True)
    return None, error.message if isinstance(error, RowsRejected) else describe_unfit(error)
