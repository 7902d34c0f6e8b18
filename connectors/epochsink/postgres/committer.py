"""The driver's side of the PostgreSQL sinks of one database: check, vote, commit, replay, and end orphans."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Final, TypeVar

import psycopg
import pyarrow as pa
from psycopg import errors

from epochsink.errors import ConfigurationError, PrepareFailed, SpoolMissing, WentBack
from epochsink.postgres.catalog import max_prepared_transactions
from epochsink.postgres.commit import Commit, finish_again
from epochsink.postgres.committable import WHOLE, Part, Relation, read_part
from epochsink.postgres.config import PostgresConfig
from epochsink.postgres.database import Database
from epochsink.postgres.dead_letter import EpochLetters
from epochsink.postgres.errors import describe, failure, is_disconnected, is_passing, translated
from epochsink.postgres.holder import name_holder
from epochsink.postgres.operator import PostgresOperator
from epochsink.postgres.preflight import check, unreachable
from epochsink.postgres.repair import require_before
from epochsink.postgres.server import Server
from epochsink.postgres.session import Session
from epochsink.postgres.sessions import SessionName
from epochsink.postgres.spooled import AcceptedRows
from epochsink.postgres.table import Table
from epochsink.postgres.table_identity import require_same_table
from epochsink.postgres.vote import TableShare, prepare_seal, vote, vote_by_task
from epochsink.postgres.writer import by_task_writer
from epochsink.retry import retrying
from epochsink.sink import (
    Ballots,
    Committable,
    Epoch,
    Identity,
    Joining,
    Keeping,
    LastDone,
    Marks,
    Outcome,
    Participant,
    Parts,
    Recorded,
    Remnant,
    SinkWriter,
    Task,
    Verdict,
    WriterContext,
    identity_key,
    only_compares,
    write_all,
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

    def __init__(
        self,
        members: Mapping[str, PostgresConfig],
        retry_seconds: float = RETRY_SECONDS,
        connect: Callable[[Server, str, float], Database] = Database.connect,
        writer: Callable[..., SinkWriter] = by_task_writer,
    ) -> None:
        super().__init__(members)
        self._connect = connect
        self._writer = writer
        self._first, self._config = next(iter(members.items()))
        self._servers = {name: Server.of(config) for name, config in members.items()}
        self._server = self._servers[self._first]
        self._retry_seconds = retry_seconds
        self._tables: dict[str, Table] = {}
        self._voting, self._settling = self._session(self._first), self._session(self._first)
        self._asking = {name: self._session(name) for name in members}
        self._asking_lock = threading.Lock()  # both of the coordinator's threads ask
        self._purge_at = dict.fromkeys(members, 0)  # by number alone, epochs without rows would be the ones that purge

    def _session(self, sink: str, name: str = "epochsink") -> Session:
        return Session(partial(self._connect, self._servers[sink]), name)

    def operator(self) -> PostgresOperator:
        """Return what answers an operator's commands."""
        return PostgresOperator(self, self._tables, self._asking, self._ask)

    # ---- one sink

    def check(self, sink: str, schema: pa.Schema) -> list[str]:
        """Compare configuration, row and live table; create the marker table. Return the findings."""
        config: PostgresConfig = self.members[sink]
        try:
            connection = self._asking[sink].database().connection
            findings = check(config, connection, schema)
            mode = config.mode(max_prepared_transactions(connection))
        except psycopg.Error as error:
            return [unreachable(config, error)]
        _log.info("%s: commit=%r, epochs are %s", Relation.of(config.table), config.commit, mode)
        return findings

    def open(self, identity: Identity) -> Joining:
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
        self._asking[sink] = self._session(sink, name)
        if sink == self._first:
            self._voting.close()
            self._settling.close()
            self._voting, self._settling = self._session(sink, name), self._session(sink, name)
        return Joining() if identity.generation or only_compares() else self._joined(identity)

    def _joined(self, identity: Identity) -> Joining:
        """Insert the mark of joining; return it, the markers' schema and the database.

        In another schema or database an applied epoch would look lost.
        """
        base, table = uuid.uuid4().hex, self._tables[identity.sink]
        schema = table.config.marker_schema
        with self._ask(identity.sink, f"joining {table}") as database:
            database.markers(schema).create()
            # before the ledger names it: so a mark that the ledger names and the table lacks was removed
            table.marker.join(database, base)
            origin = {"schema": schema, "base": base, "place": database.place().to_json()}
            return Joining(origin)

    def marks(self, sink: str, done: LastDone | None, pending: LastDone | None) -> Marks:
        """Return the marker rows; commit what a failover has made prepared again. Note which table it is."""
        # again with a new session: one that is lost here would leave the outcome of a decided epoch unknown
        again = retrying(is_passing, seconds=self._retry_seconds, longest_pause=2.0)
        with self._asking_lock, translated(f"reading the marker of {self._tables[sink]}"):
            return again(self._marks, sink, done, pending)

    def _marks(self, sink: str, done: LastDone | None, pending: LastDone | None) -> Marks:
        table, database = self._tables[sink], self._asking[sink].database(self._retry_seconds)
        if only_compares():
            return table.marks(database, done, pending)
        with database.unblocked(str(table.marker), self._retry_seconds):
            self._tables[sink] = table = table.located(database)
            marks = table.marks(database, done, pending)
        # an old primary, which is refused, may have prepared what the present one has committed
        if marks.refusal is None and marks.disagreement(done, pending) is not None:
            if done:
                again = finish_again(database, self._retry_seconds, table, done)
            else:
                again = table.join_again(database, pending)
            if again:
                marks = table.marks(database, done, pending)
        if marks.disagreement(done, pending) is not None:
            return marks
        try:
            with database.unblocked(str(table.marker), self._retry_seconds):
                require_same_table(database, table, done, pending)
        except WentBack as replaced:
            return replace(marks, refusal=replaced)
        return marks

    @contextmanager
    def _ask(self, sink: str, doing: str, *, patient: bool = True) -> Iterator[Database]:
        """Lend one of the threads the session in which it asks about a sink's table."""
        with self._asking_lock, translated(doing):
            yield self._asking[sink].database(self._retry_seconds if patient else 0.0)

    # ---- phase 1

    def begin(
        self, epoch: Epoch, schemas: Mapping[str, pa.Schema], *, retained: bool = False
    ) -> Mapping[str, WriterContext]:
        """Leave rows to the spool alone, unless each task commits its own."""
        contexts = super().begin(epoch, schemas, retained=retained)
        if not self._config.atomic:
            return contexts
        alone = WriterContext(Keeping.IN_SPOOL_ALONE)
        return dict.fromkeys(contexts, alone)

    def vote(self, epoch: Epoch, ballots: Ballots) -> Parts:
        """Prepare the rows of all sinks as one part; if each task has prepared its own, verify that they are there."""
        if not self._config.atomic:
            ((sink, ballot),) = ballots.items()
            table = self._tables[sink]
            return {sink: self._voted(epoch, ballots, lambda session: vote_by_task(session, table, epoch, ballot))}
        shares = {name: TableShare.of(self._tables[name], ballot) for name, ballot in ballots.items()}
        try:
            part = self._voted(epoch, ballots, lambda session: vote(session, epoch, shares))
        except (OSError, SpoolMissing) as missing:
            raise PrepareFailed(
                f"the rows that epoch {epoch.number} has spooled for {self._named(ballots)} cannot be read back: "
                f"{missing}",
                hint="Spark runs the epoch again, which writes them anew",
            ) from missing
        return {name: [part.to_json()] for name in ballots}

    def _voted(self, epoch: Epoch, sinks: Iterable[str], vote: Callable[[Database], Voted]) -> Voted:
        """Vote; a passing failure is retried."""

        def once() -> Voted:
            # a new session if the last one was lost: a server that restarts in mid-vote has kept what is durable
            database = self._voting.database(self._retry_seconds)
            with database.watched():
                return vote(database)

        doing = f"preparing epoch {epoch.number} of {self._named(sinks)}"
        with translated(doing):
            try:
                return retrying(_is_worth_voting_again, attempts=_VOTE_TURNS, longest_pause=1.0)(once)
            except errors.LockNotAvailable as refused:
                database = self._voting.database(self._retry_seconds)
                raise name_holder(
                    database, [self._tables[name] for name in sinks], failure(refused, doing)
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
            name: [self._with_letters(verdict_of[part], epoch, part, name, commit.letters.get(name)) for part in own]
            for name, own in recorded.items()
        }

    def _with_letters(self, verdict: Verdict, epoch: Epoch, part: Part, sink: str, merged: int | None) -> Verdict:
        """Say how many rows of a committed part became dead letters: ``merged``, or as recorded, or counted."""
        member = part.members[sink]
        if verdict.outcome is not Outcome.COMMITTED or not member.merge.sets_aside:
            return verdict
        known = merged if merged is not None else member.letters
        if known is not None:
            return replace(verdict, set_aside=known)
        try:
            database = self._settling.database(self._retry_seconds)
            return replace(
                verdict, set_aside=database.letters_of(EpochLetters(self._query_id, epoch.number, part.attempt), member)
            )
        except psycopg.Error as unread:
            _log.info("the dead letters of epoch %d are not counted: %s", epoch.number, describe(unread))
            return replace(verdict, set_aside=None)

    def replay(self, epoch: Epoch, part: Committable, ballots: Ballots, attempt: str) -> Committable:
        """Copy the spooled rows again and prepare them as ``attempt``, as one for all sinks that share the part.

        A task's part that is still prepared, as it waits for a seal that was gone, is returned as it is.
        """
        recorded, doing = read_part(part), f"preparing epoch {epoch.number} of {self._named(ballots)} again"
        replayed = self._prepared_again(epoch, Epoch(epoch.number, attempt or recorded.attempt), part, ballots, doing)
        if not attempt:
            # Not before, when this may have reached another server: if a failover that comes later spares what was
            # prepared, it spares what was committed before that too.
            with translated(doing):
                for name, ballot in ballots.items():
                    require_before(self._tables[name], self._settling.database(), epoch, ballot.after)
        return replayed

    def _prepared_again(
        self, epoch: Epoch, again: Epoch, part: Committable, ballots: Ballots, doing: str
    ) -> Committable:
        recorded, shares = read_part(part), {}
        for name, ballot in ballots.items():
            member, after = recorded.members[name], ballot.after
            table = self._tables[name].as_recorded(member.merge)
            rows = AcceptedRows(member.tasks, member.rows, ballot.rows)
            if recorded.name != WHOLE:
                with translated(doing):
                    database = self._settling.database(self._retry_seconds)
                    if database.still_prepared({str(recorded.gid)}):
                        return part
                (task,) = member.tasks
                writer = self._writer(table.config, Task(table.identity, again, 0, task), again=True)
                return write_all(writer, ballot.rows.read(task))
            if recorded.is_seal:
                # a failover may have lost the seal before tasks' parts were committed; a repair knows only what lacks
                own = LastDone(epoch.number, epoch.attempt, tuple(ballot.parts))
                share = TableShare(table, rows, after if after and after.parts else None, own)
                with translated(doing):
                    database = self._settling.database(self._retry_seconds)
                    with database.watched():
                        return prepare_seal(database, again, share, member).to_json()
            shares[name] = TableShare(table, rows, after)
        with translated(doing):
            database = self._settling.database(self._retry_seconds)
            with database.watched():
                return vote(database, again, shares).to_json()

    # ---- leftovers

    def remnants(self, recorded: Recorded) -> list[Remnant]:
        """Return sessions, prepared transactions and staging tables."""
        with self._sweeping() as database:
            return [one for table in self._tables.values() for one in table.orphans(database).remnants(recorded)]

    def end(self, remnants: Sequence[Remnant]) -> list[str]:
        """End sessions, then prepared transactions, then staging tables."""
        with self._sweeping() as database:
            return [line for table in self._tables.values() for line in table.orphans(database).end(remnants)]

    @contextmanager
    def _sweeping(self) -> Iterator[Database]:
        """Lend the session to vote and sweep in. Raises `ConnectionError` if the server cannot be reached."""
        doing = f"sweeping leftovers of {self._named(self._tables)}"
        with translated(doing):
            try:
                database = self._voting.database(self._retry_seconds)
                database.place()  # refuses a standby, where nothing can be ended
                yield database
            except psycopg.OperationalError as error:
                if is_disconnected(error):
                    raise ConnectionError(f"{doing}: {self._server.database}: {describe(error)}") from error
                raise

    def finish(self, epoch: Epoch, ballots: Ballots) -> None:
        """Drop the epoch's staging tables, and from time to time old markers."""
        try:
            # without retries: what stays is for the next sweep, and the commit thread has the next epoch to commit
            database = self._settling.database()
            for name, ballot in ballots.items():
                table = self._tables[name]
                staging = {part.members[name].table for part in map(read_part, ballot.parts)}
                for staged in filter(None, staging):
                    table.orphans(database).drop(staged)
                if epoch.number >= self._purge_at[name]:
                    table.marker.purge(database, epoch.number)
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
