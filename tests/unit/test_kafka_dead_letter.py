"""Rows that a topic cannot take are found without a loop over rows, and exactly."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
from kafka.record.default_records import DefaultRecordBatchBuilder

from epochsink import arrow_buffers
from epochsink.errors import ConfigurationError, RowsRejected
from epochsink.kafka import Kafka
from epochsink.kafka.dead_letter import CLIENT_OVERHEAD, NO_KEY, RefusedRows, Rules, Sender, batch_bytes, refused
from epochsink.kafka.writer import fill, headers_of
from epochsink.sink import Epoch, Identity, Task
from epochsink.sink.letter_row import decode_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

RULES = Rules("letters", largest_message=1_000_000, largest_batch=2_000, largest_letter=100_000, needs_key=False)
TASK = Task(Identity("q", "topic"), Epoch(4, "a" * 32), 3, "b" * 32)


def found(batch: pa.RecordBatch, rules: Rules = RULES) -> dict[int, str]:
    """Return the reasons by row."""
    told = refused(batch, fill(batch), rules)
    return {} if told is None else dict(zip(told.rows.tolist(), told.reasons, strict=True))


def batch_of(*rows: tuple[bytes | None, bytes | None, Sequence[tuple[str, bytes | None]] | None]) -> pa.RecordBatch:
    keys, values, headers = zip(*rows, strict=True)
    entry = pa.struct([("key", pa.string()), ("value", pa.binary())])
    pairs = [None if each is None else [{"key": name, "value": value} for name, value in each] for each in headers]
    return pa.record_batch(
        {
            "key": pa.array(keys, pa.binary()),
            "value": pa.array(values, pa.binary()),
            "headers": pa.array(pairs, pa.list_(entry)),
        }
    )


def encoded(key: bytes | None, value: bytes | None, headers: Sequence[tuple[str, bytes | None]] | None) -> int:
    """Return the bytes of a batch of one record, as another client encodes it."""
    builder = DefaultRecordBatchBuilder(2, 0, 1, 5, 0, 0, 1 << 20)
    builder.append(0, timestamp=1, key=key, value=value, headers=list(headers or []))
    return len(builder.build())


def test_the_size_of_a_row_is_what_another_client_writes() -> None:
    told = random.Random(7)
    for _ in range(300):
        key = told.choice([None, b"", told.randbytes(told.randrange(200))])
        value = told.choice([None, b"", told.randbytes(told.randrange(9000))])
        headers = [("h" * told.randrange(1, 80), told.randbytes(told.randrange(100))) for _ in range(told.randrange(4))]
        batch = batch_of((key, value, headers))
        size = encoded(key, value, headers)
        exact, below = (Rules("letters", 1 << 20, limit, 1 << 20, needs_key=False) for limit in (size, size - 1))
        assert found(batch, exact) == {}, (key, value, headers)
        assert list(found(batch, below)) == [0], (key, value, headers)


def test_only_rows_above_a_limit_are_found_in_a_slice_of_a_batch_with_nulls() -> None:
    whole = batch_of(
        (b"k", b"x" * 5_000, None),
        (b"k", b"x" * 1_900, None),
        (b"k", None, [("h", b"y" * 1_950)]),
        (None, b"x", []),
        (b"k", b"x" * 1_950, [("h", None)]),
        (b"k" * 2_000, None, None),
    )
    assert sorted(found(whole)) == [0, 2, 4, 5]
    assert sorted(found(whole.slice(1))) == [1, 3, 4]
    assert found(whole.slice(3, 1)) == {}


def test_the_clients_limit_counts_too() -> None:
    rules = Rules("letters", 1_000, 1_000_000, 1 << 20, needs_key=False)
    at, above = (batch_of((b"k", b"x" * (1_000 - CLIENT_OVERHEAD - 1 + more), None)) for more in (0, 1))
    assert found(at, rules) == {}
    assert "message.max.bytes = 1000 of the client" in found(above, rules)[0]


def test_a_row_without_a_key_is_found_only_where_it_needs_one_and_an_empty_key_is_a_key() -> None:
    batch = batch_of((None, b"a", None), (b"", b"b", None), (b"k", b"c", None))
    assert found(batch) == {}
    assert found(batch, Rules("letters", 1 << 20, 2_000, 1 << 20, needs_key=True)) == {0: NO_KEY}


def test_a_letter_holds_the_row_and_its_place() -> None:
    rules = Rules("letters", 1 << 20, 2_000, 1 << 20, needs_key=True)
    batch = batch_of((b"k", b"good", None), (None, b"\xff\x00", [("h", b"v")]))
    told = refused(batch, fill(batch), rules)
    assert told is not None
    letters, [headers] = Sender(rules, TASK, "orders").letters(batch, told, 10)
    [row] = decode_rows(letters.column("value").to_pylist())
    assert row.equals(batch.slice(1))
    said = {header["key"].decode(): header["value"].decode() for header in headers}
    assert (said["error"], said["position"], said["epoch"], said["target"]) == (NO_KEY, "3/11", "4", "orders")
    assert json.loads(said["row"]) == {"key": None, "value": "\\xff\\x00", "headers": [{"key": "h", "value": "v"}]}


def test_the_header_for_people_is_bounded() -> None:
    batch = batch_of((b"k", "\u20ac".encode() * 5_000, None))
    _, [headers] = Sender(RULES, TASK, "orders").letters(batch, RefusedRows(np.arange(1), ["why"]), 0)
    [shown] = [header["value"].decode() for header in headers if header["key"] == b"row"]
    assert shown.endswith("\u20ac ...")
    assert len(shown) == 1_004


def test_the_row_of_a_letter_is_what_was_refused() -> None:
    given: list[tuple[bytes | None, bytes | None, Sequence[tuple[str, bytes | None]] | None]] = [
        (b"k", b'{"base64": "eHg="}', [("h", None), ("\u00e9", b"\xff")]),
        (None, b"\xff\xfe", None),
        (b"", None, []),
        (b"\xff", "\u00e9\x00\u2028".encode(), [("h", b"")]),
    ]
    batch = batch_of(*given)
    dated = batch.append_column("timestamp", pa.array([1, None, 253_402_300_800_000_000, 5], pa.timestamp("us", "UTC")))
    placed = dated.append_column("partition", pa.array([None, 3, 0, None], pa.int32()))
    sender, all_of_them = Sender(RULES, TASK, "t"), RefusedRows(np.arange(4), ["why"] * 4)
    for rows in (placed, batch.select(["value"])):
        letters, _ = sender.letters(rows, all_of_them, before=0)
        [back] = decode_rows(letters.column("value").to_pylist())
        assert back.equals(rows)


@pytest.mark.parametrize(("kind", "large"), [(pa.string(), False), (pa.large_string(), True)])
def test_text_that_is_not_utf_8_is_carried_and_shown(kind: pa.DataType, *, large: bool) -> None:
    """A string of Spark's holds any bytes; so may keys, values, and the values of headers."""

    def text(*values: bytes) -> pa.Array:
        return arrow_buffers.texts(values, pa.large_binary() if large else pa.binary()).view(kind)

    entries = pa.StructArray.from_arrays([text(b"h", b"i"), text(b"\xff", b"v")], ["key", "value"])
    headers = pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), entries)
    batch = pa.record_batch({"key": text(b"k\xff", b"k"), "value": text(b"v\xfe", b"v"), "headers": headers})
    letters, [told, _] = Sender(RULES, TASK, "t").letters(batch, RefusedRows(np.arange(2), ["why"] * 2), 0)
    [back] = decode_rows(letters.column("value").to_pylist())
    assert headers_of(back) == [[{"key": b"h", "value": b"\xff"}], [{"key": b"i", "value": b"v"}]]
    assert back["key"].cast(pa.large_binary()).to_pylist() == [b"k\xff", b"k"]
    shown = next(json.loads(header["value"]) for header in told if header["key"] == b"row")
    assert shown == {"key": "k\\xff", "value": "v\\xfe", "headers": [{"key": "h", "value": "\\xff"}]}


