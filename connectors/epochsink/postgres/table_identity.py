"""Notice that the table was replaced since epochs were written to it, or that a crash may have emptied it.

A row beside the markers says which table the epochs are in. A table keeps its oid until it is dropped. If it is
restored on its own (``pg_restore --clean --table``), it lacks the epochs since its backup, and the markers still name
them.

A crash empties an UNLOGGED table, which looks like any other once it is logged again. But to become UNLOGGED and to
become logged the table is written to new files, and a crash resets the server's statistics. So the row notes the files
and the time of that reset. If both have changed since the last look, the table may have been UNLOGGED in the crash.

The row is not part of an epoch's transaction. It changes only while nothing is lost, or when an operator says so.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from psycopg import errors, sql

from epochsink.errors import WentBack
from epochsink.postgres.applied_epochs import JOINED, TABLE
from epochsink.postgres.prepared_transaction import LOCAL

if TYPE_CHECKING:
    from epochsink.postgres.server import Connection
    from epochsink.postgres.table import Table
    from epochsink.sink import LastDone

_LOOK: Final = """
WITH RECURSIVE found AS (
    SELECT c.oid FROM unnest(%s::text[]) WITH ORDINALITY AS path (schema, place)
    JOIN pg_catalog.pg_namespace n ON n.nspname = path.schema
    JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = %s
    ORDER BY path.place LIMIT 1
), tree (oid) AS (
    SELECT oid FROM found
    UNION ALL
    SELECT i.inhrelid FROM tree
    JOIN pg_catalog.pg_class p ON p.oid = tree.oid AND p.relkind = 'p'
    JOIN pg_catalog.pg_inherits i ON i.inhparent = p.oid
)
SELECT (SELECT oid FROM found)::text, coalesce(bool_or(c.relpersistence = 'u'), false),
       coalesce(jsonb_object_agg(c.oid, pg_relation_filenode(c.oid)) FILTER (WHERE c.relkind = 'r'), '{}'),
       (SELECT stats_reset::text FROM pg_catalog.pg_stat_bgwriter)
FROM tree JOIN pg_catalog.pg_class c ON c.oid = tree.oid
"""


class _Look(NamedTuple):
    """A table's oid; the file of each of its partitions, by oid; when a crash last reset the server's statistics."""

    oid: str
    files: dict[str, int]
    crash: str | None

    def may_be_emptied(self, before: _Look) -> bool:
        """Whether there was a crash since a look before, and a file was replaced."""
        return self.crash != before.crash and any(
            before.files.get(oid, file) != file for oid, file in self.files.items()
        )


def require_same_table(connection: Connection, table: Table, done: LastDone | None, pending: LastDone | None) -> None:
    """Raise `WentBack` if the table is another one than at the last look, or a crash may have emptied it.

    The look is noted unless it shows a loss. Raises `psycopg.Error`.
    """
    relation, identity = table.relation, table.identity
    path = list(connection.schemas) if relation.schema is None else [relation.schema]
    oid, unlogged, files, crash = connection.execute(_LOOK, [path, relation.name]).fetchone() or (None, False, {}, None)
    marker, key = sql.Identifier(table.config.marker_schema, TABLE), f"{table.key}.table"
    try:
        query = sql.SQL("SELECT part, attempt FROM {} WHERE key = %s").format(marker)
        row = connection.execute(query, [key]).fetchone()
    except (errors.UndefinedTable, errors.InvalidSchemaName):
        # the markers are gone: `Marker.verify` reports that
        return
    # a look noted while the table is UNLOGGED would hide a later crash; the next epoch refuses such a table
    if oid is None or unlogged:
        return
    now, before = _Look(oid, files, crash), None if row is None else _Look(row[0], **json.loads(row[1]))
    if now == before:
        return
    if before is not None and done is not None and done.parts and oid != before.oid:
        raise _is_another_table(table, done, oid, before.oid)
    if before is not None and oid == before.oid and now.may_be_emptied(before):
        if done is not None and done.parts:
            raise _may_be_emptied(table, done.epoch)
        if done is None and pending is not None:
            raise _may_be_emptied(table, -1)
    note: dict[str, Any] = {"files": files, "crash": crash}
    values = key, JOINED, oid, json.dumps(note), identity.query_id, identity.sink
    # in one request, as `Marker.join` is: a session that stays open between two would keep the next start waiting
    connection.execute(
        LOCAL
        + sql.SQL(
            "DELETE FROM {marker} WHERE key = {key}; "
            "INSERT INTO {marker} (key, epoch, part, attempt, query_id, sink) VALUES ({values})"
        ).format(marker=marker, key=sql.Literal(key), values=sql.SQL(", ").join(map(sql.Literal, values)))
    )


def _is_another_table(table: Table, done: LastDone, oid: str, known: str) -> WentBack:
    return WentBack(
        f"table {table} is not the one that epoch {done.epoch} was written to (oid {oid}, formerly {known}): it was "
        "dropped and created again, restored on its own, or another one was renamed to it",
        hint=f"if it holds every row of this query up to epoch {done.epoch}, or need not, say so: epochsink accept "
        f"CHECKPOINT {done.epoch} --sink NAME; else load what it lacks first (the input is in offsets/ of the "
        "checkpoint), or put the newer table back",
    )


def _may_be_emptied(table: Table, epoch: int) -> WentBack:
    which = str(epoch) if epoch >= 0 else "none"
    return WentBack(
        f"table {table} was rewritten, and the server has crashed or failed over, since this query last looked: if "
        "the table was UNLOGGED at that moment, the crash has emptied it",
        hint=f"look whether it holds every row of this query up to epoch {which}; TRUNCATE, VACUUM FULL and ALTER "
        f"TABLE rewrite a table too. If it does, or need not: epochsink accept CHECKPOINT {which} --sink NAME. Else "
        "load what it lacks first (the input is in offsets/ of the checkpoint)",
    )
