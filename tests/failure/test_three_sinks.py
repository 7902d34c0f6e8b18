"""One epoch goes to Kafka, PostgreSQL and Elasticsearch; the pipeline dies where some of them have it and some not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest
from harness import Harness, make_topic
from indices import keyed
from tables import make_table

from epochsink_devkit.history import CheckedTarget
from epochsink_devkit.history.readers.elasticsearch import ElasticsearchReader
from epochsink_devkit.history.readers.kafka import KafkaReader
from epochsink_devkit.history.readers.postgres import PostgresReader

if TYPE_CHECKING:
    from pathlib import Path

    from fix_services import FreshName, PrivateKafka, PrivatePostgres

    from epochsink_devkit.services import ElasticsearchService

ROWS_FED: Final = 30
"""Rows added to each of the two source partitions before a start: one epoch."""

CRASHES: Final = (
    "coordinator.vote.between:2",  # Kafka and PostgreSQL have voted, Elasticsearch has not
    "coordinator.record.before:2",
    "coordinator.record.after",
    "kafka.commit.between",  # of the epoch's two transactions one is ended
    "coordinator.commit.between:3",  # Kafka and PostgreSQL have it, Elasticsearch has nothing
    "elasticsearch.bulk.between",  # later, all requests might be on their way already
    "coordinator.done.before",
)

pytestmark = pytest.mark.timeout(1800)


def sinks(servers: str, topic: str, dsn: str, url: str, index: str) -> dict[str, dict[str, Any]]:
    """Return the three sinks, in the order in which they vote and commit."""
    return {
        "topic": {"kind": "Kafka", "bootstrap_servers": servers, "topic": topic, "key": "cast(key AS string)"},
        "table": {"kind": "Postgres", "dsn": dsn, "table": "log", "commit": "prepared"},
        "search": keyed(url, index),
    }


def test_three_sinks_of_one_pass_hold_the_same_epochs_wherever_it_is_killed(
    tmp_path: Path,
    private_kafka: PrivateKafka,
    private_postgres: PrivatePostgres,
    elasticsearch: ElasticsearchService,
    fresh_topic: FreshName,
) -> None:
    kafka, postgres = private_kafka(), private_postgres()
    topic, servers = fresh_topic("sink"), kafka.bootstrap_servers
    make_topic(servers, topic)
    make_table(postgres.dsn, "log")
    made = sinks(servers, topic, postgres.dsn, elasticsearch.url, topic)
    with Harness(tmp_path, kafka, fresh_topic("source"), sinks=made) as harness:
        harness.read(CheckedTarget("topic", atomic=False), KafkaReader(servers, topic))
        harness.read(CheckedTarget("table"), PostgresReader(postgres.dsn, "log"))
        harness.read(CheckedTarget("search", atomic=False, keyed=True), ElasticsearchReader(elasticsearch.url, topic))
        harness.feed(ROWS_FED)
        harness.feed_and_crash_at(CRASHES, ROWS_FED)
        harness.drain()
        report = harness.report()
    assert report.clean, str(report)
    assert report.windows["search"] > 1, "no crash left an epoch in part for as long as a start takes"
