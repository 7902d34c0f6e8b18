"""Name the prepared transaction that a vote waits for: it has no session, and ends only when somebody ends it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from epochsink.identity import PreparedName

if TYPE_CHECKING:
    from collections.abc import Sequence

    from epochsink.errors import PrepareFailed
    from epochsink.postgres.relation import Relation
    from epochsink.postgres.server import Connection

# a prepared transaction has no process; in pg_locks the lock on its own id tells by which name its others go
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


def name_holder(
    connection: Connection, tables: Sequence[Relation], key: str, generation: int, waited: PrepareFailed
) -> PrepareFailed:
    """Return the failure of a vote that waited for a lock on one of ``tables``, with the transaction that holds one.

    ``key`` and ``generation`` are the sink's own. What this driver or an earlier one holds is not named: the sweep
    before the next attempt ends it. Raises `psycopg.Error`.
    """
    found = connection.execute(_HOLDERS, [[table.name for table in tables]]).fetchone()
    if found is None:
        return waited
    gid, since, table = found
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
    waited.message += f": it belongs to another query, '{owner.label or owner.key}', which has not committed it"
    waited.hint = (
        "if that query will not run again, end what its checkpoint holds: epochsink abandon ITS_CHECKPOINT --sinks "
        f"MODULE:ATTRIBUTE. If that checkpoint is gone: epochsink orphans --dsn DSN --end '{gid}'. If it is only down, "
        "start it: it commits or ends the transaction itself"
    )
    return waited
