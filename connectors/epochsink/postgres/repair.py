"""Find out what a database that was set back lacks of done epochs.

A restore or a failover takes back the newest transactions, and the marker rows are in the same ones. So a part without
its marker row is not in the table either. The rows are prepared again under the attempt that the ledger records, so
that the marker is as it was, and its primary key admits the part once, even if two repairs run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from epochsink.errors import WentBack
from epochsink.postgres.committable import read_part
from epochsink.postgres.database import Database
from epochsink.postgres.table import Table
from epochsink.postgres.table_identity import require_same_table
from epochsink.sink import Committable, Epoch, LastDone, Losses
from epochsink.sink.marks import ReadMarks


class PostgresLosses(Losses):
    """One search by marker rows; ``tables`` by sink, and ``ask`` lends the session of one."""

    def __init__(
        self,
        marks: ReadMarks,
        tables: Mapping[str, Table],
        ask: Callable[..., AbstractContextManager[Database]],
    ) -> None:
        super().__init__(marks)
        self._tables = tables
        self._ask = ask

    def lacking(self, sink: str, done: LastDone) -> list[Committable]:
        """Return the parts that have no marker row; see `lacking`."""
        with self._ask(sink, f"reading the marker of {self._tables[sink]}") as database:
            return _lacking(database, self._tables[sink], done)


def _lacking(database: Database, table: Table, done: LastDone) -> list[Committable]:
    """Return the parts of a done epoch that have no marker row.

    Raises `WentBack` if rows may be there without their markers: in another database or table, or without any marker.
    """
    table.require_place(database, done)
    require_same_table(database, table, done, None)
    marker = table.marker
    if not marker.has_joined(database):
        raise WentBack(
            f"table {table} has no marker of this query at all: whether its rows were taken back with the markers, or "
            "somebody deleted the markers alone, is unknown; what is applied again could be there twice",
            hint="restore the table and the markers from one and the same copy",
        )
    parts = {read_part(part): part for part in done.parts}
    table.refuse_applied(database, Epoch(done.epoch, done.attempt), [part.attempt for part in parts])
    missing = {read: part for read, part in parts.items() if marker.attempt(database, done.epoch, read.name) is None}
    seals = [read for read in missing if read.is_seal]
    if len(missing) < len(parts) and any(member.merge.key for seal in seals for member in seal.members.values()):
        raise WentBack(
            f"table {table} holds rows of epoch {done.epoch} without its seal: the server has failed over while they "
            "were committed, and rows of earlier epochs that are applied again now would replace later ones of a key",
            hint="load the rows that are missing with a query of its own (the input is in offsets/ of the checkpoint), "
            f"then say so: epochsink accept CHECKPOINT {done.epoch} --sink NAME",
        )
    return list(missing.values())


def require_before(table: Table, database: Database, epoch: Epoch, after: LastDone | None) -> None:
    """Raise `WentBack` if a table has lost the epoch before this one again, which was there or has just been applied.

    This epoch's marker would hide that from every later comparison.
    """
    newest = table.marker.marks(database, table.relation, after, None).newest
    before = -1 if after is None else after.epoch
    if (-1 if newest is None else newest) < before:
        raise WentBack(
            f"table {table} no longer holds epoch {before}, after which epoch {epoch.number} was to be applied again: "
            "the server has failed over, or was set back, since this repair began",
            hint="type the command again: it begins with what is missing now",
        )
