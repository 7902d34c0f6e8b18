"""The driver's side of one table: check, vote, commit, replay, and end orphans."""

from __future__ import annotations

import logging
import threading
import uuid
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final, TypeVar

import psycopg
from psycopg import errors

from epochsink.errors import ConfigurationError, PrepareFailed, SpoolMissing, WentBack
from epochsink.identity import identity_key
from epochsink.postgres import applied_epochs as marker_table
from epochsink.postgres import orphans
from epochsink.postgres.applied_epochs import Marker, require_same_table
from epochsink.postgres.catalog import max_prepared_transactions
from epochsink.postgres.commit import Commit, commit_side_by_side
from epochsink.postgres.committable import Relation, StagedTask, read_part, read_written
from epochsink.postgres.config import PostgresConfig
from epochsink.postgres.errors import describe, failure, is_disconnected, is_passing, translated
from epochsink.postgres.place import Place
from epochsink.postgres.preflight import check, unreachable
from epochsink.postgres.prepared_transaction import commit_prepared
from epochsink.postgres.remnants import name_holder
from epochsink.postgres.server import Server, deadline
from epochsink.postgres.sessions import Session, SessionName, watched
from epochsink.postgres.spooled import SpooledRows, SpooledTask
from epochsink.postgres.vote import Share, Voter, vote, vote_by_task
from epochsink.postgres.writer import by_task_writer
from epochsink.retry import retrying
from epochsink.sink import Task, write_all

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import pyarrow as pa

    from epochsink.postgres.committable import Member, Merge, Part
    from epochsink.postgres.server import Connection
    from epochsink.sink import Ballot, Committable, Epoch, Identity, LastDone, Rows, Verdict

_log = logging.getLogger(__name__)

Voted = TypeVar("Voted")

RETRY_SECONDS: Final = 30.0
"""Seconds for which a commit that meets a passing failure is repeated before its outcome is called unknown."""

_VOTE_TURNS: Final = 3
_PURGE_EVERY: Final = 100


