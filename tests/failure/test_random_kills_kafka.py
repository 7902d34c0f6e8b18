"""SIGKILL at random moments to the driver, its JVM, a Python worker and the broker, while a reader looks on.

``EPOCHSINK_KILLS`` says how many kills (``make prove`` asks for many), ``EPOCHSINK_SEED`` which ones, and
``EPOCHSINK_RECORDS`` in which folder the record of the run is kept.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
from kafka_rig import ROWS_FED, KafkaRig, pipeline_into_kafka

from proof.record import Record

if TYPE_CHECKING:
    from fix_services import PrivateKafka
    from processes import PipelineProcess

KILLS: Final = int(os.environ.get("EPOCHSINK_KILLS", "4"))
KINDS: Final = ("driver", "JVM", "worker", "broker")
BACKLOG: Final = 6 * ROWS_FED
"""Rows of each source partition that a run finds at its start: enough for it to be killed at work."""
LONGEST_PAUSE_SECONDS: Final = 1.5
ENDS_SECONDS: Final = 120.0

pytestmark = pytest.mark.timeout(300 + 120 * KILLS)


class Killer:
    """Kills one thing after another; a run that outlives a kill goes on to the next."""

    def __init__(self, rig: KafkaRig, chance: random.Random) -> None:
        self._rig = rig
        self._harness = rig.harness
        self._chance = chance

    def kill_all(self, kills: list[str]) -> None:
        """Start runs until each kill has struck one that was at work."""
        while kills:
            self._harness.feed(max(1, BACKLOG - self._harness.backlog()))
            with self._harness.start() as process:
                while kills and self._reaches_work(process):
                    if self._strike(process, kills[-1]):
                        kills.pop()
                self._harness.log.write("ended", driver=process.driver, code=process.exit_code)
            self._harness.watch.look()

    def _reaches_work(self, process: PipelineProcess) -> bool:
        """Wait for an epoch that is decided, then for a while; return whether the run still lives."""
        goal = self._harness.watch.epochs + 1
        self._harness.lives_until(process, lambda: self._harness.watch.epochs >= goal)
        until = time.monotonic() + self._chance.uniform(0, LONGEST_PAUSE_SECONDS)
        return self._harness.lives_until(process, lambda: time.monotonic() > until)

    def _strike(self, process: PipelineProcess, what: str) -> bool:
        if what == "broker":
            self._rig.kill_broker()
            return True
        pid = self._pid_of(process, what)
        if pid is None:
            return False
        self._harness.kill(process, what, pid)
        if what != "worker":
            process.wait(time.monotonic() + ENDS_SECONDS, self._harness.watch.look)
        return True

    def _pid_of(self, process: PipelineProcess, what: str) -> int | None:
        if what == "worker":
            workers = process.workers()
            return self._chance.choice(workers) if workers else None
        return process.jvm() if what == "JVM" else process.driver


def kill_plan(chance: random.Random) -> list[str]:
    """Return what to kill, one after another: each kind as often as any other."""
    chosen = [KINDS[at % len(KINDS)] for at in range(KILLS)]
    chance.shuffle(chosen)
    return chosen


def test_a_pipeline_whose_processes_and_broker_are_killed_at_random_is_exactly_once(
    tmp_path: Path, private_kafka: PrivateKafka
) -> None:
    seed = int(os.environ.get("EPOCHSINK_SEED") or random.randrange(2**32))
    chance = random.Random(seed)
    kills = kill_plan(chance)
    print(f"EPOCHSINK_SEED={seed} EPOCHSINK_KILLS={KILLS}: {', '.join(reversed(kills))}")  # noqa: T201 - to repeat it
    record = Record("random kills", seed)
    with pipeline_into_kafka(tmp_path, private_kafka()) as rig:
        Killer(rig, chance).kill_all([*kills])
        rig.harness.drain()
        report = rig.harness.report()
    if folder := os.environ.get("EPOCHSINK_RECORDS"):
        counts = {name: report.counts[name] for name in ("epochs", "source rows", "reads", "drivers")}
        figures = {"kills": len(kills), **counts, "anomalies": [*map(str, report.anomalies)]}
        record.keep(Path(folder), figures)
    assert report.clean, str(report)
