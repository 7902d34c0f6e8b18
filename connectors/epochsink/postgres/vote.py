"""Phase 1 in the driver: what the tasks wrote becomes one prepared epoch, verified against the server."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Self

from psycopg import sql

from epochsink.errors import PrepareFailed
from epochsink.failpoints import reach
from epochsink.identity import PreparedName
from epochsink.postgres import orphans
from epochsink.postgres.catalog import require_unchanged
from epochsink.postgres.committable import WHOLE, Part, StagedTask, read_part, read_written
from epochsink.postgres.merge import merge, verify, verify_casts
from epochsink.postgres.place import Place
from epochsink.postgres.prepared_transaction import commit, prepare, transaction
from epochsink.postgres.spooled import SpooledRows, SpooledTask
from epochsink.postgres.staging import TAG_ENCODING, tag_value
from epochsink.postgres.writer import CopyIn, fitted, staging_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from epochsink.postgres.committable import Member
    from epochsink.postgres.server import Connection
    from epochsink.postgres.table import Table
    from epochsink.sink import Ballot, Committables, Epoch, LastDone


@dataclass(frozen=True, slots=True)
class Share:
    """One sink's rows in a vote.

    ``rows`` are in the spool, or (``spool=False``) staged by the accepted tasks. ``after`` is what the table must hold
    already (None: not known).
    """

    table: Table
    rows: SpooledRows | Sequence[StagedTask]
    after: LastDone | None

    @classmethod
    def of(cls, table: Table, epoch: Epoch, ballot: Ballot) -> Self:
        """Return what the accepted tasks have answered. Raises `PrepareFailed` if they do not agree."""
        written = [read_written(answer) for answer in ballot.parts]
        spooled = [task for task in written if isinstance(task, SpooledTask)]
        staged = [task for task in written if isinstance(task, StagedTask)]
        if spooled and staged:
            raise PrepareFailed(f"only some tasks of epoch {epoch.number} have staged their rows for {table}")
        return cls(table, SpooledRows.of(spooled, ballot.rows) if spooled else staged, ballot.after)


@dataclass(frozen=True, slots=True)
class _Staged:
    """One sink's rows in its staging table."""

    share: Share
    member: Member
    logged: bool

    @classmethod
    def by_tasks(cls, share: Share, epoch: Epoch, written: Sequence[StagedTask]) -> Self:
        """Put together what the tasks have staged. Raises `PrepareFailed` if they do not agree."""
        first = written[0]
        for other in written:
            if (other.table, other.logged, other.merge) != (first.table, first.logged, first.merge):
                raise PrepareFailed(
                    f"the tasks of epoch {epoch.number} saw different tables or server settings: {first} and {other}",
                    hint="the table or the server changed meanwhile; Spark runs the epoch again",
                )
        tasks, rows = tuple(task.task for task in written), sum(task.rows for task in written)
        return cls(share, share.table.member(first.table, tasks, rows, first.merge), first.logged)

    def verify(self, connection: Connection, epoch: Epoch) -> None:
        """Check what can be checked before the rows are merged."""
        table = self.share.table
        table.refuse_applied(connection, epoch, [])
        table.expect(connection, self.share.after)
        verify(connection, self.member)
        merge = self.member.merge
        with transaction(connection):
            # nothing of the target is locked yet, so the merge looks again
            require_unchanged(connection, merge)
            if merge.casts:
                verify_casts(connection, self.member)
            connection.rollback()


class _Incoming:
    """Spooled rows on their way into a table. The first record batch has their schema."""

    def __init__(self, connection: Connection, share: Share, rows: SpooledRows) -> None:
        self._connection = connection
        self._share = share
        self._rows = rows
        batches = rows.read()
        first = next(batches)
        self._batches = chain([first], batches)
        self._found = fitted(connection, share.table.config, first[1].schema, direct=False)

    def is_copied(self) -> bool:
        """Return whether one COPY can bring the rows into the target: it has no keys and casts, and ignores rules."""
        config, target = self._share.table.config, self._found.target
        return not (
            config.key
            or config.mode(target.max_prepared_transactions) == "staged"
            or target.row_security
            or target.has_rules
            or self._found.merge.casts
        )

    def member(self, staging: str | None = None) -> Member:
        """Return what is recorded of the rows."""
        return self._share.table.member(staging, self._rows.tasks, self._rows.count, self._found.merge)

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

    def stage(self, epoch: Epoch) -> _Staged:
        """Copy the rows into a staging table and commit that, as tasks do. The merge compares their number."""
        connection, table, found = self._connection, self._share.table, self._found
        staging, is_new = staging_of(connection, table.config, table.identity, epoch, found)
        with transaction(connection):
            staging.relax(connection)
            if not is_new:
                # the vote is repeated: the server may have committed a COPY whose reply was lost
                connection.execute(sql.SQL("DELETE FROM {}").format(staging.relation.quoted))
            with CopyIn(connection, staging.relation.quoted, [*found.encodings, TAG_ENCODING]) as copy:
                for task, batch in self._batches:
                    copy.write(batch, tag_value(task))
                copy.finish()
            reach("postgres.copied")
            commit(connection)
        return _Staged(self._share, self.member(staging.relation.name), staging.logged)


