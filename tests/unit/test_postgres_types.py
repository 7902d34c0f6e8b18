"""Which Arrow types go into which columns: what loses values is a finding, never a surprise."""

from __future__ import annotations

import uuid
from typing import Any

import pyarrow as pa
import pytest

from epochsink.postgres.catalog import Column
from epochsink.postgres.types import Mismatch, encoding

UTC = pa.timestamp("us", "UTC")
NAIVE = pa.timestamp("us")
TEXTS = pa.list_(pa.string())


def column(receive: str, *, element: str | None = None, modifier: int = -1, declared: str = "thing") -> Column:
    return Column("c", declared, declared, "", "=", receive, element, modifier, False, False, "", "")  # noqa: FBT003 - a row of the catalog


def numeric(precision: int, scale: int) -> Column:
    return column(
        "numeric_recv", modifier=(precision << 16 | scale & 0x7FF) + 4, declared=f"numeric({precision},{scale})"
    )


@pytest.mark.parametrize(
    ("given", "receive", "sent"),
    [
        (pa.int8(), "int2recv", pa.int16()),
        (pa.int32(), "int8recv", pa.int64()),
        (pa.int64(), "int8recv", pa.int64()),
        (pa.float32(), "float8recv", pa.float64()),
        (pa.int32(), "float8recv", pa.float64()),
        (pa.int64(), "numeric_recv", pa.decimal128(19, 0)),
        (pa.decimal128(38, 18), "numeric_recv", pa.decimal128(38, 18)),
        (pa.string(), "varcharrecv", pa.string()),
        (pa.large_string(), "textrecv", pa.large_string()),
        (pa.string(), "enum_recv", pa.string()),
        (pa.string(), "jsonb_recv", pa.string()),
        (pa.string(), "uuid_recv", pa.binary(16)),
        (pa.binary(), "bytearecv", pa.binary()),
        (pa.date32(), "date_recv", pa.date32()),
        (UTC, "timestamptz_recv", UTC),
        (pa.timestamp("us", "Asia/Tokyo"), "timestamptz_recv", UTC),
        (UTC, "timestamp_recv", NAIVE),
        (NAIVE, "timestamp_recv", NAIVE),
    ],
)
def test_what_loses_nothing_is_sent_as_the_column_reads_it(given: pa.DataType, receive: str, sent: pa.DataType) -> None:
    chosen = encoding(pa.field("c", given), column(receive))
    assert chosen.field.type == sent
    assert chosen.staged_as is None


@pytest.mark.parametrize(
    ("given", "target", "says"),
    [
        (pa.int64(), column("int4recv", declared="integer"), "CAST(c AS INT)"),
        (pa.int64(), column("float8recv"), "CAST(c AS DOUBLE)"),
        (pa.float64(), column("float4recv"), "CAST(c AS FLOAT)"),
        (pa.float64(), column("int8recv"), "CAST(c AS BIGINT)"),
        (pa.string(), column("int8recv"), "CAST(c AS BIGINT)"),
        (pa.string(), column("date_recv"), "CAST(c AS DATE)"),
        (pa.string(), column("boolrecv"), "CAST(c AS BOOLEAN)"),
        (pa.decimal128(10, 4), numeric(12, 2), "scale 4 > 2"),
        (pa.decimal128(10, 2), numeric(12, 2 - 4), "scale 2 > -2"),
        (pa.float64(), numeric(12, 2), "CAST(c AS DECIMAL(12,2))"),
        (NAIVE, column("timestamptz_recv"), "not a point in time"),
        (pa.date32(), column("timestamp_recv"), "CAST(c AS TIMESTAMP_NTZ)"),
        (pa.null(), column("textrecv"), "holds only null"),
        (pa.int64(), column("textrecv"), "CAST(c AS STRING)"),
        (pa.binary(), column("textrecv"), "CAST(c AS STRING)"),
        (pa.list_(pa.int64()), column("array_recv", element="int4recv"), "can lose data"),
        (pa.list_(pa.string()), column("textrecv"), "can lose data"),
        (pa.duration("us"), column("time_recv"), "column of type interval"),
        (pa.string(), column("time_recv", modifier=0, declared="time(0)"), "change the column's type to time"),
        (pa.large_string(), column("timetz_recv", modifier=3), "change the column's type to timetz"),
        (pa.string(), column("interval_recv", modifier=6 << 16 | 0xFFFF), "change the column's type to interval"),
        (pa.string(), column("cash_recv", declared="money"), "change the column's type to numeric"),
        (TEXTS, column("array_recv", element="time_recv", modifier=2), "change the column's type to time[]"),
        (TEXTS, column("array_recv", element="cash_recv"), "change the column's type to numeric[]"),
    ],
)
def test_what_would_lose_values_is_refused_with_the_cast_to_write(
    given: pa.DataType, target: Column, says: str
) -> None:
    with pytest.raises(Mismatch) as caught:
        encoding(pa.field("c", given), target)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("given", "target", "staged_as"),
    [
        (pa.string(), column("inet_recv", declared="inet"), "text"),
        (pa.string(), column("time_recv", modifier=6, declared="time(6)"), "text"),
        (pa.string(), column("interval_recv", declared="interval"), "text"),
        (pa.list_(pa.string()), column("array_recv", element="uuid_recv", declared="uuid[]"), "text[]"),
        (pa.list_(pa.string()), column("array_recv", element="varcharrecv", declared="varchar[]"), "text[]"),
        (pa.list_(UTC), column("array_recv", element="timestamptz_recv", declared="timestamptz[]"), "timestamp[]"),
    ],
)
def test_what_has_no_binary_form_is_staged_and_cast(given: pa.DataType, target: Column, staged_as: str) -> None:
    chosen = encoding(pa.field("c", given), target)
    assert (chosen.staged_as, chosen.cast_to) == (staged_as, target.bare_type)


