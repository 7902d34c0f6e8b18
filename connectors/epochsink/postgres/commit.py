"""Phase 2: commit what Spark has decided.

Each commit waits for the disk. Many prepared transactions are committed in several sessions: the server writes its log
once for all commits that wait at the same moment, so that they take little longer than one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Final

import psycopg
from psycopg import errors

from epochsink.errors import EpochsinkError, PrepareFailed, RowsRejected, SpoolMissing
from epochsink.failpoints import reach
from epochsink.postgres.applied_epochs import MarkerRows
from epochsink.postgres.catalog import TableChanged, require_unchanged
from epochsink.postgres.committable import WHOLE, Member, Part, read_part
from epochsink.postgres.database import Database
from epochsink.postgres.dead_letter import EpochLetters
from epochsink.postgres.errors import AwaitsStandby, describe, failure, is_contended, is_passing, rule_of
from epochsink.postgres.marker_table import TABLE
from epochsink.postgres.merge import by_trying
from epochsink.postgres.prepared_transaction import is_busy
from epochsink.postgres.server import Server
from epochsink.postgres.session import Session
from epochsink.postgres.spooled import AcceptedRows
from epochsink.postgres.table import Table
from epochsink.retry import retrying
from epochsink.sink import COMMITTED, Ballots, Epoch, Identity, LastDone, Outcome, Verdict, one_by_one

_log = logging.getLogger(__name__)

MOST_SESSIONS: Final = 8
_STAYS: Final = "the epoch stays recorded, and the next start commits it"
WORTH_A_SESSION: Final = 8
"""How many transactions are worth another session: to open one takes about as long as to commit 8."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Commits parts of a query's epochs, in ``session``."""

    query_id: str
    server: Server
    session: Session
    retry_seconds: float
    letters: dict[str, int] = field(default_factory=dict)
    """How many rows of each sink became letters, if this commit has merged them."""

    def all_of(self, epoch: Epoch, parts: Sequence[Part], ballots: Ballots) -> dict[Part, Verdict]:
        """Commit parts, one sink after another: a sink's seal is for its own parts only.

        After an unknown outcome no further sink is tried: its parts get the same verdict.
        """
        parts_of: dict[tuple[str, ...], list[Part]] = {}
        for part in parts:
            parts_of.setdefault(tuple(part.members), []).append(part)
        verdicts: dict[Part, Verdict] = {}
        unknown: Verdict | None = None
        for own in parts_of.values():
            if unknown is None:
                outcomes = self._of_sink(epoch, own, ballots)
                unknown = next((each for each in outcomes.values() if each.outcome is Outcome.UNKNOWN), None)
            else:
                outcomes = dict.fromkeys(own, unknown)
            verdicts |= outcomes
        return verdicts

    def _of_sink(self, epoch: Epoch, parts: Sequence[Part], ballots: Ballots) -> dict[Part, Verdict]:
        """Commit the seal, if there is one, and the other parts only after the server has confirmed it."""
        seal = next((part for part in parts if part.is_seal), None)
        if seal is None:
            return self._side_by_side(epoch, parts, ballots)
        tasks = [part for part in parts if part is not seal]
        sealed = self(epoch, seal, ballots)
        if sealed.outcome is Outcome.UNKNOWN:
            waits = replace(sealed, evidence=f"it waits for its epoch's seal {seal.gid}: {sealed.evidence}")
            verdicts = dict.fromkeys(tasks, waits)
        elif sealed.outcome is Outcome.ABORTED:
            unsealed = one_by_one(tasks, lambda part: self(epoch, part, ballots, is_sealed=False))
            verdicts = dict(zip(tasks, unsealed, strict=True))
        else:
            verdicts = self._side_by_side(epoch, tasks, ballots)
        return {seal: sealed} | verdicts

    def _side_by_side(self, epoch: Epoch, parts: Sequence[Part], ballots: Ballots) -> dict[Part, Verdict]:
        gids = {index: part.gid for index, part in enumerate(parts) if part.gid is not None}
        committed = commit_side_by_side(self.server, self.session, gids, self.retry_seconds)
        verdicts = one_by_one(parts, lambda part: self(epoch, part, ballots), committed)
        return dict(zip(parts, verdicts, strict=True))

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
        database = self.session.database()
        with database.transaction():
            try:
                for member in part.members.values():
                    require_unchanged(database.read_target(member.merge.target), member.merge)
            except TableChanged as changed:
                return changed
            finally:
                database.rollback()
        return None

    def _commit_prepared(self, epoch: Epoch, part: Part, gid: str, ballots: Ballots) -> Verdict:
        database = self.session.database()
        try:
            with database.watched(self.retry_seconds):
                database.commit_prepared(gid)
        except errors.UndefinedObject:
            return self._ask_marker(database, epoch, part, ballots)
        reach("postgres.committed")
        return COMMITTED

    def _look(self, epoch: Epoch, part: Part, gid: str, ballots: Ballots) -> Verdict:
        database = self.session.database()
        if database.still_prepared({gid}):
            return Verdict(Outcome.ABORTED, f"{gid} waits for the seal of its epoch, which is gone")
        return self._ask_marker(database, epoch, part, ballots)

    def _marker(self, sink: str, member: Member) -> MarkerRows:
        return MarkerRows(member.schema, Identity(self.query_id, sink))

    def _ask_marker(self, database: Database, epoch: Epoch, part: Part, ballots: Ballots) -> Verdict:
        # each sink has a marker in the transaction; for another one it may have been prepared again by itself, once a
        # later start has set the sinks apart
        sink, member = next((one, part.members[one]) for one in part.members if one in ballots)
        database.place()  # refuses a standby, which may lack the marker
        applied_by = self._marker(sink, member).attempt(database, epoch.number, part.name)
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
        try:
            return by_trying(partial(self._merge_staged, epoch, part, ballots), part.members.values())
        except RowsRejected as refused:
            refused.hint = f"{refused.hint}; {_STAYS}".removeprefix("; ")
            raise

    def _merge_staged(self, epoch: Epoch, part: Part, ballots: Ballots, *, careful: bool = False) -> Verdict:
        database, members = self.session.database(), part.members
        rows = {
            sink: AcceptedRows(member.tasks, member.rows, ballots[sink].rows)
            for sink, member in members.items()
            if sink in ballots
        }
        try:
            with database.watched(), database.transaction():
                own = LastDone(epoch.number, epoch.attempt, (part.to_json(),))
                for sink, member in members.items():
                    marker, after = self._marker(sink, member), ballots[sink].after if sink in ballots else None
                    if after is not None:
                        # before our own mark, which would hide that the one of the epoch before it is missing; the lock
                        # that this takes keeps the markers from being dropped until the transaction ends
                        marker.verify(database, member.merge.target, after, own)
                    marker.insert(database, epoch.number, WHOLE, part.attempt)
                for member in members.values():
                    if not database.exists(member.staging):
                        raise PrepareFailed(f"staging table {member.staging} is gone")
                letters = EpochLetters(self.query_id, epoch.number, part.attempt, rows)
                refused_rows = database.merge(members, letters, careful=careful)
                reach("postgres.merged")
                database.commit()
        except errors.UniqueViolation as refused:
            markers = {(member.schema, TABLE) for member in members.values()}
            if (refused.diag.schema_name, refused.diag.table_name) not in markers:
                raise
            return self._ask_marker(database, epoch, part, ballots)
        except (RowsRejected, TableChanged):
            raise
        except PrepareFailed as failed:
            if not failed.may_pass:
                failed.hint += f"; {_STAYS}"
                raise
            return Verdict(Outcome.ABORTED, f"{failed.message}, and the marker is absent")
        self.letters.update({sink: len(refused) for sink, refused in refused_rows.items()})
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
    known.hint = f"{known.hint}; {_STAYS}".removeprefix("; ")
    return known


