"""SIGKILL at random moments to what a pipeline consists of, while readers look on.

``EPOCHSINK_KILLS`` says how many kills (``make prove`` asks for many), ``EPOCHSINK_SEED`` which ones, and
``EPOCHSINK_RECORDS`` in which folder the record of the run is kept.
"""

from __future__ import annotations

import os
import random
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

from proof.record import Record

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from harness import Harness
    from processes import PipelineProcess

    from epochsink_devkit.history import Report

KILLS: Final = int(os.environ.get("EPOCHSINK_KILLS", "4"))
CLASSIC: Final = ("driver", "JVM", "worker", "broker")
CONNECT: Final = ("client", "server", "run", "worker")
"""On Spark Connect. "run" is the process that calls foreachBatch."""

LONGEST_PAUSE_SECONDS: Final = 1.5
ENDS_SECONDS: Final = 120.0
RUNS_IN_VAIN: Final = 5
"""A run may end by itself, because of a service that was killed. So many in a row mean that none can work."""


def broker_stays() -> None:
    """Never called: a plan without "broker" kills no service."""
    raise AssertionError("the plan of kills has a broker, and the test has none to kill")


class Killer:
    """Kills one thing after another; a run that outlives a kill goes on to the next.

    ``backlog`` is how many rows of each source partition a run finds at its start: enough for it to be killed at work.
    """

    def __init__(
        self,
        harness: Harness,
        chance: random.Random,
        backlog: int,
        kill_broker: Callable[[], None] = broker_stays,
    ) -> None:
        self._harness = harness
        self._chance = chance
        self._backlog = backlog
        self._kill_broker = kill_broker

    def kill_all(self, kills: list[str]) -> None:
        """Start runs until each kill has struck one that was at work. AssertionError if runs end by themselves."""
        with ExitStack() as left:
            beside: PipelineProcess | None = None
            in_vain = 0
            while kills:
                self._harness.feed(max(1, self._backlog - self._harness.backlog()))
                process = left.enter_context(self._harness.start())
                struck = ""
                while kills and self._reaches_work(process):
                    if self._strike(process, kills[-1]):
                        struck = kills.pop()
                self._harness.log.write("ended", driver=process.driver, code=process.exit_code)
                in_vain = 0 if struck else in_vain + 1
                assert in_vain < RUNS_IN_VAIN, f"{in_vain} runs ended by themselves:\n{self._harness.tail()}"
                if beside is not None:
                    beside.kill_all()
                # the server of a killed client continues with its run, beside the next one
                beside = process if struck == "client" else None
                if beside is None:
                    process.kill_all()
                self._harness.watch.look()

    def _reaches_work(self, process: PipelineProcess) -> bool:
        """Wait for an epoch that is decided, then for a while; return whether the run still lives."""
        goal = self._harness.watch.epochs + 1
        self._harness.lives_until(process, lambda: self._harness.watch.epochs >= goal)
        until = time.monotonic() + self._chance.uniform(0, LONGEST_PAUSE_SECONDS)
        return self._harness.lives_until(process, lambda: time.monotonic() > until)

    def _strike(self, process: PipelineProcess, what: str) -> bool:
        if what == "broker":
            self._kill_broker()
            return True
        pid = self._pid_of(process, what)
        if pid is None:
            return False
        self._harness.kill(process, what, pid)
        if what == "server":
            # its client asks for it for minutes
            self._harness.kill(process, "client", process.driver)
        if what not in ("worker", "run"):
            process.wait(time.monotonic() + ENDS_SECONDS, self._harness.watch.look)
        return True

    def _pid_of(self, process: PipelineProcess, what: str) -> int | None:
        if what == "worker":
            workers = process.workers()
            return self._chance.choice(workers) if workers else None
        if what == "run":
            return process.batch_worker()
        return process.jvm() if what in ("JVM", "server") else process.driver


class Kills:
    """The kills of one test, whose seed it prints, and the record of what came of them."""

    def __init__(self, what: str, kinds: Sequence[str]) -> None:
        seed = int(os.environ.get("EPOCHSINK_SEED") or random.randrange(2**32))
        self.chance = random.Random(seed)
        self.plan = kill_plan(self.chance, kinds, KILLS)
        print(f"EPOCHSINK_SEED={seed} EPOCHSINK_KILLS={KILLS}: {', '.join(reversed(self.plan))}")  # noqa: T201 - to repeat it
        self._record = Record(what, seed)

    def keep(self, report: Report) -> None:
        """Keep the record, if a folder is given for it."""
        if folder := os.environ.get("EPOCHSINK_RECORDS"):
            names = ("epochs", "source rows", "reads", "drivers", "ledger entries")
            counts = {name: report.counts[name] for name in names}
            figures = {"kills": len(self.plan), **counts, "anomalies": [*map(str, report.anomalies)]}
            self._record.keep(Path(folder), figures)


def kill_plan(chance: random.Random, kinds: Sequence[str], kills: int) -> list[str]:
    """Return what to kill, the last one first: each kind as often as any other."""
    chosen = [kinds[at % len(kinds)] for at in range(kills)]
    chance.shuffle(chosen)
    return chosen
