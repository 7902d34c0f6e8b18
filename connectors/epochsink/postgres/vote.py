"""Phase 1 in the driver: what the tasks wrote becomes one prepared epoch, verified against the server."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

from psycopg import errors, sql

from epochsink.errors import PrepareFailed, WentBack
from epochsink.failpoints import reach
from epochsink.identity import PreparedName, identity_key
from epochsink.postgres import orphans
from epochsink.postgres.applied_epochs import Marker
from epochsink.postgres.catalog import require_unchanged
from epochsink.postgres.committable import WHOLE, Member, Part, Relation
from epochsink.postgres.merge import merge, verify, verify_casts
from epochsink.postgres.place import Place
from epochsink.postgres.prepared_transaction import commit, prepare, transaction
from epochsink.postgres.spooled import SpooledRows
from epochsink.postgres.staging import TAG_ENCODING, tag_value
from epochsink.postgres.writer import CopyIn, fitted, staging_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from epochsink.postgres.committable import Merge, StagedTask
    from epochsink.postgres.config import PostgresConfig
    from epochsink.postgres.server import Connection
    from epochsink.sink import Epoch, Identity, LastDone


@dataclass(frozen=True, slots=True)
class Voter:
    """One sink that votes on an epoch. ``after`` is what its target must hold already (None: not known).

    Raises `PrepareFailed`, `WentBack`, `psycopg.Error`.
    """

    config: PostgresConfig
    identity: Identity
    after: LastDone | None = None

    @property
    def table(self) -> Relation:
        """The target table."""
        return Relation.of(self.config.table)

    @property
    def key(self) -> str:
        """The sink in names."""
        return identity_key(self.identity)

    def expect(self, connection: Connection) -> None:
        """Raise `WentBack` unless the newest epoch that is done is there, and nothing newer."""
        if self.after is not None:
            self._marker.verify(connection, self.table, self.after, None)

    def refuse_applied(self, connection: Connection, epoch: Epoch, ours: list[str]) -> None:
        """Raise `WentBack` if another attempt has applied the epoch."""
        applied_by = self._marker.other_attempt(connection, epoch.number, ours)
        if applied_by is not None:
            raise self._went_back(epoch, applied_by)

    def mark(self, connection: Connection, epoch: Epoch) -> None:
        """Mark the epoch as applied by the transaction under way."""
        try:
            self._marker.insert(connection, self.identity, epoch.number, WHOLE, epoch.attempt)
        except errors.UniqueViolation as applied:
            raise self._went_back(epoch, applied.diag.message_detail or "") from applied

    def member(self, table: str | None, tasks: tuple[str, ...], rows: int, merge: Merge) -> Member:
        """Return what is recorded of the sink's rows; ``table`` is their staging table, if they have one."""
        return Member(self.key, self.config.marker_schema, table, tasks, rows, merge)

    @property
    def _marker(self) -> Marker:
        return Marker.of(self.config.marker_schema, self.identity)

    def _went_back(self, epoch: Epoch, evidence: str) -> WentBack:
        return WentBack(
            f"epoch {epoch.number} is already applied to {self.table}, by another attempt: {evidence}",
            hint="an older copy of the checkpoint was restored: put the newer one back, or start a new checkpoint",
        )


@dataclass(frozen=True, slots=True)
class Share:
    """One sink's rows in a vote: in the spool, or (``spool=False``) staged by the accepted tasks."""

    voter: Voter
    rows: SpooledRows | Sequence[StagedTask]


