"""Which table a sink's epochs are in, by its oid, which a table that is dropped and created again does not keep.

Restored on its own (``pg_restore --clean --table``), a table lacks the epochs since its backup, and the markers, which
were not restored, say that they are there. So a row beside the markers names the table. It is not part of an epoch's
transaction: it changes only while nothing is there to lose, and by an operator's word.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from psycopg import errors, sql

from epochsink.errors import WentBack
from epochsink.identity import identity_key
from epochsink.postgres.applied_epochs import TABLE

if TYPE_CHECKING:
    from epochsink.postgres.relation import Relation
    from epochsink.postgres.server import Connection
    from epochsink.sink import Identity, LastDone

_OID: Final = """
SELECT c.oid FROM pg_catalog.unnest(%s::pg_catalog.text[]) WITH ORDINALITY AS path (schema, place)
JOIN pg_catalog.pg_namespace n ON n.nspname OPERATOR(pg_catalog.=) path.schema
JOIN pg_catalog.pg_class c ON c.relnamespace OPERATOR(pg_catalog.=) n.oid AND c.relname OPERATOR(pg_catalog.=) %s
ORDER BY path.place LIMIT 1
"""


def require_same_table(
    connection: Connection, schema: str, identity: Identity, table: Relation, done: LastDone | None
) -> None:
    """Raise `WentBack` if the table is another one than when epoch ``done`` was written; note it where it is not known.

    ``schema`` is that of the markers. Raises `psycopg.Error`.
    """
    path = list(connection.schemas) if table.schema is None else [table.schema]
    found = connection.execute(_OID, [path, table.name]).fetchone()
    marker, key = sql.Identifier(schema, TABLE), f"{identity_key(identity)}.table"
    try:
        query = sql.SQL("SELECT part FROM {} WHERE key = %s").format(marker)
        known = connection.execute(query, [key]).fetchone()
    except (errors.UndefinedTable, errors.InvalidSchemaName):
        # the markers themselves are gone, which is for them to say
        return
    if found is None or (known is not None and known[0] == str(found[0])):
        return
    if known is not None and done is not None and done.parts:
        raise WentBack(
            f"table {table} is not the one that epoch {done.epoch} was written to (oid {found[0]}, formerly "
            f"{known[0]}): it was dropped and created again, restored on its own, or another one was renamed to it",
            hint=f"if it holds every row of this query up to epoch {done.epoch}, or need not, say so: epochsink accept "
            f"CHECKPOINT {done.epoch} --sink NAME; else load what it lacks first (the input is in offsets/ of the "
            "checkpoint), or put the newer table back",
        )
    with connection.transaction():
        connection.execute(sql.SQL("DELETE FROM {} WHERE key = %s").format(marker), [key])
        connection.execute(
            sql.SQL(
                "INSERT INTO {} (key, epoch, part, attempt, query_id, sink) VALUES (%s, -1, %s, '', %s, %s)"
            ).format(marker),
            [key, str(found[0]), identity.query_id, identity.sink],
        )
