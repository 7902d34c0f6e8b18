"""Show an operator the dead letters of a table, and retry or drop them.

A retry deletes letters and merges their rows into the target in one transaction, by the sink's own merge. So a letter
is deleted if and only if its row is written, whatever is killed, and of two retries at once the second one finds
nothing. There is one such transaction for each attempt whose letters are chosen, in the order of their epochs.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Final

import psycopg
import pyarrow as pa
from psycopg import sql

from epochsink.errors import ConfigurationError, OutcomeUnknown, PrepareFailed
from epochsink.failpoints import reach
from epochsink.postgres import dead_letter
from epochsink.postgres.errors import describe, is_disconnected
from epochsink.postgres.incoming import Incoming
from epochsink.postgres.merge import merge, superseded
from epochsink.postgres.prepared_transaction import commit, transaction
from epochsink.postgres.server import Connection
from epochsink.postgres.spooled import AcceptedRows
from epochsink.postgres.table import Table
from epochsink.sink import Chosen, Epoch, Letter, Letters, Retried
from epochsink.sink.letter_row import decode_rows

_TASK: Final = "0" * 32
"""The task that rows of letters are read from."""


@dataclass(frozen=True, slots=True)
class _Decoded:
    """The rows of letters, to be read as those of a task are from the spool."""

    batch: pa.RecordBatch

    def tasks(self) -> Sequence[str]:
        """Return the one task."""
        return [_TASK]

    def read(self, task: str) -> Iterator[pa.RecordBatch]:  # noqa: ARG002
        """Yield the rows."""
        yield self.batch

    def verify(self) -> None:
        """Do nothing: the rows are here."""


class PostgresLetters(Letters):
    """The dead letters of one table. ``ask`` lends a session; its argument says what for."""

    def __init__(self, table: Table, ask: Callable[[str], AbstractContextManager[Connection]]) -> None:
        self._table = table
        self._ask = ask
        self._letters = sql.Identifier(table.config.marker_schema, dead_letter.TABLE)

    def read(self, chosen: Chosen, limit: int) -> list[Letter]:
        """Return the newest letters. Raises `EpochsinkError`."""
        where = self._chosen(chosen)
        with self._ask(f"reading the dead letters of {self._table}") as connection:
            if not self._exist(connection):
                return []
            rows = connection.execute(
                sql.SQL(
                    "SELECT id, epoch, coalesce(sqlstate, ''), error, \"row\", set_aside_at FROM {} WHERE {} "
                    "ORDER BY id DESC LIMIT {}"
                ).format(self._letters, where, sql.Literal(limit))
            ).fetchall()
        return [
            Letter(str(number), epoch, state, error, row, at.isoformat(timespec="seconds"))
            for number, epoch, state, error, row, at in rows
        ]

    def count(self, chosen: Chosen) -> int:
        """Return the number of letters. Raises `EpochsinkError`."""
        where = self._chosen(chosen)
        with self._ask(f"counting the dead letters of {self._table}") as connection:
            return self._counted(connection, where) if self._exist(connection) else 0

    def caution(self) -> str:
        """Say which stored rows a retry replaces."""
        config = self._table.config
        if not config.key:
            return ""
        if config.newer_wins:
            return f"a stored row whose {config.newer_wins} is larger stays (newer_wins=)"
        if config.accumulate:
            return f"{', '.join(config.accumulate)} are combined with the stored ones; other columns are replaced"
        return "each row replaces the stored one of its key, even if that is newer: only newer_wins= would know"

    def drop(self, chosen: Chosen) -> int:
        """Delete letters. Raises `EpochsinkError`."""
        where = self._chosen(chosen)
        with self._changing("deleting") as connection:
            if not self._exist(connection):
                return 0
            with transaction(connection):
                (newest,) = connection.execute(
                    sql.SQL("SELECT max(id) FROM {} WHERE {}").format(self._letters, where)
                ).fetchone() or (None,)
                done = connection.execute(sql.SQL("DELETE FROM {} WHERE {}").format(self._letters, where))
                self._require_deleted(connection, where, newest)
                commit(connection)
            return int(done.rowcount)

    def retry(self, chosen: Chosen) -> Retried:
        """Write letters to the table, those of each attempt in a transaction. Raises `EpochsinkError`."""
        where, done = self._chosen(chosen), Retried()
        with self._changing("retrying") as connection:
            if not self._exist(connection):
                return done
            attempts = connection.execute(
                sql.SQL("SELECT epoch, attempt, max(id) FROM {} WHERE {} GROUP BY 1, 2 ORDER BY 1, min(id)").format(
                    self._letters, where
                )
            ).fetchall()
            for epoch, attempt, newest in attempts:
                done += self._retry(connection, Epoch(epoch, attempt), where, newest)
        return done

    @contextmanager
    def _changing(self, doing: str) -> Iterator[Connection]:
        """Lend a session. Raises `OutcomeUnknown` if its connection is lost: a COMMIT may have been carried out."""
        doing = f"{doing} dead letters of {self._table}"
        with self._ask(doing) as connection:
            try:
                yield connection
            except psycopg.Error as error:
                if not is_disconnected(error):
                    raise
                raise OutcomeUnknown(
                    f"{doing} was broken off: {describe(error)}",
                    hint="type it again: what is done is not done twice",
                ) from error

    def _require_deleted(self, connection: Connection, where: sql.Composed, newest: int | None) -> None:
        """Raise `PrepareFailed` if letters are left up to the ``newest`` of those that were deleted.

        Another retry at the same time adds newer ones, for what is refused again.
        """
        upto = sql.SQL("{} AND id OPERATOR(pg_catalog.<=) {}").format(where, sql.Literal(newest))
        if left := self._counted(connection, upto):
            raise PrepareFailed(
                f"the table of dead letters {self._letters.as_string(connection)} keeps {left} dead letters of "
                f"{self._table} that were deleted; nothing was changed",
                hint="see whether a trigger, rule or policy of the table of dead letters keeps rows, and drop it",
                may_pass=False,
            )

    def _retry(self, connection: Connection, at: Epoch, where: sql.Composed, newest: int) -> Retried:
        """Delete the letters of an attempt, and write their rows as those of an epoch are: staged, then merged."""
        done = Retried()
        where = sql.SQL("{} AND epoch OPERATOR(pg_catalog.=) {} AND attempt OPERATOR(pg_catalog.=) {}").format(
            where, sql.Literal(at.number), sql.Literal(at.attempt)
        )
        with transaction(connection):
            letters = connection.execute(
                sql.SQL("DELETE FROM {} WHERE {} RETURNING id, {}").format(
                    self._letters, where, sql.Identifier(dead_letter.ARROW)
                )
            ).fetchall()
            self._require_deleted(connection, where, newest)
            reach("postgres.letters.taken")
            if not letters:
                connection.rollback()  # another retry, or a drop, was first
                return done
            # one batch, unless the row got other columns within the attempt
            for batch in decode_rows(row for _, row in sorted(letters)):
                done += self._merge(connection, at, batch)
            reach("postgres.letters.merged")
            commit(connection)
        reach("postgres.letters.committed")
        return done

    def _merge(self, connection: Connection, at: Epoch, batch: pa.RecordBatch) -> Retried:
        """Merge rows of letters; those that are refused again become letters again."""
        sink = self._table.identity.sink
        rows = AcceptedRows((_TASK,), batch.num_rows, _Decoded(batch))
        try:
            incoming = Incoming(connection, self._table, rows).retrying_letters()
        except PrepareFailed as unfit:
            raise PrepareFailed(
                f"the dead letters of epoch {at.number} do not fit {self._table}: {unfit.message}; nothing of that "
                "epoch was changed",
                hint="correct the table, or drop these letters: epochsink letters drop CHECKPOINT --sinks "
                f"MODULE:ATTRIBUTE --sink NAME --epoch {at.number}",
            ) from unfit
        member = incoming.stage_here(Epoch(at.number, uuid.uuid4().hex))
        letters = dead_letter.EpochLetters.of(self._table.identity, at, {sink: rows})
        refused = merge(connection, {sink: member}, letters, careful=True)[sink]
        older = superseded(connection, member, refused) if member.merge.key else 0
        connection.execute(sql.SQL("DROP TABLE {}").format(member.staging.quoted))
        return Retried(
            written=batch.num_rows - len(refused) - older,
            superseded=older,
            kept=len(refused),
            reason=refused[-1].error if refused else "",
        )

    def _chosen(self, chosen: Chosen) -> sql.Composed:
        conditions = [sql.SQL("key OPERATOR(pg_catalog.=) {}").format(sql.Literal(self._table.key))]
        if chosen.ids:
            if wrong := [each for each in chosen.ids if not each.isdecimal()]:
                raise ConfigurationError(
                    f"invalid id {wrong[0]!r} of a dead letter: it is a number here",
                    hint="the ids are in: epochsink letters list CHECKPOINT --sinks MODULE:ATTRIBUTE",
                )
            conditions.append(
                sql.SQL("id OPERATOR(pg_catalog.=) ANY ({}::pg_catalog.int8[])").format(
                    sql.Literal([int(each) for each in chosen.ids])
                )
            )
        if chosen.epoch is not None:
            conditions.append(sql.SQL("epoch OPERATOR(pg_catalog.=) {}").format(sql.Literal(chosen.epoch)))
        return sql.SQL(" AND ").join(conditions)

    def _exist(self, connection: Connection) -> bool:
        """Return whether there is a table of letters."""
        row = connection.execute("SELECT to_regclass(%s)", [self._letters.as_string(connection)]).fetchone()
        return bool(row and row[0])

    def _counted(self, connection: Connection, where: sql.Composed) -> int:
        row = connection.execute(sql.SQL("SELECT count(*) FROM {} WHERE {}").format(self._letters, where)).fetchone()
        return int(row[0]) if row else 0
