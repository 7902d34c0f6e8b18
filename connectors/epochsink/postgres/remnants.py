"""Find what sinks have left in a database, without a checkpoint.

A prepared transaction belongs to no session. It keeps its locks until it is committed or rolled back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from psycopg import sql

from epochsink.identity import PREFIX, staging_owner
from epochsink.postgres.committable import Relation
from epochsink.postgres.config import PostgresConfig, connection_string
from epochsink.postgres.database import Database
from epochsink.postgres.errors import translated
from epochsink.postgres.orphans import PREPARED, STAGING
from epochsink.postgres.prepared_transaction import LOCAL
from epochsink.postgres.server import Server
from epochsink.sink import Remnant


class SweptDatabase:
    """One database, for an operator. Raises `EpochsinkError` if it is unreachable or refuses a statement."""

    def __init__(self, dsn: str, options: Mapping[str, str]) -> None:
        # The configuration requires a table; nothing is written to it.
        server = Server.of(PostgresConfig(dsn=connection_string(dsn), table=("none",), options=options))
        with translated(f"connecting to {server.database}"):
            self._database = Database.connect(server, f"{PREFIX}-orphans")

    def remnants(self) -> list[Remnant]:
        """Return the prepared transactions and staging tables of every sink, oldest first if that is known."""
        with translated("looking for what sinks have left"):
            return remnants(self._database)

    def end(self, remnant: Remnant) -> None:
        """Roll back a prepared transaction, or drop a staging table. Its rows are lost."""
        with translated(f"ending {remnant.name}"):
            if remnant.kind == PREPARED:
                self._database.rollback_prepared(remnant.name)
            else:
                table = Relation(*remnant.name.split(".", 1))
                self._database.connection.execute(LOCAL + sql.SQL("DROP TABLE IF EXISTS {}").format(table.quoted))

    def close(self) -> None:
        """Release the connection."""
        self._database.close()


def remnants(database: Database) -> list[Remnant]:
    """Return the prepared transactions and staging tables of every sink, oldest first if that is known.

    Raises `psycopg.Error`.
    """
    used = {name.key for _, name in database.sessions()}
    return [*_transactions(database, used), *_tables(database, used)]


def _transactions(database: Database, used: set[str]) -> Iterator[Remnant]:
    locks: dict[str, set[str]] = {}
    for lock in database.prepared_locks():
        locks.setdefault(lock.gid, set()).add(lock.words)
    for transaction in database.prepared_transactions():
        name = transaction.name
        if name is not None:
            yield Remnant(
                kind=PREPARED,
                name=transaction.gid,
                key=name.key,
                label=name.label,
                generation=name.generation,
                epoch=name.epoch,
                since=float(transaction.since),
                owner=transaction.owner,
                holds=tuple(sorted(locks.get(transaction.gid, ()))),
                in_use=name.key in used,
            )


def _tables(database: Database, used: set[str]) -> Iterator[Remnant]:
    for table in database.staging_tables(is_measured=True):
        owner, note = staging_owner(table.name), table.note
        if owner is not None and note is not None:
            key, _ = owner
            yield Remnant(
                kind=STAGING,
                name=f"{table.schema}.{table.name}",
                key=key,
                label=note.label,
                generation=note.generation,
                epoch=note.epoch,
                owner=table.owner,
                holds=(f"{table.size} bytes",),
                in_use=key in used,
            )
