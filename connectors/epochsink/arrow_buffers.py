"""Arrow from Python's values and NumPy's, and back, without pandas.

`pyarrow.array`, `pyarrow.scalar` (which every compute function calls for a Python value) and `Array.to_numpy` import
pandas when they are first called, to know its types. That costs each of Spark's Python workers more than a second of
processor time and 50 MB, so nothing that runs in a task calls them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray


def texts(values: Sequence[str | bytes], kind: pa.DataType | None = None) -> pa.Array:
    """Return an array of ``kind``: a string or binary type, large_string if left out."""
    encoded = [value.encode() if isinstance(value, str) else value for value in values]
    offsets = np.array([0, *accumulate(map(len, encoded))], np.int64)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.large_binary(), len(encoded), buffers).cast(kind or pa.large_string())


def text(value: str | bytes, kind: pa.DataType | None = None) -> pa.Scalar:
    """Return a scalar of ``kind``, as `texts` does."""
    return texts([value], kind)[0]


def numbers(values: NDArray[Any]) -> pa.Array:
    """Return an array of the same type, which shares the memory of ``values``."""
    kind = pa.from_numpy_dtype(values.dtype)
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(np.ascontiguousarray(values))])


def number(value: float, kind: str) -> pa.Scalar:
    """Return a scalar of NumPy's type ``kind``, such as "int64"."""
    return numbers(np.array([value], kind))[0]


def to_numpy(column: pa.Array) -> NDArray[Any]:
    """Return a view of a column of fixed width without nulls, or a copy of a boolean one."""
    if pa.types.is_boolean(column.type):
        return to_numpy(column.cast(pa.uint8())).view(np.bool_)
    kind = column.type.to_pandas_dtype()
    if len(column) == 0:  # Arrow may leave out the buffers
        return np.zeros(0, kind)
    return np.frombuffer(column.buffers()[1], kind)[column.offset : column.offset + len(column)]


def not_utf8(column: pa.Array) -> list[int]:
    """Return the positions of the values that hold text which is not UTF-8, also in lists, structs and maps.

    Spark keeps any bytes in a string. The first look at the whole column tells in a few milliseconds for a million
    values that there are none; only a column that has some is searched, by halves.
    """
    places = []
    ranges = [(0, len(column))]
    while ranges:
        start, length = ranges.pop()
        if not _is_utf8(column.slice(start, length)):
            if length == 1:
                places.append(start)
            else:
                half = length // 2
                ranges += [(start + half, length - half), (start, half)]
    return places


def _is_utf8(column: pa.Array) -> bool:
    # a slice of a nested column keeps all values of its children, which would be looked at as well
    whole = pa.concat_arrays([column]) if pa.types.is_nested(column.type) else column
    try:
        whole.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True