def test_a_letter_that_its_topic_cannot_take_stops_the_query() -> None:
    batch = batch_of((b"k", b"x" * 200_000, None))
    told = refused(batch, fill(batch), RULES)
    assert told is not None
    with pytest.raises(RowsRejected, match=r"a dead letter of \d+ bytes, more than max.message.bytes = 100000"):
        Sender(RULES, TASK, "orders").letters(batch, told, 0)


def test_batches_of_rows_are_not_larger_because_letters_may_be() -> None:
    assert RULES.options({"batch.size": "900"}, 1 << 20) == {"batch.size": "900", "message.max.bytes": "1000000"}
    large = Rules("letters", 1_000, 5_000, 1 << 20, needs_key=False)
    assert large.options({}, 1 << 20) == {"batch.size": "1000", "message.max.bytes": str(1 << 20)}
    assert batch_bytes(0, 0, 0) == 61 + 1 + 6


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"topic": "t", "letters_limit": 0.1}, "letters_limit=0.1 without on_rejected='dead_letter'"),
        ({"topic": "t", "dead_letter_topic": "d"}, "dead_letter_topic='d' without on_rejected='dead_letter'"),
        ({"topic": "t", "on_rejected": "skip"}, "on_rejected"),
        ({"topic": "t", "on_rejected": "dead_letter", "letters_limit": 2}, "letters_limit"),
        ({"topic_column": "t", "on_rejected": "dead_letter"}, "without topic="),
        ({"topic": "t", "on_rejected": "dead_letter", "dead_letter_topic": "t"}, "the topic of the rows itself"),
        ({"topic": "t", "on_rejected": "dead_letter", "dead_letter_topic": "a b"}, "invalid dead_letter_topic='a b'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said.replace("(", "\\(")):
        Kafka(bootstrap_servers="broker:9092", **settings)


def test_the_topic_of_letters_is_named_after_the_topic() -> None:
    assert Kafka(bootstrap_servers="b:1", topic="t", on_rejected="dead_letter").letters_topic == "t.dead_letter"
    assert Kafka(bootstrap_servers="b:1", topic="t").letters_topic is None
