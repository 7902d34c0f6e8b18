"""Read the headers of record batches, and give a batch to another producer.

The records stay as they are, compressed. The new checksum is computed from the stored checksum and the changed bytes,
so the broker and every reader still detect a batch that was damaged in the log.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import cache
from typing import Final, NamedTuple

SEQUENCES: Final = 1 << 31
"""The number of sequence numbers; after the last one they begin again at 0."""

_PREFIX: Final = struct.Struct(">qi")
"""Base offset, and the number of bytes that follow; the same in every format."""
_MAGIC_AT: Final = 16
_MAGIC: Final = 2
_HEADER: Final = struct.Struct(">qiibIhiqqqhii")
_CRC_AT: Final = 17
_COVERED_FROM: Final = 21
"""The checksum covers all bytes after it."""
_NO_LEADER_EPOCH: Final = -1

_LOG_APPEND_TIME: Final = 0x08
_TRANSACTIONAL: Final = 0x10
_CONTROL: Final = 0x20

_CONTROL_TYPE: Final = struct.Struct(">h")
_CONTROL_TYPE_AT: Final = _HEADER.size + 7
"""After five one-byte fields of the record and two bytes for the version of its key."""
_ABORT: Final = 0

_POLYNOMIAL: Final = 0x82F63B78
"""The Castagnoli polynomial, bits reversed."""


class Batch(NamedTuple):
    """One record batch, and what its header says."""

    data: memoryview
    base_offset: int
    attributes: int
    last_offset_delta: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    records: int

    @property
    def is_control(self) -> bool:
        """Whether it is a control batch, which ends a transaction."""
        return bool(self.attributes & _CONTROL)

    @property
    def is_abort(self) -> bool:
        """Whether it is a control batch that aborts a transaction."""
        return self.is_control and _CONTROL_TYPE.unpack_from(self.data, _CONTROL_TYPE_AT)[0] == _ABORT

    @property
    def is_whole(self) -> bool:
        """Whether it is transactional and still has all records: compaction removes records from batches."""
        return bool(self.attributes & _TRANSACTIONAL) and self.records == self.last_offset_delta + 1

    def under(self, producer_id: int, producer_epoch: int, base_sequence: int) -> bytes:
        """Return the batch with another producer and sequence number in its header."""
        fields = list(_HEADER.unpack_from(self.data))
        size, _, _, crc = fields[1:5]
        # brokers refuse this flag from a producer; they set it again if the topic has LogAppendTime
        attributes = self.attributes & ~_LOG_APPEND_TIME
        # the broker sets offset and leader epoch, which the checksum does not cover
        fields[:3] = 0, size, _NO_LEADER_EPOCH
        fields[5] = attributes
        fields[9:12] = producer_id, producer_epoch, base_sequence
        header = bytearray(_HEADER.pack(*fields))
        covered = slice(_COVERED_FROM, _HEADER.size)
        changed = bytes(was ^ now for was, now in zip(self.data[covered], header[covered], strict=True))
        crc ^= _after_zeros(_remainder(changed), len(self.data) - _HEADER.size)
        struct.pack_into(">I", header, _CRC_AT, crc)
        return bytes(header) + self.data[_HEADER.size :]


def split(data: bytes) -> Iterator[tuple[int, Batch | None]]:
    """Yield, for each complete batch of a fetch, the offset after it and the batch.

    The last batch may be cut off, and is left out then. None is a batch in a format without transactions.
    """
    view, at = memoryview(data), 0
    while len(view) - at >= _HEADER.size:
        base_offset, size = _PREFIX.unpack_from(view, at)
        end = at + _PREFIX.size + size
        if end > len(view):
            return
        if view[at + _MAGIC_AT] != _MAGIC:
            yield base_offset + 1, None
        else:
            fields = _HEADER.unpack_from(view, at)
            attributes, last_offset_delta = fields[5:7]
            batch = Batch(view[at:end], base_offset, attributes, last_offset_delta, *fields[9:])
            yield base_offset + last_offset_delta + 1, batch
        at = end


# ---- the change of a CRC-32C: for messages of one length, the checksum is linear in the bits


@cache
def _table() -> list[int]:
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return table


def _remainder(data: bytes) -> int:
    table, value = _table(), 0
    for byte in data:
        value = table[(value ^ byte) & 0xFF] ^ value >> 8
    return value


def _after_zeros(value: int, count: int) -> int:
    """Return a remainder after ``count`` more zero bytes, with one step for each bit of ``count``."""
    power = 0
    while count:
        if count & 1:
            value = _applied(_zeros(power), value)
        count >>= 1
        power += 1
    return value


@cache
def _zeros(power: int) -> tuple[int, ...]:
    """Return the matrix that maps a remainder over 2 ** power zero bytes, one column for each bit."""
    if power == 0:
        return tuple(_remainder_step(1 << bit) for bit in range(32))
    half = _zeros(power - 1)
    return tuple(_applied(half, column) for column in half)


def _remainder_step(value: int) -> int:
    return _table()[value & 0xFF] ^ value >> 8


def _applied(matrix: tuple[int, ...], value: int) -> int:
    result = 0
    for column in matrix:
        if not value:
            break
        if value & 1:
            result ^= column
        value >>= 1
    return result
