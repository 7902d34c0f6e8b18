"""The pipeline on YARN: one topic into all three sinks, with its checkpoint on HDFS."""

from __future__ import annotations

import json
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import psutil
from harness import PIPELINE, RUN_SECONDS, Harness, make_topic
from indices import keyed
from tables import make_table

from epochsink_devkit.history import CheckedTarget
from epochsink_devkit.history.readers.elasticsearch import ElasticsearchReader
from epochsink_devkit.history.readers.kafka import KafkaReader
from epochsink_devkit.history.readers.postgres import PostgresReader
from model.recorded import RecordedCheckpoint
from nemesis.store import HdfsFiles

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from processes import PipelineProcess

    from epochsink.protocol.storage import Storage
    from epochsink_devkit.services import ElasticsearchService, KafkaService, LocalHdfs, PostgresService
    from yarn.cluster import Container, NodeManager, YarnCluster

SUBMIT: Final = Path(__file__).with_name("submit.py")
SETTINGS: Final = {
    "spark.task.maxFailures": "20",
    # a test kills more of them than Spark allows within the life of an application by default
    "spark.executor.maxNumFailures": "100",
    "spark.yarn.maxAppAttempts": "8",
}


@dataclass(frozen=True)
class World:
    """All servers."""

    kafka: KafkaService
    postgres: PostgresService
    elasticsearch: ElasticsearchService
    hdfs: LocalHdfs
    yarn: YarnCluster


class YarnHarness(Harness):
    """A pipeline in client or cluster mode; ``name`` is that of its targets and of its folder on HDFS."""

    def __init__(self, folder: Path, world: World, name: str, *, cluster_mode: bool) -> None:
        root = f"http://127.0.0.1:{world.hdfs.web_port}/webhdfs/v1/{name}"
        self._files = cast("Storage", HdfsFiles(root))
        self.yarn = world.yarn
        servers, dsn, url = world.kafka.bootstrap_servers, world.postgres.dsn, world.elasticsearch.url
        make_topic(servers, name)
        make_table(dsn, name)
        super().__init__(
            folder,
            world.kafka,
            f"{name}_source",
            program=SUBMIT if cluster_mode else PIPELINE,
            watch=lambda _, run, log: RecordedCheckpoint(self._files, run, log),
            checkpoint=f"{world.hdfs.url}/{name}",
            settings={**world.yarn.settings, **SETTINGS},
            sinks={
                "topic": {"kind": "Kafka", "bootstrap_servers": servers, "topic": name, "key": "cast(key AS string)"},
                "table": {"kind": "Postgres", "dsn": dsn, "table": name, "commit": "prepared"},
                "search": keyed(url, name),
            },
        )
        self.read(CheckedTarget("topic", atomic=False), KafkaReader(servers, name))
        self.read(CheckedTarget("table"), PostgresReader(dsn, name))
        self.read(CheckedTarget("search", atomic=False, keyed=True), ElasticsearchReader(url, name))

    def executors(self) -> list[Container]:
        """Return the running executors whose JVM runs, oldest first."""
        return [one for one in self.yarn.containers() if not one.is_master and one.jvm is not None]

    def master(self, process: PipelineProcess, takes: int) -> Container:
        """Wait until so many drivers have taken the ledger; return the application master of the newest."""
        self.wait_for(process, lambda: self.takes() >= takes, f"driver {takes}")
        return max((one for one in self.yarn.containers() if one.is_master), key=lambda one: one.attempt)

    @contextmanager
    def without(self, process: PipelineProcess, node: NodeManager, what: str) -> Iterator[None]:
        """Kill a NodeManager; at the end, when all that it has started has ended by itself, start it again."""
        self.kill_one(process, f"NodeManager of {what}", node.process)
        yield
        deadline = time.monotonic() + RUN_SECONDS
        while left := [one.name for one in node.containers()]:
            assert time.monotonic() < deadline, f"{left} are left"
            time.sleep(0.1)
        node.start()

    def stopped(self, process: PipelineProcess, once: Path) -> tuple[Container, psutil.Process]:
        """Wait until a process of a container has stopped at the armed failpoint; return both."""

        def found() -> tuple[Container, psutil.Process] | None:
            if once.exists():
                for container in self.yarn.containers():
                    for one in container.processes:
                        with suppress(psutil.NoSuchProcess):
                            if one.status() == psutil.STATUS_STOPPED:
                                return container, one
            return None

        return cast("tuple[Container, psutil.Process]", self.wait_for(process, found, "the stop"))

    def masters(self) -> list[str]:
        """Return the names of all application masters that have ever run, oldest first."""
        folders = (folder for node in self.yarn.nodes for folder in node.folder.glob("logs/*/*_000001"))
        return sorted(folder.name for folder in folders)

    def takes(self) -> int:
        """Return how many drivers have taken the ledger."""
        lines = (self.log.folder / "history.jsonl").read_text().splitlines()
        return sum(json.loads(line)["event"] == "took" for line in lines)

    def kill_one(self, process: PipelineProcess, what: str, victim: psutil.Process | Container | None) -> None:
        """SIGKILL to a process, or to all of a container."""
        assert victim is not None, what
        for one in victim.processes if not isinstance(victim, psutil.Process) else (victim,):
            self.kill(process, what, one.pid)

    def ends_well(self, process: PipelineProcess) -> None:
        """Wait for the end of a run that must have taken all input."""
        self.log.write("healed")
        code = process.wait(time.monotonic() + 2 * RUN_SECONDS, self.watch.look)
        self.log.write("ended", driver=process.driver, code=code)
        self.watch.look()
        assert code == 0, self.tail()
        assert self.watch.decided() == self._fed
        self.log.write("drained")

    def armed(self, point: str, once: Path) -> Mapping[str, str]:
        """Return the settings with which a Python worker stops at a failpoint, the first that comes there."""
        values = {"": point, "_ONCE": str(once), "_SIGNAL": "STOP"}
        return {f"spark.executorEnv.EPOCHSINK_FAILPOINT{name}": value for name, value in values.items()}

    def verdict(self, **counts: Any) -> None:
        """Judge, and print the counts."""
        report = self.report()
        rows = sum(self._fed.values())
        told = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items())
        print(  # noqa: T201 - the counts are the result
            f"YARN: {told}; {self.takes()} drivers, {self.watch.epochs} epochs, {rows:,} rows into each of three "
            f"sinks, {len(report.anomalies)} anomalies"
        )
        assert report.clean, str(report)

    def _note_spool(self) -> None:
        for query in self._files.names("epochsink/spool"):
            for attempt in self._files.names(f"epochsink/spool/{query}"):
                self.log.write("leftover", target="spool", kind="orphan", what=f"{query}/{attempt}")
