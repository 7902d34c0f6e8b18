"""The values that every supported type is tested with, on each way into a target and under each setting.

A column for each type; two values of each, and NULL.
"""

from __future__ import annotations

import base64
import datetime as dt
import uuid
from decimal import Decimal
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
from psycopg import sql

if TYPE_CHECKING:
    from collections.abc import Mapping

UTC = dt.UTC
INSTANTS = pa.timestamp("us", "UTC")
ID = "6f1ed002-ab5d-4ddc-9f4d-0123456789ab"

EXACT: dict[str, tuple[pa.DataType, list[Any]]] = {
    "smallint": (pa.int16(), [-(2**15), 2**15 - 1]),
    "integer": (pa.int32(), [-(2**31), 2**31 - 1]),
    "bigint": (pa.int64(), [-(2**63), 2**63 - 1]),
    "real": (pa.float32(), [1.5, float("inf")]),
    "double precision": (pa.float64(), [-1e300, 5e-324]),
    "numeric": (pa.decimal128(38, 18), [Decimal("-12345678901234567890.000000000000000001"), Decimal("0.000086")]),
    "numeric(10,2)": (pa.decimal128(10, 2), [Decimal("-0.05"), Decimal("99999999.99")]),
    "boolean": (pa.bool_(), [True, False]),
    "text": (pa.string(), ["", "é\t\\N\"'\n\U0001f600"]),
    "varchar(5)": (pa.string(), ["ábcde", "x"]),
    'text COLLATE "C"': (pa.large_string(), ["large", ""]),
    "bytea": (pa.binary(), [b"", b"\x00\xff\\"]),
    "date": (pa.date32(), [dt.date(1, 1, 1), dt.date(9999, 12, 31)]),
    "timestamptz": (
        INSTANTS,
        [dt.datetime(1, 1, 1, tzinfo=UTC), dt.datetime(1999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC)],
    ),
    "timestamp": (pa.timestamp("us"), [dt.datetime(1969, 7, 20, 20, 17, 40, 123456), dt.datetime(9999, 12, 31)]),  # noqa: DTZ001 - has no zone
    "integer[]": (pa.list_(pa.int32()), [[1, None, -3], []]),
    "text[]": (pa.list_(pa.string()), [["a", None, "ü"], []]),
    "numeric[]": (pa.list_(pa.decimal128(10, 2)), [[Decimal("1.50")], [None]]),
    "date[]": (pa.list_(pa.date32()), [[dt.date(2024, 2, 29)], []]),
}
CONVERTED: dict[str, tuple[pa.DataType, list[Any], list[Any]]] = {
    "bigint": (pa.int32(), [7, -7], [7, -7]),
    "double precision": (pa.int32(), [7, -7], [7.0, -7.0]),
    "numeric(20,2)": (pa.int64(), [7, -(2**53) - 1], [Decimal(7), Decimal(-(2**53) - 1)]),
    "uuid": (pa.string(), [ID, ID.upper()], [uuid.UUID(ID)] * 2),
    "json": (pa.string(), ['{"b": 1, "a": [null]}', "3"], [{"b": 1, "a": [None]}, 3]),
    "jsonb": (pa.string(), ['{"b": 1, "a": [null]}', "3"], [{"b": 1, "a": [None]}, 3]),
    "char(3)": (pa.string(), ["ab", "abc"], ["ab ", "abc"]),
    "timestamp": (
        pa.timestamp("us", "America/New_York"),
        [dt.datetime(2024, 1, 1, 12, tzinfo=UTC), dt.datetime(2024, 7, 1, tzinfo=UTC)],
        [dt.datetime(2024, 1, 1, 12), dt.datetime(2024, 7, 1)],  # noqa: DTZ001 - the column has no zone
    ),
}
CAST: dict[str, tuple[pa.DataType, list[Any], list[str]]] = {
    "inet": (pa.string(), ["10.0.0.1", "::1"], ["10.0.0.1/32", "::1/128"]),
    "uuid[]": (pa.list_(pa.string()), [[ID], []], [f"{{{ID}}}", "{}"]),
    "varchar(3)[]": (pa.list_(pa.string()), [["abc", None], []], ["{abc,NULL}", "{}"]),
    "timestamptz[]": (
        pa.list_(INSTANTS),
        [[dt.datetime(2024, 1, 1, tzinfo=UTC)], []],
        ['{"2024-01-01 00:00:00+00"}', "{}"],
    ),
    "interval": (pa.string(), ["1 day", "2 hours"], ["1 day", "02:00:00"]),
}


