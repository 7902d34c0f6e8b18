"""What reads Spark's own Kafka source, in the environment of the demo: a pipeline that is killed, and the demo."""

from __future__ import annotations

import json
import uuid
from typing import TYPE_CHECKING, Final

import pytest
from harness import Harness, make_topic
from tables import make_table

from epochsink_devkit.demo.session import JVM_OPTIONS
from epochsink_devkit.history import CheckedTarget
from epochsink_devkit.history.readers.kafka import KafkaReader
from epochsink_devkit.history.readers.postgres import PostgresReader

if TYPE_CHECKING:
    from pathlib import Path

    from epochsink_devkit.services import KafkaService, PostgresService
    from versions.environments import Environment

# with the installation of [demo], on a machine that does much else
pytestmark = pytest.mark.timeout(900)
ROWS_FED: Final = 30
CRASHES: Final = (
    "coordinator.record.before",  # Spark reads the epoch's rows from the topic again
    "coordinator.record.after",  # the next run adopts the epoch
    "coordinator.commit.between",  # decided; the topic has the epoch, the table has not
)


def test_a_killed_pipeline_from_kafkas_source_is_exactly_once(
    with_demo: Environment, kafka: KafkaService, postgres: PostgresService, tmp_path: Path
) -> None:
    """By the verdict of the checker, whose readers look on all the time."""
    servers, name = kafka.bootstrap_servers, f"killed_{uuid.uuid4().hex[:8]}"
    make_topic(servers, name)
    make_table(postgres.dsn, name)
    sinks = {
        "topic": {"kind": "Kafka", "bootstrap_servers": servers, "topic": name, "key": "cast(key AS string)"},
        "table": {"kind": "Postgres", "dsn": postgres.dsn, "table": name},
    }
    python = str(with_demo.python)
    with Harness(tmp_path, kafka, f"{name}_source", python=python, jvm_options=JVM_OPTIONS, sinks=sinks) as harness:
        harness.read(CheckedTarget("topic", atomic=False), KafkaReader(servers, name))
        harness.read(CheckedTarget("table"), PostgresReader(postgres.dsn, name))
        harness.feed_and_crash_at(CRASHES, ROWS_FED)
        harness.drain()
        report = harness.report()
    assert report.clean, str(report)
    assert report.counts["kills"] == len(CRASHES)
    assert report.counts["source rows"] == len(CRASHES) * 2 * ROWS_FED


def test_the_demo_runs(with_demo: Environment, tmp_path: Path) -> None:
    """It kills each of its pipelines once; the one that writes as users do without epochsink has duplicates."""
    page = tmp_path / "demo.html"
    asked: list[str | Path] = ["demo", "--quick", "--json", "--orders", "2000", "--page", page]
    done = with_demo.run("epochsink", *asked, folder=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    results = {result["pipeline"]: result for result in json.loads(done.stdout)["results"]}
    assert results.keys() == {"epochsink", "plain", "upsert"}
    assert all(result["kills"] == 1 for result in results.values())
    assert results["epochsink"]["count"] == {"rows_out": 2000, "lost": 0, "duplicated": 0}
    assert results["plain"]["count"]["duplicated"] > 0
    assert "kill -9" in page.read_text()
