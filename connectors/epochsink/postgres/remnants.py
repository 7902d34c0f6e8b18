"""Find what sinks have left in a database, without a checkpoint, and name the transaction that blocks a vote.

A prepared transaction belongs to no session. It keeps its locks until it is committed or rolled back.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from psycopg import sql

from epochsink.identity import PREFIX, PreparedName, staging_owner
from epochsink.postgres.committable import WHOLE, Relation
from epochsink.postgres.config import PostgresConfig, connection_string
from epochsink.postgres.errors import translated
from epochsink.postgres.prepared_transaction import LOCAL, rollback_prepared
from epochsink.postgres.server import Server
from epochsink.postgres.sessions import SessionName
from epochsink.postgres.staging import Note
from epochsink.sink import Remnant

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from epochsink.errors import PrepareFailed
    from epochsink.postgres.server import Connection
    from epochsink.postgres.table import Table

PREPARED: Final = "prepared transaction"
STAGING: Final = "staging table"

# A prepared transaction has no process. Its lock on its own transaction id leads to its virtual transaction in
# pg_locks, and that to its other locks.
_PREPARED: Final = """
SELECT x.gid, x.owner::pg_catalog.text, pg_catalog.date_part('epoch', x.prepared), (
    SELECT pg_catalog.array_agg(DISTINCT pg_catalog.concat(held.relation::pg_catalog.regclass, ' ', held.mode))
    FROM pg_catalog.pg_locks own JOIN pg_catalog.pg_locks held
      ON held.virtualtransaction OPERATOR(pg_catalog.=) own.virtualtransaction AND held.pid IS NULL
    WHERE own.locktype OPERATOR(pg_catalog.=) 'transactionid' AND own.pid IS NULL
      AND own.transactionid OPERATOR(pg_catalog.=) x.transaction
      AND held.locktype OPERATOR(pg_catalog.=) 'relation'
)
FROM pg_catalog.pg_prepared_xacts x
WHERE x.database OPERATOR(pg_catalog.=) pg_catalog.current_database() ORDER BY x.prepared
"""
_STAGING: Final = """
SELECT n.nspname, c.relname, pg_catalog.pg_get_userbyid(c.relowner)::pg_catalog.text,
       pg_catalog.obj_description(c.oid, 'pg_class'), pg_catalog.pg_total_relation_size(c.oid)
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid OPERATOR(pg_catalog.=) c.relnamespace
WHERE c.relkind OPERATOR(pg_catalog.=) 'r' AND pg_catalog.starts_with(c.relname::pg_catalog.text, 's_') ORDER BY 1, 2
"""
_SESSIONS: Final = "SELECT application_name FROM pg_catalog.pg_stat_activity"


class Database:
    """One database, for an operator. Raises `EpochsinkError` if it is unreachable or refuses a statement."""

    def __init__(self, dsn: str, options: Mapping[str, str]) -> None:
        # The configuration requires a table; nothing is written to it.
        server = Server.of(PostgresConfig(dsn=connection_string(dsn), table=("none",), options=options))
        with translated(f"connecting to {server.database}"):
            self._connection: Connection = server.connect(f"{PREFIX}-orphans")

    def remnants(self) -> list[Remnant]:
        """Return the prepared transactions and staging tables of every sink, oldest first if that is known."""
        with translated("looking for what sinks have left"):
            return remnants(self._connection)

    def end(self, remnant: Remnant) -> None:
        """Roll back a prepared transaction, or drop a staging table. Its rows are lost."""
        with translated(f"ending {remnant.name}"):
            if remnant.kind == PREPARED:
                rollback_prepared(self._connection, remnant.name)
            else:
                table = Relation(*remnant.name.split(".", 1))
                self._connection.execute(LOCAL + sql.SQL("DROP TABLE IF EXISTS {}").format(table.quoted))

    def close(self) -> None:
        """Release the connection."""
        self._connection.close()


def remnants(connection: Connection) -> list[Remnant]:
    """Return the prepared transactions and staging tables of every sink, oldest first if that is known.

    Raises `psycopg.Error`.
    """
    sessions = [SessionName.parse(name or "") for (name,) in connection.execute(_SESSIONS).fetchall()]
    used = {session.key for session in sessions if session}
    return [*_prepared(connection, used), *_staging(connection, used)]


def _prepared(connection: Connection, used: set[str]) -> list[Remnant]:
    found = []
    for gid, owner, since, locks in connection.execute(_PREPARED).fetchall():
        name = PreparedName.parse(gid)
        if name is not None:
            found.append(
                Remnant(
                    kind=PREPARED,
                    name=gid,
                    key=name.key,
                    label=name.label,
                    generation=name.generation,
                    epoch=name.epoch,
                    since=float(since),
                    owner=owner,
                    holds=tuple(sorted(locks or ())),
                    in_use=name.key in used,
                )
            )
    return found


def _staging(connection: Connection, used: set[str]) -> list[Remnant]:
    found = []
    for schema, table, owner, comment, size in connection.execute(_STAGING).fetchall():
        ours, note = staging_owner(table), Note.parse(comment)
        if ours is not None and note is not None:
            found.append(
                Remnant(
                    kind=STAGING,
                    name=f"{schema}.{table}",
                    key=ours[0],
                    label=note.label,
                    generation=note.generation,
                    epoch=note.epoch,
                    owner=owner,
                    holds=(f"{size} bytes",),
                    in_use=ours[0] in used,
                )
            )
    return found


_HOLDERS: Final = """
SELECT x.gid, pg_catalog.date_part('epoch', x.prepared), c.relname::pg_catalog.text
FROM pg_catalog.pg_prepared_xacts x
JOIN pg_catalog.pg_locks own ON own.locktype OPERATOR(pg_catalog.=) 'transactionid' AND own.pid IS NULL
  AND own.transactionid OPERATOR(pg_catalog.=) x.transaction
