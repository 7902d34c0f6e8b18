"""Phase 1 on the executors: one COPY for each task, into staging or straight into the target."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final

import psycopg

from epochsink import arrow_buffers
from epochsink.errors import PrepareFailed
from epochsink.failpoints import reach
from epochsink.identity import PreparedName, identity_key, identity_label, staging_table
from epochsink.postgres.applied_epochs import Marker
from epochsink.postgres.binary_copy import CopyIn
from epochsink.postgres.catalog import read_checks, read_target
from epochsink.postgres.committable import Member, Merge, PreparedPart, StagedTask
from epochsink.postgres.errors import translated
from epochsink.postgres.merge import merge
from epochsink.postgres.prepared_transaction import begin, commit, prepare, transaction
from epochsink.postgres.relation import Relation
from epochsink.postgres.row_mapping import fit
from epochsink.postgres.server import Server
from epochsink.postgres.sessions import SessionName, watched
from epochsink.postgres.staging import DELETED, TAG, TAG_ENCODING, Staging, is_rank, is_reserved, tag
from epochsink.postgres.table_shape import require_safe, require_unchanged

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

    from epochsink.postgres.catalog import Target
    from epochsink.postgres.config import PostgresConfig
    from epochsink.postgres.server import Connection
    from epochsink.postgres.types import Encoding
    from epochsink.sink import Committable, Task

CONNECT_SECONDS: Final = 20.0
"""Seconds for which a task waits for a server that restarts or has no free partition."""


def make_writer(config: PostgresConfig, task: Task, *, atomic: bool) -> CopyWriter:
    """Return the writer of one task attempt, connected. Raises `PrepareFailed`."""
    if atomic:
        return StagingWriter(config, task)
    return MergingWriter(config, task) if config.key else DirectWriter(config, task)


class CopyWriter:
    """What the writers share: one session, one COPY that begins with the first batch."""

    def __init__(self, config: PostgresConfig, task: Task, lent: Connection | None = None) -> None:
        """Connect, unless a session is ``lent``, which stays open."""
        self._config = config
        self._relation = Relation.of(config.table)
        self._task = task
        self._key = identity_key(task.identity)
        self._copy: CopyIn | None = None
        self._server = Server.of(config)
        self._is_lent = lent is not None
        self._connection = lent or self._connect()

    def _connect(self) -> Connection:
        name = SessionName(self._key, self._task.identity.generation, self._task.epoch.attempt)
        with translated(f"connecting to {self._server.database}"):
            return self._server.connect(str(name), CONNECT_SECONDS)

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
            self._release()

    def abort(self) -> None:
        """Let go of everything that is not yet durable."""
        if self._copy is not None:
            self._copy.cancel()
        with suppress(psycopg.Error):
            self._release()

    def _release(self) -> None:
        if self._is_lent:
            with suppress(psycopg.Error):
                self._connection.rollback()
        else:
            self._connection.close()

    @property
    def _constants(self) -> Sequence[pa.Scalar]:
        """The values of the last columns, in every row of a batch."""
        return ()

    def _begin(self, schema: pa.Schema) -> CopyIn:
        raise NotImplementedError

    def _prepare(self, rows: int) -> Committable:
        raise NotImplementedError

    def _finish_copy(self) -> int:
        if self._copy is None:
            raise PrepareFailed("prepare() without a row: a task without rows makes no writer")
        rows = self._copy.finish()
        if rows != self._copy.sent:
            raise PrepareFailed(
                f"the server took {rows} of {self._copy.sent} rows",
                hint=f"see whether a rule or trigger of {self._relation} swallows rows",
            )
        return rows

    def _doing(self, verb: str) -> str:
        task = self._task
        return f"{verb} rows of epoch {task.epoch.number}, partition {task.partition}, for {self._relation}"

    def _gid(self) -> PreparedName:
        identity, epoch = self._task.identity, self._task.epoch
        label = identity_label(identity)
        return PreparedName(self._key, identity.generation, epoch.number, epoch.attempt, self._task.uuid, label)

    def _prepared(self, rows: int, table: str | None, merge: Merge) -> Committable:
        attempt, tasks = self._task.epoch.attempt, (self._task.uuid,)
        return PreparedPart(str(self._gid()), attempt, tasks, rows, merge, table).to_json()

    def _mark(self) -> None:
        marker = Marker(self._config.marker_schema, self._key)
        epoch = self._task.epoch
        marker.insert(self._connection, self._task.identity, epoch.number, self._task.uuid, epoch.attempt)


class StagingWriter(CopyWriter):
    """Copies into the attempt's staging table and commits that; the driver merges."""

    _merge: Merge
    _staging: Staging

    def _begin(self, schema: pa.Schema) -> CopyIn:
        target, encodings = fitted(self._connection, self._config, schema, direct=False)
        table = Relation(self._config.marker_schema, staging_table(self._key, self._task.epoch.attempt))
        self._staging = Staging(table, self._config.mode(target.max_prepared_transactions) == "staged")
        self._merge = merge_of(self._config, target, encodings)
        who, label = self._task.identity, identity_label(self._task.identity)
        note = f"epochsink generation {who.generation} epoch {self._task.epoch.number} of {label}"
        columns = _definitions(target, encodings)
        checks: dict[str, str] = {}
        if self._staging.logged and not self._merge.deletes:
            columns, checks = self._rules(target, columns)
        self._staging.ensure(self._connection, columns, checks, note)
        begin(self._connection)
        if not self._staging.logged:
            # A crash that loses unlogged rows, or their commit, fails the vote. It need not be waited for.
            self._connection.execute("SET LOCAL synchronous_commit = off")
        return CopyIn(self._connection, table.quoted, [*encodings, TAG_ENCODING])

    @property
    def _constants(self) -> Sequence[pa.Scalar]:
        return [arrow_buffers.number(tag(self._task.uuid), "int64")]

    def go_on_as(self, task: Task) -> None:
        """Write rows of another task of the same attempt."""
        self._task = task

    def _rules(self, target: Target, columns: dict[str, str]) -> tuple[dict[str, str], dict[str, str]]:
        """Give staging the target's own rules: rows that break them then fail before the decision, not after."""
        exact = [name for name in self._merge.columns if name not in self._merge.casts]
        needed = {name: f"{columns[name]} NOT NULL" for name in exact if target.columns[name].not_null}
        return columns | needed, read_checks(self._connection, target, exact)

    def _prepare(self, rows: int) -> Committable:
        commit(self._connection)
        staging = self._staging
        return StagedTask(staging.relation.name, staging.logged, self._task.uuid, rows, self._merge).to_json()


