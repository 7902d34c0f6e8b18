"""An epoch's rows on their way from the spool, or from dead letters, into a target or a staging table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import NamedTuple, Self

import numpy as np
import pyarrow as pa
from psycopg import sql

from epochsink import arrow_buffers
from epochsink.errors import PrepareFailed
from epochsink.failpoints import reach
from epochsink.postgres.catalog import read_target, require_unchanged
from epochsink.postgres.committable import Member
from epochsink.postgres.copy_in import CopyIn
from epochsink.postgres.dead_letter import refused, require_a_row_taken, told
from epochsink.postgres.errors import is_missing, may_be_refusal
from epochsink.postgres.merge import writing_rows
from epochsink.postgres.prepared_transaction import commit, transaction
from epochsink.postgres.row_mapping import Fitted
from epochsink.postgres.server import Connection
from epochsink.postgres.sink_table import SinkTable
from epochsink.postgres.spooled import AcceptedRows
from epochsink.postgres.staging import NUMBER, NUMBER_ENCODING, REFUSED, TAG_ENCODING, Staging, tag_value
from epochsink.sink import Epoch


class Piece(NamedTuple):
    """Rows of one task. ``first`` is the number of the first one among all rows of the epoch, from 1."""

    task: str
    first: int
    batch: pa.RecordBatch

    def halves(self) -> tuple[Piece, Piece] | None:
        """Split the rows in two; None for a single row."""
        middle = self.batch.num_rows // 2
        if not middle:
            return None
        return self._slice(0, middle), self._slice(middle, self.batch.num_rows - middle)

    def none(self) -> Piece:
        """Return it without rows."""
        return self._slice(0, 0)

    def _slice(self, offset: int, rows: int) -> Piece:
        return self._replace(first=self.first + offset, batch=self.batch.slice(offset, rows))


class Incoming:
    """Rows on their way into a table. The first record batch has their schema.

    Rows of a sink that sets rows aside are numbered in the staging table, so that the row of a dead letter is found
    again among ``rows``; those of others are tagged with their task.
    """

    def __init__(self, connection: Connection, table: SinkTable, rows: AcceptedRows) -> None:
        self._connection = connection
        self._rows = rows
        batches = rows.read()
        first = next(batches)
        self._batches = chain([first], batches)
        self._fitted = Fitted.of(connection, table, first[1].schema, direct=False)

    def retrying_letters(self) -> Self:
        """Let rows that are refused become letters, whatever the sink does with other rows."""
        self._fitted = replace(self._fitted, merge=replace(self._fitted.merge, sets_aside=True))
        return self

    def is_copied(self) -> bool:
        """Return whether one COPY can bring the rows into the target: it has no keys and casts, and ignores rules."""
        config, target = self._fitted.table.config, self._fitted.target
        return not (
            config.key
            or config.mode(target.max_prepared_transactions) == "staged"
            or target.row_security
            or target.has_rules
            or self._fitted.merge.casts
        )

    def member(self, staging: Staging | None = None) -> Member:
        """Return what is recorded of the rows."""
        return self._fitted.member(self._rows.tasks, self._rows.count, staging)

    def copy(self) -> None:
        """Copy the rows into the target, in the transaction under way. Raises `PrepareFailed`."""
        fitted = self._fitted
        with (
            writing_rows(self._connection, fitted.merge),
            CopyIn(self._connection, fitted.merge.target.quoted, fitted.encodings) as copy,
        ):
            for _, batch in self._batches:
                copy.write(batch)
            # a trigger may swallow or redirect rows, as it may in an INSERT: the server's count says nothing
            copy.finish()
        if copy.sent != self._rows.count:
            raise PrepareFailed(f"the spool holds {copy.sent} rows, and the accepted tasks wrote {self._rows.count}")
        reach("postgres.copied")
        # the lock of COPY keeps the table as it is now: it must be the table that the rows were encoded for
        require_unchanged(read_target(self._connection, fitted.merge.target), fitted.merge, copied=True)

    @property
    def sets_aside(self) -> bool:
        """Whether rows that are refused become dead letters."""
        return self._fitted.merge.sets_aside

    def stage(self, epoch: Epoch) -> Member:
        """Copy the rows into a staging table and commit that. The merge compares their number."""
        connection, fitted = self._connection, self._fitted
        staging, is_new = fitted.staging(connection, epoch)
        try:
            with transaction(connection):
                staging.relax(connection)
                if not is_new:
                    # the vote is repeated
                    staging.clear(connection)
                self._fill(staging, _pieces(self._batches))
                reach("postgres.copied")
                commit(connection)
        except Exception as failed:
            if not (self.sets_aside and may_be_refusal(failed)):
                raise
        else:
            return self.member(staging)
        with transaction(connection):
            staging.relax(connection)
            staging.clear(connection)
            unfit = self._fill_by_halves(staging)
            reach("postgres.copied")
            commit(connection)
        return replace(self.member(staging), unfit=unfit)

    def stage_here(self, epoch: Epoch) -> Member:
        """Copy the rows into a staging table in the transaction under way, which drops it."""
        staging, _ = self._fitted.staging(self._connection, epoch)
        return replace(self.member(staging), unfit=self._fill_by_halves(staging))

    def _fill(self, staging: Staging, pieces: Iterable[Piece]) -> None:
        last = NUMBER_ENCODING if self.sets_aside else TAG_ENCODING
        with CopyIn(self._connection, staging.relation.quoted, [*self._fitted.encodings, last]) as copy:
            for task, first, batch in pieces:
                copy.write(batch, _numbers(first, batch.num_rows) if self.sets_aside else tag_value(task))
            copy.finish()

    def _fill_by_halves(self, staging: Staging) -> int:
        """Like `_fill`, but of rows that the staging table cannot hold it stores the reason; return their number."""
        insert = sql.SQL("INSERT INTO {} ({}, {}) VALUES (%s, %s)").format(
            staging.relation.quoted, sql.Identifier(NUMBER), sql.Identifier(REFUSED)
        )
        unfit = missing = 0
        fill = partial(self._fill_with, staging)
        for piece in _pieces(self._rows.read()):
            for row, error in refused(self._connection, piece, Piece.halves, fill, none=piece.none()):
                self._connection.execute(insert, [row.first, json.dumps(told(error), ensure_ascii=False)])
                unfit += 1
                if is_missing(error):
                    missing += 1
                    require_a_row_taken(error, missing, self._rows.count)
        return unfit

    def _fill_with(self, staging: Staging, piece: Piece) -> None:
        self._fill(staging, [piece])


def _pieces(batches: Iterable[tuple[str, pa.RecordBatch]]) -> Iterator[Piece]:
    first = 1
    for task, batch in batches:
        yield Piece(task, first, batch)
        first += batch.num_rows


def _numbers(first: int, count: int) -> pa.Array:
    return arrow_buffers.numbers(np.arange(first, first + count, dtype="i8"))
