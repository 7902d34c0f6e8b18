"""What the schema registry and Spark must have before an Avro message is written, and what is said if they do not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pyarrow as pa
import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from http_proxy import Answer, Proxy
from kafka_kit import create_topic

from epochsink import Avro, ConfigurationError, Kafka
from epochsink.sink import comparing
from epochsink.testing.sink_rig import OneSink
from epochsink_devkit.history.readers.kafka import KafkaReader
from epochsink_devkit.services import free_port

if TYPE_CHECKING:
    from fix_services import FreshName
    from streams import Stream

    from epochsink_devkit.services import KafkaService, LocalRegistry

ORDERS = pa.schema([("order_id", pa.int64()), ("amount", pa.float64())])


def findings(kafka: KafkaService, topic: str, schema: pa.Schema, **avro: Any) -> list[str]:
    value = Avro(subject=f"{topic}-value", **avro)
    committer = OneSink.of(Kafka(bootstrap_servers=kafka.bootstrap_servers, topic=topic, timeout=10, value=value))
    try:
        return committer.check(schema)
    finally:
        committer.close()


def test_a_schema_that_the_subject_does_not_allow_is_refused_and_one_that_it_does_is_added(
    kafka: KafkaService, registry: LocalRegistry, fresh_topic: FreshName
) -> None:
    topic = create_topic(kafka.bootstrap_servers, fresh_topic("avro"))
    subject = f"{topic}-value"
    client = SchemaRegistryClient({"url": registry.url})
    assert findings(kafka, topic, ORDERS, registry=registry.url) == []
    client.set_compatibility(subject, "BACKWARD")

    [finding] = findings(kafka, topic, ORDERS.set(1, pa.field("amount", pa.string())), registry=registry.url)
    for part in (registry.url, f"'{subject}'", "Incompatible", '"string"', "select="):
        assert part in finding, finding
    assert client.get_versions(subject) == [1]

    assert findings(kafka, topic, ORDERS.append(pa.field("note", pa.string())), registry=registry.url) == []
    assert client.get_versions(subject) == [1, 2]


def test_a_comparison_registers_no_schema_and_says_what_a_start_would_register(
    kafka: KafkaService, registry: LocalRegistry, fresh_topic: FreshName
) -> None:
    """One that the subject does not allow is refused as at a start."""
    topic = create_topic(kafka.bootstrap_servers, fresh_topic("avro"))
    subject, client = f"{topic}-value", SchemaRegistryClient({"url": registry.url})
    with comparing() as would:
        assert findings(kafka, topic, ORDERS, registry=registry.url) == []
        value = Avro(registry=registry.url, subject=subject)
        assert value.sql("row", ORDERS) == value.sql("row", ORDERS)
    [line] = would
    assert f"register a schema under subject '{subject}'" in line
    assert subject not in client.get_subjects()
    assert findings(kafka, topic, ORDERS, registry=registry.url) == []
    client.set_compatibility(subject, "BACKWARD")
    with comparing() as would:
        assert findings(kafka, topic, ORDERS, registry=registry.url) == []
        assert would == []
        [finding] = findings(kafka, topic, ORDERS.set(1, pa.field("amount", pa.string())), registry=registry.url)
    assert "make the rows fit the subject's newest schema" in finding
    assert client.get_versions(subject) == [1]


def test_a_registry_that_does_not_answer_is_named(kafka: KafkaService, fresh_topic: FreshName) -> None:
    topic = create_topic(kafka.bootstrap_servers, fresh_topic("avro"))
    url = f"http://127.0.0.1:{free_port()}"
    [finding] = findings(kafka, topic, ORDERS, registry=url, options={"max.retries": 0})
    assert f"the schema registry {url} does not answer" in finding
    assert "start the registry" in finding


def test_a_run_asks_the_registry_once_and_the_next_one_again(
    kafka: KafkaService, registry: LocalRegistry, fresh_topic: FreshName
) -> None:
    """Columns that change between two runs get a schema of their own; messages of before keep theirs."""
    topic = create_topic(kafka.bootstrap_servers, fresh_topic("avro"))
    more = ORDERS.append(pa.field("note", pa.string()))
    with Proxy(registry.url, lambda _: None) as proxy:
        value = Avro(
            registry=proxy.url + urlsplit(registry.url).path, subject=f"{topic}-value", options={"max.retries": 0}
        )
        before = value.sql("row", ORDERS)
        asked = len(proxy.seen)
        assert asked > 0
        proxy.behave = lambda _: Answer(503)
        assert value.sql("row", ORDERS) == before
        assert len(proxy.seen) == asked
        with pytest.raises(ConfigurationError, match=r"does not answer|refuses the schema"):
            value.sql("row", more)
        proxy.behave = lambda _: None
        assert value.sql("row", more).partition(",")[0] != before.partition(",")[0]
        assert value.sql("row", ORDERS) == before


def test_a_second_run_of_a_process_takes_the_id_that_the_registry_has_by_then(
    kafka: KafkaService, registry: LocalRegistry, fresh_topic: FreshName
) -> None:
    """The registry was replaced or set back between the runs: the old id is unknown to it, or another schema's."""
    topic = create_topic(kafka.bootstrap_servers, fresh_topic("avro"))
    with Proxy(registry.url, lambda _: None) as proxy:
        avro: dict[str, Any] = {"registry": proxy.url + urlsplit(registry.url).path, "options": {"max.retries": 0}}
        value = Avro(subject=f"{topic}-value", **avro)
        assert findings(kafka, topic, ORDERS, **avro) == []
        first = value.sql("row", ORDERS)
        proxy.behave = lambda _: Answer(200, b'{"subject": "s", "version": 1, "id": 66051, "schema": "{}"}')
        assert findings(kafka, topic, ORDERS, **avro) == []
        assert value.sql("row", ORDERS).startswith("CAST(concat(X'0000010203', ")
        proxy.behave = lambda _: None
        assert value.sql("row", ORDERS) != first, "within a run, the id stays"


def test_a_session_without_spark_avro_is_told_the_package(
    kafka: KafkaService, registry: LocalRegistry, fresh_topic: FreshName, stream: Stream
) -> None:
    topic = create_topic(kafka.bootstrap_servers, fresh_topic("avro"))
    value = Avro(registry=registry.url, subject=f"{topic}-value")
    sink = Kafka(bootstrap_servers=kafka.bootstrap_servers, topic=topic, value=value)
    stream.put(range(3))
    with pytest.raises(ConfigurationError, match=r"org\.apache\.spark:spark-avro_2\.13:\d+\.\d+\.\d+ to spark\.jars"):
        stream.run(stream.exactly_once({"topic": sink}))
    assert KafkaReader(kafka.bootstrap_servers, topic).values() == []
