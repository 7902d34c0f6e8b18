"""A dead letter keeps the row as the writer got it; what people read of it takes every value."""

from __future__ import annotations

import json
import subprocess
import sys
from decimal import Decimal

import pyarrow as pa
import pytest

from epochsink.sink import over_limit
from epochsink.sink.letter_row import decode_rows, encode_row, render_row


def days(number: int) -> pa.Array:
    """Return a date that Python may not have."""
    return pa.array([number], pa.int32()).cast(pa.date32())


def raw_text(value: bytes) -> pa.Array:
    """Return text as Spark may hold it: not UTF-8."""
    return pa.array([value], pa.binary()).view(pa.string())


AWKWARD = {
    "a date after year 9999": (days(7_000_000), "21135-05-09"),
    "a date before year 1": (days(-800_000), "-221-09-04"),
    "a session zone that Python does not know": (
        pa.array([10**17], pa.int64()).cast(pa.timestamp("us", "GMT+8")),
        "5138-11-16T09:46:40.000000Z",
    ),
    "text that is not UTF-8, with a NUL": (raw_text(b"\xffa\x00\xc3\xa9"), "\\xffa\\x00\u00e9"),
    "bytes": (pa.array([b"\xff\x00"]), "\\xff00"),
    "a decimal that str() writes with an exponent": (
        pa.array([Decimal("0E-18")], pa.decimal128(38, 18)),
        "0.000000000000000000",
    ),
    "NaN": (pa.array([float("nan")]), "nan"),
    "a float's own digits": (pa.array([0.1], pa.float32()), 0.1),
    "an interval": (pa.array([3], pa.int64()).cast(pa.duration("us")), "3 microseconds"),
    "a nanosecond": (pa.array([3], pa.time64("ns")), "00:00:00.000000003"),
    "nested": (pa.array([[{"a": 1, "b": [b"x", None]}]]), [{"a": 1, "b": ["\\x78", None]}]),
    "a map": (pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int32())), [{"key": "k", "value": 1}]),
    "words of a dictionary": (pa.array(["a"]).dictionary_encode(), "a"),
    "a type of its own": (
        pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"x" * 16], pa.binary(16))),
        "\\x" + "78" * 16,
    ),
    "null": (pa.nulls(1, pa.date32()), None),
}


@pytest.mark.parametrize("case", AWKWARD)
def test_rows_are_carried_and_rendered_whatever_their_values(case: str) -> None:
    """The bytes give back the very row, and the JSON is valid."""
    column, rendering = AWKWARD[case]
    batch = pa.record_batch([column], schema=pa.schema([pa.field("v", column.type, metadata={"spark": "kept"})]))
    (back,) = decode_rows([encode_row(batch)])
    assert back.schema.equals(batch.schema, check_metadata=True)
    assert encode_row(back) == encode_row(batch)
    assert render_row(batch) == {"v": rendering}
    assert json.loads(json.dumps(render_row(batch), allow_nan=False)) == {"v": rendering}


def test_a_row_of_a_large_batch_is_carried_alone() -> None:
    """The rest of the batch is not in its letter."""
    row = pa.record_batch({"v": pa.array(range(100_000))}).slice(70_000, 1)
    letter = encode_row(row)
    assert len(letter) < 1000
    assert next(decode_rows([letter])).equals(row)


def test_letters_of_one_schema_come_back_in_one_batch() -> None:
    """Others have a batch of their own, and the order is kept."""
    letters = [encode_row(pa.record_batch({name: pa.array([value])})) for name, value in [("a", 1), ("a", 2), ("b", 3)]]
    batches = [batch.to_pydict() for batch in decode_rows(letters)]
    assert batches == [{"a": [1, 2]}, {"b": [3]}]
    assert list(decode_rows([])) == []


def test_no_pandas_is_loaded_in_a_task() -> None:
    """It would cost each of Spark's workers a second of processor time."""
    code = (
        "import sys, numpy as np, pyarrow as pa\n"
        "from epochsink import arrow_buffers\n"
        "from epochsink.sink.letter_row import decode_rows, encode_row, render_row\n"
        "number, text = arrow_buffers.numbers(np.array([7], 'i8')), arrow_buffers.texts(['a'])\n"
        "columns = [number, text, text.cast(pa.string()), number.cast(pa.timestamp('us', 'UTC')),\n"
        "    number.cast(pa.int32()).cast(pa.date32()), number.cast(pa.float64()), number.cast(pa.time64('us'))]\n"
        "batch = pa.record_batch(columns, names=list('abcdefg'))\n"
        "print(render_row(next(decode_rows([encode_row(batch)]))))\n"
        "sys.exit('pandas' in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("refused", "rows", "limit", "is_over"),
    [
        (29, 100, 0.29, False),
        (30, 100, 0.29, True),
        (57, 100, 0.57, False),
        (1, 10**6, 1e-06, False),
        (0, 0, 0.0, False),
        (1, 9, 0.0, True),
        (9, 9, 1.0, False),
    ],
)
def test_the_limit_is_the_share_as_it_is_written(refused: int, rows: int, limit: float, *, is_over: bool) -> None:
    """0.29 * 100 is less than 29 in floats."""
    assert over_limit(refused, rows, limit) is is_over
