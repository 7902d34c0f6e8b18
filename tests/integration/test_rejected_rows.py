"""What a user reads if a target refuses a row: at most 15 lines, the sink and a command, and nothing of the row."""

from __future__ import annotations

import logging
import traceback
from typing import TYPE_CHECKING

import pytest
from elasticsearch import Elasticsearch as Client
from fix_kafka import NEWEST_LEVEL
from kafka_kit import create_topic
from pyspark.sql import is_remote

from epochsink import Elasticsearch, ExactlyOnce, Kafka, Postgres, RowsRejected

if TYPE_CHECKING:
    from pathlib import Path

    from fix_postgres import Truth
    from fix_services import FreshName
    from pyspark.sql import SparkSession

    from epochsink.sink import Sink
    from epochsink_devkit.services import ElasticsearchService, KafkaService

pytestmark = pytest.mark.connect

SECRET = "Erika Mustermann"


def run(spark: SparkSession, folder: Path, sink: Sink, *, show_values: bool) -> RowsRejected:
    (folder / "input").mkdir(exist_ok=True)
    (folder / "input" / "1.json").write_text(f'{{"id": 7, "name": "{SECRET}", "age": "of age: {SECRET}"}}\n')
    people = spark.readStream.schema("id BIGINT, name STRING, age STRING").json(str(folder / "input"))
    checkpoint = str(folder / f"checkpoint-{show_values}")
    once = ExactlyOnce(checkpoint=checkpoint, sinks={"people": sink}, show_values=show_values)
    with pytest.raises(RowsRejected) as refused:
        once.start(people.writeStream.trigger(availableNow=True)).awaitTermination(60)
    return refused.value


def verify(error: RowsRejected, caplog: pytest.LogCaptureFixture, checkpoint: Path) -> None:
    printed = "".join(traceback.format_exception(error))
    assert len(printed.splitlines()) <= 15, printed
    assert SECRET not in printed
    assert "\nepochsink.errors.RowsRejected: sink 'people': " in printed
    assert f"Type: epochsink status {checkpoint}" in printed
    assert "Values: not shown" in printed
    ours = [record for record in caplog.records if record.name.startswith("epochsink")]
    # on Spark Connect the server has the log
    assert ours or is_remote()
    assert SECRET not in caplog.text


@pytest.mark.parametrize(
    ("rule", "key"),
    [
        ("age text CHECK (length(age) < 3)", None),
        ("age numeric(9)", None),
        ("age numeric(9)", "id"),
        ("age varchar(2)", "id"),
    ],
)
def test_postgresql(
    rule: str,
    key: str | None,
    tmp_path: Path,
    spark: SparkSession,
    *,
    pg_schema: str,
    pg_truth: Truth,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pg_truth.execute(f"CREATE TABLE {pg_schema}.people (id bigint PRIMARY KEY, name text, {rule})")
    number = "CAST(id * 1000000000000 AS DECIMAL(20, 0)) AS age"
    select = ["id", "name", "age"] if "text" in rule or "varchar" in rule else ["id", "name", number]
    sink = Postgres(pg_truth.dsn, table=f"{pg_schema}.people", key=key, select=select, marker_schema=pg_schema)
    caplog.set_level(logging.DEBUG, "epochsink")
    error = run(spark, tmp_path, sink, show_values=False)
    verify(error, caplog, tmp_path / "checkpoint-False")
    assert 'Source: the beginning to {"logOffset":0}' in str(error)
    assert "7000000000000" not in "".join(traceback.format_exception(error)) + caplog.text
    shown = "".join(traceback.format_exception(run(spark, tmp_path, sink, show_values=True)))
    assert "Values: not shown" not in shown


def test_elasticsearch(
    tmp_path: Path, spark: SparkSession, elasticsearch: ElasticsearchService, caplog: pytest.LogCaptureFixture
) -> None:
    index = f"people-{tmp_path.name.replace('_', '-')}"
    with Client(elasticsearch.url) as client:
        client.indices.create(index=index, mappings={"properties": {"age": {"type": "keyword"}, "id": {"type": "ip"}}})
    # the mapping takes numbers as text for an ip, and refuses this one
    sink = Elasticsearch(elasticsearch.url, index=index, select=["name AS id", "age"])
    caplog.set_level(logging.DEBUG, "epochsink")
    error = run(spark, tmp_path, sink, show_values=False)
    verify(error, caplog, tmp_path / "checkpoint-False")
    assert 'source of epoch 0: the beginning to {"logOffset":0}' in str(error)
    # the epoch is pending, and the next start tries it first
    assert SECRET not in "".join(traceback.format_exception(run(spark, tmp_path, sink, show_values=False)))
    assert SECRET in str(run(spark, tmp_path, sink, show_values=True))


@pytest.mark.parametrize("kafka", [NEWEST_LEVEL], indirect=True, ids=str)
def test_kafka(
    tmp_path: Path, spark: SparkSession, kafka: KafkaService, fresh_topic: FreshName, caplog: pytest.LogCaptureFixture
) -> None:
    topic = create_topic(kafka.bootstrap_servers, fresh_topic(), max_message_bytes="2000")
    sink = Kafka(bootstrap_servers=kafka.bootstrap_servers, topic=topic, value="repeat(age, 300)")
    caplog.set_level(logging.DEBUG, "epochsink")
    error = run(spark, tmp_path, sink, show_values=False)
    printed = "".join(traceback.format_exception(error))
    assert "sink 'people': epoch 0, Spark partition 0: " in printed
    assert "max.message.bytes" in printed
    assert 'Source: the beginning to {"logOffset":0}' in printed
    assert SECRET not in printed + caplog.text
