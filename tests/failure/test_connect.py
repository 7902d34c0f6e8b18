"""Three sinks on Spark Connect; worker, server and client are killed, while readers look on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest
from harness import Harness, make_topic
from indices import keyed
from random_kills import CONNECT, KILLS, Killer, Kills
from tables import make_table

from epochsink_devkit.history import CheckedTarget
from epochsink_devkit.history.readers.elasticsearch import ElasticsearchReader
from epochsink_devkit.history.readers.kafka import KafkaReader
from epochsink_devkit.history.readers.postgres import PostgresReader

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fix_services import FreshName, PrivateKafka, PrivatePostgres

    from epochsink_devkit.services import ElasticsearchService

ROWS_FED: Final = 30
"""Rows added to each of the two source partitions before a start: one epoch."""

CRASH: Final = "coordinator.commit.between:3"
"""Where the process of a run kills itself: Kafka and PostgreSQL have the epoch, Elasticsearch has nothing of it."""
BACKLOG: Final = 4 * ROWS_FED

pytestmark = pytest.mark.timeout(600 + 150 * KILLS)


@pytest.fixture
def harness(
    tmp_path: Path,
    private_kafka: PrivateKafka,
    private_postgres: PrivatePostgres,
    elasticsearch: ElasticsearchService,
    fresh_topic: FreshName,
) -> Iterator[Harness]:
    """Return the harness of a pipeline on Spark Connect into a topic, a table and an index."""
    kafka, postgres = private_kafka(), private_postgres()
    topic, servers = fresh_topic("sink"), kafka.bootstrap_servers
    make_topic(servers, topic)
    make_table(postgres.dsn, "log")
    sinks = {
        "topic": {"kind": "Kafka", "bootstrap_servers": servers, "topic": topic, "key": "cast(key AS string)"},
        "table": {"kind": "Postgres", "dsn": postgres.dsn, "table": "log", "commit": "prepared"},
        "search": keyed(elasticsearch.url, topic),
    }
    with Harness(tmp_path, kafka, fresh_topic("source"), sinks=sinks, remote=True) as made:
        made.read(CheckedTarget("topic", atomic=False), KafkaReader(servers, topic))
        made.read(CheckedTarget("table"), PostgresReader(postgres.dsn, "log"))
        made.read(CheckedTarget("search", atomic=False, keyed=True), ElasticsearchReader(elasticsearch.url, topic))
        yield made


def test_three_sinks_are_exact_when_worker_server_and_client_are_killed(harness: Harness) -> None:
    """A run's process kills itself in the middle of a commit. Then clients, servers and workers are killed at random.

    The server of a killed client goes on with its run, until the next run takes the checkpoint.
    """
    kills = Kills("random kills on Connect", CONNECT)
    harness.feed(2 * ROWS_FED)
    harness.crash_at(CRASH)
    Killer(harness, kills.chance, BACKLOG).kill_all([*kills.plan])
    harness.drain()
    report = harness.report()
    kills.keep(report)
    assert report.clean, str(report)
