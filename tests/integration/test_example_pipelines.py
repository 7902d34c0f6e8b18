"""The pipelines of examples/ run as they stand, and again when there is more to read, in one Spark session."""

from __future__ import annotations

import json
import runpy
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from confluent_kafka import Producer
from elasticsearch import Elasticsearch
from kafka_kit import create_topic

from epochsink_devkit.history.readers.kafka import KafkaReader

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pyspark.sql import SparkSession

    from epochsink_devkit.services import ElasticsearchService, KafkaService, PostgresService

    Run = Callable[..., None]

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def run(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run an example once for each lot of lines, which are added to the folder that it reads."""
    assert spark.version
    folder = tmp_path / "input"
    folder.mkdir()
    monkeypatch.setenv("INPUT", str(folder))
    monkeypatch.setenv("CHECKPOINT", str(tmp_path / "checkpoint"))

    def run_(name: str, *lots: Sequence[object], **settings: str) -> None:
        for setting, value in settings.items():
            monkeypatch.setenv(setting, value)
        for lot in lots:
            (folder / f"{len(list(folder.iterdir()))}.json").write_text("\n".join(map(json.dumps, lot)))
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")

    return run_


def rows(server: PostgresService, query: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(server.dsn) as connection:
        return connection.execute(query.encode()).fetchall()


def drop(server: PostgresService, table: str) -> None:
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        connection.execute(f"DROP TABLE IF EXISTS {table}".encode())


def values(kafka: KafkaService, topic: str) -> list[bytes]:
    """Return what consumers with read_committed see."""
    with closing(KafkaReader(kafka.bootstrap_servers, topic)) as reader:
        return reader.values()


def documents(server: ElasticsearchService, index: str) -> list[dict[str, Any]]:
    with Elasticsearch(server.url) as client:
        client.indices.refresh(index=index)
        return [hit["_source"] for hit in client.search(index=index)["hits"]["hits"]]


def test_all_cells_of_a_notebook_run_again(run: Run, postgres: PostgresService) -> None:
    drop(postgres, "notebook_orders")
    placed = {"amount": 1.0, "placed_at": "2026-01-01T00:00:00Z"}
    lots = [[{"order_id": order, **placed} for order in lot] for lot in ([1, 2], [3])]
    run("notebook", *lots, DSN=postgres.dsn)
    assert rows(postgres, "SELECT order_id FROM notebook_orders ORDER BY 1") == [(1,), (2,), (3,)]


def test_three_sinks_hold_the_same_orders(
    run: Run, kafka: KafkaService, postgres: PostgresService, elasticsearch: ElasticsearchService
) -> None:
    drop(postgres, "paid_orders")
    orders = [
        {"order_id": number, "customer": "ann", "amount": number % 3, "placed_at": "2026-01-01T00:00:00Z"}
        for number in range(6)
    ]
    servers = {"KAFKA": kafka.bootstrap_servers, "DSN": postgres.dsn, "ELASTICSEARCH": elasticsearch.url}
    run("three_sinks", orders[:4], orders[4:], **servers)
    paid = [1, 2, 4, 5]
    assert [number for (number,) in rows(postgres, "SELECT order_id FROM paid_orders ORDER BY 1")] == paid
    assert sorted(order["order_id"] for order in documents(elasticsearch, "paid-orders")) == paid
    assert sorted(json.loads(value)["order_id"] for value in values(kafka, "orders.paid")) == paid


def test_kafka_to_kafka_forwards_each_error_once(run: Run, kafka: KafkaService) -> None:
    create_topic(kafka.bootstrap_servers, "log.lines")
    for lot in ("ab", "c"):
        producer = Producer({"bootstrap.servers": kafka.bootstrap_servers})
        for text in lot:
            for level in ("ERROR", "INFO"):
                producer.produce("log.lines", value=json.dumps({"level": level, "text": text}))
        assert producer.flush(30) == 0
        run("kafka_to_kafka", [], KAFKA=kafka.bootstrap_servers)
    seen = [json.loads(value) for value in values(kafka, "log.errors")]
    assert sorted(line["text"] for line in seen) == ["a", "b", "c"]
    assert {line["level"] for line in seen} == {"ERROR"}


def test_events_go_to_the_index_of_their_tenant_and_what_fits_none_becomes_a_dead_letter(
    run: Run, elasticsearch: ElasticsearchService
) -> None:
    events = [
        {"tenant": tenant, "event_id": number, "text": text}
        for tenant, number, text in [("a", 1, "x"), ("b", 1, "y"), ("ACME", 1, "z"), ("a", 1, "newer")]
    ]
    run("events_to_elasticsearch", events[:3], events[3:], ELASTICSEARCH=elasticsearch.url)
    assert [event["text"] for event in documents(elasticsearch, "events-a")] == ["newer"]
    assert [event["text"] for event in documents(elasticsearch, "events-b")] == ["y"]
    assert len(documents(elasticsearch, "rejected-events")) == 1


def test_counters_add_up(run: Run, postgres: PostgresService) -> None:
    drop(postgres, "page_counters")
    lots = [[{"page": page, "at": "2026-01-01T00:00:00Z"} for page in pages] for pages in ("aab", "ac")]
    run("counters", *lots, DSN=postgres.dsn)
    assert rows(postgres, "SELECT page, clicks FROM page_counters ORDER BY 1") == [("a", 3), ("b", 1), ("c", 1)]


def test_running_totals_write_only_what_changed(run: Run, postgres: PostgresService) -> None:
    drop(postgres, "customer_totals")
    run("running_totals", [{"customer": name, "amount": 1} for name in "ab"], DSN=postgres.dsn)
    [before] = rows(postgres, "SELECT xmin FROM customer_totals WHERE customer = 'b'")
    run("running_totals", [{"customer": "a", "amount": 2}], DSN=postgres.dsn)
    assert rows(postgres, "SELECT customer, total FROM customer_totals ORDER BY 1") == [("a", 3), ("b", 1)]
    assert rows(postgres, "SELECT xmin FROM customer_totals WHERE customer = 'b'") == [before]


def test_what_a_producer_sent_again_is_written_once(run: Run, postgres: PostgresService) -> None:
    drop(postgres, "payments")
    lots = [[{"payment_id": one, "amount": 1.0, "at": "2026-01-01T00:00:00Z"} for one in ids] for ids in ("aab", "bc")]
    run("deduplicate", *lots, DSN=postgres.dsn)
    assert rows(postgres, "SELECT payment_id FROM payments ORDER BY 1") == [("a",), ("b",), ("c",)]
