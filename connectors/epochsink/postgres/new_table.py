"""The table that ``create=True`` makes: a column for each of the row's, with the type that loses nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pyarrow as pa
from psycopg import sql

from epochsink.errors import ConfigurationError
from epochsink.postgres.row_mapping import is_nested

if TYPE_CHECKING:
    from epochsink.postgres.config import PostgresConfig
    from epochsink.postgres.relation import Relation

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
    columns: list[sql.Composable] = [
        sql.SQL("{} {}").format(sql.Identifier(field.name), sql.SQL(_type(field.name, field.type))) for field in row
    ]
    if config.key:
        key = sql.SQL(", ").join(map(sql.Identifier, config.key))
        columns.append(sql.SQL("PRIMARY KEY ({})").format(key))
    return sql.SQL("CREATE TABLE IF NOT EXISTS {} ({})").format(relation.quoted, sql.SQL(", ").join(columns))


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
