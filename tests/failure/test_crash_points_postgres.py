"""The pipeline is killed at one failpoint after another, and nothing is lost or doubled.

One growing pipeline writes two tables at once, from the spool: one appends without a unique key (which would hide
duplicates) through prepared transactions; the other upserts and deletes through logged staging tables.
Each start recovers what the crash before it left, does at least one epoch, and dies at its own point. Readers look on
all the while.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any, Final

import psycopg
import pytest
from harness import Ended, Harness
from psycopg import sql
from tables import make_table

from epochsink.failpoints import POINTS
from epochsink.identity import staging_owner
from epochsink_devkit.history import CheckedTarget
from epochsink_devkit.history.readers.postgres import PostgresReader

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fix_services import FreshName, PrivatePostgres
    from processes import PipelineProcess

    from epochsink_devkit.services import KafkaService, PostgresService

ROWS_FED: Final = 60
"""Rows added to each of the two source partitions before a start: two epochs."""

CRASHES: Final = (
    "coordinator.take.after",
    "coordinator.write.before:2",
    "task.begin:2",
    "task.written:2",
    "task.spooled:2",
    "task.prepared:2",
    "postgres.merged:2",
    "coordinator.record.before:2",
    "coordinator.record.after:2",
    "coordinator.commit.between:3",
    "coordinator.done.after:2",
    "coordinator.drain.before",
)
"""Every point in a task, and of the driver's one in each of its steps: test_postgres_shared.py has them all."""
REPLAYS: Final = ("coordinator.replay.before", "coordinator.replay.prepared", "coordinator.replay.after")

pytestmark = pytest.mark.timeout(1800)


class Tables:
    """The two tables of the pipeline, the server that holds them, and a harness whose readers look at them."""

    def __init__(self, harness: Harness, server: PostgresService) -> None:
        self.harness = harness
        self.server = server

    def restart_with(self, crash: str, *, attempts: int = 1) -> Ended:
        """Feed, start, and die at a failpoint; return how the run ended."""
        self.harness.feed(ROWS_FED)
        return self.harness.crash_at(crash, attempts=attempts)

    def is_clean(self) -> None:
        """Drain, and have the checker find nothing."""
        self.harness.drain()
        report = self.harness.report()
        assert report.clean, str(report)

    def clear_away(self) -> tuple[int, int]:
        """Roll prepared transactions back and drop staging tables, as an administrator might; return how many."""
        with psycopg.connect(self.server.dsn, autocommit=True) as connection:
            gids = [gid for (gid,) in connection.execute("SELECT gid FROM pg_prepared_xacts").fetchall()]
            for gid in gids:
                connection.execute(sql.SQL("ROLLBACK PREPARED {}").format(sql.Literal(gid)))
            found = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'epochsink'").fetchall()
            staging = [name for (name,) in found if staging_owner(name)]
            for name in staging:
                connection.execute(sql.SQL("DROP TABLE {}").format(sql.Identifier("epochsink", name)))
        self.harness.log.write("killed", what=f"{gids}, {staging}", pid=0)
        return len(gids), len(staging)


