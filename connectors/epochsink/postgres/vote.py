"""Phase 1 in the driver: what the tasks wrote becomes one prepared epoch, verified against the server."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from psycopg import errors

from epochsink.errors import PrepareFailed, WentBack
from epochsink.failpoints import reach
from epochsink.identity import PreparedName, identity_key, identity_label
from epochsink.postgres import orphans
from epochsink.postgres.applied_epochs import WHOLE, Marker
from epochsink.postgres.committable import Member, PreparedPart, SharedPart, StagedEpoch
from epochsink.postgres.merge import merge, verify, verify_casts
from epochsink.postgres.place import Place
from epochsink.postgres.prepared_transaction import prepare, transaction
from epochsink.postgres.relation import Relation
from epochsink.postgres.table_shape import require_unchanged

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from epochsink.postgres.committable import Part, StagedTask
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
    def key(self) -> str:
        """What names of ours know the sink by."""
        return identity_key(self.identity)

    def expect(self, connection: Connection) -> None:
        """Raise `WentBack` unless the newest epoch that is done is there, and nothing newer."""
        if self.after is not None:
            self._marker.verify(connection, Relation.of(self.config.table), self.after, None)

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

    @property
    def _marker(self) -> Marker:
        return Marker.of(self.config.marker_schema, self.identity)

    def _went_back(self, epoch: Epoch, evidence: str) -> WentBack:
        table = Relation.of(self.config.table)
        return WentBack(
            f"epoch {epoch.number} is already applied to {table}, by another attempt: {evidence}",
            hint="an older copy of the checkpoint was restored: put the newer one back, or start a new checkpoint",
        )


@dataclass(frozen=True, slots=True)
class StagedRows:
    """What the accepted tasks of one sink have staged for an epoch."""

    voter: Voter
    member: Member
    logged: bool

    @classmethod
    def of(cls, voter: Voter, epoch: Epoch, written: Sequence[StagedTask]) -> StagedRows:
        """Put the tasks' answers together. Raises `PrepareFailed` if they do not agree."""
        first = written[0]
        for other in written:
            if (other.table, other.logged, other.merge) != (first.table, first.logged, first.merge):
                raise PrepareFailed(
                    f"the tasks of epoch {epoch.number} saw different tables or server settings: {first} and {other}",
                    hint="the table or the server changed meanwhile; Spark runs the epoch again",
                )
        tasks, rows = tuple(part.task for part in written), sum(part.rows for part in written)
        member = Member(voter.key, voter.config.marker_schema, first.table, tasks, rows, first.merge)
        return cls(voter, member, first.logged)

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


def vote_by_task(
    connection: Connection, voter: Voter, epoch: Epoch, written: Sequence[PreparedPart]
) -> Sequence[PreparedPart]:
    """Verify that each task's own transaction is prepared; each is a part."""
    voter.expect(connection)
    voter.refuse_applied(connection, epoch, [epoch.attempt])
    gids = {part.gid for part in written}
    missing = gids - orphans.still_prepared(connection, gids)
    if missing:
        raise PrepareFailed(
            f"prepared transaction(s) {', '.join(sorted(missing))} are not in pg_prepared_xacts",
            hint="somebody rolled them back; Spark runs the epoch again when the query restarts",
        )
    place = Place.of(connection)
    return [replace(part, place=place) for part in written]


def vote_as_one(connection: Connection, epoch: Epoch, staged: Mapping[str, StagedRows]) -> Part:
    """Return the one part that stands for staged rows of one or several sinks, by their names.

    Merged into every target in one transaction and prepared; where the rows are logged, that waits for the decision.
    """
    members = [rows.member for rows in staged.values()]
    logged = {rows.logged for rows in staged.values()}
    if len(logged) > 1:
        raise PrepareFailed(
            f"the tasks of epoch {epoch.number} saw different server settings",
            hint="max_prepared_transactions has changed meanwhile; Spark runs the epoch again",
        )
    if logged == {True}:
        for rows in staged.values():
            rows.verify(connection, epoch)
        if any(rows.voter.config.validate for rows in staged.values()):
            with transaction(connection):
                merge(connection, members)
                connection.execute("SET CONSTRAINTS ALL IMMEDIATE")
                connection.rollback()
        return _part(staged, epoch, None, Place.of(connection))
    voters = [rows.voter for rows in staged.values()]
    name = whole(voters[0], epoch)
    part = _part(staged, epoch, str(name), Place.of(connection))
    prepare_once(connection, epoch, voters, name, lambda: merge(connection, members))
    return part


def whole(first: Voter, epoch: Epoch) -> PreparedName:
    """Return the name of the transaction of a whole epoch, which bears that of its first sink."""
    label = identity_label(first.identity)
    return PreparedName(first.key, first.identity.generation, epoch.number, epoch.attempt, WHOLE, label)


def prepare_once(
    connection: Connection, epoch: Epoch, voters: Sequence[Voter], name: PreparedName, write: Callable[[], None]
) -> None:
    """Prepare a transaction that ``write`` writes all rows of an epoch in; nothing if that is done already."""
    if orphans.still_prepared(connection, {str(name)}):
        # the vote is repeated because its reply was lost
        return
    with transaction(connection):
        for voter in voters:
            # in the transaction that is prepared, which cannot outlive what it rests on; and before any mark of ours,
            # which would look like an epoch that nobody has recorded
            voter.expect(connection)
        for voter in voters:
            # the markers first: an epoch that is applied already stops here, before any row is written
            voter.mark(connection, epoch)
        write()
        reach("postgres.merged")
        prepare(connection, name)
    reach("postgres.prepared")


def _part(staged: Mapping[str, StagedRows], epoch: Epoch, gid: str | None, place: Place) -> Part:
    if len(staged) > 1:
        return SharedPart(epoch.attempt, {name: rows.member for name, rows in staged.items()}, gid, place)
    (rows,) = staged.values()
    one = rows.member
    if gid is None:
        return StagedEpoch(epoch.attempt, one.tasks, one.rows, one.table, one.merge, place)
    return PreparedPart(gid, epoch.attempt, one.tasks, one.rows, one.merge, one.table, place)
