"""Phase 2: commit what Spark has decided.

Each commit waits for the disk. Many prepared transactions are committed in several sessions: the server writes its log
once for all commits that wait at the same moment, so that they take little longer than one.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final

import psycopg
from psycopg import errors

from epochsink.errors import EpochsinkError, PrepareFailed, RowsRejected, SpoolMissing
from epochsink.failpoints import reach
from epochsink.postgres import applied_epochs, orphans
from epochsink.postgres.applied_epochs import Marker
from epochsink.postgres.catalog import TableChanged, require_unchanged
from epochsink.postgres.committable import WHOLE, read_part
from epochsink.postgres.dead_letter import Letters
from epochsink.postgres.errors import AwaitsStandby, describe, failure, is_contended, is_passing, rule_of
from epochsink.postgres.merge import merge
from epochsink.postgres.place import Place
from epochsink.postgres.prepared_transaction import commit, commit_prepared, is_busy, transaction
from epochsink.postgres.sessions import watched
from epochsink.retry import retrying
from epochsink.sink import COMMITTED, Identity, LastDone, Outcome, Verdict, one_by_one

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from epochsink.postgres.committable import Member, Part
    from epochsink.postgres.server import Connection, Server
    from epochsink.postgres.sessions import Session
    from epochsink.postgres.table import Table
    from epochsink.sink import Ballots, Epoch

_log = logging.getLogger(__name__)

MOST_SESSIONS: Final = 8
WORTH_A_SESSION: Final = 8
"""How many transactions are worth another session: to open one takes about as long as to commit 8."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Commits parts of a query's epochs, in ``session``."""

    query_id: str
    server: Server
    session: Session
    retry_seconds: float

    def all_of(self, epoch: Epoch, parts: Sequence[Part], ballots: Ballots) -> dict[Part, Verdict]:
        """Commit parts: an epoch's seal first, and nothing that it stands for before the server has confirmed that."""
        verdicts: dict[Part, Verdict] = {}
        # a seal stands for the parts of its own sink
        of_sinks: dict[tuple[str, ...], list[Part]] = {}
        for part in parts:
            of_sinks.setdefault(tuple(part.members), []).append(part)
        for own in of_sinks.values():
            unknown = next((one for one in verdicts.values() if one.outcome is Outcome.UNKNOWN), None)
            verdicts |= self._of_sink(epoch, own, ballots) if unknown is None else dict.fromkeys(own, unknown)
        return verdicts

    def _of_sink(self, epoch: Epoch, parts: Sequence[Part], ballots: Ballots) -> dict[Part, Verdict]:
        seal = next((part for part in parts if part.is_seal), None)
        others = [part for part in parts if part is not seal]
        verdicts = {}
        if seal is not None:
            verdicts[seal] = sealed = self(epoch, seal, ballots)
            if sealed.outcome is Outcome.UNKNOWN:
                waits = replace(sealed, evidence=f"it waits for its epoch's seal {seal.gid}: {sealed.evidence}")
                return verdicts | dict.fromkeys(others, waits)
            if sealed.outcome is Outcome.ABORTED:
                unsealed = one_by_one(others, lambda part: self(epoch, part, ballots, is_sealed=False))
                return verdicts | dict(zip(others, unsealed, strict=True))
        gids = {index: part.gid for index, part in enumerate(others) if part.gid is not None}
        at_once = commit_side_by_side(self.server, self.session.name, gids, self.retry_seconds)
        committed = one_by_one(others, lambda part: self(epoch, part, ballots), at_once)
        return verdicts | dict(zip(others, committed, strict=True))

    def __call__(self, epoch: Epoch, part: Part, ballots: Ballots, *, is_sealed: bool = True) -> Verdict:
        """Commit a prepared transaction or merge staged rows. Passing failures are retried for ``retry_seconds``.

        ``ballots`` are those of the sinks that have recorded the part; there may be others. While its seal is gone
        (``is_sealed=False``) a part that is still prepared is aborted too: `PostgresCommitter.replay` makes the seal
        again, and leaves such a part as it is.
        """
        again = retrying(_is_worth_repeating, seconds=self.retry_seconds, first_pause=0.05, longest_pause=2.0)
        try:
            if part.gid is not None:
                # the prepared transaction has compared the markers itself
                settle = self._commit_prepared if is_sealed else self._look
                return again(settle, epoch, part, part.gid, ballots)
            return again(self._commit_staged, epoch, part, ballots)
        except TableChanged as changed:
            return _written_again(epoch, part, changed, ballots)
        except psycopg.Error as error:
            evidence = f"{self.server.database}: {describe(error)}"
            if isinstance(error, AwaitsStandby):
                return Verdict(Outcome.UNKNOWN, f"{evidence}; {rule_of(error).hint}")
            if is_passing(error) or is_busy(error):
                return Verdict(Outcome.UNKNOWN, evidence)
            change = self._change(part)
            if change is not None:
                return _written_again(epoch, part, change, ballots)
            # the server has answered and committed nothing: this is a refusal, not an unknown outcome
            raise _refused(error, epoch, part) from error

    def _change(self, part: Part) -> TableChanged | None:
        """Return how a table has changed since rows were staged for it, which may be why the INSERT failed."""
        if part.gid is not None:
            return None
        connection = self.session.connection()
        with transaction(connection):
            try:
                for member in part.members.values():
                    require_unchanged(connection, member.merge)
            except TableChanged as changed:
                return changed
            finally:
                connection.rollback()
        return None

    def _commit_prepared(self, epoch: Epoch, part: Part, gid: str, ballots: Ballots) -> Verdict:
        connection = self.session.connection()
        try:
            with watched(connection, self.server, self.retry_seconds):
                commit_prepared(connection, gid)
        except errors.UndefinedObject:
            return self._ask_marker(connection, epoch, part, ballots)
        reach("postgres.committed")
        return COMMITTED

    def _look(self, epoch: Epoch, part: Part, gid: str, ballots: Ballots) -> Verdict:
        connection = self.session.connection()
        if orphans.still_prepared(connection, {gid}):
            return Verdict(Outcome.ABORTED, f"{gid} waits for the seal of its epoch, which is gone")
        return self._ask_marker(connection, epoch, part, ballots)

    def _marker(self, sink: str, member: Member) -> Marker:
        return Marker(member.schema, Identity(self.query_id, sink))

    def _ask_marker(self, connection: Connection, epoch: Epoch, part: Part, ballots: Ballots) -> Verdict:
        # each sink has a marker in the transaction; for another one it may have been prepared again by itself, once a
        # later start has set the sinks apart
        sink, member = next((one, part.members[one]) for one in part.members if one in ballots)
        Place.of(connection)  # refuses a standby, which may lack the marker
        applied_by = self._marker(sink, member).attempt(connection, epoch.number, part.name)
        if applied_by == part.attempt:
            return COMMITTED
        if applied_by is None:
            gone = part.gid or ", ".join(sorted(part.tables))
            return Verdict(Outcome.ABORTED, f"{gone} is gone and the marker is absent")
        return Verdict(
            Outcome.UNKNOWN,
            f"the marker says that attempt {applied_by} applied epoch {epoch.number}, and the ledger records attempt "
            f"{part.attempt}",
        )

    def _commit_staged(self, epoch: Epoch, part: Part, ballots: Ballots) -> Verdict:
        connection, members = self.session.connection(), part.members
        try:
            with watched(connection, self.server), transaction(connection):
                own = LastDone(epoch.number, epoch.attempt, (part.to_json(),))
                for sink, member in members.items():
                    marker, after = self._marker(sink, member), ballots[sink].after if sink in ballots else None
                    if after is not None:
                        # before our own mark, which would hide that the one of the epoch before it is missing; the lock
                        # that this takes keeps the markers from being dropped until the transaction ends
                        marker.verify(connection, member.merge.target, after, own)
                    marker.insert(connection, epoch.number, WHOLE, part.attempt)
                for member in members.values():
                    if not orphans.exists(connection, member.staging):
                        raise PrepareFailed(f"staging table {member.staging} is gone")
                merge(connection, members, Letters(self.query_id, epoch.number, part.attempt))
                reach("postgres.merged")
                commit(connection)
        except errors.UniqueViolation as refused:
            markers = {(member.schema, applied_epochs.TABLE) for member in members.values()}
            if (refused.diag.schema_name, refused.diag.table_name) not in markers:
                raise
            return self._ask_marker(connection, epoch, part, ballots)
        except (RowsRejected, TableChanged):
            raise
        except PrepareFailed as failed:
            if not failed.may_pass:
                failed.hint += "; the epoch stays recorded, and the next start commits it"
                raise
            return Verdict(Outcome.ABORTED, f"{failed.message}, and the marker is absent")
        reach("postgres.committed")
        return COMMITTED


