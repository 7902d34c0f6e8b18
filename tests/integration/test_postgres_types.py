"""Every supported type comes back from PostgreSQL as it was sent, on each way into the table."""

from __future__ import annotations

import datetime as dt
import uuid
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from psycopg import sql

from epochsink.errors import RowsRejected

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fix_postgres import MakeDriver, Truth

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
WAYS = [
    pytest.param({}, id="atomic"),
    pytest.param({"atomic": False}, id="by-task"),
    pytest.param({"spool": True}, id="spooled"),
]


def batch(columns: dict[str, tuple[pa.DataType, list[Any]]]) -> pa.RecordBatch:
    arrays = [pa.array([*values, None], data) for data, values in columns.values()]
    return pa.record_batch(arrays, [f"c {name}" for name in columns])


def create(pg_truth: Truth, table: str, types: Iterable[str]) -> None:
    columns = [f"{quoted(name)} {name}" for name in types]
    pg_truth.execute(f"CREATE TABLE {table} ({', '.join(columns)})")


def quoted(name: str) -> str:
    return sql.Identifier(f"c {name}").as_string()


@pytest.mark.parametrize("way", WAYS)
def test_types_with_a_twin_in_arrow_come_back_as_sent(
    way: dict[str, Any], pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    table = f"{pg_schema}.exact"
    create(pg_truth, table, EXACT)
    rows = batch(EXACT)
    pg_driver(table, rows, **way).run(0, rows)
    expected = [*zip(*(values for _, values in EXACT.values()), strict=True), (None,) * len(EXACT)]
    assert pg_truth.execute(f"SELECT * FROM {table}") == expected  # noqa: S608 - a name that the test made


@pytest.mark.parametrize("way", WAYS)
def test_types_that_widen_or_parse_come_back_as_the_columns_type(
    way: dict[str, Any], pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    table = f"{pg_schema}.converted"
    create(pg_truth, table, CONVERTED)
    rows = batch({name: (data, values) for name, (data, values, _) in CONVERTED.items()})
    pg_driver(table, rows, **way).run(0, rows)
    expected = [*zip(*(values for _, _, values in CONVERTED.values()), strict=True), (None,) * len(CONVERTED)]
    assert pg_truth.execute(f"SELECT * FROM {table}") == expected  # noqa: S608 - a name that the test made


DOMAINS: dict[str, tuple[str, pa.DataType, Any, str]] = {
    "short": ("varchar(5)", pa.string(), "ábcde", "ábcde"),
    "amount": ("numeric(10,2)", pa.decimal128(10, 2), Decimal("0.05"), "0.05"),
    "document": ("jsonb", pa.string(), '{"a": 1}', '{"a": 1}'),
    "moment": ("timestamp(3)", pa.timestamp("us"), dt.datetime(2026, 1, 2, 3, 4, 5, 678000), "2026-01-02 03:04:05.678"),  # noqa: DTZ001 - has no zone
    "numbers": ("int[]", pa.list_(pa.int32()), [1, None], "{1,NULL}"),
    "place": ("inet", pa.string(), "::1", "::1/128"),
}
"""A domain's base type, the row's type, a value, and its text in PostgreSQL."""


@pytest.mark.parametrize("commit", ["prepared", "staged"])
def test_domains_of_several_levels_take_what_their_base_types_take(
    commit: str, pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    table = f"{pg_schema}.domains"
    for name, (base, *_) in DOMAINS.items():
        for level, kind in enumerate([base, f"{pg_schema}.{name}0", f"{pg_schema}.{name}1"]):
            pg_truth.execute(f"CREATE DOMAIN {pg_schema}.{name}{level} AS {kind} {'NOT NULL' if level == 1 else ''}")
    pg_truth.execute(f"CREATE TABLE {table} ({', '.join(f'{name} {pg_schema}.{name}2' for name in DOMAINS)})")
    rows = pa.record_batch({name: pa.array([value], kind) for name, (_, kind, value, _) in DOMAINS.items()})
    pg_driver(table, rows, commit=commit).run(0, rows)
    shown = ", ".join(f"{name}::text" for name in DOMAINS)
    assert pg_truth.execute(f"SELECT {shown} FROM {table}") == [tuple(text for *_, text in DOMAINS.values())]  # noqa: S608 - made here


REFUSED: dict[str, tuple[str, pa.Array, str]] = {
    "too long": ("varchar(5)", pa.array(["abcdef"]), "too long"),
    "null": ("text", pa.array([None], pa.string()), "null"),
    "finer": ("timestamp(3)", pa.array([1], pa.timestamp("us")), "does not fit"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_value_that_an_inner_domain_refuses_is_refused(
    case: str, pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    """Not cut or rounded: a cast to a domain would."""
    base, values, said = REFUSED[case]
    table = f"{pg_schema}.inner"
    pg_truth.execute(f"CREATE DOMAIN {pg_schema}.a AS {base} NOT NULL; CREATE DOMAIN {pg_schema}.b AS {pg_schema}.a")
    pg_truth.execute(f"CREATE TABLE {table} (v {pg_schema}.b)")
    rows = pa.record_batch({"v": values})
    with pytest.raises(RowsRejected, match=said):
        pg_driver(table, rows).run(0, rows)
    assert pg_truth.rows(table) == []


@pytest.mark.parametrize("commit", ["prepared", "staged"])
def test_types_without_a_binary_form_are_cast_by_the_merge(
    commit: str, pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    table = f"{pg_schema}.cast"
    create(pg_truth, table, CAST)
    rows = batch({name: (data, values) for name, (data, values, _) in CAST.items()})
    pg_driver(table, rows, commit=commit).run(0, rows)
    texts = ", ".join(f"{quoted(name)}::text" for name in CAST)
    pg_truth.execute("SET TimeZone = 'UTC'")
    expected = [*zip(*(values for _, _, values in CAST.values()), strict=True), (None,) * len(CAST)]
    assert pg_truth.execute(f"SELECT {texts} FROM {table}") == expected  # noqa: S608 - a name that the test made


def test_enums_and_domains_take_their_text(pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth) -> None:
    pg_truth.execute(f"CREATE TYPE {pg_schema}.mood AS ENUM ('glad', 'sad')")
    pg_truth.execute(f"CREATE DOMAIN {pg_schema}.price AS numeric(8,2) CHECK (VALUE > 0)")
    table = f"{pg_schema}.moods"
    pg_truth.execute(f"CREATE TABLE {table} (mood {pg_schema}.mood, price {pg_schema}.price)")
    rows = pa.record_batch({"mood": ["sad", None], "price": pa.array([Decimal("1.25"), None], pa.decimal128(8, 2))})
    pg_driver(table, rows).run(0, rows)
    pg_driver(table, rows, atomic=False).run(0, rows)
    assert pg_truth.execute(f"SELECT mood::text, price FROM {table}") == [("sad", Decimal("1.25")), (None, None)] * 2  # noqa: S608


def test_columns_that_the_row_lacks_keep_their_default(pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth) -> None:
    """Identity and generated columns too."""
    table = f"{pg_schema}.defaults"
    pg_truth.execute(
        f"CREATE TABLE {table} (n bigint GENERATED ALWAYS AS IDENTITY, id int PRIMARY KEY, "
        "kind text NOT NULL DEFAULT 'new', twice int GENERATED ALWAYS AS (id * 2) STORED)"
    )
    rows = pa.record_batch({"id": pa.array([5], pa.int32())})
    pg_driver(table, rows).run(0, rows)
    assert pg_truth.rows(table) == [(1, 5, "new", 10)]


def test_a_batch_larger_than_a_chunk_arrives_whole(pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth) -> None:
    table = f"{pg_schema}.large"
    pg_truth.execute(f"CREATE TABLE {table} (id bigint, body text)")
    count = 40
    rows = pa.record_batch(
        {"id": pa.array(range(count), pa.int64()), "body": [str(i) * (1 << 18) for i in range(count)]}
    )
    pg_driver(table, rows, atomic=False).run(0, rows)
    found = pg_truth.execute(f"SELECT count(*), sum(length(body)), count(DISTINCT id) FROM {table}")  # noqa: S608
    assert found == [(count, sum(len(body) for body in rows["body"].to_pylist()), count)]
