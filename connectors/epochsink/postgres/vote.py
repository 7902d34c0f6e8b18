"""Phase 1 in the driver: what the tasks wrote becomes one prepared epoch, verified against the server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import psycopg

from epochsink.errors import PrepareFailed
from epochsink.failpoints import reach
from epochsink.identity import PreparedName
from epochsink.postgres.catalog import require_target, require_unchanged
from epochsink.postgres.committable import WHOLE, Member, Part, read_part
from epochsink.postgres.database import Database
from epochsink.postgres.dead_letter import EpochLetters
from epochsink.postgres.errors import failure, is_author, may_be_refusal
from epochsink.postgres.merge import by_trying
from epochsink.postgres.place import Place
from epochsink.postgres.spooled import AcceptedRows, SpooledTask
from epochsink.postgres.table import Table
from epochsink.sink import Ballot, Committables, Epoch, LastDone


@dataclass(frozen=True, slots=True)
class TableShare:
    """One sink's rows in a vote.

    ``rows`` are in the spool. ``after`` is what the table must hold already (None: not known), ``own`` what it may hold
    of this epoch.
    """

    table: Table
    rows: AcceptedRows
    after: LastDone | None
    own: LastDone | None = None

    @classmethod
    def of(cls, table: Table, ballot: Ballot) -> Self:
        """Return what the accepted tasks have answered."""
        tasks = [SpooledTask(**answer) for answer in ballot.parts]
        return cls(table, AcceptedRows.of(tasks, ballot.rows), ballot.after)


def vote_by_task(database: Database, table: Table, epoch: Epoch, ballot: Ballot) -> Committables:
    """Verify that each task's own transaction is prepared, and seal them; each is a part. Raises as `vote` does.

    The seal's marker row is that of the whole epoch. So of two drivers on copies of a checkpoint one gets it. It is
    prepared after the epoch before is committed, and is committed first. So a server that has lost that commit has lost
    the seal too, and the tasks' rows cannot hide that.
    """
    # first: what a standby lacks proves nothing
    place = database.place()
    table.expect(database, ballot.after)
    table.refuse_applied(database, epoch, [epoch.attempt])
    written = [read_part(answer) for answer in ballot.parts]
    require_target(
        database.located(table.relation),
        table.relation,
        {member.merge.target for part in written for member in part.members.values()},
    )
    gids = {part.gid for part in written if part.gid}
    missing = gids - database.still_prepared(gids)
    if missing:
        raise PrepareFailed(
            f"prepared transaction(s) {', '.join(sorted(missing))} are not in pg_prepared_xacts",
            hint="they were rolled back; Spark runs the epoch again when the query restarts",
        )
    empty = replace(written[0].members[table.identity.sink], table=None, tasks=(), rows=0)
    # after the tasks' transactions were seen: so they are older in the server's log
    share = TableShare(table, AcceptedRows((), 0, ballot.rows), ballot.after)
    seal = prepare_seal(database, epoch, share, empty)
    return [part.to_json() for part in (seal, *(replace(part, place=place) for part in written))]


def prepare_seal(database: Database, epoch: Epoch, share: TableShare, member: Member) -> Part:
    """Prepare the seal of an epoch of one sink, whose ``member`` has no rows. Raises as `vote` does."""
    sink = share.table.identity.sink
    return _prepared(database, epoch, {sink: share}, {sink: member}, dict)


def vote(database: Database, epoch: Epoch, shares: Mapping[str, TableShare]) -> Part:
    """Make one part of the rows of one or several sinks, by their names. May be repeated.

    Spooled rows of a single append are copied straight into the target. All others are staged, merged into every target
    in one transaction, and that is prepared; if the staging tables are logged, the merge waits for the decision.

    Raises `PrepareFailed`, `WentBack`, `SpoolMissing`, `OSError`, `pyarrow.ArrowInvalid`, `psycopg.Error`.
    """
    # first: what a standby lacks proves nothing
    place = database.place()
    members = {}
    for sink, share in shares.items():
        incoming = database.incoming(share.table, share.rows)
        if len(shares) == 1 and incoming.is_copied():
            try:
                return _prepared(database, epoch, shares, {sink: incoming.member()}, incoming.copy)
            except Exception as error:
                if not incoming.sets_aside or not may_be_refusal(error):
                    raise
            incoming = database.incoming(share.table, share.rows)
        members[sink] = incoming.stage(epoch)
    return _merged(database, epoch, shares, members, place)


def _merged(
    database: Database, epoch: Epoch, shares: Mapping[str, TableShare], members: Mapping[str, Member], place: Place
) -> Part:
    staged = list(members.values())
    if len({member.logged for member in staged}) > 1:
        raise PrepareFailed(
            f"the tasks of epoch {epoch.number} saw different server settings",
            hint="max_prepared_transactions has changed meanwhile; Spark runs the epoch again",
        )

    letters = EpochLetters.of(
        next(iter(shares.values())).table.identity,
        epoch,
        {sink: share.rows for sink, share in shares.items()},
        {sink: share.table.config.letters_limit for sink, share in shares.items()},
    )

    def prepared(*, careful: bool = False) -> Part:
        write = partial(database.merge, members, letters, careful=careful)
        if careful:
            # A standby that starts takes no connections while a transaction with more than 64 savepoints is prepared.
            with database.transaction():
                known = write()
                database.rollback()
            try:
                return _prepared(database, epoch, shares, members, partial(write, known=known))
            except Exception as error:
                if not may_be_refusal(error):
                    raise
                # other rows are refused now: they are looked for in what is prepared
        return _prepared(database, epoch, shares, members, write)

    def tried(*, careful: bool = False) -> None:
        with database.transaction():
            database.merge(members, letters, careful=careful)
            database.require_deferred()
            database.rollback()

    if not staged[0].logged:
        return by_trying(prepared, staged)
    for sink, member in members.items():
        _verify_staged(database, epoch, shares[sink], member)
    if any(share.table.config.validate or share.table.config.sets_aside for share in shares.values()):
        by_trying(tried, staged)
    return Part(epoch.attempt, members, None, place)


def _verify_staged(database: Database, epoch: Epoch, share: TableShare, member: Member) -> None:
    """Check what can be checked before the rows are merged."""
    share.table.refuse_applied(database, epoch, [])
    share.table.expect(database, share.after)
    if member.merge.sets_aside:
        return  # the trial merge looks for refused rows itself, and they do not stop the query
    database.verify_staged(member)
    with database.transaction():
        # nothing of the target is locked yet, so the merge looks again
        require_unchanged(database.read_target(member.merge.target), member.merge)
        if member.merge.casts:
            database.verify_casts(member)
        database.rollback()


def _prepared(
    database: Database,
    epoch: Epoch,
    shares: Mapping[str, TableShare],
    members: Mapping[str, Member],
    write: Callable[[], Mapping[str, Sized] | None],
) -> Part:
    """Prepare a transaction in which ``write`` writes all rows of an epoch, unless that is done already.

    ``write`` returns the letters of each sink, if it may make some.
    """
    # it bears the name of its first sink
    first = next(iter(shares.values()))
    name = PreparedName.of(first.table.identity, epoch, WHOLE)
    part = Part(epoch.attempt, members, str(name), database.place())
    if database.still_prepared({str(name)}):
        # the vote is repeated because its reply was lost
        return part
    with database.transaction():
        for share in shares.values():
            # in the prepared transaction itself, and before any mark of ours, which would look like an unrecorded epoch
            share.table.expect(database, share.after, share.own)
        for share in shares.values():
            # before any row: an epoch that is applied already stops here
            share.table.mark(database, epoch)
        letters = write() or {}
        reach("postgres.merged")
        try:
            database.prepare(name)
        except psycopg.Error as error:
            if not is_author(error):
                raise
            # a deferred trigger of the table looks at a row now
            raise failure(error, f"preparing epoch {epoch.number}", is_refusal=True) from error
    reach("postgres.prepared")
    counted = {
        sink: replace(member, letters=len(letters.get(sink, ()))) if member.merge.sets_aside else member
        for sink, member in members.items()
    }
    return replace(part, members=counted)
