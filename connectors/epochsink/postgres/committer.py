"""The driver's side of the PostgreSQL sinks of one database: check, vote, commit, replay, and end orphans."""

from __future__ import annotations

import logging
import threading
import uuid
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, TypeVar

import psycopg
from psycopg import errors

from epochsink.errors import ConfigurationError, PrepareFailed, SpoolMissing, WentBack
from epochsink.identity import identity_key
from epochsink.postgres import applied_epochs
from epochsink.postgres.audit import audit
from epochsink.postgres.catalog import max_prepared_transactions
from epochsink.postgres.commit import Commit, finish_again
from epochsink.postgres.committable import WHOLE, Relation, read_part
from epochsink.postgres.dead_letter import Letters
from epochsink.postgres.errors import describe, failure, is_disconnected, is_passing, translated
from epochsink.postgres.examine import examine
from epochsink.postgres.letters import PostgresLetters
from epochsink.postgres.orphans import still_prepared
from epochsink.postgres.place import Place
from epochsink.postgres.preflight import check, unreachable
from epochsink.postgres.remnants import name_holder, remnants
from epochsink.postgres.repair import lacking, reapply
from epochsink.postgres.server import PING_SECONDS, Server, deadline
from epochsink.postgres.sessions import Session, SessionName, unblocked, watched
from epochsink.postgres.spooled import SpooledRows
from epochsink.postgres.table import Table
from epochsink.postgres.table_identity import require_same_table
from epochsink.postgres.vote import Share, prepare_seal, vote, vote_by_task
from epochsink.postgres.writer import by_task_writer
from epochsink.retry import retrying
from epochsink.sink import Epoch, Finding, Keeping, LastDone, Outcome, Participant, Task, write_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import pyarrow as pa

    from epochsink.postgres.committable import Part
    from epochsink.postgres.config import PostgresConfig
    from epochsink.postgres.server import Connection
    from epochsink.sink import (
        Ballots,
        Committable,
        Committables,
        Comparison,
        Identity,
        Parts,
        Receipt,
        Recorder,
        Remnant,
        Verdict,
    )

_log = logging.getLogger(__name__)
Voted = TypeVar("Voted")

RETRY_SECONDS: Final = 30.0
"""Seconds for which a commit that meets a passing failure is repeated before its outcome is called unknown."""

_VOTE_TURNS: Final = 3
_PURGE_EVERY: Final = 100


