"""The order of a key's rows within an epoch, on a real broker and a real server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from kafka_kit import Reader, sink_on_new_topic

from epochsink import Kafka, Postgres
from epochsink.errors import ConfigurationError

if TYPE_CHECKING:
    from fix_postgres import Truth
    from fix_services import FreshName
    from streams import Stream

    from epochsink_devkit.services import KafkaService

KEYS = 7


def test_a_topic_keeps_the_order_of_a_keys_rows_whatever_sink_is_beside_it(
    stream: Stream, kafka: KafkaService, pg_schema: str, pg_truth: Truth, fresh_topic: FreshName
) -> None:
    """PostgreSQL with atomic=False brings the rows of its own key together, by a shuffle: not beside a topic."""
    table = f"{pg_schema}.orders"
    pg_truth.execute(f"CREATE TABLE {table} (id bigint PRIMARY KEY, customer bigint)")
    topic = sink_on_new_topic(kafka.bootstrap_servers, fresh_topic()).topic
    customer = f"id % {KEYS} AS customer"

    def sinks(*, atomic: bool) -> dict[str, Kafka | Postgres]:
        written = Kafka(
            bootstrap_servers=kafka.bootstrap_servers,
            topic=topic,
            key=f"CAST(id % {KEYS} AS STRING)",
            value="CAST(id AS STRING)",
            select=["id", customer],
        )
        merged = Postgres(
            pg_truth.dsn,
            table=table,
            key="id",
            select=["id", customer],
            atomic=atomic,
            marker_schema=pg_schema,
        )
        return {"topic": written, "table": merged}

    for first in (0, 1000):
        stream.put(range(first, first + 1000))
    with pytest.raises(
        ConfigurationError, match=r"sink 'topic' keeps the order .* sink 'table' needs a shuffle"
    ) as refused:
        stream.run(stream.exactly_once({**sinks(atomic=False)}))
    assert "atomic=True" in refused.value.hint
    assert not stream.checkpoint.exists()
    stream.run(stream.exactly_once({**sinks(atomic=True)}))
    with Reader(kafka.bootstrap_servers, str(topic)) as reader:
        found: dict[str, list[int]] = {}
        for message in reader.until(2000):
            found.setdefault(message.key().decode(), []).append(int(message.value()))
    assert found == {str(key): list(range(key, 2000, KEYS)) for key in range(KEYS)}
    assert len(pg_truth.rows(table)) == 2000