def _written_again(epoch: Epoch, part: Part, changed: TableChanged, ballots: Ballots) -> Verdict:
    """Declare staged rows void if the spool has them: they are staged again for the table as it is now."""
    try:
        for sink in part.members.keys() & ballots.keys():
            ballots[sink].rows.verify()
    except SpoolMissing as gone:
        raise PrepareFailed(
            f"committing epoch {epoch.number}, which is decided: {changed.message}; its rows cannot be staged "
            f"again: {gone.message}",
            hint="change the table back; the epoch stays recorded, and the next start commits it",
            may_pass=False,
        ) from changed
    return Verdict(Outcome.ABORTED, f"{changed.message}, and the marker is absent")


def _refused(error: psycopg.Error, epoch: Epoch, part: Part) -> PrepareFailed:
    tables = ", ".join(str(member.merge.target) for member in part.members.values())
    known = failure(error, f"committing epoch {epoch.number}, which is decided, into {tables}")
    if part.gid is not None and isinstance(error, errors.InsufficientPrivilege):
        known.hint = "only the role that prepared it, or a superuser, may: start the query as that role once"
    known.hint = f"{known.hint}; the epoch stays recorded, and the next start commits it".removeprefix("; ")
    return known


def _is_worth_repeating(error: BaseException) -> bool:
    return is_busy(error) or is_contended(error) or is_passing(error)


