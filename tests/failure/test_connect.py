"""Three sinks on Spark Connect; worker, server and client are killed, while readers look on."""

from __future__ import annotations

import os
import random
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

import pytest
from harness import Harness, make_topic
from indices import keyed
from tables import make_table

from epochsink.testing import Target
from epochsink.testing.readers.elasticsearch import ElasticsearchReader
from epochsink.testing.readers.kafka import KafkaReader
from epochsink.testing.readers.postgres import PostgresReader

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fix_services import FreshName, PrivateKafka, PrivatePostgres

    from epochsink.devkit.services import ElasticsearchService

ROWS_FED: Final = 30
"""Rows added to each of the two source partitions before a start: one epoch."""

CRASH: Final = "coordinator.commit.between:3"
"""Where the process of a run kills itself: Kafka and PostgreSQL have the epoch, Elasticsearch has nothing of it."""
BACKLOG: Final = 4 * ROWS_FED
"""Rows of each source partition that a run finds at its start: enough for it to be killed at work."""
LONGEST_PAUSE_SECONDS: Final = 1.0
ENDS_SECONDS: Final = 120.0

pytestmark = pytest.mark.timeout(900)


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
        made.read(Target("topic", atomic=False), KafkaReader(servers, topic))
        made.read(Target("table"), PostgresReader(postgres.dsn, "log"))
        made.read(Target("search", atomic=False, keyed=True), ElasticsearchReader(elasticsearch.url, topic))
        yield made


def test_three_sinks_are_exact_when_worker_server_and_client_are_killed(harness: Harness) -> None:
    """A run's process kills itself in the middle of a commit. Then a client is killed.

    Its server goes on with its run, until the next run takes the checkpoint. Then the server of that run is killed.
    """
    seed = int(os.environ.get("EPOCHSINK_SEED") or random.randrange(2**32))
    print(f"EPOCHSINK_SEED={seed}")  # noqa: T201 - to repeat it
    chance = random.Random(seed)
    harness.feed(2 * ROWS_FED)
    harness.crash_at(CRASH)
    with ExitStack() as left:
        for what in ("client", "server"):
            harness.feed(max(1, BACKLOG - harness.backlog()))
            process = left.enter_context(harness.start())
            # the server of the killed client decides epochs too
            harness.wait_for(process, process.batch_worker, "the process of the run")
            harness.wait_for_epochs(process, 1)
            harness.pause(process, chance.uniform(0, LONGEST_PAUSE_SECONDS))
            victim = process.driver if what == "client" else process.jvm()
            assert victim is not None, what
            harness.kill(process, what, victim)
            if what == "server":
                # its client asks for it for minutes
                harness.kill(process, "client", process.driver)
            code = process.wait(time.monotonic() + ENDS_SECONDS, harness.watch.look)
            harness.log.write("ended", driver=process.driver, code=code)
    harness.drain()
    report = harness.report()
    assert report.clean, str(report)
