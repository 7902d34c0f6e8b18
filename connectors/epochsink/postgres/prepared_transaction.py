"""Transactions that end in PREPARE TRANSACTION, and the names in pg_prepared_xacts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final, LiteralString

import psycopg
from psycopg import errors, sql

from epochsink.errors import PrepareFailed
from epochsink.identity import PREFIX, PreparedName
from epochsink.postgres.errors import translated
from epochsink.postgres.server import Connection
from epochsink.retry import retrying

_BUSY_SECONDS: Final = 5.0
LOCAL: Final = sql.SQL("SET LOCAL synchronous_commit = local; ")
"""For statements that need no synchronous standby: a later commit of the epoch sends them to it as well."""
SYNC_HINT: Final = "run ALTER SYSTEM SET fsync = on; SELECT pg_reload_conf();"


def is_busy(error: BaseException) -> bool:
    """Return whether another session is in the middle of committing or rolling back the same prepared transaction."""
    return isinstance(error, (errors.ObjectNotInPrerequisiteState, errors.ObjectInUse))


def create_if_missing(connection: Connection, statement: sql.Composed) -> None:
    """Run a ``CREATE ... IF NOT EXISTS``, which fails if another session creates the same at that moment.

    It has been committed there by the time that this one fails: the second try finds it. What fails then as well is
    raised: something else has the name. Raises `psycopg.Error`.
    """
    try:
        connection.execute(LOCAL + statement)
    except (errors.UniqueViolation, errors.DuplicateSchema, errors.DuplicateTable, errors.DuplicateObject):
        connection.execute(LOCAL + statement)


def create_unless_seen(
    connection: Connection, look_up: LiteralString, name: sql.Identifier, statement: sql.Composed
) -> None:
    """Run a ``CREATE ... IF NOT EXISTS`` if ``look_up`` does not find the name. Raises `psycopg.Error`."""
    # not by IF NOT EXISTS alone: that needs the right to create, which a query's user may lack once the thing is there
    query = sql.SQL("SELECT pg_catalog.{}(%s) IS NULL").format(sql.SQL(look_up))
    missing = connection.execute(query, [name.as_string(connection)]).fetchone()
    if missing and missing[0]:
        create_if_missing(connection, statement)


def begin(connection: Connection) -> None:
    """Begin a transaction, whatever the role's defaults are, with the search path that the target's triggers know.

    What is executed in it names pg_catalog for every function and operator. Raises `PrepareFailed` if the server does
    not write to disk what it acknowledges, `psycopg.Error`.
    """
    statement = sql.SQL(
        "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; "
        "SELECT pg_catalog.set_config('search_path', {}, true), pg_catalog.current_setting('fsync')"
    ).format(sql.Literal(connection.search_path))
    try:
        begun = connection.execute(statement)
    except errors.FeatureNotSupported as refused:
        # so a standby answers READ WRITE; every other statement that writes gets the error that says what it is
        raise errors.ReadOnlySqlTransaction(refused.diag.message_primary or "") from refused
    begun.nextset()
    _, fsync = begun.fetchone() or ("", "")
    # here and not only in the check before the first row: a reload changes it under a running query
    if fsync != "on":
        connection.rollback()
        raise PrepareFailed(
            f"the server has fsync = {fsync}: a power failure may lose transactions that it has acknowledged",
            hint=SYNC_HINT,
            may_pass=False,
        )


@contextmanager
def transaction(connection: Connection) -> Iterator[None]:
    """Run the body in a transaction that it ends itself, with `commit` or `prepare`; rolled back if it raises."""
    begin(connection)
    try:
        yield
    except BaseException:
        with suppress(psycopg.Error):
            connection.rollback()
        raise


def commit(connection: Connection) -> None:
    """Commit the transaction under way. Raises `psycopg.Error`."""
    _expect(connection.execute("COMMIT").statusmessage, "COMMIT")


def prepare(connection: Connection, name: PreparedName) -> None:
    """Prepare the transaction under way. Raises `PrepareFailed`, `psycopg.Error`."""
    try:
        # PREPARE TRANSACTION takes a literal and no parameter.
        done = connection.execute(sql.SQL("PREPARE TRANSACTION {}").format(sql.Literal(str(name))))
    except (errors.OutOfMemory, errors.ObjectNotInPrerequisiteState) as refused:
        # out of memory (53200) says that all max_prepared_transactions are in use, 55000 that the server has none
        connection.rollback()
        with translated("counting prepared transactions"):
            raise _no_room(connection) from refused
    _expect(done.statusmessage, "PREPARE TRANSACTION")


def commit_prepared(connection: Connection, gid: str) -> None:
    """Commit a prepared transaction. Raises `psycopg.Error`."""
    connection.execute(sql.SQL("COMMIT PREPARED {}").format(sql.Literal(gid)))


def rollback_prepared(connection: Connection, gid: str) -> bool:
    """Roll a prepared transaction back; return whether there was one of that name. Raises `psycopg.Error`."""
    statement = sql.SQL("ROLLBACK PREPARED {}").format(sql.Literal(gid))
    again = retrying(is_busy, seconds=_BUSY_SECONDS, longest_pause=1.0)
    # an unreachable standby must not block this; if a failover loses the rollback, the next sweep repeats it
    connection.execute("SET synchronous_commit = local")
    try:
        again(connection.execute, statement)
    except errors.UndefinedObject:
        return False
    finally:
        if not connection.closed:
            connection.execute(sql.SQL("SET synchronous_commit = {}").format(sql.Literal(connection.durability)))
    return True


def _expect(status: str | None, wanted: str) -> None:
    # A transaction that has failed answers both commands with ROLLBACK, and no error.
    if status != wanted:
        raise PrepareFailed(f"the server answered {wanted} with {status}", hint="see the server's log")


def _no_room(connection: Connection) -> PrepareFailed:
    limit, used, ours = connection.execute(
        "SELECT current_setting('max_prepared_transactions')::int, count(*), count(*) FILTER (WHERE gid LIKE %s) "
        "FROM pg_prepared_xacts",
        [f"{PREFIX}:%"],
    ).fetchone() or (0, 0, 0)
    if limit == 0:
        return PrepareFailed(
            "the server has max_prepared_transactions = 0, so it prepares none",
            hint="set it to at least 10 and restart the server, or use commit='staged' or 'auto' with atomic=True",
            may_pass=False,
        )
    return PrepareFailed(
        f"all of the server's max_prepared_transactions = {limit} are used: {ours} by epochsink, {used - ours} by "
        "others",
        hint="raise max_prepared_transactions (needs a restart): an atomic sink needs 2, one with atomic=False "
        "2 for each task, and 2; or end what others have left: SELECT * FROM pg_prepared_xacts",
        limit=limit,
        ours=ours,
        others=used - ours,
    )
