"""Text that is not UTF-8 is found in Arrow's columns."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from epochsink import arrow_buffers

VALUES = ("whole", "naïve", b"\xff", "", b"a\xc3", b"\xed\xa0\x80", "🦆")
"""A byte that no UTF-8 has, a letter cut in the middle, and half of a surrogate pair."""


def unchecked(*values: str | bytes, kind: pa.DataType) -> pa.Array:
    """Return an array of text with these bytes, as one that comes from Spark."""
    binary = arrow_buffers.texts(values, pa.large_binary() if kind == pa.large_string() else pa.binary())
    return binary.view(kind)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()], ids=str)
def test_each_text_that_is_not_utf8_is_found(kind: pa.DataType) -> None:
    """The positions are those in the column, also in a slice of it."""
    column = unchecked(*VALUES, kind=kind)
    assert arrow_buffers.not_utf8(column) == [2, 4, 5]
    assert arrow_buffers.not_utf8(column.slice(3)) == [1, 2]
    assert arrow_buffers.not_utf8(column.slice(0, 2)) == []
    assert arrow_buffers.not_utf8(column.slice(0, 0)) == []


def test_text_inside_lists_structs_and_maps_is_found() -> None:
    """A text that is not UTF-8 counts for the row that it is in, and for no other."""
    texts = unchecked(*VALUES, kind=pa.string())
    ends = arrow_buffers.numbers(np.array([0, 2, 3, 3, 5, 7], "int32"))
    lists = pa.ListArray.from_arrays(ends, texts)
    assert arrow_buffers.not_utf8(lists) == [1, 3, 4]
    assert arrow_buffers.not_utf8(lists.slice(2, 2)) == [1]
    assert arrow_buffers.not_utf8(lists.slice(2, 1)) == []
    structs = pa.StructArray.from_arrays([arrow_buffers.numbers(np.arange(7)), texts], ["id", "text"])
    assert arrow_buffers.not_utf8(structs.slice(1)) == [1, 3, 4]
    maps = pa.MapArray.from_arrays(ends, texts, arrow_buffers.numbers(np.arange(7)))
    assert arrow_buffers.not_utf8(maps) == [1, 3, 4]


def test_bytes_and_nulls_are_not_text() -> None:
    """Binary columns hold any bytes, and a null has no text."""
    assert arrow_buffers.not_utf8(arrow_buffers.texts(VALUES, pa.binary())) == []
    assert arrow_buffers.not_utf8(pa.array([None, "a"], pa.string())) == []
