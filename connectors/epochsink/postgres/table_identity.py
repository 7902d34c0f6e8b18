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

from psycopg import errors

from epochsink.errors import WentBack
from epochsink.postgres.applied_epochs import JOINED
from epochsink.postgres.database import Database, TableLook
from epochsink.postgres.marker_table import MarkerRow
from epochsink.postgres.table import Table
from epochsink.sink import LastDone


def require_same_table(database: Database, table: Table, done: LastDone | None, pending: LastDone | None) -> None:
    """Raise `WentBack` if the table is another one than at the last look, or a crash may have emptied it.

    The look is noted unless it shows a loss. Raises `psycopg.Error`.
    """
    identity, markers, key = table.identity, database.markers(table.config.marker_schema), f"{table.key}.table"
    now = database.look(table.relation)
    try:
        row = markers.single(key)
    except (errors.UndefinedTable, errors.InvalidSchemaName):
        # the markers are gone: `MarkerRows.verify` reports that
        return
    # a look noted while the table is UNLOGGED would hide a later crash; the next epoch refuses such a table
    if now is None or now.unlogged:
        return
    before = None if row is None else TableLook(row[0], **json.loads(row[1]))
    if now == before:
        return
    if before is not None and done is not None and done.parts and now.oid != before.oid:
        raise _is_another_table(table, done, now.oid, before.oid)
    if before is not None and now.oid == before.oid and now.may_be_emptied(before):
        if done is not None and done.parts:
            raise _may_be_emptied(table, done.epoch)
        if done is None and pending is not None:
            raise _may_be_emptied(table, -1)
    note = json.dumps({"files": now.files, "crash": now.crash})
    markers.replace_alone(MarkerRow(key, JOINED, now.oid, note, identity.query_id, identity.sink))


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
        f"TABLE rewrite a table too. If it does, or need not: epochsink accept CHECKPOINT {which} --sink NAME; else "
        "load what it lacks first (the input is in offsets/ of the checkpoint)",
    )
