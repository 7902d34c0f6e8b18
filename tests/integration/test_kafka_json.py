"""A row that is written as JSON: the right text of each value, and no row that JSON cannot hold."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pyspark
import pytest
from fix_kafka import NEWEST_LEVEL
from kafka_kit import Reader, create_topic

from epochsink.errors import RowsRejected
from epochsink.kafka import Kafka
from epochsink.kafka.dead_letter import rendered
from epochsink.sink.letter_row import decode_rows

if TYPE_CHECKING:
    from fix_services import FreshName
    from streams import Stream

    from epochsink.sink import Sink
    from epochsink_devkit.services import KafkaService

pytestmark = pytest.mark.parametrize("kafka", [NEWEST_LEVEL], indirect=True, ids=str)

WRITES_NAN = not pyspark.__version__.startswith("4.0.")
"""Whether Spark writes NaN of a VARIANT as the text "NaN"; 4.0 writes what is not JSON."""
BAD = "CAST(IF(id = {}, X'61FF62', X'61EFBFBD62') AS STRING)"
VALUES = {
    "id": "id",
    "t": BAD.format(1),
    "nested": f"array(named_struct('m', map({BAD.format(2)}, {BAD.format(3)})), NULL)",
    "bytes": "array(map('k', named_struct('t', CAST(X'EFBFBD' AS STRING), 'b', X'FF')))",
    "deep": f"array(named_struct('b', X'FF', 'm', map({BAD.format(5)}, 1)))",
    "v": "IF(id = 4, CAST(double('NaN') AS VARIANT), parse_json('{\"NaN\": [1.50, null, \"Infinity\"]}'))",
    "zero": "CAST(0 AS DECIMAL(38, 18))",
    "small": "map('a', array(CAST(0.0000000015 AS DECIMAL(38, 18)), NULL))",
    "none": "CAST(NULL AS STRUCT<d: DECIMAL(38, 18)>)",
    "price": "CAST(1.50 AS DECIMAL(10, 2))",
}


def sink_on(kafka: KafkaService, topic: str, **settings: Any) -> Kafka:
    select = [f"{expression} AS {name}" for name, expression in VALUES.items()]
    create_topic(kafka.bootstrap_servers, topic)
    return Kafka(bootstrap_servers=kafka.bootstrap_servers, topic=topic, select=select, **settings)


def test_rows_that_json_cannot_hold_are_set_aside_and_decimals_have_plain_digits(
    kafka: KafkaService, fresh_topic: FreshName, stream: Stream
) -> None:
    topic = fresh_topic()
    stream.put(range(6))
    stream.run(stream.exactly_once({"topic": sink_on(kafka, topic, on_rejected="dead_letter")}))
    with Reader(kafka.bootstrap_servers, topic) as reader:
        message, *others = reader.until(1 + WRITES_NAN)
    assert [json.loads(other.value())["v"] for other in others] == ["NaN"] * WRITES_NAN
    text = message.value().decode()
    assert '"zero":0,"small":{"a":[0.0000000015,null]},"none":null,"price":1.50}' in text, text
    row = json.loads(text)
    assert (row["id"], row["t"], row["nested"]) == (0, "a\ufffdb", [{"m": {"a\ufffdb": "a\ufffdb"}}, None])
    assert row["bytes"] == [{"k": {"t": "\ufffd", "b": "/w=="}}], "bytes are no text, and JSON holds them"
    assert row["v"] == {"NaN": [1.5, None, "Infinity"]}
    with Reader(kafka.bootstrap_servers, f"{topic}.dead_letter") as reader:
        letters = reader.until(5 - WRITES_NAN)
    reasons = sorted(dict(letter.headers())["error"].decode().partition(",")[0] for letter in letters)
    assert reasons == [
        "column 'deep' has text that is not UTF-8",
        "column 'nested' has text that is not UTF-8",
        "column 'nested' has text that is not UTF-8",
        "column 't' has text that is not UTF-8",
    ] + ["column 'v' has a VARIANT with NaN or an infinity"] * (not WRITES_NAN)
    shown = [rendered(row)["value"] for letter in letters for row in decode_rows([letter.value()])]
    assert sum("a\\xffb" in text for text in shown) == 4, "a letter has the bytes as they were"
    assert not any('"price"' in text for text in shown), "and no JSON after them"


def test_a_row_that_json_cannot_hold_stops_a_query_that_sets_none_aside(
    kafka: KafkaService, fresh_topic: FreshName, stream: Stream
) -> None:
    topic = fresh_topic()
    stream.put(range(2))
    with pytest.raises(RowsRejected, match="column 't' has text that is not UTF-8, which JSON cannot hold"):
        stream.run(stream.exactly_once({"topic": sink_on(kafka, topic)}))
    with Reader(kafka.bootstrap_servers, topic) as reader:
        assert reader.poll(0.3) == []


def test_a_time_without_a_zone_is_read_in_sparks_session_by_argument_and_by_column(
    kafka: KafkaService, fresh_topic: FreshName, stream: Stream
) -> None:
    """A record's own time: 12:00 in New York, in winter, is 17:00 in UTC."""
    noon = "TIMESTAMP_NTZ'2026-01-02 12:00:00'"
    topics = {"column": fresh_topic(), "argument": fresh_topic()}
    for topic in topics.values():
        create_topic(kafka.bootstrap_servers, topic)
    servers = kafka.bootstrap_servers
    sinks: dict[str, Sink] = {
        "column": Kafka(
            bootstrap_servers=servers, topic=topics["column"], select=["word AS value", f"{noon} AS timestamp"]
        ),
        "argument": Kafka(bootstrap_servers=servers, topic=topics["argument"], select=["id"], timestamp=noon),
    }
    stream.put([0])
    zone = str(stream.spark.conf.get("spark.sql.session.timeZone"))
    stream.spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    try:
        stream.run(stream.exactly_once(sinks))
    finally:
        stream.spark.conf.set("spark.sql.session.timeZone", zone)
    for topic in topics.values():
        with Reader(kafka.bootstrap_servers, topic) as reader:
            [message] = reader.until(1)
        assert message.timestamp()[1] == 1_767_373_200_000
