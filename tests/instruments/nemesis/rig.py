"""A cluster with a pipeline that is kept alive, fed and read: what random faults and named scenarios have in common."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections import Counter
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, Final, Self

import psycopg
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from elasticsearch import ApiError, TransportError
from part_targets import Findings

from epochsink_devkit.history import HistoryLog, Report, Workload, check
from epochsink_devkit.history.readers import TargetUnreachable
from epochsink_devkit.history.sampling import Sampler
from model.recorded import RecordedCheckpoint
from nemesis.cluster import PARTITIONS, SOURCE, Cluster
from nemesis.hosts import SUBNET
from nemesis.reading import Blindfold, Guarded, Rest
from nemesis.recovery import LONGEST, patience
from nemesis.supervisor import RUN, Supervisor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

PROGRESS_SECONDS: Final = 30.0
DRAIN_SECONDS: Final = 120.0
REST_SECONDS: Final = 120.0
ROWS_PER_SECOND: Final = 12
FIRST_EPOCH_SECONDS: Final = 300.0
_UNREACHABLE: Final = (psycopg.Error, TargetUnreachable, KafkaException, ApiError, TransportError)


class Timeline:
    """What happened besides what the checker needs, as lines of JSON for the page."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()

    def tell(self, what: str, **facts: Any) -> None:
        """Write one event, and print it."""
        with self._lock, self.path.open("a") as file:
            file.write(json.dumps({"at": time.monotonic(), "what": what, **facts}) + "\n")
        shown = " ".join(f"{name}={value}" for name, value in facts.items() if value not in ("", None))
        print(f"{time.strftime('%H:%M:%S')} {what} {shown}", flush=True)


