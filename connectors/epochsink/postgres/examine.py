"""Examine the server of a sink before a start: version, clock, settings, markers, and an epoch without rows."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Final

import psycopg
from psycopg import errors, sql

from epochsink.errors import EpochsinkError
from epochsink.identity import PreparedName
from epochsink.postgres import preflight
from epochsink.postgres.catalog import TargetTable, max_prepared_transactions, read_target, unsafe
from epochsink.postgres.committable import WHOLE, Relation
from epochsink.postgres.config import PostgresConfig
from epochsink.postgres.database import Database
from epochsink.postgres.errors import describe
from epochsink.postgres.prepared_transaction import prepare, rollback_prepared, transaction
from epochsink.postgres.server import Connection, Server
from epochsink.postgres.table import Table
from epochsink.sink import Epoch, Finding, Identity, only_compares

_FREE: Final = 2
"""How many prepared transactions an atomic sink may have at once."""
_USED: Final = "SELECT count(*), coalesce(extract(epoch FROM now() - min(prepared)), 0)::float8 FROM pg_prepared_xacts"


def examine(config: PostgresConfig, connection: Connection) -> Iterator[Finding]:
    """Yield what was found. Creates the marker table if it is missing, unless it `only_compares`.

    Raises `psycopg.Error`.
    """
    version = connection.info.parameter_status("server_version")
    yield Finding("server", f"PostgreSQL {version}, {Server.of(config).database}, user {preflight.user_of(connection)}")
    unfit = [*preflight.check_server(connection)] or [*preflight.check_markers(config, connection)]
    if unfit:
        yield from _fatal("server", unfit)
        return
    yield _clock(connection)
    limit = max_prepared_transactions(connection)
    mode = config.mode(limit)
    yield _room(connection, limit, mode)
    relation = Relation.of(config.table)
    target = read_target(connection, relation)
    if target is None:
        if config.create:
            yield Finding("table", f"{relation} does not exist; the first start creates it")
        else:
            yield Finding("table", f"{relation} does not exist", "create it, or set create=True", is_fatal=True)
        return
    deletes = config.delete_when is not None
    unfit = [*preflight.check_kind(target), *unsafe(target, config.key, deletes=deletes, direct=config.is_direct)]
    if mode == "staged":
        unfit += preflight.check_publications(config, connection)
    yield from _fatal("table", unfit)
    if not unfit:
        marks = not (only_compares() and preflight.missing_markers(config, connection))
        yield _trial(config, connection, target, mode, marks=marks)


def _fatal(what: str, findings: list[str]) -> Iterator[Finding]:
    for each in findings:
        yield Finding(what, each, is_fatal=True)


def _clock(connection: Connection) -> Finding:
    before = time.time()
    row = connection.execute("SELECT extract(epoch FROM clock_timestamp())::float8").fetchone()
    ahead = (float(row[0]) if row else before) - (before + time.time()) / 2
    return Finding.of_clock("the server", ahead)


def _room(connection: Connection, limit: int, mode: str) -> Finding:
    if mode == "staged":
        return Finding("settings", f"max_prepared_transactions = {limit}; epochs are staged, and merged once decided")
    used, oldest = connection.execute(_USED).fetchone() or (0, 0.0)
    text = f"max_prepared_transactions = {limit}, {used} in use"
    if used:
        text += f", the oldest for {oldest:.0f} s"
    if limit == 0:
        return Finding("settings", text, "set it to at least 10 and restart, or use commit='staged'", is_fatal=True)
    hint = f"raise it, or see who holds them: epochsink orphans --dsn DSN; a sink needs {_FREE}"
    return Finding("settings", text, hint if limit - used < _FREE else "")


def _trial(config: PostgresConfig, connection: Connection, target: TargetTable, mode: str, *, marks: bool) -> Finding:
    """Prepare an epoch without rows under a name of its own, and roll it back. ``marks``: there is a marker table."""
    # another query id each time: no other sink's sweep or marker knows this one
    identity = Identity(f"doctor-{uuid.uuid4().hex}", "trial", pipeline="doctor")
    table, epoch = Table(config, identity), Epoch(0, uuid.uuid4().hex)
    name = PreparedName.of(identity, epoch, WHOLE)
    try:
        with transaction(connection):
            if marks:
                table.mark(Database(connection, Server.of(config)), epoch)
            # takes the table's lock and compares the rights as an INSERT does, and fires no trigger
            connection.execute(sql.SQL("EXPLAIN INSERT INTO {} SELECT WHERE false").format(target.relation.quoted))
            if mode == "staged":
                connection.rollback()
            else:
                prepare(connection, name)
        if mode != "staged":
            rollback_prepared(connection, str(name))
    except errors.InsufficientPrivilege as refused:
        grant = f"GRANT INSERT ON {target.relation} TO {preflight.user_of(connection)};"
        return Finding("trial epoch", describe(refused), f"let the table's owner run: {grant}", is_fatal=True)
    except psycopg.Error as failure:
        # the server may have prepared it, and the answer was lost
        hint = f"see the server's log; if it is still prepared: epochsink orphans --dsn DSN --end '{name}'"
        return Finding("trial epoch", describe(failure), hint, is_fatal=True)
    except EpochsinkError as failure:
        return Finding("trial epoch", failure.message, failure.hint, is_fatal=True)
    done = [*(["marked"] if marks else []), *(["prepared"] if mode != "staged" else [])]
    return Finding(
        "trial epoch", f"{', '.join(done) or 'begun'} and rolled back in {target.relation}; no row was written"
    )
