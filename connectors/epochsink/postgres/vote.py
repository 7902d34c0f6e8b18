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
from epochsink.postgres.catalog import read_target
from epochsink.postgres.committable import PreparedPart, StagedEpoch
from epochsink.postgres.merge import merge, verify, verify_casts
from epochsink.postgres.place import Place
from epochsink.postgres.prepared_transaction import prepare, transaction
from epochsink.postgres.relation import Relation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from epochsink.postgres.committable import Merge, Part, StagedTask
    from epochsink.postgres.config import PostgresConfig
    from epochsink.postgres.server import Connection
    from epochsink.sink import Epoch, Identity, LastDone


@dataclass(frozen=True, slots=True)
class Vote:
    """Prepares epochs of one identity. Raises `PrepareFailed`, `WentBack`, `psycopg.Error`."""

    config: PostgresConfig
    identity: Identity

    def tasks(
        self, connection: Connection, epoch: Epoch, written: Sequence[PreparedPart], after: LastDone | None
    ) -> Sequence[PreparedPart]:
        """Verify that each task's own transaction is prepared; each is a part."""
        self._expect(connection, after)
        self._refuse_applied(connection, epoch, [epoch.attempt])
        prepared = orphans.prepared_gids(connection, self._key)
        missing = [part.gid for part in written if part.gid not in prepared]
        if missing:
            raise PrepareFailed(
                f"prepared transaction(s) {', '.join(missing)} are not in pg_prepared_xacts",
                hint="somebody rolled them back; Spark runs the epoch again when the query restarts",
            )
        place = Place.of(connection)
        return [replace(part, place=place) for part in written]

    def whole(
        self, connection: Connection, epoch: Epoch, written: Sequence[StagedTask], after: LastDone | None
    ) -> Part:
        """Return the one part that stands for an epoch whose rows are staged; merged and prepared unless logged."""
        first = written[0]
        for other in written:
            if (other.table, other.logged, other.merge) != (first.table, first.logged, first.merge):
                raise PrepareFailed(
                    f"the tasks of epoch {epoch.number} saw different tables or server settings: {first} and {other}",
                    hint="the table or the server changed meanwhile; Spark runs the epoch again",
                )
        tasks, rows = tuple(part.task for part in written), sum(part.rows for part in written)
        staging = Relation(self.config.schema_for_markers, first.table)
        if first.logged:
            self._refuse_applied(connection, epoch, [])
            self._expect(connection, after)
            verify(connection, first.merge, staging, tasks, rows)
            if first.merge.casts:
                self._verify_casts(connection, first.merge, staging, tasks)
            if self.config.validate:
                with transaction(connection):
                    merge(connection, first.merge, staging, tasks, rows)
                    connection.execute("SET CONSTRAINTS ALL IMMEDIATE")
                    connection.rollback()
            return StagedEpoch(epoch.attempt, tasks, rows, first.table, first.merge, Place.of(connection))
        gid = PreparedName(
            self._key, self.identity.generation, epoch.number, epoch.attempt, WHOLE, identity_label(self.identity)
        )
        part = PreparedPart(str(gid), epoch.attempt, tasks, rows, first.table, Place.of(connection))
        if part.gid in orphans.prepared_gids(connection, self._key):
            return part
        with transaction(connection):
            # in the transaction that is prepared, which cannot outlive what it rests on
            self._expect(connection, after)
            # the marker first: an epoch that is applied already stops here, before any row is merged
            self._mark_whole(connection, epoch)
            merge(connection, first.merge, staging, tasks, rows)
            reach("postgres.merged")
            prepare(connection, gid)
        reach("postgres.prepared")
        return part

    def _verify_casts(self, connection: Connection, merge: Merge, staging: Relation, tasks: Sequence[str]) -> None:
        target = read_target(connection, merge.target)
        if target is None:
            raise PrepareFailed(
                f"table {merge.target} is gone",
                hint="create it again, then restart the query, which runs the epoch again",
                may_pass=False,
            )
        types = {name: column.definition for name, column in target.columns.items()}
        with transaction(connection):
            verify_casts(connection, merge, staging, tasks, types)
            connection.rollback()

    @property
    def _key(self) -> str:
        return identity_key(self.identity)

    @property
    def _marker(self) -> Marker:
        return Marker.of(self.config.schema_for_markers, self.identity)

    def _expect(self, connection: Connection, after: LastDone | None) -> None:
        """Raise `WentBack` unless the newest epoch that is done is there, and nothing newer."""
        if after is not None:
            self._marker.verify(connection, Relation.of(self.config.table), after, None)

    def _refuse_applied(self, connection: Connection, epoch: Epoch, ours: list[str]) -> None:
        applied_by = self._marker.other_attempt(connection, epoch.number, ours)
        if applied_by is not None:
            raise self._went_back(epoch, applied_by)

    def _mark_whole(self, connection: Connection, epoch: Epoch) -> None:
        try:
            self._marker.insert(connection, self.identity, epoch.number, WHOLE, epoch.attempt)
        except errors.UniqueViolation as applied:
            raise self._went_back(epoch, applied.diag.message_detail or "") from applied

    def _went_back(self, epoch: Epoch, evidence: str) -> WentBack:
        table = Relation.of(self.config.table)
        return WentBack(
            f"epoch {epoch.number} is already applied to {table}, by another attempt: {evidence}",
            hint="an older copy of the checkpoint was restored: put the newer one back, or start a new checkpoint",
        )