class Feeder(threading.Thread):
    """Adds rows to the source, some a second, until `end`."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(name="feeder", daemon=True)
        # a row is what stands at an offset, so one that is retried and comes twice is two; an idempotent producer
        # would end for good where the brokers lose its sequence
        self._producer = Producer({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0, "acks": "all"})
        self._servers = cluster.bootstrap_servers
        self._ended = threading.Event()

    def run(self) -> None:
        """Feed."""
        while not self._ended.wait(1.0):
            for partition in range(PARTITIONS):
                # the client may have asked for the topic just before every broker knew it
                with suppress(KafkaException):
                    for _ in range(ROWS_PER_SECOND // PARTITIONS):
                        self._producer.produce(SOURCE, value=b"", partition=partition)
            self._producer.poll(0)

    def ends(self) -> dict[int, int]:
        """Return how many rows each partition has, which is what the pipeline has to deliver."""
        consumer = Consumer({"bootstrap.servers": self._servers, "group.id": "ends", "log_level": 0})
        try:
            marks = {
                part: consumer.get_watermark_offsets(TopicPartition(SOURCE, part), timeout=30)
                for part in range(PARTITIONS)
            }
        finally:
            consumer.close()
        return {part: high for part, (_, high) in marks.items()}

    def end(self) -> None:
        """Stop, once the brokers have everything."""
        self._ended.set()
        self.join()
        if left := self._producer.flush(120):
            raise TimeoutError(f"the source took {left} rows less than it was given")


class Rig:
    """Everything of one run. As a context manager it leaves no process, no host and no rule."""

    def __init__(
        self,
        folder: Path,
        sinks: Sequence[str],
        seed: int,
        *,
        canaries: bool,
        store: str = "",
        subnet: str = SUBNET,
    ) -> None:
        self.folder = folder
        self.timeline = Timeline(folder / "timeline.jsonl")
        self.history = HistoryLog(folder / "history")
        self.blindfold = Blindfold()
        skew = random.Random(seed) if canaries else None
        # the soak takes turns
        atomic = not canaries or seed % 2 == 0
        self.cluster = Cluster(folder, sinks, store=store, subnet=subnet, skew=skew, atomic=atomic, part=canaries)
        self._seed = seed
        self._workload = Workload(keys=23)
        self._canaries = canaries
        self._samplers: list[Sampler] = []
        self.aside = Findings(Counter())
        """What was wrong in the targets that cannot take all rows, and in the one that adds them up."""

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self.cluster)
            skews = {host.name: host.skew for host in self.cluster.network.hosts.values() if host.skew}
            self.timeline.tell("cluster", hosts=len(self.cluster.network.hosts), clocks_ahead_by_seconds=skews)
            chance = random.Random(self._seed)
            self.supervisor = Supervisor(self.cluster, self.history, self._workload, chance, self.timeline.tell)
            self.supervisor.quiet = not self._canaries
            self.watch = RecordedCheckpoint(self.cluster.watched(), RUN, self.history)
            self.feeder = Feeder(self.cluster)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()

    def begin(self) -> None:
        """Start the readers and the pipeline; returns when the first epoch is decided."""
        self._read()
        # first: the first driver may be a canary
        for sampler in self._samplers:
            sampler.start()
            self._stack.callback(sampler.stop)
        self.feeder.start()
        self.supervisor.start()
        self._stack.callback(self.supervisor.end)
        self.wait(lambda: self.watch.epochs > 0, FIRST_EPOCH_SECONDS, "the first epoch")
        self.timeline.tell("begin", seed=self._seed, sinks=",".join(self.cluster.sinks))

    def _read(self) -> None:
        for target, reader in self.cluster.readers():
            facts = {"atomic": target.atomic, "keyed": target.keyed, "dead_letters": None, "lag": target.lag}
            self.history.write("target", name=target.name, **facts)
            service = {"topic": "kafka", "table": "postgres"}.get(target.name, "elastic")
            guarded, rest = Guarded(reader, service, self.blindfold), Rest(lambda: self.supervisor.deaths)
            self._samplers.append(Sampler(target, guarded, self.history, self.watch.look, rest))

    def wait(self, condition: Callable[[], Any], seconds: float, what: str) -> float:
        """Wait until something holds; return how long it took. TimeoutError after so many seconds."""
        began = time.monotonic()
        while not condition():
            self.watch.look()
            if self.supervisor.failure is not None:
                raise self.supervisor.failure
            if time.monotonic() - began > seconds:
                raise TimeoutError(f"{what} did not come within {seconds:.0f} s")
            time.sleep(0.1)
        return time.monotonic() - began

    def progress(self, seconds: float = 4 * PROGRESS_SECONDS) -> float:
        """Wait for a further epoch; return how long it took.

        TimeoutError after so many seconds, or more on a busy machine (see `nemesis.recovery.patience`).
        """
        epochs, began = self.watch.epochs, time.monotonic()
        busiest, cores = 0.0, os.cpu_count() or 1

        def comes_or_stays_away() -> bool:
            nonlocal busiest
            busiest = max(busiest, os.getloadavg()[0])
            return self.watch.epochs > epochs or time.monotonic() - began > patience(seconds, busiest, cores)

        took = self.wait(comes_or_stays_away, LONGEST * seconds + 1, "a further epoch")
        if self.watch.epochs == epochs:
            raise TimeoutError(f"a further epoch did not come within {took:.0f} s, at a load of up to {busiest:.1f}")
        return took

    def look_aside(self) -> None:
        """Compare the targets that cannot take all rows with what is decided. To be called when all is healed."""
        with suppress(*_UNREACHABLE):
            self.aside.early(self.cluster.part, self.watch)

    def _compare_aside(self) -> None:
        deadline = time.monotonic() + REST_SECONDS
        while True:
            try:
                return self.aside.final(self.cluster.part, self.watch.decided())
            except _UNREACHABLE:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def finish(self) -> Report:
        """Let the pipeline take all input and end, read everything once more, and judge."""
        self.history.write("healed")
        self.timeline.tell("healed all")
        self.feeder.end()
        drained, epochs = self.supervisor.drain(DRAIN_SECONDS), -1
        # on a busy machine as long as it goes on
        while not drained and self.watch.epochs > epochs:
            epochs = self.watch.epochs
            drained = self.supervisor.drain(DRAIN_SECONDS)
            self.watch.look()
        if drained:
            self.watch.look()
            self.history.write("drained")
            self.timeline.tell("drained")
        else:
            self.timeline.tell("not drained")
        for sampler in self._samplers:
            sampler.finish(REST_SECONDS)
        if self._canaries:
            self._compare_aside()
        for left in self.cluster.spooled():
            self.history.write("leftover", target="spool", kind="orphan", what=left)
        self.history.write_input(RUN, self._workload.source(self.feeder.ends()))
        report = check(self.history.folder, progress_within=4 * PROGRESS_SECONDS)
        self.timeline.tell("judged", anomalies=len(report.anomalies))
        return report
