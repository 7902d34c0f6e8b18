"""Is everything there that the first epoch will need? Asked before any row moves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import psycopg
from psycopg import errors, sql

from epochsink.postgres import applied_epochs
from epochsink.postgres.catalog import read_target
from epochsink.postgres.errors import describe, failure
from epochsink.postgres.row_mapping import fit, unfilled

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa

    from epochsink.postgres.catalog import Target
    from epochsink.postgres.server import Connection
    from epochsink.postgres.sink import Postgres

MIN_VERSION: Final = 140000

_UNIQUE: Final = """
SELECT array(SELECT a.attname::text FROM unnest((i.indkey::int2[])[0:i.indnkeyatts - 1]) AS k
             JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k)
FROM pg_catalog.pg_index i
WHERE i.indrelid = to_regclass(%s) AND i.indisunique AND i.indisvalid AND i.indimmediate
  AND i.indpred IS NULL AND i.indexprs IS NULL
"""
_LACKING: Final = """
SELECT c.name FROM unnest(%s::text[]) AS c (name)
WHERE NOT has_column_privilege(to_regclass(%s), c.name, %s)
"""


def check(sink: Postgres, connection: Connection, schema: pa.Schema) -> list[str]:
    """Return what does not fit between a sink, its writers' input (``schema``) and the live server.

    Creates the marker table and its schema where they are missing. Raises `psycopg.Error` if the connection dies.
    """
    unfit = list(_check_server(connection))
    if unfit:
        return unfit
    findings = list(_check_markers(sink, connection))
    try:
        target = read_target(connection, sink.relation)
    except errors.InsufficientPrivilege as refused:
        return [*findings, f"table {sink.relation}: {describe(refused)}; GRANT USAGE ON SCHEMA to {_user(connection)}"]
    if target is None:
        return [*findings, _unknown_table(sink, connection)]
    return [*findings, *_check_target(sink, connection, target, schema)]


def unreachable(sink: Postgres, error: psycopg.OperationalError) -> str:
    """Return the finding for a server that does not let us in."""
    known = failure(error, f"cannot connect to {sink.server.database}")
    return f"{known.message}; {known.hint}"


def _check_server(connection: Connection) -> Iterator[str]:
    version = connection.info.server_version
    if version < MIN_VERSION:
        yield f"the server is PostgreSQL {version // 10000}, and epochsink needs 14 or newer; upgrade it"
    standby = connection.execute("SELECT pg_is_in_recovery()").fetchone()
    if standby and standby[0]:
        yield (
            "the server is a standby and takes no writes; connect to the primary, or name several hosts and "
            "target_session_attrs='read-write'"
        )


def _check_markers(sink: Postgres, connection: Connection) -> Iterator[str]:
    user, schema = _user(connection), sql.Identifier(sink.marker_schema).as_string(connection)
    ddl = f"CREATE SCHEMA IF NOT EXISTS {schema}; GRANT USAGE, CREATE ON SCHEMA {schema} TO {user};"
    try:
        applied_epochs.create(connection, sink.marker_schema)
    except errors.InsufficientPrivilege as refused:
        yield f"markers and staging need the schema {schema}: {describe(refused)}; let the DBA run: {ddl}"
        return
    table = sql.Identifier(sink.marker_schema, applied_epochs.TABLE).as_string(connection)
    may_stage, may_mark = connection.execute(
        "SELECT has_schema_privilege(%s, 'CREATE'), has_table_privilege(%s, 'SELECT') AND "
        "has_table_privilege(%s, 'INSERT') AND has_table_privilege(%s, 'DELETE')",
        [sink.marker_schema, table, table, table],
    ).fetchone() or (False, False)
    if not may_stage:
        yield f"user {user} may not create staging tables in schema {schema}; let the DBA run: {ddl}"
    if not may_mark:
        yield (
            f"user {user} may not use the marker table {table}; let its owner run: "
            f"GRANT SELECT, INSERT, DELETE ON {table} TO {user};"
        )


def _check_target(sink: Postgres, connection: Connection, target: Target, schema: pa.Schema) -> Iterator[str]:
    yield from _check_kind(target)
    encodings, unfit = fit(schema, target, direct=not sink.atomic and not sink.key)
    yield from unfit
    for column in unfilled(schema, target):
        yield (
            f"column {column.name!r} of {target.relation} is NOT NULL without a default, and the row lacks it; add it "
            "in select=, or give it a default"
        )
    yield from _check_key(sink, connection, target, schema)
    names = [encoding.field.name for encoding in encodings if encoding.field.name in target.columns]
    yield from _check_privileges(sink, connection, target, names)
    yield from _check_order(sink, connection, target, names)
    yield from _check_mode(sink, target)


def _check_kind(target: Target) -> Iterator[str]:
    if target.kind not in ("r", "p"):
        kinds = {"v": "a view", "m": "a materialized view", "f": "a foreign table"}
        yield (
            f"{target.relation} is {kinds.get(target.kind, 'no table')}, and rows can only be copied into a table, "
            "ordinary or partitioned; name the table behind it"
        )
    if target.persistence == "u":
        yield (
            f"{target.relation} is UNLOGGED: a crash of the server empties it, and committed epochs are lost; "
            f"ALTER TABLE {target.relation} SET LOGGED"
        )


def _check_key(sink: Postgres, connection: Connection, target: Target, schema: pa.Schema) -> Iterator[str]:
    if not sink.key:
        return
    absent = [name for name in sink.key if name not in schema.names]
    if absent:
        yield f"key column(s) {', '.join(absent)} are not in the row ({', '.join(schema.names)}); add them in select="
        return
    for name in sink.key:
        if name in target.columns and not target.columns[name].not_null:
            quoted = sql.Identifier(name).as_string(connection)
            yield (
                f"key column {name!r} of {target.relation} is nullable, and null keys never match; "
                f"ALTER TABLE {target.relation} ALTER COLUMN {quoted} SET NOT NULL"
            )
    unique = [names for (names,) in connection.execute(_UNIQUE, [str(target.relation)]).fetchall()]
    if not any(set(names) == set(sink.key) for names in unique):
        known = "; ".join(", ".join(names) for names in unique) or "none"
        columns = sql.SQL(", ").join(map(sql.Identifier, sink.key)).as_string(connection)
        yield (
            f"key={list(sink.key)} is no primary key or unique constraint of {target.relation} (it has: {known}; "
            "partial, deferrable and expression indexes do not count); "
            f"ALTER TABLE {target.relation} ADD UNIQUE ({columns})"
        )


def _check_privileges(sink: Postgres, connection: Connection, target: Target, names: Sequence[str]) -> Iterator[str]:
    needed = {"INSERT": list(names)}
    if sink.key:
        needed["SELECT"] = [name for name in names if name in sink.key]
        needed["UPDATE"] = [name for name in names if name not in sink.key]
    user, table = _user(connection), str(target.relation)
    for privilege, columns in needed.items():
        lacking = [name for (name,) in connection.execute(_LACKING, [columns, table, privilege]).fetchall()]
        if lacking:
            yield (
                f"user {user} lacks {privilege} on {table}, column(s) {', '.join(lacking)}; let its owner run: "
                f"GRANT {privilege} ON {table} TO {user};"
            )
    if sink.delete_when is not None:
        may = connection.execute("SELECT has_table_privilege(to_regclass(%s), 'DELETE')", [table]).fetchone()
        if not (may and may[0]):
            yield f"user {user} lacks DELETE on {table}; let its owner run: GRANT DELETE ON {table} TO {user};"


def _check_order(sink: Postgres, connection: Connection, target: Target, names: Sequence[str]) -> Iterator[str]:
    row = sql.SQL(", ").join(
        sql.SQL("NULL::{} AS {}").format(sql.SQL(target.columns[name].declared), sql.Identifier(name)) for name in names
    )
    for expression in sink.order_by:
        try:
            connection.execute(sql.SQL("SELECT ({}) FROM (SELECT {}) AS row LIMIT 0").format(sql.SQL(expression), row))
        except (errors.ProgrammingError, errors.DataError) as wrong:
            yield (
                f"order_by={expression!r} is no SQL expression over the row's columns: {describe(wrong)}; use "
                f"{', '.join(names)}"
            )


def _check_mode(sink: Postgres, target: Target) -> Iterator[str]:
    if sink.mode(target.max_prepared_transactions) == "prepared" and target.max_prepared_transactions == 0:
        staged = "" if sink.atomic else " and atomic=True"
        yield (
            f"commit={sink.commit!r} with atomic={sink.atomic} needs prepared transactions, and the server has "
            "max_prepared_transactions = 0; set it to at least 10 and restart the server, or use "
            f"commit='staged'{staged}"
        )


def _unknown_table(sink: Postgres, connection: Connection) -> str:
    near = connection.execute(
        "SELECT format('%%s.%%s', n.nspname, c.relname) FROM pg_catalog.pg_class c "
        "JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace "
        "WHERE lower(c.relname) = lower(%s) AND c.relkind IN ('r', 'p') ORDER BY 1 LIMIT 3",
        [sink.relation.name.strip('"')],
    ).fetchall()
    hint = f"did you mean {' or '.join(name for (name,) in near)}?" if near else "create it."
    path = connection.execute("SHOW search_path").fetchone() or ("",)
    return (
        f"table {sink.relation} does not exist in {sink.server.database} (search_path {path[0]}); {hint} Names are "
        "literal: write them without quotes, with the table's own case, and with its schema"
    )


def _user(connection: Connection) -> str:
    return sql.Identifier(connection.info.user).as_string(connection)