class PostgresCommitter:
    """The driver's side of one PostgreSQL sink. Each of the coordinator's threads has a session, and both share one."""

    def __init__(self, config: PostgresConfig, retry_seconds: float = RETRY_SECONDS) -> None:
        self._config = config
        self._server = Server.of(config)
        self._relation = Relation.of(config.table)
        self._retry_seconds = retry_seconds
        self._voting = Session(self._server, "epochsink")
        self._settling = Session(self._server, "epochsink")
        self._checking = Session(self._server, "epochsink")
        self._check_lock = threading.Lock()
        self._purge_at = 0  # by number alone, epochs without rows would be the ones that purge

    def check(self, schema: pa.Schema) -> list[str]:
        """Compare configuration, row and live table; create the marker table. Return the findings."""
        try:
            connection = self._voting.connection()
            findings = check(self._config, connection, schema)
            mode = self._config.mode(max_prepared_transactions(connection))
        except psycopg.OperationalError as error:
            return [unreachable(self._config, error)]
        _log.info("%s: commit=%r, epochs are %s", self._relation, self._config.commit, mode)
        return findings

    def initial_state(self) -> dict[str, Any]:
        """Insert the mark of joining; return it, the markers' schema and the database.

        In another schema or database an applied epoch would look lost.
        """
        base = uuid.uuid4().hex
        with translated(f"joining {self._relation}"):
            connection = self._voting.connection(self._retry_seconds)
            marker_table.create(connection, self._config.marker_schema)
            # before the ledger names it: so a mark that the ledger names and the table lacks was removed
            self._marker.join(connection, self._identity, base)
            place = Place.of(connection).to_json()
        return {"schema": self._config.marker_schema, "base": base, "place": place}

    def open(self, identity: Identity) -> None:
        """Take the sink's identity. Raises `ConfigurationError` if its markers are in another schema."""
        configured = self._config.marker_schema
        schema = identity.origin.get("schema", configured)
        if schema != configured:
            raise ConfigurationError(
                f"marker_schema={configured!r}, and this checkpoint's markers are in {schema!r}",
                hint=f"keep marker_schema={schema!r}; another schema needs a new checkpoint",
            )
        self.close()
        self._identity = identity
        self._key = identity_key(identity)
        self._marker = Marker.of(self._config.marker_schema, identity)
        name = str(SessionName(self._key, identity.generation))
        self._voting = Session(self._server, name)
        self._settling = Session(self._server, name)
        self._checking = Session(self._server, name)
        self._commit = Commit(identity, self._relation, self._marker, self._server, self._settling, self._retry_seconds)

    def close(self) -> None:
        """Release the sessions."""
        for session in (self._voting, self._settling, self._checking):
            session.close()

    def newest(self) -> int | None:
        """Return the newest epoch whose marker is committed. Raises `EpochsinkError`."""
        with translated(f"reading the marker of {self._relation}"):
            return self._marker.newest(self._voting.connection(self._retry_seconds))

    def leftovers(self) -> list[str]:
        """Return prepared transactions and staging tables of this identity."""
        with translated(f"looking for leftovers of {self._relation}"):
            return self._sweeper(self._voting.connection(self._retry_seconds)).names()

    def newest_generation(self) -> int:
        """Return the highest generation of a prepared transaction, staging table or session of this identity."""
        with translated(f"looking for leftovers of {self._relation}"):
            return self._sweeper(self._voting.connection(self._retry_seconds)).newest_generation()

    def verify_applied(self, done: LastDone | None, pending: LastDone | None) -> None:
        """Compare the marker rows with the ledger; commit what a failover has made prepared again."""
        # both threads call this, and share the session
        with self._check_lock, translated(f"reading the marker of {self._relation}"):
            connection = self._checking.connection(self._retry_seconds)
            try:
                with deadline(connection, self._retry_seconds):
                    self._require_place(connection, done)
                    self._marker.verify(connection, self._relation, done, pending)
            except WentBack:
                if not (self._finish_again(connection, done) if done else self._join_again(connection, pending)):
                    raise
                self._marker.verify(connection, self._relation, done, pending)
            with deadline(connection, self._retry_seconds):
                schema = self._config.marker_schema
                require_same_table(connection, schema, self._identity, self._relation, done=done, pending=pending)

    def _require_place(self, connection: Connection, done: LastDone | None) -> None:
        """Raise `WentBack` if the newest epoch was prepared in another database."""
        if done is None:
            recorded = Place.from_json(self._identity.origin.get("place"))
        else:
            recorded = next((part.place for part in map(read_part, done.parts)), None)
        if recorded is not None:
            Place.of(connection).require(recorded, self._relation, done.epoch if done else -1)

    def _join_again(self, connection: Connection, pending: LastDone | None) -> bool:
        """Insert the mark of joining again if no epoch was ever committed: its loss hides no epoch."""
        if pending is not None or self._marker.base is None:
            return False
        self._marker.join(connection, self._identity, self._marker.base)
        return True

    def _finish_again(self, connection: Connection, done: LastDone) -> bool:
        """Commit parts of a done epoch that are prepared again: the server has lost the end of its log.

        What was committed before these parts were prepared is still there, so the order of epochs is kept. Return
        whether there was such a part.
        """
        gids = {part.gid for part in map(read_part, done.parts) if part.gid}
        again = orphans.still_prepared(connection, gids)
        for gid in again:
            _log.warning("%s is prepared again, and its epoch is done: a failover lost its commit. Committing it", gid)
            with watched(connection, self._server, self._retry_seconds):
                commit_prepared(connection, gid)
        return bool(again)

    # ---- phase 1

    def share(self, epoch: Epoch, ballot: Ballot) -> Share:
        """Return where the accepted tasks' rows are. Raises `PrepareFailed`."""
        written = [read_written(answer) for answer in ballot.parts]
        spooled = [task for task in written if isinstance(task, SpooledTask)]
        staged = [task for task in written if isinstance(task, StagedTask)]
        if spooled and staged:
            raise PrepareFailed(f"only some tasks of epoch {epoch.number} have staged their rows for {self._relation}")
        return Share(self._voter(ballot.after), SpooledRows.of(spooled, ballot.rows) if spooled else staged)

    def share_again(self, member: Member, ballot: Ballot) -> Share:
        """Return where a recorded part's rows are kept, to be written as it was recorded."""
        voter = Voter(self._as_recorded(member.merge), self._identity, ballot.after)
        return Share(voter, SpooledRows(member.tasks, member.rows, ballot.rows))

    def vote_by_task(self, epoch: Epoch, ballot: Ballot) -> Sequence[Part]:
        """Verify that what each task has prepared is there."""
        written = [read_part(answer) for answer in ballot.parts]
        voter = self._voter(ballot.after)
        return self._repeated(epoch, [self._relation], lambda session: vote_by_task(session, voter, epoch, written))

    def vote(self, epoch: Epoch, shares: Mapping[str, Share]) -> Part:
        """Prepare the rows of one or several sinks as one."""
        tables = [share.voter.table for share in shares.values()]
        try:
            return self._repeated(epoch, tables, lambda session: vote(session, epoch, shares))
        except (OSError, SpoolMissing) as missing:
            raise PrepareFailed(
                f"the rows that epoch {epoch.number} has spooled for {self._relation} cannot be read back: {missing}",
                hint="Spark runs the epoch again, which writes them anew",
            ) from missing

    def _voter(self, after: LastDone | None) -> Voter:
        return Voter(self._config, self._identity, after)

    def _repeated(self, epoch: Epoch, tables: Sequence[Relation], vote: Callable[[Connection], Voted]) -> Voted:
        """Vote; a passing failure is retried."""

        def once() -> Voted:
            # a new session if the last one was lost: a server that restarts in mid-vote has kept what is durable
            connection = self._voting.connection(self._retry_seconds)
            with watched(connection, self._server):
                return vote(connection)

        doing = f"preparing epoch {epoch.number} of {self._relation}"
        with translated(doing):
            try:
                return retrying(_is_worth_voting_again, attempts=_VOTE_TURNS, longest_pause=1.0)(once)
            except errors.LockNotAvailable as refused:
                waited = failure(refused, doing)
                raise name_holder(
                    self._voting.connection(self._retry_seconds), tables, self._key, self._identity.generation, waited
                ) from refused

    # ---- phase 2

    def commit(self, epoch: Epoch, part: Committable, rows: Rows, after: Mapping[str, LastDone]) -> Verdict:
        """Commit a prepared transaction, or merge staged rows; passing failures are retried for `RETRY_SECONDS`."""
        return self._commit(epoch, read_part(part), rows, after)

    def commit_at_once(self, parts: Sequence[Committable]) -> set[int]:
        """Commit prepared transactions side by side if there are many; return the indices of those committed."""
        known = {index: read_part(part).gid for index, part in enumerate(parts)}
        gids = {index: gid for index, gid in known.items() if gid is not None}
        name = str(SessionName(self._key, self._identity.generation))
        return commit_side_by_side(self._server, name, gids, self._retry_seconds)

    def replay(self, again: Epoch, shares: Mapping[str, Share]) -> Part:
        """Prepare the rows of one or several sinks as one again, from the spool."""
        with translated(f"preparing epoch {again.number} of {self._relation} again"):
            connection = self._settling.connection(self._retry_seconds)
            with watched(connection, self._server):
                return vote(connection, again, shares)

    def replay_task(self, again: Epoch, member: Member, rows: Rows) -> Committable:
        """Prepare the rows of one task again, from the spool."""
        (uuid,) = member.tasks
        writer = by_task_writer(self._as_recorded(member.merge), Task(self._identity, again, 0, uuid))
        return write_all(writer, rows.read(uuid))

    def _as_recorded(self, merge: Merge) -> PostgresConfig:
        """Return the options with table, key and deletes as the epoch was written, whatever a later start sets."""
        given = {item.name: getattr(self._config, item.name) for item in fields(PostgresConfig)}
        schema, table = merge.target.schema, merge.target.name
        recorded = {
            "table": (table,) if schema is None else (schema, table),
            "key": merge.key,
            "order_by": self._config.order_by if merge.key else (),
            "delete_when": (self._config.delete_when or "true") if merge.deletes else None,
        }
        return PostgresConfig(**given | recorded)

    # ---- leftovers

    def abort_orphans(self, keep: Sequence[Committable], done: Sequence[Committable] = ()) -> list[str]:
        """End sessions, prepared transactions and staging tables that ``keep`` does not name.

        Raises `ConnectionError` if the server cannot be reached: the next sweep finds what is left.
        """
        doing = f"sweeping leftovers of {self._relation}"
        with translated(doing):
            try:
                return self._sweeper(self._voting.connection(self._retry_seconds)).end_all(
                    [read_part(part) for part in keep], [read_part(part) for part in done]
                )
            except psycopg.OperationalError as error:
                if is_disconnected(error):
                    raise ConnectionError(f"{doing}: {self._server.database}: {describe(error)}") from error
                raise

    def finish(self, epoch: Epoch, parts: Sequence[Committable]) -> None:
        """Drop the epoch's staging table, and from time to time old markers."""
        tables = {part.members[self._identity.sink].table for part in map(read_part, parts)}
        try:
            connection = self._settling.connection()
            sweeper = self._sweeper(connection)
            for table in filter(None, tables):
                sweeper.drop(table)
            if epoch.number >= self._purge_at:
                self._marker.purge(connection, epoch.number)
                self._purge_at = epoch.number + _PURGE_EVERY
        except psycopg.Error as error:
            _log.warning("leftovers of epoch %d stay for the next sweep: %s", epoch.number, describe(error))

    def _sweeper(self, connection: Connection) -> orphans.Orphans:
        return orphans.Orphans(connection, self._config.marker_schema, self._key, self._identity.generation)


def _is_worth_voting_again(error: BaseException) -> bool:
    # not LockNotAvailable: the lock has been waited for already, for ``timeout`` seconds
    return is_passing(error) or isinstance(error, (errors.DeadlockDetected, errors.SerializationFailure))
