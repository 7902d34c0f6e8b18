"""The value of a message that the sink itself renders as JSON, and how it says that JSON cannot hold a row.

Spark's `to_json` would replace text that is not UTF-8. Such a row gets a mark, the reason, and its text before the
JSON, each with a line break at its end. No JSON begins with the byte of the mark, and none has a line break in it. The
column is named `JSON`, because a ``value`` of the user's may begin with any byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np
import pyarrow as pa

from epochsink import arrow_buffers
from epochsink.sink.row_json import first_of, marked_json, not_json, not_utf8, value_json
from epochsink.sink.sql import field_of, text_of

JSON: Final = "json"
VALUE: Final = "value"
_MARK: Final = 0xFF
_END: Final = b"\n"


def rendered_row(row: str, schema: pa.Schema, *, delete_when: str | None = None) -> str:
    """Return the SQL of the column `JSON`. ``row`` names the struct with the fields of ``schema``.

    A row for which the condition ``delete_when`` is true has NULL.
    """
    kind = pa.struct(list(schema))
    reason = first_of(_unfit(row, schema))
    # the text of the row once: Spark's code for it has a part for each column
    mark = None if reason is None else f"concat({reason}, {text_of(row)}, {_bytes(_END)})"
    return f"CAST({marked_json(value_json(row, kind, unless=delete_when), mark)} AS BINARY)"


def _bytes(text: bytes) -> str:
    return f"CAST(X'{text.hex()}' AS STRING)"


def _unfit(row: str, schema: pa.Schema) -> Iterator[tuple[str, str]]:
    """Yield conditions in SQL that JSON cannot hold a row, each with the mark and the reason."""
    for field in schema:
        value = field_of(row, field.name)
        for condition, what in (
            (not_utf8(value, field.type), "text that is not UTF-8"),
            (not_json(value, field.type), "a VARIANT with NaN or an infinity"),
        ):
            if condition is not None:
                reason = f"column '{field.name}' has {what}, which JSON cannot hold"
                yield condition, _bytes(bytes([_MARK]) + reason.encode() + _END)


def value_of(batch: pa.RecordBatch) -> pa.Array:
    """Return the values of messages, whichever column has them."""
    return batch.column(JSON if JSON in batch.schema.names else VALUE)


def marked(batch: pa.RecordBatch) -> Mapping[int, str]:
    """Return the rows with a mark, by number, with the reason; one look at the first bytes, if there are none."""
    if JSON not in batch.schema.names:
        return {}
    column = batch.column(JSON)
    _, offsets, data = column.buffers()
    if data is None or not data.size:
        return {}
    wide = pa.types.is_large_binary(column.type)
    starts = np.frombuffer(offsets, "i8" if wide else "i4")[column.offset : column.offset + len(column) + 1]
    filled = np.flatnonzero(np.diff(starts))
    rows = filled[np.frombuffer(data, "u1")[starts[filled]] == _MARK]
    return {
        int(row): column[row].as_buffer().to_pybytes()[1:].partition(_END)[0].decode()
        for row in rows.tolist()
        if column[row].is_valid
    }


def as_value(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a single row with a column ``value``, without a mark and its reason: for people."""
    if JSON not in batch.schema.names:
        return batch
    place = batch.schema.names.index(JSON)
    column = batch.column(place)
    if marked(batch):
        text = column[0].as_buffer().to_pybytes().partition(_END)[2].rpartition(_END)[0]
        column = arrow_buffers.texts([text], pa.binary())
    return batch.set_column(place, VALUE, column)