def finish_again(connection: Connection, server: Server, seconds: float, table: Table, done: LastDone) -> bool:
    """Commit parts of a done epoch that are prepared again: the server has lost the end of its log.

    What was committed before these parts were prepared is still there, so the order of epochs is kept. Tasks with
    ``atomic=False`` may have prepared theirs before the last commit of the epoch before: it is there if the seal is.
    So nothing is committed unless all parts are there. Return whether there was a part to commit.
    """
    parts = [read_part(part) for part in done.parts]
    again = orphans.still_prepared(connection, {part.gid for part in parts if part.gid})
    left = [part for part in parts if part.gid in again]
    marked = (table.marker.attempt(connection, done.epoch, part.name) == part.attempt for part in parts)
    if not all(part in left or is_marked for part, is_marked in zip(parts, marked, strict=True)):
        return False
    for gid in filter(None, (part.gid for part in left)):
        _log.warning("%s is prepared again, and its epoch is done: a failover lost its commit. Committing it", gid)
        with watched(connection, server, seconds):
            commit_prepared(connection, gid)
    return bool(left)


def commit_side_by_side(server: Server, name: str, gids: Mapping[int, str], seconds: float) -> set[int]:
    """Commit prepared transactions; return the keys of those that the server has confirmed.

    ``name`` is that of the sessions, ``seconds`` the limit for one commit. What fails is committed one by one later.
    """
    sessions = min(MOST_SESSIONS, len(gids) // WORTH_A_SESSION)
    if sessions < 2:  # noqa: PLR2004 - one session is there already
        return set()
    turns: SimpleQueue[tuple[int, str]] = SimpleQueue()
    for turn in gids.items():
        turns.put(turn)
    with ThreadPoolExecutor(sessions, "epochsink-commit-prepared") as threads:
        done = threads.map(lambda _: _commit(server, name, turns, seconds), range(sessions))
        return set().union(*done)


def _commit(server: Server, name: str, turns: SimpleQueue[tuple[int, str]], seconds: float) -> set[int]:
    try:
        connection = server.connect(name)
    except (psycopg.Error, EpochsinkError) as refused:
        _log.info("%s: no further session to commit in: %s", server.database, refused)
        return set()
    committed = set()
    with closing(connection), suppress(Empty):
        while True:
            key, gid = turns.get_nowait()
            try:
                with watched(connection, server, seconds):
                    commit_prepared(connection, gid)
            except psycopg.Error as failure:
                _log.info("%s: the commit of %s is tried again: %s", server.database, gid, describe(failure))
                if connection.closed or isinstance(failure, AwaitsStandby):
                    break
            else:
                reach("postgres.committed")
                committed.add(key)
    return committed
