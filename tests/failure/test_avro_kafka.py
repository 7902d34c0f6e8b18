"""A pipeline that writes Avro and is killed: consumers with a schema registry read each row once, as it was."""

from __future__ import annotations

import datetime as dt
import json
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer
from harness import Harness, make_topic

from epochsink_devkit.history import CheckedTarget
from epochsink_devkit.history.readers.kafka import KafkaReader
from epochsink_devkit.services.artifacts import spark_avro, spark_packages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from epochsink_devkit.services import KafkaService, LocalRegistry

TYPES: Final = (
    "*",
    "timestamp_micros(src_off + 1) AS at",
    "to_timestamp_ntz('2024-02-29 01:02:03.000004') AS local",
    "date_from_unix_date(cast(src_off AS int)) AS day",
    "cast(src_off AS decimal(20, 2)) / 8 AS amount",
    "named_struct('word', op, 'numbers', array(kver, null)) AS nested",
    "map('key', key) AS by_name",
    "cast(null AS string) AS nothing",
    "cast('\\u00e9' AS binary) AS raw",
    "src_off % 2 = 0 AS even",
    "cast(src_off AS float) / 3 AS third",
    "cast(src_off % 100 AS tinyint) AS tiny",
)


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """Return what `TYPES` makes of a row."""
    off = row["src_off"]
    return {
        "at": dt.datetime(1970, 1, 1, tzinfo=dt.UTC) + dt.timedelta(microseconds=off + 1),
        "local": dt.datetime(2024, 2, 29, 1, 2, 3, 4),  # noqa: DTZ001 - without a zone on purpose
        "day": dt.date(1970, 1, 1) + dt.timedelta(days=off),
        "amount": Decimal(off) / 8,
        "nested": {"word": row["op"], "numbers": [row["kver"], None]},
        "by_name": {"key": row["key"]},
        "nothing": None,
        "raw": "\u00e9".encode(),
        "even": off % 2 == 0,
        "tiny": off % 100,
    }


class AvroReader(KafkaReader):
    """Reads values as any consumer of Avro does, and compares what the reader of JSON does not look at."""

    def __init__(self, servers: str, topic: str, decoded: Callable[[bytes], dict[str, Any]]) -> None:
        super().__init__(servers, topic)
        self._decoded = decoded

    def _records(self, *fixed: Any) -> Iterator[tuple[int, int, bytes]]:
        for partition, offset, value in super()._records(*fixed):
            row = self._decoded(value)
            expected = shown(row)
            assert {name: row.pop(name) for name in expected} == expected
            assert abs(row.pop("third") - row["src_off"] / 3) < 1e-3
            yield partition, offset, json.dumps(row).encode()


def test_avro_that_is_written_through_crashes_is_read_back_exactly(
    tmp_path: Path, kafka: KafkaService, registry: LocalRegistry
) -> None:
    servers, topic = kafka.bootstrap_servers, "avro_sink"
    make_topic(servers, topic)
    avro = {
        "value": {"registry": registry.url, "subject": f"{topic}-value", "name": "org.example.Row"},
        "key": {"registry": registry.url, "subject": f"{topic}-key", "columns": "key"},
    }
    sink = {"kind": "Kafka", "bootstrap_servers": servers, "topic": topic, "select": TYPES, "avro": avro}
    jars = {"spark.driver.extraClassPath": ":".join(map(str, (*spark_packages(), *spark_avro())))}
    decode = AvroDeserializer(SchemaRegistryClient({"url": registry.url}))
    reader = AvroReader(servers, topic, lambda value: decode(value, None))
    with Harness(tmp_path, kafka, "avro_source", sinks={"topic": sink}, settings=jars) as harness:
        harness.read(CheckedTarget("topic", atomic=False), reader)
        harness.feed_and_crash_at(("kafka.produced", "coordinator.record.after"), rows=60)
        harness.feed(60)
        harness.drain()
        report = harness.report()
    assert report.clean, str(report)
    assert SchemaRegistryClient({"url": registry.url}).get_versions(f"{topic}-value") == [1]
