"""Kills a pipeline and starts it again until its input is drained, while readers look on; then asks the checker."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from pipeline import Spec
from processes import PipelineProcess

from epochsink_devkit.demo.session import jvm_options
from epochsink_devkit.history import HistoryLog, Report, Workload, check
from epochsink_devkit.history.sampling import Sampler
from model.recorded import RecordedCheckpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from epochsink_devkit.history import CheckedTarget
    from epochsink_devkit.history.readers import TargetReader
    from epochsink_devkit.services import KafkaService

PIPELINE: Final = Path(__file__).with_name("pipeline.py")
PARTITIONS: Final = 2
WORKLOAD: Final = Workload(keys=23)
"""Few keys, so that every epoch overwrites and deletes what the one before it wrote."""

RUN_SECONDS: Final = 240.0
REST_SECONDS: Final = 60.0
PROGRESS_SECONDS: Final = 120.0
"""More than a start of Spark takes on a busy machine."""

NEVER_RECORDED: Final = frozenset(
    {
        "coordinator.settle.before",
        "coordinator.write.before",
        "coordinator.vote.before",
        "coordinator.vote.between",
        "coordinator.record.before",
        "task.begin",
        "task.written",
        "task.spooled",
        "task.prepared",
        "postgres.copied",
        "postgres.prepared",
        "kafka.produced",
    }
)
"""failpoints at which the attempt under way is not recorded yet: none of its rows may ever be seen."""


class Watch(Protocol):
    """What looks at a checkpoint: `RecordedCheckpoint` at those of Spark."""

    @property
    def epochs(self) -> int:
        """The number of decided epochs seen so far."""

    def look(self) -> None:
        """Write events for all that is new since the last look."""

    def decided(self) -> dict[int, int]:
        """Return the end offset of each source partition in the newest decided epoch."""


@dataclass(frozen=True)
class Ended:
    """How a run of the pipeline ended. ``crashed``: at the failpoint that was armed."""

    exit_code: int
    crashed: bool


class Harness:
    """One source topic, one checkpoint, and the history of what is done to the pipeline between them."""

    def __init__(
        self,
        folder: Path,
        kafka: KafkaService,
        topic: str,
        *,
        program: Path = PIPELINE,
        workload: Workload = WORKLOAD,
        python: str = sys.executable,
        watch: Callable[[Path, str, HistoryLog], Watch] = RecordedCheckpoint,
        **spec: Any,
    ) -> None:
        self.folder = folder
        self._command = [python, str(program)]
        self._environment = {"PYSPARK_PYTHON": python}
        self.log = HistoryLog(folder / "history")
        self._servers = kafka.bootstrap_servers
        self._topic = topic
        self._spec = spec if "jvm_options" in spec else spec | {"jvm_options": jvm_options()}
        self._run = "r1"
        self._workload = workload
        self._fed = dict.fromkeys(range(PARTITIONS), 0)
        self.watch = watch(folder / "checkpoint", self._run, self.log)
        self._samplers: list[Sampler] = []
        self.runs = 0
        (folder / "checkpoint").mkdir()
        make_topic(self._servers, topic)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        for sampler in self._samplers:
            sampler.stop()

    def read(self, target: CheckedTarget, reader: TargetReader) -> None:
        """Let a reader look at a target from now on."""
        facts = {"atomic": target.atomic, "keyed": target.keyed, "dead_letters": target.dead_letters, "lag": target.lag}
        self.log.write("target", name=target.name, **facts)
        sampler = Sampler(target, reader, self.log, self.watch.look)
        self._samplers.append(sampler)
        sampler.start()

    def feed(self, rows: int) -> None:
        """Add so many rows to each partition of the source."""
        producer = Producer({"bootstrap.servers": self._servers})
        for partition in self._fed:
            for _ in range(rows):
                producer.produce(self._topic, value=b"", partition=partition)
            self._fed[partition] += rows
        if producer.flush(30):
            raise TimeoutError("the source topic did not take the input")

    def start(
        self,
        *,
        crash: str = "",
        once: str = "",
        stop: bool = False,
        attempts: int = 1,
        tasks: int = 0,
        checkpoint: str = "checkpoint",
        settings: Mapping[str, str] | None = None,
    ) -> PipelineProcess:
        """Start the pipeline, with a failpoint armed for its first pass. To be used as a context manager.

        With ``stop`` it stops at that point, until it gets SIGCONT. Only the folder "checkpoint" is watched.
        ``settings`` are more of Spark's, for this run.
        """
        self.runs += 1
        driver = uuid.uuid4().hex
        spec = Spec(
            run=self._run,
            driver=driver,
            history=str(self.log.folder),
            bootstrap_servers=self._servers,
            topic=self._topic,
            attempts=attempts,
            tasks=tasks,
            workload=asdict(self._workload),
            **{
                "checkpoint": str(self.folder / checkpoint),
                **self._spec,
                "settings": {**self._spec.get("settings", {}), **(settings or {})},
            },
        )
        armed = {"EPOCHSINK_FAILPOINT": crash, "EPOCHSINK_FAILPOINT_ONCE": once} if crash else {}
        if stop:
            armed["EPOCHSINK_FAILPOINT_SIGNAL"] = "STOP"
        self.log.write("started", run=self._run, driver=driver, armed=crash)
        command = [*self._command, str(spec.write(self.folder / f"spec-{self.runs}.json"))]
        return PipelineProcess(command, self.output, self._environment | armed)

    @property
    def output(self) -> Path:
        """What the newest run has written."""
        return self.folder / f"run-{self.runs}.log"

    def run(self, *, crash: str = "", attempts: int = 1, tasks: int = 0) -> Ended:
        """Run the pipeline to its end, which may be the armed failpoint."""
        once = self.folder / f"crashed-{self.runs + 1}"
        with self.start(crash=crash, once=str(once), attempts=attempts, tasks=tasks) as process:
            code = process.wait(time.monotonic() + RUN_SECONDS, self.watch.look)
        self.log.write("ended", driver=process.driver, code=code)
        ended = Ended(code, once.exists())
        if ended.crashed:
            self.log.write("killed", what=crash, pid=process.driver)
        if ended.crashed and code != 0:
            self._mark_aborted(crash)
        self.watch.look()
        return ended

    def _mark_aborted(self, crash: str) -> None:
        """Say that the attempt under way at a crash before the record is aborted for good."""
        attempt = self.open_attempt()
        if crash.partition(":")[0] in NEVER_RECORDED and attempt is not None:
            self.log.write("aborted", attempt=attempt)

    def open_attempt(self) -> str | None:
        """Return the newest attempt if its foreachBatch did not return."""
        lines = (self.log.folder / "history.jsonl").read_text().splitlines()
        newest = None
        for event in map(_parse, lines):
            if event["event"] == "invoked":
                newest = event["attempt"]
            elif event["event"] == "returned" and event["attempt"] == newest:
                newest = None
        return newest

    def feed_and_crash_at(self, points: Iterable[str], rows: int) -> None:
        """Feed so many rows and run the pipeline until it kills itself, at one failpoint after another."""
        for point in points:
            self.feed(rows)
            self.crash_at(point)

    def crash_at(self, point: str, *, attempts: int = 1, tasks: int = 0) -> Ended:
        """Run the pipeline until a process kills itself at a failpoint; return how the run ended.

        AssertionError if it never came there.
        """
        ended = self.run(crash=point, attempts=attempts, tasks=tasks)
        assert ended.crashed, f"run {self.runs} never reached {point} (status {ended.exit_code}):\n{self.tail()}"
        return ended

    def kill(self, process: PipelineProcess, what: str, pid: int) -> None:
        """SIGKILL to one process of a run."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self.log.write("killed", what=what, pid=pid, driver=process.driver)

    def wait_for(self, process: PipelineProcess, condition: Callable[[], Any], what: str) -> Any:
        """Wait until something holds while a run goes on; returns it. AssertionError if the run ends before."""
        deadline = time.monotonic() + RUN_SECONDS
        while not (held := condition()):
            self.watch.look()
            assert process.exit_code is None, f"the run ended before {what}:\n{self.tail()}"
            assert time.monotonic() < deadline, f"{what} did not come:\n{self.tail()}"
            time.sleep(0.02)
        return held

    def lives_until(self, process: PipelineProcess, condition: Callable[[], Any]) -> bool:
        """Wait until something holds; return whether the run has lived to see it."""
        deadline = time.monotonic() + RUN_SECONDS
        while process.exit_code is None and not condition():
            self.watch.look()
            assert time.monotonic() < deadline, f"run {self.runs} does nothing:\n{self.tail()}"
            time.sleep(0.02)
        return process.exit_code is None

    def backlog(self) -> int:
        """Return how many rows of a source partition are not decided yet, at the most."""
        decided = self.watch.decided()
        return max(fed - decided.get(partition, 0) for partition, fed in self._fed.items())

    def wait_for_epochs(self, process: PipelineProcess, more: int) -> None:
        """Wait until a run has decided so many more epochs."""
        goal = self.watch.epochs + more
        self.wait_for(process, lambda: self.watch.epochs >= goal, f"{more} more epochs")

    def pause(self, process: PipelineProcess, seconds: float) -> None:
        """Let a run go on for a moment, so that what follows strikes anywhere in an epoch."""
        until = time.monotonic() + seconds
        self.wait_for(process, lambda: time.monotonic() > until, "the moment")

    def end(self, process: PipelineProcess) -> None:
        """Let a run that was tampered with end as it likes, or end it; what remains of it is killed."""
        with process:
            code = process.wait(time.monotonic() + RUN_SECONDS, self.watch.look)
        self.log.write("ended", driver=process.driver, code=code)
        self.watch.look()

    def drain(self, starts: int = 3) -> None:
        """Start the pipeline until all input is decided. AssertionError after so many starts."""
        self.log.write("healed")
        for _ in range(starts):
            ended = self.run()
            if ended.exit_code == 0 and self.watch.decided() == self._fed:
                self.log.write("drained")
                return
        raise AssertionError(f"after {starts} starts, {self.watch.decided()} of {self._fed} is decided:\n{self.tail()}")

    def report(self) -> Report:
        """Take the final reads, and judge; the ledger, too, must be one that the specification allows."""
        self.finish()
        report = check(self.log.folder, progress_within=PROGRESS_SECONDS)
        report.counts["ledger entries"] = self.replay()
        return report

    def finish(self) -> None:
        """Take the final reads; the history is complete then."""
        for sampler in self._samplers:
            sampler.finish(REST_SECONDS)
            # what nobody has read while it ran cannot have been seen early, twice or torn
            assert sampler.reads > self.runs, f"{sampler.name} was not looking: {sampler.reads} in {self.runs} runs"
        self._note_spool()
        self.log.write_input(self._run, self._workload.source(self._fed))

    def replay(self) -> int:
        """Replay the ledger against the specification; return how many entries it has. Raises `Refused`."""
        self.watch.look()
        assert isinstance(self.watch, RecordedCheckpoint)
        print(self.watch.recorded.replay())  # noqa: T201 - what was replayed is the result
        return len(self.watch.recorded.entries)

    def _note_spool(self) -> None:
        for folder in (self.folder / "checkpoint" / "epochsink" / "spool").glob("*/*"):
            self.log.write("leftover", target="spool", kind="orphan", what=f"{folder.parent.name}/{folder.name}")

    def tail(self, lines: int = 60) -> str:
        """Return the end of what the newest run has written."""
        return "\n".join(self.output.read_text(errors="replace").splitlines()[-lines:])


def make_topic(servers: str, topic: str, settings: dict[str, str] | None = None, *, copies: int = 1) -> None:
    """Create the source topic, or another one."""
    # the answer comes only while the client lives
    admin = AdminClient({"bootstrap.servers": servers})
    admin.create_topics([NewTopic(topic, PARTITIONS, copies, config=settings or {})])[topic].result(timeout=30)


def _parse(line: str) -> dict[str, Any]:
    event: dict[str, Any] = json.loads(line)
    return event