def postgres_sinks(dsn: str, **options: Any) -> dict[str, dict[str, Any]]:
    """Return the two sinks of the pipeline."""
    sinks: dict[str, dict[str, Any]] = {
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
    return {name: sink | options for name, sink in sinks.items()}


@pytest.fixture
def tables(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    kafka: KafkaService,
    private_postgres: PrivatePostgres,
    fresh_topic: FreshName,
) -> Iterator[Tables]:
    """Make a pipeline into two tables of a server of its own; a parameter has more options of its sinks."""
    server = private_postgres()
    make_table(server.dsn, "log")
    make_table(server.dsn, "state", key=True)
    with Harness(
        tmp_path, kafka, fresh_topic("source"), sinks=postgres_sinks(server.dsn, **getattr(request, "param", {}))
    ) as harness:
        atomic = getattr(request, "param", {}).get("atomic", True)
        harness.read(CheckedTarget("log", atomic=atomic), PostgresReader(server.dsn, "log"))
        harness.read(CheckedTarget("state", atomic=atomic, keyed=True), PostgresReader(server.dsn, "state"))
        yield Tables(harness, server)


def test_every_point_of_a_task_is_among_these() -> None:
    mine = {point for point in POINTS if point.startswith("task.")}
    assert mine <= {crash.partition(":")[0] for crash in CRASHES}


def test_a_pipeline_killed_at_one_crash_point_after_another_is_exactly_once(tables: Tables) -> None:
    for crash in CRASHES:
        tables.restart_with(crash)
    tables.is_clean()


def test_a_pipeline_killed_while_it_prepares_a_lost_epoch_again_is_exactly_once(tables: Tables) -> None:
    """An administrator clears away what is decided; each start after that dies a step later on the way to repair."""
    tables.restart_with("coordinator.commit.before")
    prepared, staged = tables.clear_away()
    assert prepared == 1
    assert staged == 1, "with the rows that wait for the merge: those of the prepared transaction were never staged"
    for crash in REPLAYS:
        tables.restart_with(crash)
    tables.is_clean()


@pytest.mark.parametrize("tables", [{"atomic": False, "commit": "prepared"}], indirect=True, ids=["tasks commit"])
def test_a_task_that_dies_is_tried_again_and_its_first_attempt_leaves_nothing(tables: Tables) -> None:
    for crash in ("task.prepared:2", "postgres.copied:2"):
        ended = tables.restart_with(crash, attempts=2)
        assert ended.exit_code == 0
    tables.is_clean()


def test_a_pipeline_whose_processes_and_server_are_killed_at_random_is_exactly_once(tables: Tables) -> None:
    """SIGKILL to the driver, its JVM, a Python worker and PostgreSQL, each at some moment of some epoch."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")  # noqa: T201 - a failure has to be told with it
    moments = random.Random(seed)
    for what in ("driver", "JVM", "worker", "PostgreSQL"):
        tables.harness.feed(4 * ROWS_FED)
        process = tables.harness.start()
        with process:
            tables.harness.wait_for_epochs(process, 2)
            tables.harness.pause(process, moments.uniform(0, 1))
            kill(tables, process, what)
            tables.harness.end(process)
    tables.is_clean()


def kill(tables: Tables, process: PipelineProcess, what: str) -> None:
    """Kill one thing; PostgreSQL comes back at once, on the same port."""
    harness = tables.harness
    if what == "PostgreSQL":
        harness.log.write("killed", what=what, pid=tables.server.pid)
        tables.server.kill()
        tables.server.start()
        return
    if what == "worker":
        kill_busy_worker(harness, process)
    else:
        pid = process.driver if what == "driver" else harness.wait_for(process, process.jvm, "the JVM")
        harness.kill(process, what, pid)


def kill_busy_worker(harness: Harness, process: PipelineProcess) -> None:
    """Kill workers while foreachBatch runs, until one had a task: that ends the run, as tasks have one attempt."""
    while process.exit_code is None:
        if harness.open_attempt() is not None:
            for pid in process.workers()[:1]:
                harness.kill(process, "worker", pid)
        harness.watch.look()
        time.sleep(0.1)
    assert process.exit_code != 0, "no worker died at work"


def test_without_epochsink_the_same_kill_makes_duplicates(
    tmp_path: Path, kafka: KafkaService, private_postgres: PrivatePostgres, fresh_topic: FreshName
) -> None:
    """Prove that these tests can fail: JDBC append in foreachBatch, killed once before Spark's checkpoint decides."""
    server = private_postgres()
    make_table(server.dsn, "log")
    with Harness(tmp_path, kafka, fresh_topic("source"), plain=(server.jdbc_url, "log")) as harness:
        harness.read(CheckedTarget("log"), PostgresReader(server.dsn, "log"))
        harness.feed(2 * ROWS_FED)
        harness.crash_at("coordinator.record.after:2")
        harness.drain()
        report = harness.report()
    assert {"duplicate", "mixed attempts"} <= report.names, str(report)
    assert report.names.isdisjoint({"lost", "gap", "stuck", "corrupt"}), str(report)