class MergingWriter(StagingWriter):
    """Merges its own rows from staging into the target, in a transaction of its own that it prepares."""

    def _prepare(self, rows: int) -> Committable:
        super()._prepare(rows)
        with transaction(self._connection):
            self._mark()
            schema, table = self._config.marker_schema, self._staging.relation.name
            merge(self._connection, [Member(self._key, schema, table, (self._task.uuid,), rows, self._merge)])
            reach("postgres.merged")
            prepare(self._connection, self._gid())
        reach("postgres.prepared")
        return self._prepared(rows, self._staging.relation.name, self._merge)


class DirectWriter(CopyWriter):
    """Copies straight into the target, in a transaction of its own that it prepares."""

    _merge: Merge

    def _begin(self, schema: pa.Schema) -> CopyIn:
        target, encodings = fitted(self._connection, self._config, schema, direct=True)
        self._merge = merge_of(self._config, target, encodings)
        begin(self._connection)
        return CopyIn(self._connection, target.relation.quoted, encodings)

    def _prepare(self, rows: int) -> Committable:
        require_unchanged(self._connection, self._merge)
        self._mark()
        prepare(self._connection, self._gid())
        reach("postgres.prepared")
        return self._prepared(rows, None, self._merge)


def fitted(
    connection: Connection, config: PostgresConfig, schema: pa.Schema, *, direct: bool
) -> tuple[Target, list[Encoding]]:
    """Return the live table, and how rows of a schema are encoded for it. Raises `PrepareFailed`, `psycopg.Error`."""
    relation = Relation.of(config.table)
    target = read_target(connection, relation)
    if target is None:
        raise PrepareFailed(
            f"table {relation} does not exist or is not visible to this user",
            hint="it was dropped or renamed while the query ran: create it again, then restart the query",
            may_pass=False,
        )
    require_safe(target, config.key, deletes=config.delete_when is not None)
    encodings, findings = fit(schema, target, direct=direct)
    if findings:
        raise PrepareFailed("; ".join(findings), hint="restart the query, which checks the table anew", may_pass=False)
    return target, encodings


def _definitions(target: Target, encodings: Sequence[Encoding]) -> dict[str, str]:
    """Return the staging table's columns with their types: the target's, where binary COPY can send them."""
    columns = {}
    for encoding in encodings:
        name = encoding.field.name
        columns[name] = "boolean" if name == DELETED else encoding.staged_as or target.columns[name].definition
    return columns | {TAG: "bigint"}


def merge_of(config: PostgresConfig, target: Target, encodings: Sequence[Encoding]) -> Merge:
    """Return what is recorded of how rows go into the target."""
    names = [encoding.field.name for encoding in encodings if not is_reserved(encoding.field.name)]
    casts = {encoding.field.name: encoding.cast_to for encoding in encodings if encoding.cast_to is not None}
    deletes = config.delete_when is not None
    ranks = sum(is_rank(encoding.field.name) for encoding in encodings)
    equals = {name: target.columns[name].equals for name in config.key if name in target.columns}
    columns = {name: target.columns[name].declared for name in names}
    return Merge(target.relation, columns, casts, config.key, deletes, ranks, equals, target.unique_for(config.key))
