"""From the user's rows and SQL to the writer's columns."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from epochsink.errors import ConfigurationError
from epochsink.kafka import Kafka
from epochsink.kafka.rendered_value import as_value, marked, rendered_row
from epochsink.sink import json_text

ORDERS = pa.schema([("order_id", pa.int64()), ("amount", pa.float64()), ("gone", pa.bool_())])
HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
SPARKS = {
    "key": pa.binary(),
    "value": pa.binary(),
    "topic": pa.string(),
    "partition": pa.int32(),
    "headers": HEADERS,
    "timestamp": pa.timestamp("us", tz="UTC"),
}


def columns(schema: pa.Schema, **settings: Any) -> dict[str, str]:
    """Return the expressions by the names that they make."""
    rendered = Kafka(**({"bootstrap_servers": "b:1", "topic": "t"} | settings)).columns("row_0", schema)
    pairs = [expression.rpartition(" AS ") for expression in rendered]
    return {name.strip("`"): expression for expression, _, name in pairs}


def refusal(schema: pa.Schema, **settings: Any) -> str:
    with pytest.raises(ConfigurationError) as raised:
        columns(schema, **settings)
    return str(raised.value)


def test_a_row_without_a_value_is_written_as_json() -> None:
    assert columns(ORDERS, key="order_id") == {
        "key": "CAST(TRY_CAST(row_0['order_id'] AS STRING) AS BINARY)",
        "json": rendered_row("row_0", ORDERS),
    }


def test_a_row_without_text_and_decimals_is_rendered_without_a_condition() -> None:
    numbers = pa.schema([("a", pa.int64()), ("b", pa.decimal128(10, 2)), ("c", pa.list_(pa.float64()))])
    assert columns(numbers) == {"json": f"CAST({json_text('row_0')} AS BINARY)"}


def test_a_mark_is_the_first_byte_of_rendered_json_only() -> None:
    values = pa.array([b"{}", None, b"", b"\xffwhy\n{1,\n\xfe}\n{}", b"{}"], pa.binary())
    for kind in (pa.binary(), pa.large_binary()):
        batch = pa.record_batch({"json": values.cast(kind)})
        assert marked(batch) == {3: "why"}
        assert marked(batch.slice(2, 2)) == {1: "why"}
        assert marked(batch.slice(4)) == {}
    assert marked(pa.record_batch({"value": values})) == {}
    assert as_value(pa.record_batch({"json": values}).slice(3, 1)).to_pydict() == {"value": [b"{1,\n\xfe}"]}


def test_a_timestamp_without_a_zone_is_read_alike_by_argument_and_by_column() -> None:
    """In Spark's session, both ways; a column went to the writer without a zone before, and was read as UTC."""
    schema = pa.schema([("value", pa.string()), ("timestamp", pa.timestamp("us"))])
    by_column, by_argument = columns(schema)["timestamp"], columns(schema, timestamp="timestamp")["timestamp"]
    assert by_column == by_argument
    assert "TRY_CAST(row_0['timestamp'] AS TIMESTAMP_LTZ)" in by_column


def test_expressions_may_use_the_whole_stream_and_end_with_a_comment() -> None:
    found = columns(ORDERS, key="concat(a, '-', b) -- of the stream", value="upper(name)", partition="pmod(a, 3)")
    assert found["key"] == "CAST(TRY_CAST((concat(a, '-', b) -- of the stream\n) AS STRING) AS BINARY)"
    assert found["value"] == "CAST(TRY_CAST((upper(name)\n) AS STRING) AS BINARY)"
    assert "TRY_CAST((pmod(a, 3)\n) AS INT)" in found["partition"]


def test_deleted_rows_become_tombstones() -> None:
    found = columns(ORDERS, key="order_id", delete_when="gone")
    assert found["json"] == rendered_row("row_0", ORDERS, delete_when="(gone\n)")
    assert "IF((gone\n), NULL, row_0)" in found["json"]
    assert "without a key deletes nothing" in refusal(ORDERS, delete_when="gone")


def test_rows_of_sparks_kafka_sink_pass_through() -> None:
    schema = pa.schema(list(SPARKS.items()))
    found = columns(schema, topic=None)
    assert found == {name: f"row_0['{name}']" for name in SPARKS}
    assert "topic" not in columns(schema), "the option goes before the column"


def test_rows_of_sparks_kafka_source_pass_through_without_offset_and_timestamp_type() -> None:
    schema = pa.schema([*SPARKS.items(), ("offset", pa.int64()), ("timestampType", pa.int32())])
    assert set(columns(schema, topic=None)) == set(SPARKS)


@pytest.mark.parametrize(
    ("name", "kind", "wanted"),
    [
        ("key", pa.int64(), "string or binary"),
        ("value", pa.float64(), "string or binary"),
        ("topic", pa.binary(), "string"),
        ("partition", pa.int64(), "int"),
        ("headers", pa.list_(pa.string()), "array<struct<key:string,value:binary>>"),
        ("headers", pa.map_(pa.string(), pa.binary()), "array<struct<key:string,value:binary>>"),
        ("timestamp", pa.int64(), "timestamp"),
    ],
)
def test_a_column_of_another_type_is_named(name: str, kind: pa.DataType, wanted: str) -> None:
    found = refusal(pa.schema(list((SPARKS | {name: kind}).items())))
    assert f"column '{name}' is of type {kind}, and Kafka takes {wanted}" in found
    assert "to_json" in found


def test_a_column_value_among_others_is_not_guessed_at() -> None:
    schema = pa.schema([("sensor", pa.string()), ("value", pa.string())])
    assert "sensor" in refusal(schema)
    assert "row_0['value']" in columns(schema, value="value")["value"]


def test_rows_need_a_topic_from_somewhere() -> None:
    assert "no topic is set" in refusal(ORDERS, topic=None)
    assert columns(ORDERS, topic=None, topic_column="concat('orders-', region)")["topic"].startswith(
        "TRY_CAST((concat("
    )


def test_every_part_of_a_message_can_be_said() -> None:
    found = columns(ORDERS, headers="array()", timestamp="at", partition="order_id")
    assert found["headers"].endswith("AS ARRAY<STRUCT<key: STRING, value: BINARY>>)")
    assert "TRY_CAST((at\n) AS TIMESTAMP_LTZ)" in found["timestamp"]
    assert "TRY_CAST(row_0['order_id'] AS INT)" in found["partition"]
