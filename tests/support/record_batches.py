"""Record batches as a broker keeps them, made by the driver's client."""

from __future__ import annotations

from kafka.record.default_records import DefaultRecordBatchBuilder
from kafka.record.util import calc_crc32c

LOG_APPEND_TIME = 0x08
CONTROL = 0x20
ABORT = b"\0\0\0\0"
COMMIT = b"\0\0\0\1"
"""Keys of the record that ends a transaction."""


def batch(
    *values: bytes,
    producer_id: int = 7,
    producer_epoch: int = 3,
    sequence: int = 0,
    offset: int = 0,
    attributes: int = 0,
    left: int | None = None,
    key: bytes | None = None,
) -> bytes:
    """Build what a broker keeps; ``left`` is how many records compaction has left of it."""
    builder = DefaultRecordBatchBuilder(
        2,
        0,
        is_transactional=True,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=sequence,
        batch_size=1 << 20,
    )
    for number, value in enumerate(values):
        builder.append(number, 1_600_000_000_000 + number, key, value, [])
    built = bytearray(builder.build())
    built[0:8] = offset.to_bytes(8, "big")
    built[22] |= attributes
    if left is not None:
        built[57:61] = left.to_bytes(4, "big")
    built[17:21] = checksum(built).to_bytes(4, "big")
    return bytes(built)


def checksum(data: bytes | bytearray) -> int:
    return int(calc_crc32c(memoryview(bytes(data))[21:]))


def end(key: bytes, *, offset: int, producer_id: int = 7, producer_epoch: int = 3) -> bytes:
    """Build the end of a transaction: ``key`` is `ABORT` or `COMMIT`."""
    ids = {"producer_id": producer_id, "producer_epoch": producer_epoch}
    return batch(b"\0" * 6, offset=offset, attributes=CONTROL, key=key, **ids)
