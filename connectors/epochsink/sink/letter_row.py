"""The row of a dead letter: as Arrow for a retry, and as JSON for people.

A retry decodes the row that the sink's writer was given and writes it as any other row. No value passes through a
Python object or through text on that way, because either may change it. The JSON is never read back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any, Final

import numpy as np
import pyarrow as pa

_NUL: Final = "\\x00"


def encode_row(batch: pa.RecordBatch) -> bytes:
    """Return a record batch with its schema, usually a single row, as an Arrow IPC stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return bytes(sink.getvalue())


def decode_rows(letters: Iterable[bytes]) -> Iterator[pa.RecordBatch]:
    """Return the rows that `encode_row` wrote, in order; neighbours with one schema are in one batch.

    Raises `pyarrow.ArrowInvalid` if bytes are not such a stream.
    """
    batches = (batch for letter in letters for batch in pa.ipc.open_stream(letter))
    for schema, alike in groupby(batches, lambda batch: batch.schema):
        yield from pa.Table.from_batches(alike, schema).combine_chunks().to_batches()


def render_row(batch: pa.RecordBatch) -> dict[str, Any]:
    """Return a single row as a JSON object for people: it takes every value, and may not be read back.

    Numbers that JSON's readers round, times and bytes are text. A NUL, and bytes that are not UTF-8, are escaped.
    """
    return {name: _render(column[0]) for name, column in zip(batch.schema.names, batch.columns, strict=True)}


def _render(value: pa.Scalar) -> Any:  # noqa: PLR0911 - whatever JSON holds; one line for each kind of type
    kind = value.type
    if not value.is_valid:
        return None
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind):
        return value.as_py()
    if pa.types.is_floating(kind):
        return _render_float(value)
    if pa.types.is_decimal(kind):
        return f"{value.as_py():f}"  # str() may have an exponent
    if isinstance(value, (pa.StringScalar, pa.LargeStringScalar, pa.StringViewScalar)):
        return value.as_buffer().to_pybytes().decode(errors="backslashreplace").replace("\x00", _NUL)
    if isinstance(value, pa.BinaryScalar):
        return f"\\x{value.as_buffer().to_pybytes().hex()}"
    return _render_time(value) if pa.types.is_temporal(kind) else _render_nested(value)


def _render_nested(value: pa.Scalar) -> Any:
    if isinstance(value, pa.ExtensionScalar):
        return _render(value.value)
    if isinstance(value, pa.DictionaryScalar):
        return _render(value.dictionary[value.index.as_py()])
    if isinstance(value, pa.ListScalar):  # a map's values are its entries
        return [_render(each) for each in value.values]
    if isinstance(value, pa.StructScalar):
        return {field.name: _render(value[place]) for place, field in enumerate(value.type)}
    return str(value)


def _render_float(value: pa.Scalar) -> float | str:
    text = str(value.cast(pa.string()).as_py())  # a float's own digits, not those of the double that it becomes
    number = float(text)
    return number if np.isfinite(number) else text


def _render_time(value: pa.Scalar) -> str:
    """Return a date, timestamp, time or interval as text. NumPy's dates have no limit to the year, Python's have."""
    kind = value.type
    if pa.types.is_date32(kind):
        return str(np.datetime64(value.value, "D"))
    if pa.types.is_timestamp(kind):
        return str(np.datetime64(value.value, kind.unit)) + ("Z" if kind.tz else "")
    if pa.types.is_duration(kind):
        return str(np.timedelta64(value.value, kind.unit))
    return str(value.cast(pa.string()).as_py()) if pa.types.is_time(kind) else str(value)
