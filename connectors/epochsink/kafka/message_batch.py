"""Arrow columns to librdkafka's array of messages, without touching rows from Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from epochsink import arrow_buffers
from epochsink.kafka.librdkafka import MESSAGE, UNASSIGNED

if TYPE_CHECKING:
    from numpy.typing import NDArray

# librdkafka takes NULL for "no value"; an empty value needs some address
_EMPTY: Final = np.zeros(1, dtype="u1")


def fill(batch: pa.RecordBatch) -> NDArray[Any]:
    """Return `MESSAGE` structs that point into the buffers of ``batch``, which must outlive them.

    Columns ``key`` and ``partition`` may be absent; ``key``, ``value`` are strings or binary.
    """
    messages = np.zeros(batch.num_rows, dtype=MESSAGE)
    messages["payload"], messages["len"] = _pointers(batch.column("value"))
    names = batch.schema.names
    if "key" in names:
        messages["key"], messages["key_len"] = _pointers(batch.column("key"))
    messages["partition"] = partitions(batch) if "partition" in names else UNASSIGNED
    return messages


def partitions(batch: pa.RecordBatch) -> NDArray[Any]:
    """Return the partition of each row, -1 where the partitioner shall choose."""
    return arrow_buffers.to_numpy(pc.fill_null(batch.column("partition"), arrow_buffers.number(UNASSIGNED, "int32")))


def by_topic(batch: pa.RecordBatch) -> list[tuple[str | None, pa.RecordBatch]]:
    """Split a batch by its column ``topic``, in the order of first appearance; None where that is null."""
    column = batch.column("topic")
    parts = []
    for topic in pc.unique(column):
        mask = pc.equal(column, topic) if topic.is_valid else pc.is_null(column)
        parts.append((topic.as_py(), batch.filter(mask)))
    return parts


def _pointers(column: pa.Array) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return (address, length) of each row's bytes; address 0 for null."""
    if pa.types.is_null(column.type):
        nothing = np.zeros(len(column), dtype="u8")
        return nothing, nothing
    wide = pa.types.is_large_string(column.type) or pa.types.is_large_binary(column.type)
    _, offset_buffer, data = column.buffers()
    offsets = np.frombuffer(offset_buffer, dtype="i8" if wide else "i4")
    offsets = offsets[column.offset : column.offset + len(column) + 1]
    base = data.address if data is not None and data.address else _EMPTY.ctypes.data
    addresses = offsets[:-1].astype("u8") + np.uint64(base)
    lengths = np.diff(offsets).astype("u8")
    if column.null_count:
        nulls = arrow_buffers.to_numpy(pc.is_null(column))
        addresses[nulls] = 0
        lengths[nulls] = 0
    return addresses, lengths
