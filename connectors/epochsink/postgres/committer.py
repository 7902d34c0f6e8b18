"""Phase 2 in the driver: vote, commit, replay, abort, sweep."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg import errors
from tenacity import (
    Retrying,
    retry_if_exception,
    retry_if_exception_type,
    stop_after_attempt,
    stop_after_delay,
    wait_random_exponential,
)

from epochsink.errors import ConfigurationError, PrepareFailed, RowsRejected, WentBack
from epochsink.failpoints import reach
from epochsink.identity import PreparedName, identity_key, identity_label
from epochsink.postgres import applied_epochs as marker_table
from epochsink.postgres import orphans
from epochsink.postgres.applied_epochs import WHOLE, Marker
from epochsink.postgres.catalog import max_prepared_transactions
from epochsink.postgres.errors import describe, failure, is_disconnected, is_passing, translated
from epochsink.postgres.merge import Merge, merge, verify
from epochsink.postgres.preflight import check, unreachable
from epochsink.postgres.prepared_transaction import BUSY, commit, commit_prepared, prepare, transaction
from epochsink.postgres.relation import Relation
from epochsink.postgres.row_mapping import writer_schema
from epochsink.postgres.sessions import Session, SessionName, deadline
from epochsink.postgres.writer import make_writer, prepared_part
from epochsink.sink import COMMITTED, Epoch, Outcome, Task, Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

    from epochsink.postgres.server import Connection
    from epochsink.postgres.sink import Postgres
    from epochsink.sink import Committable, Identity, Rows

_log = logging.getLogger(__name__)

PATIENCE: Final = 30.0
"""Seconds for which a commit that meets a passing failure is repeated before its outcome is called unknown."""

_AGAIN: Final = (*BUSY, errors.LockNotAvailable, errors.DeadlockDetected, errors.SerializationFailure)
_DEADLOCK_TURNS: Final = 3
_PURGE_EVERY: Final = 100


class PostgresCommitter:
    """The driver's side of one PostgreSQL sink: two sessions, one for each of the coordinator's threads.

    ``commit_mode`` says, after `check`, how epochs wait for the decision: "prepared" or "staged".
    """

    def __init__(self, sink: Postgres, patience: float = PATIENCE) -> None:
        self._sink = sink
        self._patience = patience
        self._voting = Session(sink.server, "epochsink")
        self._settling = Session(sink.server, "epochsink")
        self.commit_mode: str | None = None

    def check(self, schema: pa.Schema) -> list[str]:
        """Compare configuration, row and live table; create the marker table. Return the findings."""
        try:
            connection = self._voting.connection()
            findings = check(self._sink, connection, writer_schema(schema, deletes=self._sink.delete_when is not None))
            self.commit_mode = self._sink.mode(max_prepared_transactions(connection))
        except psycopg.OperationalError as error:
            return [unreachable(self._sink, error)]
        _log.info("%s: commit=%r, epochs are %s", self._sink.relation, self._sink.commit, self.commit_mode)
        return findings

    def initial_state(self) -> dict[str, Any]:
        """Return where the markers are: looked for elsewhere, an applied epoch would be taken for a lost one."""
        return {"schema": self._sink.marker_schema}

    def open(self, identity: Identity) -> None:
        """Learn who this sink is. Raises `ConfigurationError` if its markers are in another schema."""
        schema = identity.origin.get("schema", self._sink.marker_schema)
        if schema != self._sink.marker_schema:
            raise ConfigurationError(
                f"schema_for_markers={self._sink.marker_schema!r}, and this checkpoint's markers are in {schema!r}",
                hint=f"keep schema_for_markers={schema!r}; another schema needs a new checkpoint",
            )
        self.close()
        self._identity = identity
        self._key = identity_key(identity)
        self._marker = Marker(self._sink.marker_schema, self._key)
        name = str(SessionName(self._key, identity.generation))
        self._voting = Session(self._sink.server, name)
        self._settling = Session(self._sink.server, name)

    def close(self) -> None:
        """Release both sessions."""
        self._voting.close()
        self._settling.close()

    def newest(self) -> int | None:
        """Return the newest epoch whose marker is committed. Raises `EpochsinkError`."""
        with translated(f"reading the marker of {self._sink.relation}"):
            return self._marker.newest(self._voting.connection(self._patience))

    # ---- phase 1

    def vote(self, epoch: Epoch, written: Sequence[Committable], rows: Rows) -> list[Committable]:  # noqa: ARG002 - the protocol's signature
        """Verify what the tasks wrote; where the epoch is one part, merge and prepare it."""
        with translated(f"preparing epoch {epoch.number} of {self._sink.relation}"):
            connection = self._voting.connection(self._patience)
            if all("gid" in part for part in written):
                return self._vote_tasks(connection, epoch, written)
            return [_repeat_deadlocks()(self._merge_tasks, connection, epoch, written)]

    def _vote_tasks(self, connection: Connection, epoch: Epoch, written: Sequence[Committable]) -> list[Committable]:
        self._refuse_applied(connection, epoch, [epoch.attempt])
        prepared = orphans.prepared_gids(connection, self._key)
        missing = [part["gid"] for part in written if part["gid"] not in prepared]
        if missing:
            raise PrepareFailed(
                f"prepared transaction(s) {', '.join(missing)} are not in pg_prepared_xacts",
                hint="somebody rolled them back; Spark runs the epoch again when the query restarts",
            )
        return list(written)

    def _merge_tasks(self, connection: Connection, epoch: Epoch, written: Sequence[Committable]) -> Committable:
        """Return the one part that stands for an epoch whose rows are staged."""
        agreed = {json.dumps([part["table"], part["logged"], part["merge"]], sort_keys=True) for part in written}
        if len(agreed) != 1:
            raise PrepareFailed(
                f"the tasks of epoch {epoch.number} saw different tables or server settings: {sorted(agreed)}",
                hint="the table or the server changed meanwhile; Spark runs the epoch again",
            )
        first = written[0]
        tasks, count = [part["task"] for part in written], sum(part["rows"] for part in written)
        plan, table = Merge.from_json(first["merge"]), self._staging(first)
        if first["logged"]:
            self._refuse_applied(connection, epoch, [])
            verify(connection, plan, table, tasks, count)
            return {
                "attempt": epoch.attempt,
                "tasks": tasks,
                "rows": count,
                "table": table.name,
                "merge": first["merge"],
            }
        label = identity_label(self._identity)
        gid = PreparedName(self._key, self._identity.generation, epoch.number, epoch.attempt, WHOLE, label)
        if str(gid) in orphans.prepared_gids(connection, self._key):
            return prepared_part(gid, count, tasks, table.name)
        with transaction(connection):
            self._mark_whole(connection, epoch, epoch.attempt)
            merge(connection, plan, table, tasks, count)
            reach("postgres.merged")
            prepare(connection, gid)
        reach("postgres.prepared")
        return prepared_part(gid, count, tasks, table.name)

    def _refuse_applied(self, connection: Connection, epoch: Epoch, ours: list[str]) -> None:
        applied_by = self._marker.other_attempt(connection, epoch.number, ours)
        if applied_by is not None:
            raise self._went_back(epoch, applied_by)

    def _mark_whole(self, connection: Connection, epoch: Epoch, attempt: str) -> None:
        try:
            self._marker.insert(connection, self._identity, epoch.number, WHOLE, attempt)
        except errors.UniqueViolation as applied:
            raise self._went_back(epoch, applied.diag.message_detail or "") from applied

    def _went_back(self, epoch: Epoch, evidence: str) -> WentBack:
        return WentBack(
            f"epoch {epoch.number} is already applied to {self._sink.relation}, by another attempt: {evidence}",
            hint="an older copy of the checkpoint was restored: put the newer one back, or start a new checkpoint",
        )

    # ---- phase 2

    def commit(self, epoch: Epoch, part: Committable, rows: Rows) -> Verdict:  # noqa: ARG002 - the protocol's signature
        """Commit a prepared transaction, or merge staged rows; repeated for `PATIENCE` seconds where that may help."""
        act = self._commit_prepared if "gid" in part else self._commit_staged
        again = Retrying(
            retry=retry_if_exception(_is_worth_repeating),
            stop=stop_after_delay(self._patience),
            wait=wait_random_exponential(0.05, 2.0),
            reraise=True,
        )
        try:
            return again(act, epoch, part)
        except (errors.IntegrityError, errors.DataError) as refused:
            raise failure(refused, f"merging epoch {epoch.number} into {self._sink.relation}") from refused
        except psycopg.Error as error:
            return Verdict(Outcome.UNKNOWN, f"{self._sink.server.database}: {describe(error)}")

    def _commit_prepared(self, epoch: Epoch, part: Committable) -> Verdict:
        connection = self._settling.connection()
        try:
            with deadline(connection, self._patience):
                commit_prepared(connection, part["gid"])
        except errors.UndefinedObject:
            name = PreparedName.parse(part["gid"])
            return self._ask_marker(connection, epoch, part, name.part if name else WHOLE)
        reach("postgres.committed")
        return COMMITTED

    def _ask_marker(self, connection: Connection, epoch: Epoch, part: Committable, name: str) -> Verdict:
        applied_by = self._marker.attempt(connection, epoch.number, name)
        if applied_by == part["attempt"]:
            return COMMITTED
        if applied_by is None:
            return Verdict(Outcome.ABORTED, f"{part.get('gid', part.get('table'))} is gone and the marker is absent")
        return Verdict(
            Outcome.UNKNOWN,
            f"the marker says that attempt {applied_by} applied epoch {epoch.number}, and the ledger records attempt "
            f"{part['attempt']}",
        )

    def _commit_staged(self, epoch: Epoch, part: Committable) -> Verdict:
        connection = self._settling.connection()
        table = self._staging(part)
        try:
            with transaction(connection):
                self._marker.insert(connection, self._identity, epoch.number, WHOLE, part["attempt"])
                if not orphans.exists(connection, table):
                    raise PrepareFailed(f"staging table {table} is gone")
                merge(connection, Merge.from_json(part["merge"]), table, part["tasks"], part["rows"])
                reach("postgres.merged")
                commit(connection)
        except errors.UniqueViolation as refused:
            if (refused.diag.schema_name, refused.diag.table_name) != (self._sink.marker_schema, marker_table.TABLE):
                raise
            return self._ask_marker(connection, epoch, part, WHOLE)
        except RowsRejected:
            raise
        except PrepareFailed as gone:
            return Verdict(Outcome.ABORTED, f"{gone.message}, and the marker is absent")
        reach("postgres.committed")
        return COMMITTED

    def replay(self, epoch: Epoch, part: Committable, rows: Rows, attempt: str) -> Committable:
        """Copy the spooled rows again and prepare them as ``attempt``."""
        name = PreparedName.parse(part.get("gid", ""))
        atomic = name is None or name.part == WHOLE
        again = Epoch(epoch.number, attempt)
        written = [self._rewrite(task, again, rows, atomic=atomic) for task in part["tasks"]]
        if not atomic:
            return written[0]
        with translated(f"preparing epoch {epoch.number} of {self._sink.relation} again"):
            return self._merge_tasks(self._settling.connection(self._patience), again, written)

    def _rewrite(self, uuid: str, epoch: Epoch, rows: Rows, *, atomic: bool) -> Committable:
        writer = make_writer(self._sink, Task(self._identity, epoch, 0, uuid), atomic=atomic)
        try:
            for batch in rows.read(uuid):
                writer.write(batch)
            return writer.prepare()
        except BaseException:
            writer.abort()
            raise

    # ---- clearing away

    def abort_orphans(self, keep: Sequence[Committable]) -> list[str]:
        """End sessions, prepared transactions and staging tables that ``keep`` does not name.

        Raises `ConnectionError` if the server cannot be reached: the next sweep finds what is left.
        """
        doing = f"sweeping leftovers of {self._sink.relation}"
        with translated(doing):
            try:
                return self._sweeper(self._voting.connection(self._patience)).end_all(keep)
            except psycopg.OperationalError as error:
                if is_disconnected(error):
                    raise ConnectionError(f"{doing}: {self._sink.server.database}: {describe(error)}") from error
                raise

    def await_visible(self, epoch: Epoch, parts: Sequence[Committable]) -> None:
        """Do nothing: what is committed is visible."""

    def finish(self, epoch: Epoch, parts: Sequence[Committable]) -> None:
        """Drop the epoch's staging table, and now and then markers that nobody will ask for."""
        tables = {part["table"] for part in parts if "table" in part}
        try:
            connection = self._settling.connection()
            sweeper = self._sweeper(connection)
            for table in sorted(tables):
                sweeper.drop(table)
            if epoch.number % _PURGE_EVERY == 0:
                self._marker.purge(connection, epoch.number)
        except psycopg.Error as error:
            _log.warning("leftovers of epoch %d stay for the next sweep: %s", epoch.number, describe(error))

    def _sweeper(self, connection: Connection) -> orphans.Orphans:
        return orphans.Orphans(connection, self._sink.marker_schema, self._key, self._identity.generation)

    def _staging(self, part: Committable) -> Relation:
        return Relation(self._sink.marker_schema, part["table"])


def _repeat_deadlocks() -> Retrying:
    return Retrying(
        retry=retry_if_exception_type((errors.DeadlockDetected, errors.SerializationFailure)),
        stop=stop_after_attempt(_DEADLOCK_TURNS),
        wait=wait_random_exponential(0.05, 1.0),
        reraise=True,
    )


def _is_worth_repeating(error: BaseException) -> bool:
    return isinstance(error, _AGAIN) or is_passing(error)