class PostgresCommitter(Participant):
    """Puts the rows that an epoch has for tables of one database into one transaction.

    What commits as one is one part, which each sink records. A sink with ``atomic=False`` is alone, and has a seal and
    a part for each task.

    There is a session to vote and sweep in, one to commit in, and one for each sink to ask about its table. They are
    named after their sinks, the first two after the first one.
    """

    repairs = True

    def __init__(self, members: Mapping[str, PostgresConfig], retry_seconds: float = RETRY_SECONDS) -> None:
        super().__init__(members)
        self._first, self._config = next(iter(members.items()))
        # a delete does not see a row that is only prepared, and a foreign key does not see its parent
        self.writers_read = not self._config.atomic
        self._server = Server.of(self._config)
        self._retry_seconds = retry_seconds
        self._tables: dict[str, Table] = {}
        self._voting = Session(self._server, "epochsink")
        self._settling = Session(self._server, "epochsink")
        self._asking = {name: Session(Server.of(config), "epochsink") for name, config in members.items()}
        self._asking_lock = threading.Lock()  # both of the coordinator's threads ask
        self._purge_at = dict.fromkeys(members, 0)  # by number alone, epochs without rows would be the ones that purge

    # ---- one sink

    def check(self, sink: str, schema: pa.Schema) -> list[str]:
        """Compare configuration, row and live table; create the marker table. Return the findings."""
        config: PostgresConfig = self.members[sink]
        try:
            connection = self._asking[sink].connection()
            findings = check(config, connection, schema)
            mode = config.mode(max_prepared_transactions(connection))
        except psycopg.Error as error:
            return [unreachable(config, error)]
        _log.info("%s: commit=%r, epochs are %s", Relation.of(config.table), config.commit, mode)
        return findings

    def examine(self, sink: str) -> Iterator[Finding]:
        """Look at the server; see `epochsink.postgres.examine`."""
        config: PostgresConfig = self.members[sink]
        try:
            yield from examine(config, self._asking[sink].connection())
        except psycopg.Error as error:
            yield Finding("server", unreachable(config, error), is_fatal=True)

    def in_target(self) -> list[Remnant]:
        """Return the prepared transactions and staging tables of these sinks."""
        keys = {table.key for table in self._tables.values()}
        with self._asking_lock, translated(f"looking for what {self._named(self._tables)} have pending"):
            # not patient: an operator waits for the answer
            connection = self._asking[self._first].connection()
            with deadline(connection, PING_SECONDS):
                return [one for one in remnants(connection) if one.key in keys]

    def initial_state(self, sink: str) -> dict[str, Any]:
        """Insert the mark of joining; return it, the markers' schema and the database.

        In another schema or database an applied epoch would look lost.
        """
        base, table = uuid.uuid4().hex, self._tables[sink]
        schema = table.config.marker_schema
        with self._ask(sink, f"joining {table}") as connection:
            applied_epochs.create(connection, schema)
            # before the ledger names it: so a mark that the ledger names and the table lacks was removed
            table.marker.join(connection, base)
            return {"schema": schema, "base": base, "place": Place.of(connection).to_json()}

    def open(self, identity: Identity) -> None:
        """Take a sink's identity. Raises `ConfigurationError` if its markers are in another schema."""
        super().open(identity)
        sink, config = identity.sink, self.members[identity.sink]
        schema = identity.origin.get("schema", config.marker_schema)
        if schema != config.marker_schema:
            raise ConfigurationError(
                f"marker_schema={config.marker_schema!r}, and this checkpoint's markers are in {schema!r}",
                hint=f"keep marker_schema={schema!r}; another schema needs a new checkpoint",
            )
        self._tables[sink] = Table(config, identity)
        name = str(SessionName(identity_key(identity), identity.generation))
        self._asking[sink].close()
        self._asking[sink] = Session(Server.of(config), name)
        if sink == self._first:
            self._voting.close()
            self._settling.close()
            self._voting, self._settling = Session(self._server, name), Session(self._server, name)

    def newest(self, sink: str) -> int | None:
        """Return the newest epoch whose marker is committed. Raises `EpochsinkError`."""
        table = self._tables[sink]
        with self._ask(sink, f"reading the marker of {table}") as connection:
            return table.marker.newest(connection)

    def leftovers(self, sink: str) -> list[str]:
        """Return prepared transactions and staging tables of a sink."""
        table = self._tables[sink]
        with self._ask(sink, f"looking for leftovers of {table}") as connection:
            return table.orphans(connection).names()

    def newest_generation(self, sink: str) -> int:
        """Return the highest generation of a prepared transaction, staging table or session of a sink."""
        table = self._tables[sink]
        with self._ask(sink, f"looking for leftovers of {table}") as connection:
            return table.orphans(connection).newest_generation()

    def verify_applied(self, sink: str, done: LastDone | None, pending: LastDone | None) -> None:
        """Compare the marker rows with the ledger; commit what a failover has made prepared again."""
        table = self._tables[sink]
        with self._ask(sink, f"reading the marker of {table}") as connection:
            with unblocked(connection, self._server, str(table.marker), self._retry_seconds):
                self._tables[sink] = table = table.located(connection)
                if pending is not None:
                    # before anything is finished: an old primary may have prepared what the present one has
                    table.require_place(connection, done, pending)
            try:
                with unblocked(connection, self._server, str(table.marker), self._retry_seconds):
                    table.require_place(connection, done)
                    table.marker.verify(connection, table.relation, done, pending)
            except WentBack:
                if done:
                    again = finish_again(connection, self._server, self._retry_seconds, table, done)
                else:
                    again = table.join_again(connection, pending)
                if not again:
                    raise
                table.marker.verify(connection, table.relation, done, pending)
            with unblocked(connection, self._server, str(table.marker), self._retry_seconds):
                require_same_table(connection, table, done, pending)

    def audit(
        self, sink: str, done: LastDone | None, pending: LastDone | None, receipts: Sequence[Receipt]
    ) -> Sequence[Comparison]:
        """Compare markers, and count the rows that each epoch has appended; see `epochsink.postgres.audit`."""
        table = self._tables[sink]
        with self._ask(sink, f"comparing {table} with the ledger") as connection:
            table.require_place(connection, done, pending)
            table.marker.verify(connection, table.relation, done, pending)
            return audit(connection, table, receipts)

    def letters(self, sink: str) -> PostgresLetters:
        """Return the letters of a sink, whether it sets rows aside now or did so before."""
        return PostgresLetters(self._tables[sink], partial(self._ask, sink))

    @contextmanager
    def _ask(self, sink: str, doing: str) -> Iterator[Connection]:
        """Lend one of the threads the session in which it asks about a sink's table."""
        with self._asking_lock, translated(doing):
            yield self._asking[sink].connection(self._retry_seconds)

    # ---- phase 1

    def keeping(self, epoch: Epoch, schemas: Mapping[str, pa.Schema]) -> Mapping[str, Keeping]:
        """Leave rows to the spool alone, unless each task commits its own."""
        return {
            name: Keeping.IN_SPOOL_ALONE if keeping is Keeping.IN_SPOOL and self._config.atomic else keeping
            for name, keeping in super().keeping(epoch, schemas).items()
        }

    def vote(self, epoch: Epoch, ballots: Ballots) -> Parts:
        """Prepare the rows of all sinks as one part; if each task has prepared its own, verify that they are there."""
        if not self._config.atomic:
            ((sink, ballot),) = ballots.items()
            table = self._tables[sink]
            return {sink: self._voted(epoch, ballots, lambda session: vote_by_task(session, table, epoch, ballot))}
        shares = {name: Share.of(self._tables[name], epoch, ballot) for name, ballot in ballots.items()}
        try:
            part = self._voted(epoch, ballots, lambda session: vote(session, epoch, shares))
        except (OSError, SpoolMissing) as missing:
            raise PrepareFailed(
                f"the rows that epoch {epoch.number} has spooled for {self._named(ballots)} cannot be read back: "
                f"{missing}",
                hint="Spark runs the epoch again, which writes them anew",
            ) from missing
        return {name: [part.to_json()] for name in ballots}

    def _voted(self, epoch: Epoch, sinks: Iterable[str], vote: Callable[[Connection], Voted]) -> Voted:
        """Vote; a passing failure is retried."""

        def once() -> Voted:
            # a new session if the last one was lost: a server that restarts in mid-vote has kept what is durable
            connection = self._voting.connection(self._retry_seconds)
            with watched(connection, self._server):
                return vote(connection)

        doing = f"preparing epoch {epoch.number} of {self._named(sinks)}"
        with translated(doing):
            try:
                return retrying(_is_worth_voting_again, attempts=_VOTE_TURNS, longest_pause=1.0)(once)
            except errors.LockNotAvailable as refused:
                connection = self._voting.connection(self._retry_seconds)
                raise name_holder(
                    connection, [self._tables[name] for name in sinks], failure(refused, doing)
                ) from refused

    # ---- phase 2

    def commit(self, epoch: Epoch, ballots: Ballots) -> Mapping[str, Sequence[Verdict]]:
        """Commit prepared transactions, or merge staged rows; passing failures are retried for `RETRY_SECONDS`."""
        recorded = {name: [read_part(part) for part in ballot.parts] for name, ballot in ballots.items()}
        # what several sinks have recorded is one part
        parts = list(dict.fromkeys(chain.from_iterable(recorded.values())))
        commit = Commit(self._query_id, self._server, self._settling, self._retry_seconds)
        verdict_of = commit.all_of(epoch, parts, ballots)
        return {
            name: [self._with_letters(verdict_of[part], epoch, part, name) for part in own]
            for name, own in recorded.items()
        }

    def _with_letters(self, verdict: Verdict, epoch: Epoch, part: Part, sink: str) -> Verdict:
        """Say how many rows of a committed part became dead letters."""
        member = part.members[sink]
        if verdict.outcome is not Outcome.COMMITTED or not member.merge.sets_aside:
            return verdict
        try:
            connection = self._settling.connection(self._retry_seconds)
            return replace(
                verdict, set_aside=Letters(self._query_id, epoch.number, part.attempt).count(connection, member)
            )
        except psycopg.Error as unread:
            _log.info("the dead letters of epoch %d are not counted: %s", epoch.number, describe(unread))
            return replace(verdict, set_aside=None)

    def replay(self, epoch: Epoch, part: Committable, ballots: Ballots, attempt: str) -> Committable:
        """Copy the spooled rows again and prepare them as ``attempt``, as one for all sinks that share the part.

        A task's part that is still prepared, as it waits for a seal that was gone, is returned as it is.
        """
        recorded, again = read_part(part), Epoch(epoch.number, attempt)
        doing, shares = f"preparing epoch {epoch.number} of {self._named(ballots)} again", {}
        for name, ballot in ballots.items():
            member, after = recorded.members[name], ballot.after
            table = self._tables[name].as_recorded(member.merge)
            if recorded.name != WHOLE:
                with translated(doing):
                    connection = self._settling.connection(self._retry_seconds)
                    if still_prepared(connection, {str(recorded.gid)}):
                        return part
                (task,) = member.tasks
                writer = by_task_writer(table.config, Task(table.identity, again, 0, task), again=True)
                return write_all(writer, ballot.rows.read(task))
            if recorded.is_seal:
                # a failover may have lost the seal before tasks' parts were committed; a repair knows only what lacks
                own = LastDone(epoch.number, epoch.attempt, tuple(ballot.parts))
                shares[name] = Share(table, member, after if after and after.parts else None, own)
            else:
                shares[name] = Share(table, SpooledRows(member.tasks, member.rows, ballot.rows), after)
        with translated(doing):
            connection = self._settling.connection(self._retry_seconds)
            with watched(connection, self._server):
                prepare_again = prepare_seal if recorded.is_seal else vote
                return prepare_again(connection, again, shares).to_json()

    def lacking(self, sink: str, done: LastDone) -> Committables:
        """Return the parts that have no marker row; see `epochsink.postgres.repair`."""
        with self._ask(sink, f"reading the marker of {self._tables[sink]}") as connection:
            return lacking(connection, self._tables[sink], done)

    def reapply(self, epoch: Epoch, ballots: Ballots, record: Recorder) -> Mapping[str, Sequence[Verdict]]:  # noqa: ARG002
        """Commit what is still prepared, and prepare the rest again under the recorded attempt."""
        return reapply(self, epoch, ballots)

    # ---- leftovers

    def abort_orphans(self, keep: Committables, done: Committables = ()) -> list[str]:
        """End sessions, prepared transactions and staging tables that ``keep`` does not name.

        Raises `ConnectionError` if the server cannot be reached: the next sweep finds what is left.
        """
        doing = f"sweeping leftovers of {self._named(self._tables)}"
        pending, ended = [read_part(part) for part in keep], [read_part(part) for part in done]
        with translated(doing):
            try:
                connection = self._voting.connection(self._retry_seconds)
                Place.of(connection)  # refuses a standby, where nothing can be ended
                return [
                    line
                    for table in self._tables.values()
                    for line in table.orphans(connection).end_all(pending, ended)
                ]
            except psycopg.OperationalError as error:
                if is_disconnected(error):
                    raise ConnectionError(f"{doing}: {self._server.database}: {describe(error)}") from error
                raise

    def describe(self, part: Committable) -> str:
        """Return the prepared transaction's name, or the tables in which rows are staged."""
        prepared = read_part(part)
        return prepared.gid or f"rows staged in {', '.join(sorted(prepared.tables))}"

    def finish(self, epoch: Epoch, ballots: Ballots) -> None:
        """Drop the epoch's staging tables, and from time to time old markers."""
        try:
            # without retries: what stays is for the next sweep, and the commit thread has the next epoch to commit
            connection = self._settling.connection()
            for name, ballot in ballots.items():
                table = self._tables[name]
                staging = {part.members[name].table for part in map(read_part, ballot.parts)}
                for staged in filter(None, staging):
                    table.orphans(connection).drop(staged)
                if epoch.number >= self._purge_at[name]:
                    table.marker.purge(connection, epoch.number)
                    self._purge_at[name] = epoch.number + _PURGE_EVERY
        except psycopg.Error as error:
            _log.warning("leftovers of epoch %d stay for the next sweep: %s", epoch.number, describe(error))

    def close(self) -> None:
        """Release the sessions."""
        for session in (self._voting, self._settling, *self._asking.values()):
            session.close()

    def _named(self, sinks: Iterable[str]) -> str:
        return ", ".join(str(self._tables[name]) for name in sinks)

    @property
    def _query_id(self) -> str:
        return self.identities[self._first].query_id


def _is_worth_voting_again(error: BaseException) -> bool:
    # not LockNotAvailable: the lock has been waited for already, for ``timeout`` seconds
    return is_passing(error) or isinstance(error, (errors.DeadlockDetected, errors.SerializationFailure))
