"""Phase 1 on the executors: one COPY for each task, into staging or straight into the target."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Final, Self

import pgpq
import psycopg
import pyarrow as pa
from psycopg import sql

from epochsink.errors import PrepareFailed
from epochsink.failpoints import reach
from epochsink.identity import PreparedName
from epochsink.postgres.catalog import require_unchanged
from epochsink.postgres.committable import Part
from epochsink.postgres.dead_letter import Letters
from epochsink.postgres.errors import translated
from epochsink.postgres.merge import merge
from epochsink.postgres.prepared_transaction import begin, commit, prepare, transaction
from epochsink.postgres.row_mapping import Fitted
from epochsink.postgres.server import Server
from epochsink.postgres.sessions import SessionName, watched
from epochsink.postgres.staging import TAG_ENCODING, tag_value
from epochsink.postgres.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from epochsink.postgres.committable import Member
    from epochsink.postgres.config import PostgresConfig
    from epochsink.postgres.server import Connection
    from epochsink.postgres.staging import Staging
    from epochsink.postgres.types import Encoding
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
            self._connection = self._server.connect(str(name), CONNECT_SECONDS)

    def write(self, batch: pa.RecordBatch) -> None:
        """Send a record batch with at least one row. Raises `RowsRejected`, `PrepareFailed`."""
        with translated(self._doing("copying")):
            if self._copy is None:
                self._copy = self._begin(batch.schema)
            with watched(self._connection, self._server):
                self._copy.write(batch, *self._constants)

    def prepare(self) -> Committable:
        """Make what was written durable and invisible. Raises `RowsRejected`, `PrepareFailed`."""
        try:
            with translated(self._doing("preparing")), watched(self._connection, self._server):
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
        self._table.marker.insert(self._connection, epoch.number, self._task.uuid, epoch.attempt)


class StagingWriter(CopyWriter):
    """Copies into the attempt's staging table and commits that; the driver merges."""

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
        return self._part(self._commit_staged(rows))

    def _commit_staged(self, rows: int) -> Member:
        commit(self._connection)
        return self._found.member((self._task.uuid,), rows, self._staging)


class MergingWriter(StagingWriter):
    """Merges its own rows from staging into the target, in a transaction of its own that it prepares."""

    def _prepare(self, rows: int) -> Committable:
        member = self._commit_staged(rows)
        with transaction(self._connection):
            self._mark()
            merge(
                self._connection, {self._task.identity.sink: member}, Letters.of(self._task.identity, self._task.epoch)
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

    def _prepare(self, rows: int) -> Committable:
        # only now: the lock of the COPY keeps the table as it is until the transaction ends
        require_unchanged(self._connection, self._found.merge, copied=True)
        self._mark()
        return self._prepare_part(self._found.member((self._task.uuid,), rows))


CHUNK_BYTES: Final = 4 << 20
"""How much Arrow data is encoded at a time; the encoded form is about as large."""


class CopyIn:
    """One ``COPY ... FROM STDIN`` from the first batch to the last. Raises `psycopg.Error`, `pyarrow.ArrowInvalid`."""

    def __init__(
        self,
        connection: Connection,
        relation: sql.Identifier,
        encodings: Sequence[Encoding],
    ) -> None:
        """Begin to copy columns ``encodings``."""
        self._encodings = encodings
        self._schema = pa.schema([encoding.field for encoding in encodings])
        builders = {encoding.field.name: encoding.builder() for encoding in encodings}
        self._encoder = pgpq.ArrowToPostgresBinaryEncoder.new_with_encoders(self._schema, builders)
        names = sql.SQL(", ").join(sql.Identifier(name) for name in self._schema.names)
        statement = sql.SQL("COPY {} ({}) FROM STDIN (FORMAT BINARY)").format(relation, names)
        self._cursor = connection.cursor()
        self._stack = ExitStack()
        self._copy = self._stack.enter_context(self._cursor.copy(statement))
        self._copy.write(self._encoder.write_header())
        self.sent = 0

    def write(self, batch: pa.RecordBatch, *constants: pa.Scalar) -> None:
        """Send a batch whose columns are the encodings'; the last have the values ``constants`` in every row."""
        for piece in _pieces(batch):
            given = zip(self._encodings, piece.columns, strict=False)
            arrays = [encoding.convert(column) for encoding, column in given]
            arrays += [pa.repeat(value, piece.num_rows) for value in constants]
            self._copy.write(self._encoder.write_batch(pa.RecordBatch.from_arrays(arrays, schema=self._schema)))
            self.sent += piece.num_rows

    def __enter__(self) -> Self:
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        if failed is not None:
            self.cancel()

    def finish(self) -> int:
        """End the COPY; return how many rows the server counted."""
        self._copy.write(self._encoder.finish())
        self._stack.close()
        return self._cursor.rowcount

    def cancel(self) -> None:
        """Give the COPY up, if it has not ended."""
        with suppress(psycopg.Error):
            # with an error psycopg sends CopyFail; without one it would end the COPY as if all rows had come
            given_up = psycopg.OperationalError("the task gave up")
            self._stack.__exit__(type(given_up), given_up, None)


def _pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    rows = max(1, batch.num_rows * CHUNK_BYTES // max(1, batch.nbytes))
    for start in range(0, batch.num_rows, rows):
        yield batch.slice(start, rows)