def _is_worth_repeating(error: BaseException) -> bool:
    return is_busy(error) or is_contended(error) or is_passing(error)


def finish_again(database: Database, seconds: float, table: Table, done: LastDone) -> bool:
    """Commit parts of a done epoch that are prepared again: the server has lost the end of its log.

    What was committed before these parts were prepared is still there, so the order of epochs is kept. Tasks with
    ``atomic=False`` may have prepared theirs before the last commit of the epoch before: it is there if the seal is.
    So nothing is committed unless all parts are there. Return whether there was a part to commit.
    """
    parts = [read_part(part) for part in done.parts]
    again = database.still_prepared({part.gid for part in parts if part.gid})
    left = [part for part in parts if part.gid in again]
    marked = (table.marker.attempt(database, done.epoch, part.name) == part.attempt for part in parts)
    if not all(part in left or is_marked for part, is_marked in zip(parts, marked, strict=True)):
        return False
    for gid in filter(None, (part.gid for part in left)):
        _log.warning("%s is prepared again, and its epoch is done: a failover lost its commit. Committing it", gid)
        with database.watched(seconds):
            database.commit_prepared(gid)
    return bool(left)


def commit_side_by_side(server: Server, session: Session, gids: Mapping[int, str], seconds: float) -> set[int]:
    """Commit prepared transactions; return the keys of those that the server has confirmed.

    ``session`` has others beside it, ``seconds`` is the limit for one commit. What fails is committed one by one later.
    """
    sessions = min(MOST_SESSIONS, len(gids) // WORTH_A_SESSION)
    if sessions < 2:  # noqa: PLR2004 - one session is there already
        return set()
    turns: SimpleQueue[tuple[int, str]] = SimpleQueue()
    for turn in gids.items():
        turns.put(turn)
    with ThreadPoolExecutor(sessions, "epochsink-commit-prepared") as threads:
        done = threads.map(lambda _: _commit(server, session, turns, seconds), range(sessions))
        return set().union(*done)


def _commit(server: Server, session: Session, turns: SimpleQueue[tuple[int, str]], seconds: float) -> set[int]:
    try:
        database = session.another()
    except (psycopg.Error, EpochsinkError) as refused:
        _log.info("%s: no further session to commit in: %s", server.database, refused)
        return set()
    committed = set()
    with closing(database), suppress(Empty):
        while True:
            key, gid = turns.get_nowait()
            try:
                with database.watched(seconds):
                    database.commit_prepared(gid)
            except psycopg.Error as failure:
                _log.info("%s: the commit of %s is tried again: %s", server.database, gid, describe(failure))
                if database.closed or isinstance(failure, AwaitsStandby):
                    break
            else:
                reach("postgres.committed")
                committed.add(key)
    return committed
