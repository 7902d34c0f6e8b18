"""Name the prepared transaction whose locks block a statement, and say how to end it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from epochsink.errors import PrepareFailed
from epochsink.identity import PreparedName
from epochsink.postgres.committable import WHOLE, Relation
from epochsink.postgres.database import Database
from epochsink.postgres.table import Table


class Holder(NamedTuple):
    """A prepared transaction, the Unix time at which it was prepared, and what it has locked."""

    gid: str
    since: float
    locked: str


def prepared_holder(database: Database, tables: Sequence[Relation]) -> Holder | None:
    """Return the oldest prepared transaction with a lock on one of ``tables``. Raises `psycopg.Error`."""
    locks = database.prepared_locks([table.name for table in tables])
    return Holder(locks[0].gid, locks[0].since, str(locks[0].table)) if locks else None


def _seal_holder(database: Database, table: Table) -> Holder | None:
    """Return the prepared seal for which another seal waits. It locks no table, only a row of the marker table."""
    for transaction in database.prepared_transactions(table.key):
        if transaction.name is not None and transaction.name.part == WHOLE:
            return Holder(transaction.gid, transaction.since, "the markers")
    return None


def name_holder(database: Database, tables: Sequence[Table], waited: PrepareFailed) -> PrepareFailed:
    """Return ``waited``, the failure of a vote that waited for a lock on ``tables``, and name the holder in it.

    A transaction of this driver or an earlier one is not named, because the sweep before the next attempt ends it.
    Raises `psycopg.Error`.
    """
    table = tables[0]  # a shared transaction is named after its first sink
    holder = (
        prepared_holder(database, [table.relation for table in tables])
        if table.config.atomic
        else _seal_holder(database, table)
    )
    if holder is None:
        return waited
    owner = PreparedName.parse(holder.gid)
    is_own = owner is not None and owner.key == table.key
    if owner is not None and is_own and owner.generation <= table.identity.generation:
        return waited
    prepared = datetime.fromtimestamp(holder.since, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    waited.message += f"; prepared transaction '{holder.gid}' has held locks on {holder.locked} since {prepared}"
    if owner is None:
        words, gid = "", holder.gid
        waited.hint = f"end it as the role that prepared it: COMMIT PREPARED '{gid}', or ROLLBACK PREPARED '{gid}'"
    elif is_own:
        words, waited.hint = _of_a_newer_driver(holder.gid, owner, table)
    elif (sink := table.marker.sink_of(database, owner.key)) is not None:
        # the decision on this epoch would come after this vote, so that no wait and no other attempt helps
        waited.facts["may_pass"] = False
        words, waited.hint = _of_this_query(sink)
    else:
        words, waited.hint = _of_another_query(holder.gid, owner)
    waited.message += words
    return waited


def _of_a_newer_driver(gid: str, owner: PreparedName, table: Table) -> tuple[str, str]:
    words = (
        f": a driver of this query in generation {owner.generation} prepared it, and this driver is generation "
        f"{table.identity.generation}, so this checkpoint is the older copy"
    )
    hint = (
        "stop the other driver, or use the newer copy of the checkpoint. If both are gone, roll the transaction "
        f"back: epochsink orphans --dsn DSN --end '{gid}'"
    )
    return words, hint


def _of_this_query(sink: str) -> tuple[str, str]:
    hint = (
        "sinks that write the same rows have to share a transaction: give both atomic=True, and dsn=, options= and "
        "commit= in the same words; or by where= give them rows of different keys"
    )
    return f": it is of sink '{sink}' of this query, and holds them until this epoch is decided", hint


def _of_another_query(gid: str, owner: PreparedName) -> tuple[str, str]:
    hint = (
        "if that query is only down, start it: it commits or ends the transaction itself. If it will not run again, "
        "end what its checkpoint holds: epochsink abandon ITS_CHECKPOINT --sinks ITS_MODULE:ATTRIBUTE; if that "
        f"checkpoint is gone: epochsink orphans --dsn DSN --end '{gid}'"
    )
    return f": it belongs to another query, '{owner.label or owner.key}', which has not committed it", hint
