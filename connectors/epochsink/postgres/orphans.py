"""End what an identity has left: old sessions, then prepared transactions, then staging tables.

Sessions come first, because a live session could prepare another transaction after the list was read. Staging tables
come last, because a prepared transaction locks its staging table.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Final, cast

from psycopg import errors

from epochsink.identity import PreparedName, staging_owner
from epochsink.postgres.committable import Relation, read_part
from epochsink.postgres.database import Database
from epochsink.postgres.sessions import DRIVER, SessionName
from epochsink.postgres.staging import Note
from epochsink.sink import Committable, Recorded, Remnant, RemnantState

_log = logging.getLogger(__name__)


SESSION: Final = "session"
PREPARED: Final = "prepared transaction"
STAGING: Final = "staging table"
_STATES: Final = {
    SESSION: RemnantState.RUNNING,
    PREPARED: RemnantState.PREPARED,
    STAGING: RemnantState.STAGED,
}


class Orphans:
    """Finds and ends what belongs to one identity; ``generation`` is this driver's. Raises `psycopg.Error`."""

    def __init__(self, database: Database, schema: str, key: str, generation: int) -> None:
        self._database = database
        self._schema = schema
        self._key = key
        self._generation = generation

    def remnants(self, recorded: Recorded) -> list[Remnant]:
        """Return sessions, except those of this driver, prepared transactions and staging tables."""
        parts = {read_part(part): part for each in recorded[::-1] for part in each}
        attempts = {part.attempt: given for part, given in parts.items()}
        gids = {part.gid: given for part, given in parts.items() if part.gid}
        tables = {table: given for part, given in parts.items() for table in part.tables}
        staged = self._tables()
        pending = [read_part(part) for part in recorded[0]]
        kept = {each.attempt for each in pending} | {table for each in pending for table in each.tables}
        left = [table for table in staged if kept.isdisjoint({table, _attempt_of(table)})]
        prepared = sorted(self._own | self._shared(left) | self._database.still_prepared(gids.keys()))
        return [
            *(
                self._remnant(SESSION, f"{pid} ({name})", name.generation, pid, of=_working_for(name, attempts))
                for pid, name in self._database.sessions(self._key)
                if (name.generation, name.attempt) != (self._generation, DRIVER)
            ),
            *(
                self._remnant(PREPARED, gid, name.generation, gid, of=gids.get(gid))
                for gid in prepared
                if (name := PreparedName.parse(gid)) is not None
            ),
            *(
                self._remnant(STAGING, table, note.generation if note else 0, table, of=tables.get(table))
                for table, note in staged.items()
            ),
        ]

    def _remnant(self, kind: str, name: str, generation: int, handle: object, of: Committable | None) -> Remnant:
        return Remnant(kind, name, generation, self._key, state=_STATES[kind], of=of, handle=handle)

    def end(self, remnants: Sequence[Remnant]) -> list[str]:
        """End those of this identity; return one line for each thing ended."""
        own = [each for each in remnants if each.key == self._key]
        roll_back = self._database.rollback_prepared
        return [
            *(
                f"terminated {each}"
                for each in own
                if each.kind == SESSION and self._terminate(cast("int", each.handle))
            ),
            *(f"rolled back {each}" for each in own if each.kind == PREPARED and roll_back(each.name)),
            *(f"dropped {each}" for each in own if each.kind == STAGING and self.drop(each.name)),
        ]

    def drop(self, table: str) -> bool:
        """Drop a staging table. Return False if it is locked; the next sweep tries again."""
        try:
            self._database.drop_staging(Relation(self._schema, table))
        except (errors.LockNotAvailable, errors.InternalError_, errors.InsufficientPrivilege) as held:
            _log.warning("staging table %s is left for the next sweep: %s", table, held.diag.message_primary)
            return False
        return True

    def _terminate(self, pid: int) -> bool:
        try:
            return self._database.terminate(pid)
        except errors.InsufficientPrivilege as refused:
            _log.warning("session %d cannot be terminated: %s", pid, refused.diag.message_primary)
            return False

    @property
    def _own(self) -> set[str]:
        return {transaction.gid for transaction in self._database.prepared_transactions(self._key)}

    def _shared(self, staging: Sequence[str]) -> set[str]:
        """Return the transactions that hold rows of this sink out of these staging tables.

        A shared transaction is named after its first sink, which may no longer be part of the query. By its lock, not
        by the attempt: sinks of the query that are no members here have transactions of the same attempt.
        """
        if not staging:
            return set()
        return {lock.gid for lock in self._database.prepared_locks(staging) if lock.schema == self._schema}

    def _tables(self) -> dict[str, Note | None]:
        tables = self._database.staging_tables(self._key)
        return {
            table.name: table.note for table in tables if table.schema == self._schema and staging_owner(table.name)
        }


def _attempt_of(table: str) -> str | None:
    owner = staging_owner(table)
    return owner[1] if owner else None


def _working_for(name: SessionName, attempts: Mapping[str, Committable]) -> Committable | None:
    return next((part for attempt, part in attempts.items() if name.works_for(attempt)), None)
