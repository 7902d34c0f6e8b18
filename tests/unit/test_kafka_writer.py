"""Arrow buffers to librdkafka's structs: the same bytes, whatever the slice, type or nulls."""

from __future__ import annotations

import ctypes
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epochsink import arrow_buffers
from epochsink.kafka import writer
from epochsink.kafka.librdkafka import MESSAGE, Message

CELL = st.one_of(st.none(), st.binary(max_size=20))


def read(address: int, size: int) -> bytes | None:
    return ctypes.string_at(int(address), int(size)) if address else None


def test_the_struct_is_laid_out_as_in_c() -> None:
    assert MESSAGE.itemsize == ctypes.sizeof(Message) == 72
    fields: Any = MESSAGE.fields
    c_names = {"rkt": "topic", "_private": "private"}
    for name, (_, offset) in fields.items():
        assert getattr(Message, c_names.get(name, name)).offset == offset, name


@settings(deadline=None)
@given(
    cells=st.lists(st.tuples(CELL, CELL), min_size=1, max_size=40),
    start=st.integers(0, 10),
    kind=st.sampled_from([pa.binary(), pa.large_binary()]),
)
def test_every_slice_is_read_back_as_it_was(
    cells: list[tuple[bytes | None, bytes | None]], start: int, kind: pa.DataType
) -> None:
    whole = pa.record_batch(
        {
            "key": pa.array([key for key, _ in cells], kind),
            "value": pa.array([value for _, value in cells], kind),
        }
    )
    batch = whole.slice(start)
    filled = writer.fill(batch)
    found = [(read(row["key"], row["key_len"]), read(row["payload"], row["len"])) for row in filled]
    assert found == cells[start:]
    assert (filled["partition"] == -1).all()


def test_partitions_are_taken_and_null_leaves_the_choice() -> None:
    batch = pa.record_batch({"value": ["a", "b"], "partition": pa.array([3, None], pa.int32())})
    assert writer.fill(batch)["partition"].tolist() == [3, -1]


@pytest.mark.parametrize("topics", [["a", "b", "a", None], ["a"], ["b", "a"]])
def test_a_batch_is_split_by_topic_in_the_order_of_its_rows(topics: list[str | None]) -> None:
    values = [str(index) for index in range(len(topics))]
    batch = pa.record_batch({"value": values, "topic": pa.array(topics, pa.string())})
    found = {topic: part.column("value").to_pylist() for topic, part in writer.by_topic(batch)}
    expected = {
        topic: [value for value, its in zip(values, topics, strict=True) if its == topic]
        for topic in dict.fromkeys(topics)
    }
    assert found == expected
    assert list(found) == list(expected)


def test_a_topic_that_is_not_utf_8_is_split_off_under_a_name_that_the_client_refuses() -> None:
    topics = arrow_buffers.texts([b"a", b"b\xff"], pa.binary()).view(pa.string())
    batch = pa.record_batch({"value": pa.array(["1", "2"]), "topic": topics})
    assert [topic for topic, _ in writer.by_topic(batch)] == ["a", "b\\xff"]