class Case(NamedTuple):
    """One column: its type in PostgreSQL, the row's type, values, and what a session shows of them by ``shown``."""

    kind: str
    data: pa.DataType
    values: list[Any]
    stored: list[Any]
    shown: str = "{}"


CASES: dict[str, Case] = {
    **{f"c {kind}": Case(kind, data, values, values) for kind, (data, values) in EXACT.items()},
    **{f"v {kind}": Case(kind, *converted) for kind, converted in CONVERTED.items()},
    **{f"t {kind}": Case(kind, *cast, shown="{}::text") for kind, cast in CAST.items()},
}
"""All of them, by the name of the column."""


def chosen(first: str) -> dict[str, Case]:
    """Return the cases whose columns begin so."""
    return {name: case for name, case in CASES.items() if name.startswith(first)}


def columns(cases: Mapping[str, Case]) -> dict[str, pa.Array]:
    """Return the columns of three rows: two values of each, and NULL."""
    return {name: pa.array([*case.values, None], case.data) for name, case in cases.items()}


def definitions(cases: Mapping[str, Case]) -> str:
    """Return the columns of a table for them."""
    return ", ".join(f"{sql.Identifier(name).as_string()} {case.kind}" for name, case in cases.items())


def shown(cases: Mapping[str, Case]) -> str:
    """Return the list of SELECT that shows what is stored; the session's time zone has to be UTC."""
    return ", ".join(case.shown.format(sql.Identifier(name).as_string()) for name, case in cases.items())


def stored(cases: Mapping[str, Case]) -> list[tuple[Any, ...]]:
    """Return the rows that it shows."""
    return list(zip(*([*case.stored, None] for case in cases.values()), strict=True))


def expression(name: str, case: Case) -> str:
    """Return a column in the SQL of Spark, which has nothing that a setting of the session changes; ``id`` from 1."""
    values = ", ".join(_literal(value, case.data) for value in [*case.values, None])
    return f"element_at(array({values}), CAST(id AS INT)) AS `{name}`"


def as_json(value: Any, data: pa.DataType) -> Any:
    """Return a value as it is in JSON that Spark renders."""
    if isinstance(value, list):
        return [as_json(each, data.value_type) for each in value]
    if isinstance(value, dt.datetime):
        return value.replace(tzinfo=None).isoformat(timespec="microseconds") + ("Z" if data.tz else "")
    if isinstance(value, dt.date):
        return value.isoformat()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return float(value) if isinstance(value, Decimal) else value


def _literal(value: Any, data: pa.DataType) -> str:
    if value is None or value == []:
        return f"CAST({'NULL' if value is None else 'array()'} AS {_spark(data)})"
    if isinstance(value, list):
        return f"array({', '.join(_literal(each, data.value_type) for each in value)})"
    if isinstance(value, str | bytes):
        # no escape, which a setting could read in another way
        return f"CAST(X'{(value.encode() if isinstance(value, str) else value).hex()}' AS {_spark(data)})"
    text = str(value)
    if isinstance(value, dt.datetime):
        text = f"{value.replace(tzinfo=None).isoformat(sep=' ')}{'Z' if data.tz else ''}"
    return f"CAST('{text}' AS {_spark(data)})"


def _spark(data: pa.DataType) -> str:
    if pa.types.is_list(data):
        return f"ARRAY<{_spark(data.value_type)}>"
    if pa.types.is_decimal(data):
        return f"DECIMAL({data.precision}, {data.scale})"
    if pa.types.is_timestamp(data):
        return "TIMESTAMP_LTZ" if data.tz else "TIMESTAMP_NTZ"
    return _SPARK[str(data)]


_SPARK = {
    "int16": "SMALLINT",
    "int32": "INT",
    "int64": "BIGINT",
    "float": "FLOAT",
    "double": "DOUBLE",
    "bool": "BOOLEAN",
    "string": "STRING",
    "large_string": "STRING",
    "binary": "BINARY",
    "date32[day]": "DATE",
}
