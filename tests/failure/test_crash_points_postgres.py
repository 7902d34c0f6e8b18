"""The pipeline is killed at every crash point that it can reach, again and again, and nothing is lost or doubled.

One growing pipeline writes two tables at once: one appends without a unique key (which would hide duplicates) through
prepared transactions, the other upserts and deletes through logged staging tables. Each start recovers what the
crash before it left, does at least one epoch, and dies at its own point. Readers look on all the while.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import psycopg
import pytest
from harness import Harness

from epochsink.faults import POINTS
from epochsink.testing import Target
from epochsink.testing.readers.postgres import PostgresReader
from epochsink.testing.rows import SCHEMA

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from epochsink.services import KafkaService, PostgresService
    from fix_services import FreshName, PrivatePostgres

ROWS_FED: Final = 60
"""Rows added to each of the two source partitions before a start: two epochs."""

CRASHES: Final = (
    "coordinator.take.before",
    "coordinator.take.after",
    "coordinator.recover.after",
    "coordinator.settle.before:2",
    "coordinator.write.before:2",
    "task.begin:2",
    "task.written:2",
    "task.spooled:2",
    "task.prepared:2",
    "postgres.copied:2",
    "coordinator.vote.before:2",
    "postgres.merged",
    "postgres.merged:2",
    "postgres.prepared:2",
    "coordinator.vote.between:3",
    "coordinator.vote.between:4",
    "coordinator.record.before:2",
    "coordinator.record.after:2",
    "coordinator.commit.before:2",
    "postgres.committed",
    "postgres.committed:2",
    "coordinator.commit.between:3",
    "coordinator.commit.between:4",
    "coordinator.done.before:2",
    "coordinator.done.after:2",
    "coordinator.drain.before",
)
REPLAYS: Final = ("coordinator.replay.before", "coordinator.replay.prepared", "coordinator.replay.after")

pytestmark = pytest.mark.timeout(900)


class Tables:
    """The two tables of the pipeline, and a harness whose readers look at them."""

    def __init__(self, harness: Harness, dsn: str) -> None:
        self.harness = harness
        self.dsn = dsn

    def restart_with(self, crash: str, *, attempts: int = 1) -> None:
        """Feed, start, and die at a crash point."""
        self.harness.feed(ROWS_FED)
        self.harness.crash_at(crash, attempts=attempts)

    def is_clean(self) -> None:
        """Drain, and have the checker find nothing."""
        self.harness.drain()
        report = self.harness.report()
        assert report.clean, str(report)
        assert report.counts["source rows"] > 0
        assert report.counts["rows read"] > report.counts["source rows"], "the readers were not looking"


def make_table(dsn: str, name: str, *, key: bool = False) -> None:
    """Create a table with the proof columns."""
    types = {"string": "text", "int32": "integer", "int64": "bigint"}
    columns = ", ".join(f"{field.name} {types[str(field.type)]}" for field in SCHEMA)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(f"CREATE TABLE {name} ({columns}{', PRIMARY KEY (key)' if key else ''})".encode())


def postgres_sinks(dsn: str) -> dict[str, dict[str, Any]]:
    """Return the two sinks of the pipeline."""
    return {
        "log": {"kind": "Postgres", "dsn": dsn, "table": "log", "commit": "prepared"},
        "state": {
            "kind": "Postgres",
            "dsn": dsn,
            "table": "state",
            "key": ["key"],
            "order_by": ["kver"],
            "delete_when": "op = 'D'",
            "commit": "staged",
        },
    }


@pytest.fixture
def tables(
    tmp_path: Path, kafka: KafkaService, private_postgres: PrivatePostgres, fresh_topic: FreshName
) -> Iterator[Tables]:
    """Make a pipeline into two tables of a server of its own."""
    server: PostgresService = private_postgres()
    make_table(server.dsn, "log")
    make_table(server.dsn, "state", key=True)
    with Harness(tmp_path, kafka, fresh_topic("source"), sinks=postgres_sinks(server.dsn)) as harness:
        harness.read(Target("log"), PostgresReader(server.dsn, "log"))
        harness.read(Target("state", keyed=True), PostgresReader(server.dsn, "state"))
        yield Tables(harness, server.dsn)


def test_every_point_that_the_coordinator_a_task_and_postgres_have_is_among_these() -> None:
    mine = {point for point in POINTS if point.partition(".")[0] in {"coordinator", "task", "postgres"}}
    assert {crash.partition(":")[0] for crash in (*CRASHES, *REPLAYS)} == mine


def test_a_pipeline_killed_at_every_crash_point_is_exactly_once(tables: Tables) -> None:
    for crash in CRASHES:
        tables.restart_with(crash)
    tables.is_clean()