def vote_by_task(connection: Connection, table: Table, epoch: Epoch, ballot: Ballot) -> Committables:
    """Verify that each task's own transaction is prepared; each is a part. Raises as `vote` does."""
    table.expect(connection, ballot.after)
    table.refuse_applied(connection, epoch, [epoch.attempt])
    written = [read_part(answer) for answer in ballot.parts]
    gids = {part.gid for part in written if part.gid}
    missing = gids - orphans.still_prepared(connection, gids)
    if missing:
        raise PrepareFailed(
            f"prepared transaction(s) {', '.join(sorted(missing))} are not in pg_prepared_xacts",
            hint="they were rolled back; Spark runs the epoch again when the query restarts",
        )
    place = Place.of(connection)
    return [replace(part, place=place).to_json() for part in written]


def vote(connection: Connection, epoch: Epoch, shares: Mapping[str, Share]) -> Part:
    """Make one part of the rows of one or several sinks, by their names. May be repeated.

    Spooled rows of a single append are copied straight into the target. All others are staged, merged into every target
    in one transaction, and that is prepared; if the staging tables are logged, the merge waits for the decision.

    Raises `PrepareFailed`, `WentBack`, `SpoolMissing`, `OSError`, `pyarrow.ArrowInvalid`, `psycopg.Error`.
    """
    staged = {}
    for sink, share in shares.items():
        if not isinstance(share.rows, SpooledRows):
            staged[sink] = _Staged.by_tasks(share, epoch, share.rows)
            continue
        incoming = _Incoming(connection, share, share.rows)
        if len(shares) == 1 and incoming.is_copied():
            return _prepared(connection, epoch, [share], {sink: incoming.member()}, incoming.copy)
        staged[sink] = incoming.stage(epoch)
    return _merged(connection, epoch, staged)


def _merged(connection: Connection, epoch: Epoch, staged: Mapping[str, _Staged]) -> Part:
    members = {sink: rows.member for sink, rows in staged.items()}
    logged = {rows.logged for rows in staged.values()}
    if len(logged) > 1:
        raise PrepareFailed(
            f"the tasks of epoch {epoch.number} saw different server settings",
            hint="max_prepared_transactions has changed meanwhile; Spark runs the epoch again",
        )
    if logged == {False}:
        shares = [rows.share for rows in staged.values()]
        return _prepared(connection, epoch, shares, members, lambda: merge(connection, list(members.values())))
    for rows in staged.values():
        rows.verify(connection, epoch)
    if any(rows.share.table.config.validate for rows in staged.values()):
        with transaction(connection):
            merge(connection, list(members.values()))
            connection.execute("SET CONSTRAINTS ALL IMMEDIATE")
            connection.rollback()
    return Part(epoch.attempt, members, None, Place.of(connection))


def _prepared(
    connection: Connection,
    epoch: Epoch,
    shares: Sequence[Share],
    members: Mapping[str, Member],
    write: Callable[[], None],
) -> Part:
    """Prepare a transaction in which ``write`` writes all rows of an epoch, unless that is done already."""
    # it bears the name of its first sink
    name = PreparedName.of(shares[0].table.identity, epoch, WHOLE)
    part = Part(epoch.attempt, members, str(name), Place.of(connection))
    if orphans.still_prepared(connection, {str(name)}):
        # the vote is repeated because its reply was lost
        return part
    with transaction(connection):
        for share in shares:
            # in the prepared transaction itself, and before any mark of ours, which would look like an unrecorded epoch
            share.table.expect(connection, share.after)
        for share in shares:
            # before any row: an epoch that is applied already stops here
            share.table.mark(connection, epoch)
        write()
        reach("postgres.merged")
        prepare(connection, name)
    reach("postgres.prepared")
    return part
