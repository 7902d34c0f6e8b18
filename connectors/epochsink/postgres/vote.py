"""Phase 1 in the driver: what the tasks wrote becomes one prepared epoch, verified against the server."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Self

from psycopg import sql

from epochsink.errors import PrepareFailed
from epochsink.failpoints import reach
from epochsink.identity import PreparedName
from epochsink.postgres import orphans
from epochsink.postgres.catalog import require_target, require_unchanged
from epochsink.postgres.committable import WHOLE, Part, read_answer, read_part
from epochsink.postgres.dead_letter import Letters, as_letter, halves_of_batch, is_refusal, refused
from epochsink.postgres.merge import merge, verify, verify_casts
from epochsink.postgres.place import Place
from epochsink.postgres.prepared_transaction import commit, prepare, transaction
from epochsink.postgres.row_mapping import Fitted
from epochsink.postgres.spooled import SpooledRows, SpooledTask
from epochsink.postgres.staging import REFUSED, TAG, TAG_ENCODING, tag, tag_value
from epochsink.postgres.writer import CopyIn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import pyarrow as pa

    from epochsink.postgres.committable import Member
    from epochsink.postgres.server import Connection
    from epochsink.postgres.staging import Staging
    from epochsink.postgres.table import Table
    from epochsink.sink import Ballot, Committables, Epoch, LastDone


@dataclass(frozen=True, slots=True)
class Share:
    """One sink's rows in a vote.

    ``rows`` are in the spool, or (``spool=False``) staged by the accepted tasks. ``after`` is what the table must hold
    already (None: not known), ``own`` what it may hold of this epoch.
    """

    table: Table
    rows: SpooledRows | Member
    after: LastDone | None
    own: LastDone | None = None

    @classmethod
    def of(cls, table: Table, epoch: Epoch, ballot: Ballot) -> Self:
        """Return what the accepted tasks have answered. Raises `PrepareFailed` if they do not agree."""
        answers = [read_answer(answer) for answer in ballot.parts]
        staged = [answer.members[table.identity.sink] for answer in answers if isinstance(answer, Part)]
        spooled = [answer for answer in answers if isinstance(answer, SpooledTask)]
        if spooled and staged:
            raise PrepareFailed(f"only some tasks of epoch {epoch.number} have staged their rows for {table}")
        return cls(table, _together(epoch, staged) if staged else SpooledRows.of(spooled, ballot.rows), ballot.after)


def _together(epoch: Epoch, staged: Sequence[Member]) -> Member:
    """Put together what tasks have staged. Raises `PrepareFailed` if they do not agree."""
    first = staged[0]
    for other in staged:
        if replace(other, tasks=first.tasks, rows=first.rows) != first:
            raise PrepareFailed(
                f"the tasks of epoch {epoch.number} saw different tables or server settings: {first} and {other}",
                hint="the table or the server changed meanwhile; Spark runs the epoch again",
            )
    tasks = tuple(task for member in staged for task in member.tasks)
    return replace(first, tasks=tasks, rows=sum(member.rows for member in staged))


class _Incoming:
    """Spooled rows on their way into a table. The first record batch has their schema."""

    def __init__(self, connection: Connection, table: Table, rows: SpooledRows) -> None:
        self._connection = connection
        self._rows = rows
        batches = rows.read()
        first = next(batches)
        self._batches = chain([first], batches)
        self._found = Fitted.of(connection, table, first[1].schema, direct=False)

    def is_copied(self) -> bool:
        """Return whether one COPY can bring the rows into the target: it has no keys and casts, and ignores rules."""
        config, target = self._found.table.config, self._found.target
        return not (
            config.key
            or config.mode(target.max_prepared_transactions) == "staged"
            or target.row_security
            or target.has_rules
            or self._found.merge.casts
        )

    def member(self, staging: Staging | None = None) -> Member:
        """Return what is recorded of the rows."""
        return self._found.member(self._rows.tasks, self._rows.count, staging)

    def copy(self) -> None:
        """Copy the rows into the target, in the transaction under way. Raises `PrepareFailed`."""
        found = self._found
        with CopyIn(self._connection, found.merge.target.quoted, found.encodings) as copy:
            for _, batch in self._batches:
                copy.write(batch)
            # a trigger may swallow or redirect rows, as it may in an INSERT: the server's count says nothing
            copy.finish()
        if copy.sent != self._rows.count:
            raise PrepareFailed(f"the spool holds {copy.sent} rows, and the accepted tasks wrote {self._rows.count}")
        reach("postgres.copied")
        # the lock of COPY keeps the table as it is now: it must be the table that the rows were encoded for
        require_unchanged(self._connection, found.merge, copied=True)

    @property
    def sets_aside(self) -> bool:
        """Whether rows that are refused become dead letters."""
        return self._found.merge.sets_aside

    def stage(self, epoch: Epoch) -> Member:
        """Copy the rows into a staging table and commit that, as tasks do. The merge compares their number."""
        connection, found = self._connection, self._found
        staging, is_new = found.staging(connection, epoch)
        with transaction(connection):
            staging.relax(connection)
            if not is_new:
                # the vote is repeated
                staging.clear(connection)
            if self.sets_aside:
                self._fill_by_halves(staging)
            else:
                self._fill(staging, self._batches)
            reach("postgres.copied")
            commit(connection)
        return self.member(staging)

    def _fill(self, staging: Staging, batches: Iterable[tuple[str, pa.RecordBatch]]) -> None:
        with CopyIn(self._connection, staging.relation.quoted, [*self._found.encodings, TAG_ENCODING]) as copy:
            for task, batch in batches:
                copy.write(batch, tag_value(task))
            copy.finish()

    def _fill_by_halves(self, staging: Staging) -> None:
        """Like `_fill`, but of rows that the staging table cannot hold it stores the reason, and the row as JSON."""
        try:
            with self._connection.transaction():  # a savepoint
                self._fill(staging, self._batches)
        except Exception as failed:
            if not is_refusal(failed):
                raise
        else:
            return
        insert = sql.SQL("INSERT INTO {} ({}, {}) VALUES (%s, %s::jsonb)").format(
            staging.relation.quoted, sql.Identifier(TAG), sql.Identifier(REFUSED)
        )
        names = list(self._found.merge.columns)
        for task, batch in self._rows.read():
            fill = partial(self._fill_with, staging, task)
            for row, error in refused(self._connection, batch, halves_of_batch, fill):
                self._connection.execute(insert, [tag(task), as_letter(row, error, names)])

    def _fill_with(self, staging: Staging, task: str, batch: pa.RecordBatch) -> None:
        self._fill(staging, [(task, batch)])


def vote_by_task(connection: Connection, table: Table, epoch: Epoch, ballot: Ballot) -> Committables:
    """Verify that each task's own transaction is prepared, and seal them; each is a part. Raises as `vote` does.

    The seal's marker row is that of the whole epoch. So of two drivers on copies of a checkpoint one gets it. It is
    prepared after the epoch before is committed, and is committed first. So a server that has lost that commit has lost
    the seal too, and the tasks' rows cannot hide that.
    """
    # first: what a standby lacks proves nothing
    place = Place.of(connection)
    table.expect(connection, ballot.after)
    table.refuse_applied(connection, epoch, [epoch.attempt])
    written = [read_part(answer) for answer in ballot.parts]
    require_target(
        connection, table.relation, {member.merge.target for part in written for member in part.members.values()}
    )
    gids = {part.gid for part in written if part.gid}
    missing = gids - orphans.still_prepared(connection, gids)
    if missing:
        raise PrepareFailed(
            f"prepared transaction(s) {', '.join(sorted(missing))} are not in pg_prepared_xacts",
            hint="they were rolled back; Spark runs the epoch again when the query restarts",
        )
    empty = replace(written[0].members[table.identity.sink], table=None, tasks=(), rows=0)
    share = Share(table, empty, ballot.after)
    # after the tasks' transactions were seen: so they are older in the server's log
    seal = prepare_seal(connection, epoch, {table.identity.sink: share})
    return [part.to_json() for part in (seal, *(replace(part, place=place) for part in written))]


def prepare_seal(connection: Connection, epoch: Epoch, shares: Mapping[str, Share]) -> Part:
    """Prepare the seal of an epoch of one sink; its member has no rows. Raises as `vote` does."""
    members = {sink: share.rows for sink, share in shares.items() if not isinstance(share.rows, SpooledRows)}
    return _prepared(connection, epoch, shares, members, lambda: None)


def vote(connection: Connection, epoch: Epoch, shares: Mapping[str, Share]) -> Part:
    """Make one part of the rows of one or several sinks, by their names. May be repeated.

    Spooled rows of a single append are copied straight into the target. All others are staged, merged into every target
    in one transaction, and that is prepared; if the staging tables are logged, the merge waits for the decision.

    Raises `PrepareFailed`, `WentBack`, `SpoolMissing`, `OSError`, `pyarrow.ArrowInvalid`, `psycopg.Error`.
    """
    # first: what a standby lacks proves nothing
    place = Place.of(connection)
    members = {}
    for sink, share in shares.items():
        if isinstance(share.rows, SpooledRows):
            incoming = _Incoming(connection, share.table, share.rows)
            if len(shares) == 1 and incoming.is_copied():
                try:
                    return _prepared(connection, epoch, shares, {sink: incoming.member()}, incoming.copy)
                except Exception as error:
                    if not incoming.sets_aside or not is_refusal(error):
                        raise
                incoming = _Incoming(connection, share.table, share.rows)
            members[sink] = incoming.stage(epoch)
        else:
            require_target(connection, share.table.relation, {share.rows.merge.target})
            members[sink] = share.rows
    return _merged(connection, epoch, shares, members, place)


def _merged(
    connection: Connection, epoch: Epoch, shares: Mapping[str, Share], members: Mapping[str, Member], place: Place
) -> Part:
    staged = list(members.values())
    if len({member.logged for member in staged}) > 1:
        raise PrepareFailed(
            f"the tasks of epoch {epoch.number} saw different server settings",
            hint="max_prepared_transactions has changed meanwhile; Spark runs the epoch again",
        )

    def write() -> None:
        letters = Letters.of(next(iter(shares.values())).table.identity, epoch)
        merge(connection, members, letters)
        for sink, member in members.items():
            if member.merge.sets_aside:
                letters.refuse_more(connection, member, shares[sink].table.config.letters_limit)

    if not staged[0].logged:
        return _prepared(connection, epoch, shares, members, write)
    for sink, member in members.items():
        _verify_staged(connection, epoch, shares[sink], member)
    if any(share.table.config.validate or share.table.config.sets_aside for share in shares.values()):
        with transaction(connection):
            write()
            connection.execute("SET CONSTRAINTS ALL IMMEDIATE")
            connection.rollback()
    return Part(epoch.attempt, members, None, place)


def _verify_staged(connection: Connection, epoch: Epoch, share: Share, member: Member) -> None:
    """Check what can be checked before the rows are merged."""
    share.table.refuse_applied(connection, epoch, [])
    share.table.expect(connection, share.after)
    if member.merge.sets_aside:
        return  # the merge on trial looks for what is wrong, and what it finds is no reason to stop
    verify(connection, member)
    with transaction(connection):
        # nothing of the target is locked yet, so the merge looks again
        require_unchanged(connection, member.merge)
        if member.merge.casts:
            verify_casts(connection, member)
        connection.rollback()


def _prepared(
    connection: Connection,
    epoch: Epoch,
    shares: Mapping[str, Share],
    members: Mapping[str, Member],
    write: Callable[[], None],
) -> Part:
    """Prepare a transaction in which ``write`` writes all rows of an epoch, unless that is done already."""
    # it bears the name of its first sink
    first = next(iter(shares.values()))
    name = PreparedName.of(first.table.identity, epoch, WHOLE)
    part = Part(epoch.attempt, members, str(name), Place.of(connection))
    if orphans.still_prepared(connection, {str(name)}):
        # the vote is repeated because its reply was lost
        return part
    with transaction(connection):
        for share in shares.values():
            # in the prepared transaction itself, and before any mark of ours, which would look like an unrecorded epoch
            share.table.expect(connection, share.after, share.own)
        for share in shares.values():
            # before any row: an epoch that is applied already stops here
            share.table.mark(connection, epoch)
        write()
        reach("postgres.merged")
        prepare(connection, name)
    reach("postgres.prepared")
    return part
