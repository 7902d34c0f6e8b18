"""End what an identity has left: old sessions, then prepared transactions, then staging tables.

Sessions come first, because a live session could prepare another transaction after the list was read. Staging tables
come last, because a prepared transaction locks its staging table.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from psycopg import errors, sql

from epochsink.errors import WentBack
from epochsink.identity import PREFIX, PreparedName, staging_owner
from epochsink.postgres.committable import Relation
from epochsink.postgres.prepared_transaction import rollback_prepared
from epochsink.postgres.sessions import DRIVER, SessionName
from epochsink.postgres.staging import Note

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from epochsink.postgres.committable import Part
    from epochsink.postgres.server import Connection

_log = logging.getLogger(__name__)

_DROP_TIMEOUT: Final = "100ms"
"""A reader that locks a staging table for longer (pg_dump) must not delay each epoch."""
_TERMINATE_MILLISECONDS: Final = 2000

_SESSIONS: Final = """
SELECT pid, application_name FROM pg_stat_activity
WHERE datname = current_database() AND application_name LIKE %s AND pid <> pg_backend_pid()
"""
_STAGING: Final = """
SELECT c.relname, obj_description(c.oid, 'pg_class')
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = %s AND c.relkind = 'r' AND c.relname LIKE %s
"""
_HOLDERS: Final = """
SELECT x.gid FROM pg_prepared_xacts x
JOIN pg_locks own ON own.locktype = 'transactionid' AND own.pid IS NULL AND own.transactionid = x.transaction
JOIN pg_locks held ON held.virtualtransaction = own.virtualtransaction AND held.pid IS NULL
JOIN pg_class c ON held.locktype = 'relation' AND held.relation = c.oid JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE x.database = current_database() AND x.gid LIKE %s AND n.nspname = %s AND c.relname = ANY (%s)
"""
"""A prepared transaction has no process: its lock on its own id leads to its other locks."""


class Orphans:
    """Ends what belongs to one identity, for generations up to ``generation``. Raises `psycopg.Error`."""

    def __init__(self, connection: Connection, schema: str, key: str, generation: int) -> None:
        self._connection = connection
        self._schema = schema
        self._key = key
        self._generation = generation

    def names(self) -> list[str]:
        """Return the prepared transactions and the staging tables, of any generation."""
        return [*sorted(prepared_gids(self._connection, self._key)), *self._tables()]

    def newest_generation(self) -> int:
        """Return the highest generation of a prepared transaction, staging table or session; 0 if there is none."""
        names = [PreparedName.parse(gid) for gid in prepared_gids(self._connection, self._key)]
        found = [*names, *(name for _, name in self._sessions())]
        return max((name.generation for name in [*found, *self._tables().values()] if name), default=0)

    def end_all(self, keep: Sequence[Part], done: Sequence[Part] = ()) -> list[str]:
        """End everything that ``keep`` does not name; return one line for each thing ended.

        Raises `WentBack`, and ends nothing, if a part of ``done`` is still prepared.
        """
        self._refuse_done({part.gid for part in done if part.gid})
        attempts = {part.attempt for part in keep}
        gids = {part.gid for part in keep}
        tables = {table for part in keep for table in part.tables}
        ended = self._end_sessions(lambda name: not any(name.works_for(attempt) for attempt in attempts))
        staging = [table for table in self._staging() if table not in tables]
        of_others = [table for table in staging if (owner := staging_owner(table)) and owner[1] not in attempts]
        return [
            *ended,
            *self._roll_back(self._own | self._shared(of_others), lambda name: str(name) not in gids),
            *(f"dropped staging table {table}" for table in staging if self.drop(table)),
        ]

    def _refuse_done(self, done: set[str]) -> None:
        again = still_prepared(self._connection, done)
        if again:
            raise WentBack(
                f"prepared transaction {min(again)} exists, but the ledger says that its epoch is done: the server "
                "has lost the commit, as after a failover to a standby that lacked it; its rows are not visible",
                hint="restore the newer state of the server; the transaction is left as it is",
            )

    def drop(self, table: str) -> bool:
        """Drop a staging table. Return False if it is locked; the next sweep tries again."""
        name = Relation(self._schema, table).quoted
        # not durable: if a crash brings the table back, the next sweep drops it again
        statement = "SET LOCAL lock_timeout = {}; SET LOCAL synchronous_commit = off; DROP TABLE IF EXISTS {}"
        try:
            self._connection.execute(sql.SQL(statement).format(sql.Literal(_DROP_TIMEOUT), name))
        except (errors.LockNotAvailable, errors.InternalError_, errors.InsufficientPrivilege) as held:
            _log.warning("staging table %s is left for the next sweep: %s", table, held.diag.message_primary)
            return False
        return True

    def _end_sessions(self, is_left: Callable[[SessionName], bool]) -> list[str]:
        """Terminate sessions of older generations, and task sessions of this generation whose attempt is over."""
        ended = []
        for pid, name in self._sessions():
            if name.generation > self._generation:
                continue
            of_ours = name.generation == self._generation
            if (of_ours and name.attempt == DRIVER) or not (is_left(name) or name.attempt == DRIVER):
                continue
            if self._terminate(pid):
                ended.append(f"terminated session {pid} ({name})")
        return ended

    def _sessions(self) -> list[tuple[int, SessionName]]:
        rows = self._connection.execute(_SESSIONS, [SessionName.pattern(self._key)]).fetchall()
        return [(pid, name) for pid, application in rows if (name := SessionName.parse(application))]

    def _terminate(self, pid: int) -> bool:
        try:
            done = self._connection.execute(
                # and wait for its end: a session that is only told to end may prepare one more transaction
                "SELECT pg_terminate_backend(%s, %s)",
                [pid, _TERMINATE_MILLISECONDS],
            ).fetchone()
        except errors.InsufficientPrivilege as refused:
            _log.warning("session %d cannot be terminated: %s", pid, refused.diag.message_primary)
            return False
        return bool(done and done[0])

    @property
    def _own(self) -> set[str]:
        return prepared_gids(self._connection, self._key)

    def _shared(self, staging: Sequence[str]) -> set[str]:
        """Return the transactions that hold rows of this sink out of these staging tables.

        A shared transaction is named after its first sink, which may no longer be part of the query. By its lock, not
        by the attempt: sinks of the query that are no members here have transactions of the same attempt.
        """
        if not staging:
            return set()
        return {gid for (gid,) in self._connection.execute(_HOLDERS, [f"{PREFIX}:%", self._schema, list(staging)])}

    def _roll_back(self, gids: Collection[str], is_left: Callable[[PreparedName], bool]) -> list[str]:
        ended = []
        for gid in sorted(gids):
            name = PreparedName.parse(gid)
            if name is None or name.generation > self._generation or not is_left(name):
                continue
            if rollback_prepared(self._connection, gid):
                ended.append(f"rolled back prepared transaction {gid}")
        return ended

    def _staging(self) -> list[str]:
        """Return the identity's staging tables, except those whose comment names a newer generation."""
        return [table for table, note in self._tables().items() if not note or note.generation <= self._generation]

    def _tables(self) -> dict[str, Note | None]:
        found = self._connection.execute(_STAGING, [self._schema, f"s\\_{self._key}\\_%"]).fetchall()
        return {table: Note.parse(comment) for table, comment in found if staging_owner(table)}


def prepared_gids(connection: Connection, key: str) -> set[str]:
    """Return the names of an identity's prepared transactions. Raises `psycopg.Error`."""
    query = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database() AND gid LIKE %s"
    return {gid for (gid,) in connection.execute(query, [PreparedName.pattern(key)]).fetchall()}


def still_prepared(connection: Connection, gids: Collection[str]) -> set[str]:
    """Return those of ``gids`` that are prepared, including those named after another sink. Raises `psycopg.Error`."""
    if not gids:
        return set()
    query = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database() AND gid = ANY (%s)"
    return {gid for (gid,) in connection.execute(query, [list(gids)]).fetchall()}


def exists(connection: Connection, relation: Relation) -> bool:
    """Return whether the table exists. Raises `psycopg.Error`."""
    found = connection.execute("SELECT pg_catalog.to_regclass(%s) IS NOT NULL", [str(relation)]).fetchone()
    return bool(found and found[0])
