"""The marker: a row that is committed with an epoch's rows, and proves later that the epoch is applied.

Its primary key makes a second application of the same epoch fail, so it is only ever inserted, never updated. A
part is "all" for an epoch that is committed as a whole, else the uuid of the task whose rows it covers.

A query that joins leaves a row before its first epoch: of epoch -1, with a uuid that the ledger holds (its origin). So
a missing marker was removed; it never means that nothing was applied.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from psycopg import errors

from epochsink.errors import PrepareFailed
from epochsink.postgres.committable import Relation, read_part
from epochsink.postgres.database import Database
from epochsink.postgres.marker_table import TABLE, MarkerRow, MarkerTable
from epochsink.sink import Identity, LastDone, Mark, Marks, identity_key

KEPT_EPOCHS: Final = 1000
JOINED: Final = -1
"""The epoch of the row that a query leaves as it joins."""


class MarkerRows:
    """The marker rows of one identity, in the schema ``schema``; ``base`` is None until it has joined.

    Raises `psycopg.Error`.
    """

    def __init__(self, schema: str, identity: Identity) -> None:
        self._schema = schema
        self._identity = identity
        self._key = identity_key(identity)
        self.base: str | None = identity.origin.get("base")

    def __str__(self) -> str:
        """Return the table as SQL."""
        return str(Relation(self._schema, TABLE))

    def _table(self, database: Database) -> MarkerTable:
        return database.markers(self._schema)

    def _row(self, epoch: int, part: str, attempt: str) -> MarkerRow:
        return MarkerRow(self._key, epoch, part, attempt, self._identity.query_id, self._identity.sink)

    def join(self, database: Database, base: str) -> None:
        """Insert the row that precedes the first epoch. May be repeated."""
        with suppress(errors.UniqueViolation):
            self._require_one(self._table(database).insert_alone(self._row(JOINED, base, base)))

    def insert(self, database: Database, epoch: int, part: str, attempt: str) -> None:
        """Mark a part as applied by the transaction under way.

        Raises `errors.UniqueViolation` if it is marked already, `PrepareFailed` if the table takes no row.
        """
        self._require_one(self._table(database).insert(self._row(epoch, part, attempt)))

    def _require_one(self, taken: int) -> None:
        if taken != 1:
            raise PrepareFailed(
                f"the marker table {self} took {taken} rows of 1: without the marker, nothing tells "
                "that the epoch is applied",
                hint="see whether a trigger or rule of the marker table swallows rows, and drop it",
                may_pass=False,
            )

    def has_joined(self, database: Database) -> bool:
        """Return whether there is any row of this identity."""
        return self._table(database).has_any(self._key)

    def attempt(self, database: Database, epoch: int, part: str) -> str | None:
        """Return the attempt that applied a part, or None."""
        return self._table(database).attempt(self._key, epoch, part)

    def other_attempt(self, database: Database, epoch: int, attempts: list[str]) -> str | None:
        """Return an attempt, except ``attempts``, that has applied a part of this epoch; or None."""
        return self._table(database).other_attempt(self._key, epoch, attempts)

    def sink_of(self, database: Database, key: str) -> str | None:
        """Return the sink of the same query that has left marks under ``key``; None if there is no such sink."""
        return self._table(database).sink_of(key, self._identity.query_id)

    def verify(self, database: Database, table: Relation, done: LastDone | None, pending: LastDone | None) -> None:
        """Raise `WentBack` unless the marker rows and the ledger agree."""
        self.marks(database, table, done, pending).verify(done, pending)

    def marks(self, database: Database, table: Relation, done: LastDone | None, pending: LastDone | None) -> Marks:
        """Return the marks of the rows, beside those that these epochs leave."""
        base = {} if self.base is None else {self.base: Mark(JOINED, self.base)}
        left = marks_of(done) if done else {}
        marks = self._newest_of(database, done.epoch if done else None, left)
        return Marks(f"table {table}", marks, left if done else base, marks_of(pending) if pending else {})

    def _newest_of(self, database: Database, epoch: int | None, parts: Iterable[str]) -> dict[str, Mark]:
        """Return the newest mark of each part applied at ``epoch`` (None: whatever is newest) or later.

        If nothing of that epoch is left, the table was set back: ``parts`` get the mark of the newest older epoch.
        """
        rows = self._table(database).since(self._key, epoch, self.base)
        # a start that failed after its row of joining has left a row that means nothing
        marks = {part: Mark(number, attempt) for part, number, attempt in rows}
        newest_marks = {part: mark for part, mark in marks.items() if mark.epoch > JOINED or part == self.base}
        newest = max(newest_marks.values(), key=lambda mark: mark.epoch, default=None)
        if newest is not None and epoch is not None and newest.epoch < epoch:
            newest_marks |= dict.fromkeys(parts, newest)
        return newest_marks

    def purge(self, database: Database, epoch: int) -> None:
        """Delete the marks of epochs that are too old to be needed."""
        self._table(database).purge(self._key, epoch - KEPT_EPOCHS - 1)


def marks_of(last: LastDone) -> dict[str, Mark]:
    """Return the mark that each part of an epoch leaves."""
    return {part.name: Mark(last.epoch, part.attempt) for part in map(read_part, last.parts)}
