"""Every supported type comes back from PostgreSQL as it was sent, on each way into the table."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from value_cases import chosen, columns, definitions, shown, stored

from epochsink.errors import RowsRejected

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fix_postgres import MakeDriver, Truth
    from value_cases import Case

WAYS = [
    pytest.param({}, id="atomic"),
    pytest.param({"atomic": False}, id="by-task"),
    pytest.param({"spool": True}, id="spooled"),
]


def run(cases: Mapping[str, Case], table: str, pg_driver: MakeDriver, pg_truth: Truth, **options: Any) -> None:
    """Write the cases' rows, and compare them with what is stored."""
    pg_truth.execute(f"CREATE TABLE {table} ({definitions(cases)})")
    rows = pa.record_batch(columns(cases))
    pg_driver(table, rows, **options).run(0, rows)
    pg_truth.execute("SET TimeZone = 'UTC'")
    assert pg_truth.execute(f"SELECT {shown(cases)} FROM {table}") == stored(cases)  # noqa: S608 - a name that the test made


@pytest.mark.parametrize("way", WAYS)
def test_types_with_a_twin_in_arrow_come_back_as_sent(
    way: dict[str, Any], pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    run(chosen("c"), f"{pg_schema}.exact", pg_driver, pg_truth, **way)


@pytest.mark.parametrize("way", WAYS)
def test_types_that_widen_or_parse_come_back_as_the_columns_type(
    way: dict[str, Any], pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    run(chosen("v"), f"{pg_schema}.converted", pg_driver, pg_truth, **way)


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
    run(chosen("t"), f"{pg_schema}.cast", pg_driver, pg_truth, commit=commit)


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