@dataclass(frozen=True, slots=True)
class _Staged:
    """One sink's rows in its staging table."""

    voter: Voter
    member: Member
    logged: bool

    @classmethod
    def by_tasks(cls, voter: Voter, epoch: Epoch, written: Sequence[StagedTask]) -> _Staged:
        """Put together what the tasks have staged. Raises `PrepareFailed` if they do not agree."""
        first = written[0]
        for other in written:
            if (other.table, other.logged, other.merge) != (first.table, first.logged, first.merge):
                raise PrepareFailed(
                    f"the tasks of epoch {epoch.number} saw different tables or server settings: {first} and {other}",
                    hint="the table or the server changed meanwhile; Spark runs the epoch again",
                )
        tasks, rows = tuple(task.task for task in written), sum(task.rows for task in written)
        return cls(voter, voter.member(first.table, tasks, rows, first.merge), first.logged)

    def verify(self, connection: Connection, epoch: Epoch) -> None:
        """Check what can be checked before the rows are merged."""
        self.voter.refuse_applied(connection, epoch, [])
        self.voter.expect(connection)
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

    def __init__(self, connection: Connection, voter: Voter, rows: SpooledRows) -> None:
        self._connection = connection
        self._voter = voter
        self._rows = rows
        batches = rows.read()
        first = next(batches)
        self._batches = chain([first], batches)
        self._found = fitted(connection, voter.config, first[1].schema, direct=False)

    def is_copied(self) -> bool:
        """Return whether one COPY can bring the rows into the target: it has no keys and casts, and ignores rules."""
        config, target = self._voter.config, self._found.target
        return not (
            config.key
            or config.mode(target.max_prepared_transactions) == "staged"
            or target.row_security
            or target.has_rules
            or self._found.merge.casts
        )

    def member(self, table: str | None = None) -> Member:
        """Return what is recorded of the rows."""
        return self._voter.member(table, self._rows.tasks, self._rows.count, self._found.merge)

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
        connection, voter, found = self._connection, self._voter, self._found
        staging, is_new = staging_of(connection, voter.config, voter.identity, epoch, found)
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
        return _Staged(voter, self.member(staging.relation.name), staging.logged)


def vote_by_task(connection: Connection, voter: Voter, epoch: Epoch, written: Sequence[Part]) -> Sequence[Part]:
    """Verify that each task's own transaction is prepared; each is a part."""
    voter.expect(connection)
    voter.refuse_applied(connection, epoch, [epoch.attempt])
    gids = {part.gid for part in written if part.gid}
    missing = gids - orphans.still_prepared(connection, gids)
    if missing:
        raise PrepareFailed(
            f"prepared transaction(s) {', '.join(sorted(missing))} are not in pg_prepared_xacts",
            hint="they were rolled back; Spark runs the epoch again when the query restarts",
        )
    place = Place.of(connection)
    return [replace(part, place=place) for part in written]


def vote(connection: Connection, epoch: Epoch, shares: Mapping[str, Share]) -> Part:
    """Make one part of the rows of one or several sinks, by their names. May be repeated.

    Spooled rows of a single append are copied straight into the target. All others are staged, merged into every target
    in one transaction, and that is prepared; if the staging tables are logged, the merge waits for the decision.

    Raises `PrepareFailed`, `WentBack`, `SpoolMissing`, `OSError`, `pyarrow.ArrowInvalid`, `psycopg.Error`.
    """
    staged = {}
    for sink, share in shares.items():
        if not isinstance(share.rows, SpooledRows):
            staged[sink] = _Staged.by_tasks(share.voter, epoch, share.rows)
            continue
        incoming = _Incoming(connection, share.voter, share.rows)
        if len(shares) == 1 and incoming.is_copied():
            return _prepared(connection, epoch, [share.voter], {sink: incoming.member()}, incoming.copy)
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
        voters = [rows.voter for rows in staged.values()]
        return _prepared(connection, epoch, voters, members, lambda: merge(connection, list(members.values())))
    for rows in staged.values():
        rows.verify(connection, epoch)
    if any(rows.voter.config.validate for rows in staged.values()):
        with transaction(connection):
            merge(connection, list(members.values()))
            connection.execute("SET CONSTRAINTS ALL IMMEDIATE")
            connection.rollback()
    return Part(epoch.attempt, members, None, Place.of(connection))


def _prepared(
    connection: Connection,
    epoch: Epoch,
    voters: Sequence[Voter],
    members: Mapping[str, Member],
    write: Callable[[], None],
) -> Part:
    """Prepare a transaction in which ``write`` writes all rows of an epoch, unless that is done already."""
    # it bears the name of its first sink
    name = PreparedName.of(voters[0].identity, epoch, WHOLE)
    part = Part(epoch.attempt, members, str(name), Place.of(connection))
    if orphans.still_prepared(connection, {str(name)}):
        # the vote is repeated because its reply was lost
        return part
    with transaction(connection):
        for voter in voters:
            # in the prepared transaction itself, and before any mark of ours, which would look like an unrecorded epoch
            voter.expect(connection)
        for voter in voters:
            # before any row: an epoch that is applied already stops here
            voter.mark(connection, epoch)
        write()
        reach("postgres.merged")
        prepare(connection, name)
    reach("postgres.prepared")
    return part
