"""Two pipelines into one topic, table and index at the same time, each on its own copy of one checkpoint."""

from __future__ import annotations

import os
import shutil
import signal
from contextlib import ExitStack
from typing import TYPE_CHECKING

import psutil
import pytest
from harness import Harness, make_topic
from indices import keyless
from kafka_rig import ROWS_FED
from tables import make_table

from epochsink_devkit.history import CheckedTarget
from epochsink_devkit.history.readers.elasticsearch import ElasticsearchReader
from epochsink_devkit.history.readers.kafka import KafkaReader
from epochsink_devkit.history.readers.postgres import PostgresReader

if TYPE_CHECKING:
    from pathlib import Path

    from fix_services import FreshName
    from processes import PipelineProcess

    from epochsink_devkit.services import ElasticsearchService, KafkaService, PostgresService

pytestmark = pytest.mark.timeout(600)


def stopped_at(harness: Harness, point: str, checkpoint: str, stack: ExitStack) -> PipelineProcess:
    """Start the pipeline on a copy of the checkpoint, and let it stop at a point until it gets SIGCONT."""
    once = harness.folder / f"stopped-{harness.runs + 1}"
    process = stack.enter_context(harness.start(crash=point, once=str(once), stop=True, checkpoint=checkpoint))
    driver = psutil.Process(process.driver)
    harness.wait_for(process, lambda: once.exists() and driver.status() == psutil.STATUS_STOPPED, point)
    # so that every target has to be read before the next driver's first epoch
    harness.log.write("killed", what=f"stopped at {point}", pid=process.driver)
    return process


def test_of_two_copies_that_commit_one_epoch_in_the_same_instant_one_stops_and_the_other_is_exact(
    tmp_path: Path,
    kafka: KafkaService,
    postgres: PostgresService,
    elasticsearch: ElasticsearchService,
    fresh_topic: FreshName,
) -> None:
    """The second has compared topic and ledger, and is about to commit, when the first prepares the same epoch."""
    source, name = fresh_topic("source"), fresh_topic("sink")
    table, servers = name.replace("-", "_").replace(".", "_"), kafka.bootstrap_servers
    make_topic(servers, name)
    make_table(postgres.dsn, table)
    sinks = {
        "topic": {"kind": "Kafka", "bootstrap_servers": servers, "topic": name, "transaction_timeout": 300},
        "table": {"kind": "Postgres", "dsn": postgres.dsn, "table": table},
        "search": keyless(elasticsearch.url, name),
    }
    with Harness(tmp_path, kafka, source, sinks=sinks) as harness, ExitStack() as stack:
        harness.feed(ROWS_FED)
        first = stopped_at(harness, "coordinator.vote.before:2", "first", stack)
        first_output = harness.output
        shutil.copytree(tmp_path / "first", tmp_path / "checkpoint", dirs_exist_ok=True)
        harness.watch.look()
        harness.read(CheckedTarget("topic", atomic=False), KafkaReader(servers, name))
        harness.read(CheckedTarget("table"), PostgresReader(postgres.dsn, table))
        harness.read(CheckedTarget("search", atomic=False), ElasticsearchReader(elasticsearch.url, name))
        second = stopped_at(harness, "coordinator.commit.compared", "checkpoint", stack)

        os.kill(first.driver, signal.SIGCONT)
        harness.end(first)
        said = first_output.read_text(errors="replace")
        assert first.exit_code != 0
        assert f"process {second.driver} on host" in said
        assert "keep one copy of the checkpoint, and run one driver on it" in said

        os.kill(second.driver, signal.SIGCONT)
        harness.end(second)
        assert second.exit_code == 0, harness.tail()
        harness.feed(ROWS_FED)
        harness.drain()
        report = harness.report()
        assert report.clean, str(report)