@pytest.mark.parametrize("receive", ["time_recv", "timetz_recv"])
def test_a_time_of_day_finer_than_a_microsecond_is_named(receive: str) -> None:
    exact = ["12:30:00", None, "12:30:00.123456", "12:30:00.1234560+02"]
    scalar = encoding(pa.field("c", pa.string()), column(receive)).convert
    listed = encoding(pa.field("c", TEXTS), column("array_recv", element=receive)).convert
    assert scalar(pa.array(exact)).to_pylist() == exact
    assert listed(pa.array([exact, None], TEXTS)).to_pylist() == [exact, None]
    for array, convert in ((pa.array([None, "12:30:00.1234565"]), scalar), (pa.array([["0:0:0.0000001"]]), listed)):
        with pytest.raises(pa.ArrowInvalid, match="more than 6 digits after the second"):
            convert(array)


def test_spark_names_the_elements_of_a_list_in_its_own_way() -> None:
    given = pa.list_(pa.field("element", pa.int16(), nullable=False))
    chosen = encoding(pa.field("c", given), column("array_recv", element="int4recv"))
    assert chosen.convert(pa.array([[1, 2], None, []], given)).to_pylist() == [[1, 2], None, []]
    assert chosen.field.type.value_type == pa.int32()


@pytest.mark.parametrize("form", [str, lambda u: u.hex, lambda u: u.hex.upper(), lambda u: "{" + str(u) + "}"])
def test_uuids_become_their_bytes_in_every_form_that_postgresql_reads(form: Any) -> None:
    known = [uuid.UUID(int=0), uuid.UUID("f81d4fae-7dec-11d0-a765-00a0c91e6bf6"), uuid.UUID(int=2**128 - 1)]
    texts = pa.array([form(known[0]), "cut off", None, *map(form, known)])[2:]
    made = encoding(pa.field("c", pa.string()), column("uuid_recv")).convert(texts)
    assert made.to_pylist() == [None, *(one.bytes for one in known)]


@pytest.mark.parametrize("wrong", ["", "xyz", "f81d4fae-7dec-11d0-a765-00a0c91e6bfg", "0" * 33])
def test_a_text_that_is_no_uuid_is_named(wrong: str) -> None:
    chosen = encoding(pa.field("c", pa.string()), column("uuid_recv"))
    with pytest.raises(pa.ArrowInvalid, match="is not a valid uuid") as caught:
        chosen.convert(pa.array([None, wrong]))
    assert repr(wrong) in str(caught.value)


def test_an_empty_array_of_uuids_stays_empty() -> None:
    chosen = encoding(pa.field("c", pa.string()), column("uuid_recv"))
    assert len(chosen.convert(pa.array([], pa.string()))) == 0
    assert chosen.convert(pa.array([None], pa.string())).to_pylist() == [None]
