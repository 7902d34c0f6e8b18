"""Create the target from the row's schema, or add the columns that it lacks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Final

import psycopg
import pyarrow as pa
from psycopg import errors, sql

from epochsink.errors import ConfigurationError
from epochsink.postgres.catalog import TargetTable
from epochsink.postgres.committable import Relation
from epochsink.postgres.config import PostgresConfig
from epochsink.postgres.database import Database
from epochsink.postgres.errors import describe, is_disconnected, rule_of
from epochsink.postgres.holder import prepared_holder
from epochsink.postgres.prepared_transaction import LOCAL, create_if_missing
from epochsink.postgres.row_mapping import is_nested
from epochsink.postgres.server import Connection, Server
from epochsink.sink import would

_log = logging.getLogger(__name__)


def create_target(config: PostgresConfig, connection: Connection, relation: Relation, row: pa.Schema) -> Iterator[str]:
    """Create the table unless another query does, or it `only_compares`; yield why that is impossible."""
    try:
        statement = table_ddl(config, relation, row)
    except ConfigurationError as unfit:
        yield f"{unfit.message}; {unfit.hint}"
        return
    text = statement.as_string(connection)
    if would(f"create the table: {text}"):
        may = connection.execute(
            "SELECT has_schema_privilege(n.oid, 'CREATE') FROM pg_namespace n WHERE n.nspname = %s", [relation.schema]
        ).fetchone()
        if may != (True,):
            yield f"table {relation}: no such schema, or no right to create tables in it; let its owner run: {text};"
        return
    try:
        create_if_missing(connection, statement)
    except (errors.InsufficientPrivilege, errors.InvalidSchemaName) as refused:
        yield f"table {relation}: {describe(refused)}; let its owner run: {text};"
    except errors.DuplicateObject as refused:
        yield f"table {relation} cannot be created: {describe(refused)}; drop that type, or name another table"
    except psycopg.Error as refused:
        if is_disconnected(refused):
            raise
        yield f"table {relation} cannot be created: {describe(refused)}; {rule_of(refused).hint}"


def add_columns(config: PostgresConfig, connection: Connection, target: TargetTable, row: pa.Schema) -> Iterator[str]:
    """Add the columns that the table lacks, in one transaction; yield why that is impossible.

    Raises `psycopg.Error` if the connection is lost.
    """
    try:
        statement = columns_ddl(config, target, row)
    except ConfigurationError as unfit:
        yield f"{unfit.message}; {unfit.hint}"
        return
    if statement is None:
        return
    text = statement.as_string(connection)
    if would(f"change the table: {text}"):
        owned = connection.execute(
            "SELECT pg_has_role(c.relowner, 'USAGE') FROM pg_class c WHERE c.oid = to_regclass(%s)",
            [str(target.relation)],
        ).fetchone()
        if owned != (True,):
            yield f"add_columns=True: only the owner of {target.relation} may add columns; let its owner run: {text};"
        return
    try:
        connection.execute(LOCAL + statement)
    except errors.LockNotAvailable as refused:
        holder = prepared_holder(Database(connection, Server.of(config)), [target.relation])
        held = f", and prepared transaction '{holder.gid}' holds it" if holder else ""
        yield (
            f"add_columns=True waited {config.timeout:g} s for the lock on {target.relation}{held}: {describe(refused)}"
            "; if an earlier run of this query has prepared it, type epochsink recover CHECKPOINT --sinks "
            "MODULE:ATTRIBUTE, then start the query again"
        )
    except psycopg.Error as refused:
        if is_disconnected(refused):
            raise
        is_right = isinstance(refused, errors.InsufficientPrivilege)
        way_out = f"let its owner run: {text};" if is_right else rule_of(refused).hint
        yield f"add_columns=True: {target.relation}: {describe(refused)}; {way_out}"
    else:
        _log.info("%s: columns were missing: %s", target.relation, text)


_TYPES: Final = {
    pa.int8(): "smallint",
    pa.int16(): "smallint",
    pa.int32(): "integer",
    pa.int64(): "bigint",
    pa.float32(): "real",
    pa.float64(): "double precision",
    pa.bool_(): "boolean",
    pa.date32(): "date",
    pa.string(): "text",
    pa.large_string(): "text",
    pa.binary(): "bytea",
    pa.large_binary(): "bytea",
    pa.duration("us"): "interval",
}


def table_ddl(config: PostgresConfig, relation: Relation, row: pa.Schema) -> sql.Composed:
    """Return what creates the table for rows of this schema.

    Raises `ConfigurationError` for types without a match, and for a key that is not in the row.
    """
    absent = [name for name in config.key if name not in row.names]
    if absent:
        raise ConfigurationError(
            f"key column(s) {', '.join(absent)} are not in the row ({', '.join(row.names)})",
            hint="add them in select=",
        )
    columns: list[sql.Composable] = [_definition(field) for field in row]
    if config.key:
        key = sql.SQL(", ").join(map(sql.Identifier, config.key))
        columns.append(sql.SQL("PRIMARY KEY ({})").format(key))
    return sql.SQL("CREATE TABLE IF NOT EXISTS {} ({})").format(relation.quoted, sql.SQL(", ").join(columns))


def columns_ddl(config: PostgresConfig, target: TargetTable, row: pa.Schema) -> sql.Composed | None:
    """Return what adds the columns that the table lacks, or None if it lacks none.

    Columns of the key are not added, and none whose name differs from another one's only in case. Raises
    `ConfigurationError` for types without a match.
    """
    names = lacking(config, target, row)
    added = [sql.SQL("ADD COLUMN IF NOT EXISTS {}").format(_definition(row.field(name))) for name in names]
    return sql.SQL("ALTER TABLE {} {}").format(target.relation.quoted, sql.SQL(", ").join(added)) if added else None


def lacking(config: PostgresConfig, target: TargetTable, row: pa.Schema) -> list[str]:
    """Return the columns of the row that are to be added to the table."""
    known = {name.lower() for name in [*target.columns, *config.key]}
    return [name for name in row.names if name.lower() not in known]


def _definition(field: pa.Field) -> sql.Composed:
    return sql.SQL("{} {}").format(sql.Identifier(field.name), sql.SQL(_type(field.name, field.type)))


def _type(name: str, data: pa.DataType) -> str:
    if is_nested(data):
        return "jsonb"
    if pa.types.is_list(data):
        return f"{_type(name, data.value_type)}[]"
    if pa.types.is_decimal(data):
        return f"numeric({data.precision}, {data.scale})"
    if pa.types.is_timestamp(data):
        return "timestamp" if data.tz is None else "timestamptz"
    if data not in _TYPES:
        raise ConfigurationError(
            f"column {name!r} has type {data}, for which there is no obvious PostgreSQL type",
            hint=f"cast it in select=, for example CAST({name} AS STRING) AS {name}, or create the table yourself",
        )
    return _TYPES[data]
