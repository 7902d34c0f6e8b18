"""One sink's table, as the driver sees it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Self

from psycopg import errors

from epochsink.errors import WentBack
from epochsink.identity import identity_key
from epochsink.postgres.applied_epochs import Marker
from epochsink.postgres.catalog import located
from epochsink.postgres.committable import WHOLE, Relation, read_part
from epochsink.postgres.config import PostgresConfig
from epochsink.postgres.orphans import Orphans
from epochsink.postgres.place import Place

if TYPE_CHECKING:
    from epochsink.postgres.committable import Merge
    from epochsink.postgres.server import Connection
    from epochsink.sink import Epoch, Identity, LastDone


@dataclass(frozen=True, slots=True)
class Table:
    """A sink's configuration and its identity. Methods with a connection raise `psycopg.Error`."""

    config: PostgresConfig
    identity: Identity
    schema: str | None = None

    @property
    def relation(self) -> Relation:
        """The target table, in ``schema`` if its own name has none."""
        named = Relation.of(self.config.table)
        return Relation(named.schema or self.schema, named.name)

    def located(self, connection: Connection) -> Self:
        """Return it with its schema. To be done once: sessions that are opened later may have another search path."""
        return replace(self, schema=located(connection, self.relation).schema)

    @property
    def key(self) -> str:
        """The sink in names."""
        return identity_key(self.identity)

    @property
    def marker(self) -> Marker:
        """The sink's marker rows."""
        return Marker(self.config.marker_schema, self.identity)

    def orphans(self, connection: Connection) -> Orphans:
        """Return what the sink has left in the database."""
        return Orphans(connection, self.config.marker_schema, self.key, self.identity.generation)

    def as_recorded(self, merge: Merge) -> Self:
        """Return it with table, key and way to merge as an epoch was written, whatever a later start sets."""
        given = {item.name: getattr(self.config, item.name) for item in fields(PostgresConfig)}
        schema, name = merge.target
        recorded = {
            "table": (name,) if schema is None else (schema, name),
            "key": merge.key,
            "order_by": self.config.order_by if merge.key else (),
            "delete_when": (self.config.delete_when or "true") if merge.deletes else None,
            "newer_wins": merge.newer_wins,
            "skip_unchanged": merge.skip_unchanged,
            "accumulate": merge.accumulate,
            "on_rejected": "dead_letter" if merge.sets_aside else "stop",
            # what a later start sets for its own epochs
            "letters_limit": 1.0,
            **({"atomic": True, "spool": True} if merge.sets_aside else {}),
        }
        return replace(self, config=PostgresConfig(**given | recorded))

    def require_place(self, connection: Connection, done: LastDone | None, pending: LastDone | None = None) -> None:
        """Raise `WentBack` if the newest epochs were prepared in another database, or this is the old primary."""
        here = Place.of(connection)
        recorded = Place.from_json(self.identity.origin.get("place")) if done is None else _place_of(done)
        here.require(recorded, self.relation, done.epoch if done else -1)
        # the first epoch after a failover: `done` is of before it. Whoever accepts a target accepts its server too
        if pending is not None and (done is None or done.parts):
            here.require(_place_of(pending), self.relation, pending.epoch)

    def join_again(self, connection: Connection, pending: LastDone | None) -> bool:
        """Insert the mark of joining again if no epoch was ever committed: its loss hides no epoch."""
        marker = self.marker
        if pending is not None or marker.base is None:
            return False
        marker.join(connection, marker.base)
        return True

    def expect(self, connection: Connection, after: LastDone | None, own: LastDone | None = None) -> None:
        """Raise `WentBack` unless the newest epoch that is done (None: not known) is there, and nothing but ``own``."""
        if after is not None:
            self.marker.verify(connection, self.relation, after, own)

    def refuse_applied(self, connection: Connection, epoch: Epoch, ours: list[str]) -> None:
        """Raise `WentBack` if an attempt other than ``ours`` has applied the epoch."""
        applied_by = self.marker.other_attempt(connection, epoch.number, ours)
        if applied_by is not None:
            raise self._went_back(epoch, applied_by)

    def mark(self, connection: Connection, epoch: Epoch) -> None:
        """Mark the epoch as applied by the transaction under way. Raises `WentBack` if it is marked already."""
        try:
            self.marker.insert(connection, epoch.number, WHOLE, epoch.attempt)
        except errors.UniqueViolation as applied:
            raise self._went_back(epoch, applied.diag.message_detail or "") from applied

    def _went_back(self, epoch: Epoch, evidence: str) -> WentBack:
        return WentBack(
            f"epoch {epoch.number} is already applied to {self}, by another attempt: {evidence}",
            hint="an older copy of the checkpoint was restored: put the newer one back, or start a new checkpoint",
        )

    def __str__(self) -> str:
        return str(self.relation)


def _place_of(last: LastDone) -> Place | None:
    """Return where an epoch was prepared; None if that is not recorded."""
    places = [part.place for part in map(read_part, last.parts) if part.place is not None]
    # parts that were prepared again have the timeline of then
    return max(places, key=lambda place: place.timeline, default=None)
