"""One sink's table, as the driver sees it."""

from __future__ import annotations

from dataclasses import replace
from typing import Self

from psycopg import errors

from epochsink.errors import WentBack
from epochsink.postgres.applied_epochs import MarkerRows
from epochsink.postgres.committable import WHOLE, read_part
from epochsink.postgres.database import Database
from epochsink.postgres.orphans import Orphans
from epochsink.postgres.place import Place
from epochsink.postgres.sink_table import SinkTable
from epochsink.sink import Epoch, LastDone, Marks


class Table(SinkTable):
    """What the driver asks about a sink's table. Methods raise `psycopg.Error`."""

    __slots__ = ()

    def located(self, database: Database) -> Self:
        """Return it with its schema. To be done once: sessions that are opened later may have another search path."""
        return replace(self, schema=database.located(self.relation).schema)

    @property
    def marker(self) -> MarkerRows:
        """The sink's marker rows."""
        return MarkerRows(self.config.marker_schema, self.identity)

    def orphans(self, database: Database) -> Orphans:
        """Return what the sink has left in the database."""
        return Orphans(database, self.config.marker_schema, self.key, self.identity.generation)

    def require_place(self, database: Database, done: LastDone | None, pending: LastDone | None = None) -> None:
        """Raise `WentBack` if the newest epochs were prepared in another database, or this is the old primary."""
        here, newest = database.place(), done.epoch if done else -1
        recorded = Place.from_json(self.identity.origin.get("place")) if done is None else _place_of(done)
        here.require(recorded, self.relation, newest)
        # the first epoch after a failover: `done` was prepared before it. Accepting a target accepts its server
        if pending is not None and (done is None or done.parts):
            here.require(_place_of(pending), self.relation, newest, pending.epoch)

    def marks(self, database: Database, done: LastDone | None, pending: LastDone | None) -> Marks:
        """Return the marks of the table, and whether it is where these epochs were prepared."""
        marks = self.marker.marks(database, self.relation, done, pending)
        try:
            self.require_place(database, done, pending)
        except WentBack as elsewhere:
            return replace(marks, refusal=elsewhere)
        return marks

    def join_again(self, database: Database, pending: LastDone | None) -> bool:
        """Insert the mark of joining again if no epoch was ever committed: its loss hides no epoch."""
        marker = self.marker
        if pending is not None or marker.base is None:
            return False
        marker.join(database, marker.base)
        return True

    def expect(self, database: Database, after: LastDone | None, own: LastDone | None = None) -> None:
        """Raise `WentBack` unless the newest epoch that is done (None: not known) is there, and nothing but ``own``."""
        if after is not None:
            self.marker.verify(database, self.relation, after, own)

    def refuse_applied(self, database: Database, epoch: Epoch, ours: list[str]) -> None:
        """Raise `WentBack` if an attempt other than ``ours`` has applied the epoch."""
        applied_by = self.marker.other_attempt(database, epoch.number, ours)
        if applied_by is not None:
            raise self._went_back(epoch, applied_by)

    def mark(self, database: Database, epoch: Epoch) -> None:
        """Mark the epoch as applied by the transaction under way. Raises `WentBack` if it is marked already."""
        try:
            self.marker.insert(database, epoch.number, WHOLE, epoch.attempt)
        except errors.UniqueViolation as applied:
            raise self._went_back(epoch, applied.diag.message_detail or "") from applied

    def _went_back(self, epoch: Epoch, evidence: str) -> WentBack:
        return WentBack(
            f"epoch {epoch.number} is already applied to {self}, by another attempt: {evidence}",
            hint="an older copy of the checkpoint was restored: put the newer one back, or start a new checkpoint",
        )


def _place_of(last: LastDone) -> Place | None:
    """Return where an epoch was prepared; None if that is not recorded."""
    places = [part.place for part in map(read_part, last.parts) if part.place is not None]
    # parts that were prepared again have the timeline of that moment
    return max(places, key=lambda place: place.timeline, default=None)
