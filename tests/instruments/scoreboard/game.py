"""Play one system through the kill plan: the same input and the same seeds for each."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psycopg
from elasticsearch import Elasticsearch
from flink_jars import jdbc_jars, kafka_jars
from harness import Harness, make_topic
from kafka_proxy import Api, Fate
from tables import make_table

from epochsink_devkit.history import CheckedTarget, History, Workload
from epochsink_devkit.history.readers.elasticsearch import ElasticsearchReader
from epochsink_devkit.history.readers.kafka import KafkaReader
from epochsink_devkit.history.readers.postgres import PostgresReader
from scoreboard.flink_checkpoints import FlinkWatch
from scoreboard.judge import judge

if TYPE_CHECKING:
    from collections.abc import Callable

    from kafka_proxy import KafkaProxy

    from epochsink_devkit.history.readers import TargetReader
    from epochsink_devkit.services import ElasticsearchService, KafkaService, PostgresService
    from scoreboard.judge import Verdict
    from scoreboard.systems import System

PROGRAM: Final = Path(__file__).with_name("process.py")
FLINK_PROGRAM: Final = Path(__file__).with_name("flink_process.py")
WORKLOAD: Final = Workload(keys=23, deletes=10**9)
"""Without deletes, for which the peers have no documented way."""

ROWS_PER_EPOCH: Final = 100
ROWS_FED: Final = 1_000
"""Rows of each of the two source partitions that each run finds more than the one before it: 20 epochs, so that it is
at work when it is killed."""

ROWS_AT_A_TIME: Final = 10
"""Of these, a stream that does not limit its epochs gets so many at each look, so that it is at work as well."""

TRANSACTION_TIMEOUT_SECONDS: Final = 600
SHORT_TRANSACTION_TIMEOUT_SECONDS: Final = 5
"""Of systems that stay down for longer than that."""

MOST_COMMITS: Final = 32
"""Commits that are held before a kill: those of one checkpoint, with room."""

LONGEST_PAUSE_SECONDS: Final = 1.5
INDEX: Final = {"number_of_shards": 2, "number_of_replicas": 0}


@dataclass(frozen=True)
class Plan:
    """When to kill: so many seconds after a run has decided its first epoch."""

    seed: int
    pauses: tuple[float, ...]

    @classmethod
    def of(cls, seed: int, kills: int) -> Plan:
        """Make the plan of a seed."""
        chance = random.Random(seed)
        return cls(seed, tuple(chance.uniform(0, LONGEST_PAUSE_SECONDS) for _ in range(kills)))

    @property
    def rows(self) -> int:
        """How many rows each system gets."""
        return 2 * ROWS_FED * (len(self.pauses) + 1)


@dataclass(frozen=True)
class Servers:
    """What the systems write to, and the Python of the environment that has apache-flink.

    Systems that stay down for longer than their transactions reach the broker through the proxy.
    """

    kafka: KafkaService
    proxy: KafkaProxy
    flink: Path
    postgres: PostgresService | None = None
    elasticsearch: ElasticsearchService | None = None


def play(system: System, servers: Servers, plan: Plan, folder: Path, tell: Callable[[str], None]) -> Verdict:
    """Kill a system as planned, let it drain its input, and judge. Raises ValueError if that proves nothing."""
    target = CheckedTarget("target", keyed=system.keyed)
    name = system.name.replace("-", "_")
    places, reader = make_target(system, servers, name)
    spec: dict[str, Any] = {"rows_per_epoch": ROWS_PER_EPOCH, "peer": {"name": system.name, "target": name, **places}}
    spec["program"] = PROGRAM
    if system.flink:
        spec |= {"program": FLINK_PROGRAM, "python": str(servers.flink), "watch": FlinkWatch}
        spec["peer"]["rows_of_partition"] = str(plan.rows // 2)
    timeout = SHORT_TRANSACTION_TIMEOUT_SECONDS if system.outlasted else TRANSACTION_TIMEOUT_SECONDS
    spec["peer"]["transaction_timeout"] = str(timeout)
    source = f"source-{system.name}"
    with Harness(folder, servers.kafka, source, workload=WORKLOAD, **spec) as harness:
        harness.read(target, reader)
        for number, pause in enumerate(plan.pauses, start=1):
            tell(f"{system.title}: run {number}, {strike(harness, system, pause, servers.proxy)}")
            if system.outlasted:
                tell(f"{system.title}: the brokers had aborted what was open after {outlast(reader):.0f} s")
        harness.feed(ROWS_FED)
        try:
            harness.drain()
            tell(f"{system.title}: drained")
        except (AssertionError, TimeoutError) as failure:
            # the rows that are left are stuck
            tell(f"{system.title}: not drained: {failure}")
        harness.finish()
    return judge(History.load(harness.log.folder), target.name)


def strike(harness: Harness, system: System, pause: float, proxy: KafkaProxy) -> str:
    """Start a run, and kill driver, JVM and workers some time after it decided an epoch; say how that went.

    A system that stays down for longer than its transactions is killed between a checkpoint and its commit: all that
    can be lost by a timeout. From then on the proxy holds what would commit, until one comes.
    """
    fed = ROWS_AT_A_TIME if system.flink else ROWS_FED
    harness.feed(fed)
    with harness.start() as process:
        goal = harness.watch.epochs + 1
        harness.lives_until(process, lambda: harness.watch.epochs >= goal)
        until = time.monotonic() + pause

        def due() -> bool:
            nonlocal fed
            more = min(ROWS_AT_A_TIME, ROWS_FED - fed)
            if more:
                harness.feed(more)
                fed += more
            return time.monotonic() > until

        alive = harness.lives_until(process, due)
        if system.outlasted:
            held = [proxy.catch(Api.END_TXN, Fate.STALL) for _ in range(MOST_COMMITS)]
            goal = harness.watch.epochs + 1
            alive = harness.lives_until(
                process, lambda: due() and harness.watch.epochs >= goal and any(commit.has_struck for commit in held)
            )
        process.kill_all()
        proxy.forget()
        # what was decided meanwhile was decided before the kill
        harness.watch.look()
        if not alive:
            harness.log.write("ended", driver=process.driver, code=process.exit_code)
            return f"ended by itself with status {process.exit_code}"
        harness.log.write("killed", what="driver, JVM and workers", pid=process.driver, driver=process.driver)
    harness.feed(ROWS_FED - fed)
    return f"killed {pause:.2f} s after its first epoch, epoch {harness.watch.epochs} decided"


def outlast(reader: TargetReader) -> float:
    """Wait until the brokers have aborted all transactions that a killed job left open; return the seconds."""
    began = time.monotonic()
    while any(kind == "pin" for kind, _ in reader.leftovers()):
        time.sleep(0.2)
    return time.monotonic() - began


def make_target(system: System, servers: Servers, name: str) -> tuple[dict[str, str], TargetReader]:
    """Make the topic, table or index; return what the process needs to know of it, and its reader."""
    if system.place == "topic":
        make_topic(servers.kafka.bootstrap_servers, name)
        jars = {"jars": ";".join(kafka_jars())} if system.flink else {}
        broker = servers.proxy if system.outlasted else servers.kafka
        return {"servers": broker.bootstrap_servers, **jars}, KafkaReader(servers.kafka.bootstrap_servers, name)
    if system.place == "table" and servers.postgres is not None:
        dsn = servers.postgres.dsn
        make_table(dsn, name, key=system.keyed)
        make_table(dsn, f"{name}_staging")
        with psycopg.connect(dsn) as connection:
            connection.execute(
                f"CREATE TABLE {name}_applied (app text, batch bigint, PRIMARY KEY (app, batch))".encode()
            )
        jars = {"jars": ";".join((*kafka_jars(), *jdbc_jars()))} if system.flink else {}
        return {"dsn": dsn, "jdbc_url": servers.postgres.jdbc_url, **jars}, PostgresReader(dsn, name)
    if system.place == "index" and servers.elasticsearch is not None:
        url = servers.elasticsearch.url
        with Elasticsearch(url) as client:
            client.indices.create(index=name, settings=INDEX)
        return {"url": url}, ElasticsearchReader(url, name)
    raise ValueError(f"no server for {system.name}")
