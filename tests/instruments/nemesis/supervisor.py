"""Keeps one driver of the pipeline alive, as a scheduler of jobs would, and takes over where one is thought dead."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pipeline import Spec
from processes import PipelineProcess

from epochsink_devkit.demo.session import JVM_OPTIONS

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from epochsink_devkit.history import HistoryLog, Workload
    from nemesis.cluster import Cluster
    from nemesis.hosts import Host

CANARIES: Final = ("coordinator.record.before", "coordinator.vote.between", "task.prepared", "coordinator.vote.before")
"""Where a driver kills itself when all, some or none have voted: what it has prepared may never be seen."""
CANARY_SHARE: Final = 0.35
LOOK_SECONDS: Final = 0.1
RUN: Final = "r1"
ROWS_PER_EPOCH: Final = 240
RETAIN: Final = "45m"
"""Longer than two hosts' clocks may differ: a driver drops what is older by its own."""


@dataclass(frozen=True)
class Driver:
    """One life of the pipeline, on a host."""

    number: int
    name: str
    process: PipelineProcess
    host: Host
    log: Path
    canary: str
    once: Path


class Supervisor(threading.Thread):
    """Starts drivers until `end`. ``tell`` takes what happened, for the timeline."""

    def __init__(
        self,
        cluster: Cluster,
        history: HistoryLog,
        workload: Workload,
        chance: Random,
        tell: Callable[..., None],
    ) -> None:
        super().__init__(name="supervisor", daemon=True)
        self._cluster = cluster
        self._history = history
        self._workload = workload
        self._chance = chance
        self._tell = tell
        self._folder = cluster.folder
        (cluster.folder / "checkpoint").mkdir()
        self._stop_file = cluster.folder / "stop"
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._count = 0
        self._drained = False
        self.quiet = False
        self._held = False
        self.arm: dict[str, str] = {}
        self.last_words = ""
        self.deaths_of_canaries: list[float] = []
        """When drivers have killed themselves, by the monotonic clock."""
        self.canaries = 0
        """How many drivers or tasks have killed themselves with an epoch prepared."""
        self._words: list[str] = []
        self.driver: Driver | None = None
        self.zombies: list[Driver] = []
        self.failure: BaseException | None = None

    def run(self) -> None:
        """Start a driver whenever there is none."""
        try:
            while not self._ended.wait(LOOK_SECONDS):
                with self._lock:
                    self._look()
        except BaseException as failure:  # noqa: BLE001 - raised in the main thread
            self.failure = failure

    def _look(self) -> None:
        if self.driver is not None and self.driver.process.exit_code is not None:
            # a canary may still die while the rest is drained
            self._drained = self._stop_file.exists() and self.driver.process.exit_code == 0
            self._bury(self.driver)
            self.driver = None
        for zombie in [one for one in self.zombies if one.process.exit_code is not None]:
            self._bury(zombie)
            self.zombies.remove(zombie)
        if self.driver is None and not self._drained and not self._held:
            self.driver = self._start()

    def _start(self) -> Driver:
        self._count += 1
        number = self._count
        host = self._free_host()
        canary = "" if self.quiet or self._chance.random() > CANARY_SHARE else self._chance.choice(CANARIES)
        name = uuid.uuid4().hex
        spec = Spec(
            run=RUN,
            driver=name,
            history=str(self._history.folder),
            checkpoint=self._cluster.checkpoint,
            bootstrap_servers=self._cluster.bootstrap_servers,
            topic="source",
            sinks=self._cluster.sink_options(),
            options={"retain": RETAIN},
            rows_per_epoch=ROWS_PER_EPOCH,
            attempts=4,
            jvm_options=JVM_OPTIONS,
            settings=self._cluster.spark_settings(host) | self._in_tasks(canary, number),
            workload=asdict(self._workload),
        )
        log, once = self._folder / f"driver-{number}.log", self._folder / f"canary-{number}"
        self._history.write("started", run=RUN, driver=name, armed=canary)
        script = Path(__file__).with_name("driver.py")
        command = [
            sys.executable,
            str(script),
            str(spec.write(self._spec(number))),
            str(self._stop_file),
        ]
        path = os.pathsep.join(one for one in sys.path if one)
        arm, self.arm = self.arm, {}
        if arm:
            arm |= {"EPOCHSINK_FAILPOINT_ONCE": str(once)}
        armed = self._environment(canary, number) | arm | {"PYTHONPATH": path, "SPARK_LOCAL_IP": host.address}
        process = PipelineProcess(host.command(command), log, armed)
        self._tell("driver", number=number, host=host.name, canary=canary)
        return Driver(number, name, process, host, log, canary, once)

    def _free_host(self) -> Host:
        # the other one, if a driver that is taken for dead lies there
        taken = {zombie.host.name for zombie in self.zombies}
        return next(self._cluster.spark[name] for name in ("driver", "driver2") if name not in taken)

    @property
    def host(self) -> Host:
        """Where the driver runs, or the next one will."""
        with self._lock:
            return self._free_host() if self.driver is None else self.driver.host

    def _environment(self, canary: str, number: int) -> dict[str, str]:
        if not canary:
            return {}
        count = self._chance.randrange(2, 9)
        return {
            "EPOCHSINK_FAILPOINT": f"{canary}:{count}",
            "EPOCHSINK_FAILPOINT_ONCE": str(self._folder / f"canary-{number}"),
        }

    def _in_tasks(self, canary: str, number: int) -> dict[str, str]:
        """Arm the executors' Python, too: once for all of them."""
        armed = self.arm | (self._environment(canary, number) if canary.startswith("task.") else {})
        if armed:
            armed["EPOCHSINK_FAILPOINT_ONCE"] = str(self._folder / f"canary-{number}")
        return {f"spark.executorEnv.{name}": value for name, value in armed.items()}

    def _bury(self, driver: Driver) -> None:
        code = driver.process.exit_code
        driver.process.kill_all()
        self._history.write("ended", driver=driver.name, code=code)
        self.last_words = _last_error(driver.log)
        self._words.append(self.last_words)
        self._tell("driver ended", number=driver.number, host=driver.host.name, code=code, why=self.last_words)
        self.canaries += driver.once.exists()
        if driver.once.exists() and code != 0 and driver.canary.startswith("coordinator."):
            self.deaths_of_canaries.append(time.monotonic())
            attempt = self._open_attempt(driver)
            if attempt is not None:
                self._history.write("aborted", attempt=attempt)
                self._tell("canary", attempt=attempt, point=driver.canary)

    def _open_attempt(self, driver: Driver) -> str | None:
        """Return a driver's newest attempt if its foreachBatch did not return."""
        newest = None
        for line in (self._history.folder / "history.jsonl").read_text().splitlines():
            event = json.loads(line)
            if event["event"] == "invoked" and event["driver"] == driver.name:
                newest = event["attempt"]
            elif event["event"] in {"returned", "raised"} and event["attempt"] == newest:
                newest = None
        return newest

    @property
    def deaths(self) -> int:
        """How many drivers have ended, by whatever means."""
        return len(self._words)

    def deaths_of(self, error: str) -> int:
        """Return how many drivers have ended with an error of this name."""
        return sum(error in words for words in self._words)

    # ---- what can befall drivers

    def usurp(self) -> None:
        """Freeze the driver, and start another elsewhere, as a scheduler does that takes it for dead.

        RuntimeError if no driver runs, or one is frozen already.
        """
        with self._lock:
            if self.driver is None or self.zombies:
                raise RuntimeError("no driver to usurp, or a second one")
            self.driver.host.pause()
            self.zombies.append(self.driver)
            self.driver = None

    def thaw(self) -> None:
        """Let the frozen driver go on."""
        with self._lock:
            for zombie in self.zombies:
                zombie.host.resume()

    def kill(self) -> None:
        """SIGKILL to the driver's processes. RuntimeError if no driver runs."""
        with self._lock:
            if self.driver is None:
                raise RuntimeError("no driver to kill")
            self.driver.host.kill()

    def hold(self) -> None:
        """End all drivers, and start none until `go_on`."""
        with self._lock:
            self._held = True
            for one in [self.driver, *self.zombies]:
                if one is not None:
                    one.host.kill()

    def go_on(self) -> None:
        """Start drivers again."""
        with self._lock:
            self._held = False

    @property
    def newest_spec(self) -> Path:
        """What the newest driver was given."""
        return self._spec(self._count)

    def _spec(self, number: int) -> Path:
        return self._folder / f"spec-{number}.json"

    def set_clock(self, seconds: float, *, start_again: bool = False) -> None:
        """Set the clock of the drivers' hosts; Spark waits for its next trigger by the wall clock.

        One that was thawed waits too, and for as long has the cores that its successor needs.
        """
        for name in ("driver", "driver2"):
            self._cluster.spark[name].set_clock(seconds)
        if start_again:
            with self._lock:
                for one in [self.driver, *self.zombies]:
                    if one is not None:
                        one.host.kill()

    def drain(self, seconds: float) -> bool:
        """Let the driver take all input that there is, and end; return whether it did."""
        self.quiet = True
        self._stop_file.touch()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with self._lock:
                if self._drained and not self.zombies:
                    return True
            time.sleep(LOOK_SECONDS)
        return False

    def end(self) -> None:
        """Stop starting drivers, and end those that run."""
        self._ended.set()
        self.join()
        for driver in [self.driver, *self.zombies]:
            if driver is not None:
                driver.host.resume()
                driver.process.kill_all()


def _last_error(log: Path) -> str:
    """Return the line of a driver's log that says why it ended."""
    lines = log.read_text(errors="replace").splitlines()
    for line in reversed(lines):
        if line.startswith(("epochsink.errors.", "pyspark.errors.", "py4j.")) or (
            "Error:" in line and "WARN" not in line
        ):
            return line[:400]
    return lines[-1][:400] if lines else ""
