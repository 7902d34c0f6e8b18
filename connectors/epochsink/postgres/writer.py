"""Phase 1 on the executors with ``atomic=False``: each task copies its rows, and prepares its own transaction."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import psycopg
import pyarrow as pa

from epochsink.errors import PrepareFailed
from epochsink.failpoints import reach
from epochsink.identity import PreparedName
from epochsink.postgres.catalog import require_unchanged
from epochsink.postgres.committable import Member, Part
from epochsink.postgres.config import PostgresConfig
from epochsink.postgres.copy_in import CopyIn
from epochsink.postgres.database import Database
from epochsink.postgres.dead_letter import EpochLetters
from epochsink.postgres.errors import translated
from epochsink.postgres.merge import merge, writing_rows
from epochsink.postgres.prepared_transaction import begin, commit, prepare, transaction
from epochsink.postgres.row_mapping import Fitted
from epochsink.postgres.server import Server
from epochsink.postgres.sessions import SessionName
from epochsink.postgres.staging import TAG_ENCODING, Staging, tag_value
from epochsink.postgres.table import Table
from epochsink.sink import Committable, Task

CONNECT_SECONDS: Final = 20.0
"""Seconds for which a task waits for a server that restarts or has no free partition."""


def by_task_writer(config: PostgresConfig, task: Task, *, again: bool = False) -> CopyWriter:
    """Return the writer of a task that prepares its own transaction, connected. Raises `PrepareFailed`.

    ``again``: the rows may be staged already, by a repair of this attempt that was interrupted.
    """
    return MergingWriter(config, task, again=again) if config.key else DirectWriter(config, task)


class CopyWriter(ABC):
    """What the writers share: one session, one COPY that begins with the first batch."""

    def __init__(self, config: PostgresConfig, task: Task) -> None:
        self._table = Table(config, task.identity)
        self._task = task
        self._copy: CopyIn | None = None
        self._server = Server.of(config)
        name = SessionName(self._table.key, task.identity.generation, task.epoch.attempt)
        with translated(f"connecting to {self._server.database}"):
            self._database = Database.connect(self._server, str(name), CONNECT_SECONDS)
        self._connection = self._database.connection

    def write(self, batch: pa.RecordBatch) -> None:
        """Send a record batch with at least one row. Raises `RowsRejected`, `PrepareFailed`."""
        with translated(self._doing("copying")):
            if self._copy is None:
                self._copy = self._begin(batch.schema)
            with self._database.watched():
                self._copy.write(batch, *self._constants)

    def prepare(self) -> Committable:
        """Make what was written durable and invisible. Raises `RowsRejected`, `PrepareFailed`."""
        try:
            with translated(self._doing("preparing")), self._database.watched():
                rows = self._finish_copy()
                reach("postgres.copied")
                return self._prepare(rows)
        finally:
            # not kept for the next epoch: a sweep finds a session by the attempt in its name, and ends it
            self._connection.close()

    def abort(self) -> None:
        """Let go of everything that is not yet durable."""
        if self._copy is not None:
            self._copy.cancel()
        with suppress(psycopg.Error):
            self._connection.close()

    @property
    def _constants(self) -> Sequence[pa.Scalar]:
        """The values of the last columns, in every row of a batch."""
        return ()

    @abstractmethod
    def _begin(self, schema: pa.Schema) -> CopyIn:
        """Begin the COPY of rows with this schema."""

    @abstractmethod
    def _prepare(self, rows: int) -> Committable:
        """Make the copied rows durable and invisible."""

    def _finish_copy(self) -> int:
        if self._copy is None:
            raise PrepareFailed("prepare() without a row: a task without rows makes no writer")
        rows = self._copy.finish()
        if rows != self._copy.sent:
            raise PrepareFailed(
                f"the server took {rows} of {self._copy.sent} rows",
                hint=f"see whether a rule or trigger of {self._table} swallows rows",
            )
        return rows

    def _doing(self, verb: str) -> str:
        task = self._task
        return f"{verb} rows of epoch {task.epoch.number}, partition {task.partition}, for {self._table}"

    def _part(self, member: Member, gid: str | None = None) -> Committable:
        return Part(self._task.epoch.attempt, {self._task.identity.sink: member}, gid).to_json()

    def _prepare_part(self, member: Member) -> Committable:
        """Prepare the transaction under way, and return it as a part."""
        name = PreparedName.of(self._task.identity, self._task.epoch, self._task.uuid)
        prepare(self._connection, name)
        reach("postgres.prepared")
        return self._part(member, str(name))

    def _mark(self) -> None:
        epoch = self._task.epoch
        self._table.marker.insert(self._database, epoch.number, self._task.uuid, epoch.attempt)


class MergingWriter(CopyWriter):
    """Copies into the attempt's staging table, and merges that in a transaction of its own that it prepares."""

    _found: Fitted
    _staging: Staging

    def __init__(self, config: PostgresConfig, task: Task, *, again: bool = False) -> None:
        super().__init__(config, task)
        self._again = again

    def _begin(self, schema: pa.Schema) -> CopyIn:
        connection = self._connection
        self._found = Fitted.of(connection, self._table, schema, direct=False)
        # committed at once, before the COPY: the attempt's other tasks wait for its lock until then
        self._staging, is_new = self._found.staging(connection, self._task.epoch)
        begin(connection)
        self._staging.relax(connection)
        if self._again and not is_new:
            self._staging.clear(connection, self._task.uuid)
        return CopyIn(connection, self._staging.relation.quoted, [*self._found.encodings, TAG_ENCODING])

    @property
    def _constants(self) -> Sequence[pa.Scalar]:
        return [tag_value(self._task.uuid)]

    def _prepare(self, rows: int) -> Committable:
        commit(self._connection)
        member = self._found.member((self._task.uuid,), rows, self._staging)
        with transaction(self._connection):
            self._mark()
            merge(
                self._connection,
                {self._task.identity.sink: member},
                EpochLetters.of(self._task.identity, self._task.epoch),
            )
            reach("postgres.merged")
            return self._prepare_part(member)


class DirectWriter(CopyWriter):
    """Copies straight into the target, in a transaction of its own that it prepares."""

    _found: Fitted

    def _begin(self, schema: pa.Schema) -> CopyIn:
        self._found = Fitted.of(self._connection, self._table, schema, direct=True)
        begin(self._connection)
        return CopyIn(self._connection, self._found.merge.target.quoted, self._found.encodings)

    def _finish_copy(self) -> int:
        if self._copy is None:
            return super()._finish_copy()
        with writing_rows(self._connection, self._found.merge):
            return super()._finish_copy()

    def _prepare(self, rows: int) -> Committable:
        # only now: the lock of the COPY keeps the table as it is until the transaction ends
        merge = self._found.merge
        require_unchanged(self._database.read_target(merge.target), merge, copied=True)
        self._mark()
        return self._prepare_part(self._found.member((self._task.uuid,), rows))
