"""Record batches by their headers: found, put under another producer, and still whole by their checksum."""

from __future__ import annotations

import pytest
from kafka.record.default_records import DefaultRecordBatch
from kafka.record.legacy_records import LegacyRecordBatchBuilder
from record_batches import CONTROL, LOG_APPEND_TIME, batch

from epochsink.kafka.record_batch import split


@pytest.mark.parametrize("size", [1, 100, 70_000])
def test_a_batch_under_another_producer_is_whole_and_has_the_same_records(size: int) -> None:
    original = batch(b"a" * size, b"b", offset=900, attributes=LOG_APPEND_TIME)
    [(after, found)] = split(original)
    assert (after, found and found.base_offset) == (902, 900)
    assert found is not None
    again = found.under(1 << 40, 99, 12)
    read = DefaultRecordBatch(again)
    assert read.validate_crc()
    assert (read.producer_id, read.producer_epoch, read.base_sequence, read.base_offset) == (1 << 40, 99, 12, 0)
    assert read.timestamp_type == 0, "brokers take no time stamps of theirs from a producer"
    assert read.is_transactional
    assert [record.value for record in read] == [b"a" * size, b"b"]


def test_damage_stays_damage_under_another_producer() -> None:
    damaged = bytearray(batch(b"a" * 100))
    damaged[-5] ^= 1
    [(_, found)] = split(bytes(damaged))
    assert found is not None
    assert not DefaultRecordBatch(found.under(8, 1, 0)).validate_crc()


def test_batches_are_told_apart_and_the_last_one_may_be_cut() -> None:
    data = batch(b"a", b"b") + batch(b"c", offset=2, sequence=2, producer_id=8, attributes=CONTROL) + batch(b"d")[:-1]
    found = list(split(data))
    assert [after for after, _ in found] == [2, 3]
    assert [(one.producer_id, one.records, one.is_control) for _, one in found if one] == [(7, 2, False), (8, 1, True)]


def test_a_compacted_batch_is_not_whole() -> None:
    [(_, found)] = split(batch(b"a", b"b", b"c", left=2))
    assert found is not None
    assert not found.is_whole


def test_a_batch_of_an_older_format_is_passed_over() -> None:
    builder = LegacyRecordBatchBuilder(1, 0, 1 << 20)
    builder.append(0, 1, None, b"old")
    old = bytearray(builder.build())
    old[0:8] = (4).to_bytes(8, "big")
    found = list(split(bytes(old) + batch(b"a", offset=5)))
    assert [(after, one is None) for after, one in found] == [(5, True), (6, False)]
