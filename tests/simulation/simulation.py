"""One simulated history: a world, its drivers, a fault plan, then a healthy run, then the verdict."""

from __future__ import annotations

import json
import uuid
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING

from epochsink.protocol.ledger import FOLDER
from simulation import invariants
from simulation.driver import PRODUCTION, SLOTS, Driver, Variant, parse_offsets
from simulation.scheduler import Scheduler
from simulation.world import World

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from simulation.plans import Fault, Plan

EPOCHS = 3
HEALTHY_FROM = 10**6

Folders = dict[str, dict[str, bytes]]


class Simulation(Scheduler):
    """A query of three epochs over some sinks, run under a plan."""

    def __init__(self, plan: Plan, sinks: str, schedule: int = 0, variant: Variant = PRODUCTION) -> None:
        super().__init__(plan, schedule)
        self.sinks = sinks
        self.variant = variant
        self.world = World(sinks + (variant.later_sinks or ""))
        self.world.keeps_copies = any(fault[0] == "back" for _, fault in plan)
        self.query = "query-1"
        self.source_rows = EPOCHS * SLOTS
        self.catching_up = 0
        self.attempts = 0
        self.commits_made = 0
        self.blames_zombies = True
        self.steps_before_healing = 0
        self.copies: dict[int, Folders] = {}
        self._restored_to = HEALTHY_FROM

    @property
    def anomalies(self) -> list[str]:
        """Return every violation found."""
        return self.world.readers.anomalies

    def flag(self, anomaly: str) -> None:
        """Remember a violation."""
        self.world.readers.flag(anomaly)

    def stuck(self, why: str) -> None:
        """Remember that nothing moved any more."""
        self.flag(f"STUCK {why}")

    def start_driver(self) -> None:
        """Start a fresh process."""
        self.note(f"        --- driver {len(self.processes)} starts")
        self.active = Driver(self, len(self.processes))
        self.processes.append(self.active)

    def decided(self, number: int) -> None:
        """Take note of a commits file: readers may see the epoch from now on."""
        self.commits_made += 1
        self.world.readers.decided.add((self.query, number))
        self.copies[number] = copied(self.world.files)

    def decided_rows(self) -> int:
        """Return how many source rows the checkpoint's newest decided epoch reaches to."""
        files = self.world.files
        newest = max(map(int, files.get("commits", {})), default=-1)
        return parse_offsets(files["offsets"][str(newest)])[1] if newest >= 0 else 0

    # ---- world-wide faults

    def strike(self, process: Driver, fault: Fault) -> bool:
        """Apply a fault."""
        kind, *numbers = fault
        faults: dict[str, Callable[..., bool]] = {
            "timeout": self._time_out,
            "rollback": self._roll_back,
            "loser": process.lose_a_task,
            "back": self._set_back,
            "unmark": self._forget_markers,
            "newck": self._new_checkpoint,
            "ledger": self._restore_ledger,
            "restore": self._restore,
        }
        struck = faults[kind](*numbers)
        self.note(f"        {fault}: {'strikes' if struck else 'has no effect'}")
        return struck

    def _time_out(self) -> bool:
        return self.world.kafka.time_out()

    def _roll_back(self) -> bool:
        struck = [target.roll_back_all() for target in self.world.postgres.values()]
        return any(struck)

    def _set_back(self, sink: str, commits: int) -> bool:
        return self.world.set_back(sink, commits)

    def _forget_markers(self, sink: str) -> bool:
        # until an epoch is done, nothing says that there ever was a marker: the protocol's page names that limit
        done = any(json.loads(data)["entry"] == "done" for data in self.world.files.get(FOLDER, {}).values())
        return done and sink in self.world.copies and self.world.forget_markers(sink)

    def _kill_all(self) -> None:
        """Kill every driver, and wait until the file system has carried out what they asked of it."""
        for process in self.processes:
            process.kill()
        self.forget_due("create", "remove", "SPARK", "spool")

    def _new_checkpoint(self) -> bool:
        if self.query != "query-1":
            return False
        self.note("        all drivers die; a new checkpoint on the same targets")
        self._kill_all()
        self.query, self.catching_up = "query-2", 1
        self.world.files = {}
        self.copies.clear()
        return True

    def _restore(self, number: int, offsets: int, ledger: int) -> bool:
        copy = self.copies.get(number)
        # forward into an abandoned timeline is beyond what can be told apart
        if copy is None or number > self._restored_to:
            return False
        files = self.world.files
        if files["commits"].keys() == copy["commits"].keys() and not offsets:
            return False
        self.note(f"        all drivers die; restored: commits<={number} offsets={offsets} ledger={ledger}")
        self._kill_all()
        self._restored_to = number
        self.world.readers.went_back = True
        files["commits"] = dict(copy["commits"])
        if offsets:
            files["offsets"] = dict(copy["offsets"])
            self.catching_up = 1
        if ledger == 1:
            files[FOLDER] = dict(copy[FOLDER])
        if ledger == 2:
            files[FOLDER] = without_later_epochs(files[FOLDER], number)
        return True

    def _restore_ledger(self, number: int) -> bool:
        # forward into an abandoned timeline is beyond what can be told apart
        if (number not in self.copies and number != -1) or number > self._restored_to:
            return False
        self.note(f"        all drivers die; the ledger alone is that of commits<={number}")
        self._kill_all()
        self.world.readers.went_back = True
        self.world.files[FOLDER] = dict(self.copies[number][FOLDER]) if number in self.copies else {}
        return True

    # ---- a whole history

    def play(self) -> None:
        """Run under the plan, then without faults, and check."""
        with counted_uuids():
            self.start_driver()
            self.run()
            self.steps_before_healing = self.now
            if self.loud is None and not self.anomalies:
                self._recover_healthily()
            for process in self.processes:
                process.kill()
        invariants.check(self)

    def _recover_healthily(self) -> None:
        self.deliver(everything=True)
        self.now += HEALTHY_FROM
        self.healthy = True
        # one more batch, so that foreachBatch runs, whatever the faults have left
        self.source_rows += SLOTS
        self.note("        --- healthy run")
        self.start_driver()
        self.run()
        if self.active.dead not in ("done", "loud"):
            self.flag(f"STUCK after healing: {self.active.dead}")


def copied(files: Folders) -> Folders:
    """Return a copy of a checkpoint folder."""
    return {folder: dict(content) for folder, content in files.items()}


def without_later_epochs(ledger: dict[str, bytes], newest: int) -> dict[str, bytes]:
    """Return a ledger from which somebody has removed the entries of epochs above one."""
    kept = [data for _, data in sorted(ledger.items()) if json.loads(data).get("epoch", -1) <= newest]
    return {f"{i:020d}": data for i, data in enumerate(kept)}


@contextmanager
def counted_uuids() -> Iterator[None]:
    """Make every uuid4 the next number, so that a plan always plays the same way."""
    real, count = uuid.uuid4, iter(range(1, HEALTHY_FROM))
    uuid.uuid4 = lambda: SimpleNamespace(hex=f"{next(count):032x}")  # type: ignore[assignment,return-value]
    try:
        yield
    finally:
        uuid.uuid4 = real


def play(
    plan: Plan, sinks: str, schedule: int = 0, variant: Variant = PRODUCTION, *, trace: bool = False
) -> Simulation:
    """Play one plan and return the history with its verdict."""
    simulation = Simulation(plan, sinks, schedule, variant)
    if trace:
        simulation.trace = []
    simulation.play()
    return simulation