JOIN pg_catalog.pg_locks held ON held.virtualtransaction OPERATOR(pg_catalog.=) own.virtualtransaction
  AND held.pid IS NULL AND held.locktype OPERATOR(pg_catalog.=) 'relation'
JOIN pg_catalog.pg_class c ON c.oid OPERATOR(pg_catalog.=) held.relation
  AND c.relname OPERATOR(pg_catalog.=) ANY (%s::pg_catalog.name[])
WHERE x.database OPERATOR(pg_catalog.=) pg_catalog.current_database() ORDER BY x.prepared LIMIT 1
"""


def prepared_holder(connection: Connection, tables: Sequence[Relation]) -> tuple[str, float, str] | None:
    """Return the oldest prepared transaction with a lock on one of ``tables``: gid, Unix time, table.

    Raises `psycopg.Error`.
    """
    return connection.execute(_HOLDERS, [[table.name for table in tables]]).fetchone()


def _seal(connection: Connection, table: Table) -> tuple[str, float, str] | None:
    """Return the prepared seal that another one waits for, which locks no table but a row of the markers'."""
    for one in _prepared(connection, set()):
        name = PreparedName.parse(one.name)
        if name is not None and (name.key, name.part) == (table.key, WHOLE):
            return one.name, one.since or 0.0, "the markers"
    return None


def name_holder(connection: Connection, tables: Sequence[Table], waited: PrepareFailed) -> PrepareFailed:
    """Return ``waited``, the failure of a vote that waited for a lock on ``tables``, and name the holder in it.

    A transaction of this driver or an earlier one is not named, because the sweep before the next attempt ends it.
    Raises `psycopg.Error`.
    """
    found = (
        prepared_holder(connection, [table.relation for table in tables])
        if tables[0].config.atomic
        else _seal(connection, tables[0])
    )
    if found is None:
        return waited
    gid, since, table = found
    # a shared transaction is named after its first sink
    key, generation = tables[0].key, tables[0].identity.generation
    owner = PreparedName.parse(gid)
    if owner is not None and owner.key == key and owner.generation <= generation:
        return waited
    prepared = datetime.fromtimestamp(since, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    waited.message += f"; prepared transaction '{gid}' has held locks on {table} since {prepared}"
    if owner is None:
        waited.hint = f"end it as the role that prepared it: COMMIT PREPARED '{gid}', or ROLLBACK PREPARED '{gid}'"
        return waited
    if owner.key == key:
        waited.message += (
            f": a driver of this query in generation {owner.generation} prepared it, and this driver is generation "
            f"{generation}, so this checkpoint is the older copy"
        )
        waited.hint = (
            "stop the other driver, or use the newer copy of the checkpoint. If both are gone, roll the transaction "
            f"back: epochsink orphans --dsn DSN --end '{gid}'"
        )
        return waited
    sink = tables[0].marker.sink_of(connection, owner.key)
    if sink is not None:
        # the decision on this epoch would come after this vote: to wait again, or in another attempt, helps nothing
        waited.facts["may_pass"] = False
        waited.message += f": it is of sink '{sink}' of this query, and holds them until this epoch is decided"
        waited.hint = (
            "sinks that write the same rows have to share a transaction: give both atomic=True, and dsn=, options= and "
            "commit= in the same words; or by where= give them rows of different keys"
        )
        return waited
    waited.message += f": it belongs to another query, '{owner.label or owner.key}', which has not committed it"
    waited.hint = (
        "if that query will not run again, end what its checkpoint holds: epochsink abandon ITS_CHECKPOINT --sinks "
        f"MODULE:ATTRIBUTE. If that checkpoint is gone: epochsink orphans --dsn DSN --end '{gid}'. If it is only down, "
        "start it: it commits or ends the transaction itself"
    )
    return waited
