"""Faults at random on a cluster of hosts, readers beside, and what the checker says at the end.

    python -m nemesis.run --hours 1 [--sinks kafka,postgres] [--seed N] [--folder F] [--keep RECORDS]

Every few seconds faults strike, mostly two at once, and are healed; some drivers are canaries, which kill themselves
with an epoch prepared. In the middle PostgreSQL is set back, and repaired from the retained epochs. From time to time
all is healed, and the next epoch has to come within 30 s. A long run is made of legs of an hour at most, each with a
cluster, a history and a verdict of its own, so that nothing grows without bound. Status 0 only without an anomaly.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.progress import Progress, TextColumn, TimeElapsedColumn

from nemesis.cluster import SINKS
from nemesis.faults import CLOCK_STEPS, NOTICED_SECONDS, Fault, Faults
from nemesis.hosts import SUBNET, missing
from nemesis.page import write_page
from nemesis.recovery import Recovery
from nemesis.rig import PROGRESS_SECONDS, Rig
from nemesis.set_back import repair, set_back
from nemesis.store import STORES
from proof.page import BROKE_OFF
from proof.record import Record

if TYPE_CHECKING:
    from collections.abc import Callable

LEG_SECONDS: Final = 3600.0
CALM_EVERY_SECONDS: Final = 75.0
TWO_AT_ONCE: Final = 0.75
FAULT_SECONDS: Final = (2.0, 6.0)
GAP_SECONDS: Final = (0.5, 2.0)


@dataclass
class Leg:
    """What one leg has shown. ``anomalies`` has everything that must not be, late progress excepted.

    ``waits`` are those in vain for an epoch after a healing, ``stuck`` says what happened in each. Its files are in
    ``folder``.
    """

    seed: int
    folder: Path
    faults: Counter[str] = field(default_factory=Counter)
    not_made: int = 0
    canaries: int = 0
    repaired: int = 0
    letters: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    recoveries: list[Recovery] = field(default_factory=list)
    waits: list[Recovery] = field(default_factory=list)
    stuck: list[list[str]] = field(default_factory=list)
    anomalies: list[str] = field(default_factory=list)

    @property
    def late(self) -> list[str]:
        """The waits for an epoch after healing that were too long."""
        return [f"progress took {one}" for one in self.recoveries if one.seconds > PROGRESS_SECONDS]

    @property
    def slowest(self) -> Recovery | None:
        """The longest wait for an epoch after healing."""
        return max(self.recoveries, key=lambda one: one.seconds, default=None)

    def figures(self) -> dict[str, Any]:
        """Return what is recorded."""
        slowest = self.slowest
        loads = [one.load for one in self.recoveries]
        return {
            "faults": self.faults.total(),
            "faults by kind": dict(sorted(self.faults.items())),
            "faults not made": self.not_made,
            "canaries": self.canaries,
            "epochs applied again by a repair": self.repaired,
            "drivers": self.counts["drivers"],
            "epochs": self.counts["epochs"],
            "rows": self.counts["source rows"],
            "dead letters": self.letters,
            "reads": self.counts["reads"],
            "rows read": self.counts["rows read"],
            "ledger entries": self.counts["ledger entries"],
            "deaths of drivers that a target's readers missed": self.counts["unread kills"],
            "healings": len(self.recoveries),
            "longest progress after healing, s": round(slowest.seconds, 1) if slowest else None,
            "load then": round(slowest.load, 1) if slowest else None,
            "load at the healings": [round(min(loads), 1), round(max(loads), 1)] if loads else None,
            f"later than {PROGRESS_SECONDS:.0f} s": self.late,
            "stuck, step by step": self.stuck,
            "anomalies": self.anomalies,
        }

    def add(self, other: Leg) -> None:
        """Add the next leg."""
        self.faults += other.faults
        self.counts += other.counts
        self.not_made += other.not_made
        self.canaries += other.canaries
        self.repaired += other.repaired
        self.letters += other.letters
        self.recoveries += other.recoveries
        self.stuck += other.stuck
        self.anomalies += other.anomalies


class Nemesis:
    """Makes faults and heals them. ``show`` takes one line of progress."""

    def __init__(self, rig: Rig, chance: random.Random, leg: Leg, show: Callable[[str], None]) -> None:
        self._rig = rig
        self._chance = chance
        self._faults = Faults(rig.cluster, chance, lambda: rig.supervisor.host)
        self._leg = leg
        self._show = show

    def play(self, seconds: float) -> None:
        """Let faults strike for so long."""
        end = time.monotonic() + seconds
        middle = end - seconds / 2
        while time.monotonic() < end:
            calm = time.monotonic() + CALM_EVERY_SECONDS
            while time.monotonic() < min(calm, end):
                self._strike()
                self._show(f"{self._leg.faults.total()} faults, {self._rig.watch.epochs} epochs")
            self._wait_for_progress()
            if self._rig.cluster.can_be_set_back and not self._leg.repaired and time.monotonic() > middle:
                self._show("PostgreSQL is set back, and repaired")
                set_back(self._rig)
                self._leg.repaired = repair(self._rig)
            self._rig.look_aside()

    def _strike(self) -> None:
        faults = [self._draw() for _ in range(2 if self._chance.random() < TWO_AT_ONCE else 1)]
        for fault in faults:
            self._rig.timeline.tell("fault", kind=fault.kind, where=fault.where)
            self._rig.blindfold.cover(fault.blinds)
            try:
                fault.make()
            except (TimeoutError, RuntimeError) as failure:
                self._rig.timeline.tell("not made", kind=fault.kind, where=fault.where, why=str(failure))
                self._leg.not_made += 1
            else:
                self._leg.faults[fault.kind] += 1
        self._go_on(self._chance.uniform(*FAULT_SECONDS))
        for fault in sorted(faults, key=lambda one: one.turn):
            fault.undo()
            self._rig.timeline.tell("healed", kind=fault.kind, where=fault.where)
        # only now: another host of the same service may be cut off longer than the first
        for fault in faults:
            self._rig.blindfold.uncover(fault.blinds)
        self._go_on(self._chance.uniform(*GAP_SECONDS))

    def _draw(self) -> Fault:
        if self._chance.random() < 0.18:
            supervisor = self._rig.supervisor
            seconds = self._chance.choice(CLOCK_STEPS)
            kinds = [
                Fault("usurped", "driver", supervisor.usurp, supervisor.thaw),
                Fault("killed", "driver", supervisor.kill, lambda: None),
                Fault(
                    f"clock {seconds:+d} s",
                    "driver",
                    lambda: supervisor.set_clock(seconds),
                    lambda: supervisor.set_clock(0, start_again=abs(seconds) > NOTICED_SECONDS),
                ),
            ]
            return self._chance.choice(kinds if self._rig.cluster.network.clocks else kinds[:2])
        return self._faults.draw()

    def _go_on(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        self._rig.wait(lambda: time.monotonic() > until, seconds + 60, "the moment")

    def _wait_for_progress(self) -> None:
        self._rig.timeline.tell("calm")
        if idle := self._rig.cluster.idle():
            self._leg.anomalies.append(f"the run has left hosts idle: {', '.join(idle)}")
        began = time.monotonic()
        try:
            ended = began + self._rig.progress()
        except TimeoutError as stuck:
            self._leg.anomalies.append(f"stuck: {stuck}")
            self._leg.waits.append(Recovery(began, time.monotonic() - began, os.getloadavg()[0]))
            self._rig.timeline.tell("stuck", why=str(stuck))
            return
        # a canary that dies meanwhile is a fault like others: what counts is the longest time without one
        deaths = [died for died in self._rig.supervisor.deaths_of_canaries if began < died < ended]
        began, ended = max(pairwise([began, *deaths, ended]), key=lambda wait: wait[1] - wait[0])
        recovery = Recovery(began, ended - began, os.getloadavg()[0])
        self._leg.recoveries.append(recovery)
        self._rig.timeline.tell("progress", took=str(recovery), epochs=self._rig.watch.epochs)


def play(leg: Leg, chosen: argparse.Namespace, seconds: float, show: Callable[[str], None]) -> None:
    """Play a leg, leave its page in its folder, and note in ``leg`` what it has shown."""
    folder, seed = leg.folder, leg.seed
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    show("the cluster starts")
    sinks = chosen.sinks.split(",")
    try:
        with Rig(folder, sinks, seed + 1, canaries=True, store=chosen.store, subnet=chosen.subnet) as rig:
            rig.begin()
            Nemesis(rig, random.Random(seed), leg, show).play(seconds)
            show("all is healed; the last rows")
            report = rig.finish()
            leg.anomalies += rig.aside.shown
            leg.letters = rig.aside.letters
            leg.canaries = rig.supervisor.canaries
            leg.counts.update(report.counts)
            leg.counts["ledger entries"] += len(rig.watch.recorded.entries)
            leg.anomalies += [*map(str, report.anomalies), *rig.watch.recorded.refusals()]
    except BaseException as failure:
        # a run that breaks off, or is ended by hand, is told like an anomaly: nothing has been judged
        traceback.print_exc()
        leg.anomalies.append(f"{BROKE_OFF}: {failure!r}")
        if not isinstance(failure, Exception):
            raise
    slowest = {"the slowest one": leg.slowest.steps(folder) if leg.slowest else []}
    leg.stuck = [[str(one), *one.steps(folder)] for one in leg.waits]
    print(f"the timeline: {write_page(folder, {'sinks': chosen.sinks, 'seed': seed, **leg.figures(), **slowest})}")
    if not leg.anomalies and not leg.late:
        # hundreds of megabytes of reads, of checkpoints and of servers' logs, which nobody will look at
        for left in folder.iterdir():
            if not left.name.startswith("timeline."):
                shutil.rmtree(left) if left.is_dir() else left.unlink()


def main() -> int:
    """Play what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sinks", default=",".join(SINKS), help="which of kafka, postgres, elasticsearch")
    parser.add_argument("--store", default="", choices=("", *STORES), help="where the checkpoint lies")
    parser.add_argument("--hours", type=float, default=1 / 6)
    parser.add_argument("--seed", type=int, default=random.randrange(10_000))
    parser.add_argument("--folder", type=Path, default=Path("artifacts/nemesis"))
    parser.add_argument("--subnet", default=SUBNET, help="three numbers; another one for each run at the same time")
    parser.add_argument("--keep", type=Path, help="a folder for the record of the run")
    chosen = parser.parse_args()
    if absent := missing():
        print(absent)
        return 1
    # so that nothing is left: an exit runs what a signal would not
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    name = "-".join([*chosen.sinks.split(","), *filter(None, [chosen.store])])
    seconds = chosen.hours * 3600
    legs = math.ceil(seconds / LEG_SECONDS)
    all_legs, record = Leg(chosen.seed, chosen.folder), Record("soak", chosen.seed)

    def figures() -> dict[str, Any]:
        what = {"sinks": chosen.sinks, "checkpoint": chosen.store or "local", "hours": round(chosen.hours, 2)}
        return what | all_legs.figures()

    with Progress(TextColumn("{task.description}"), TimeElapsedColumn()) as progress:
        task = progress.add_task("", total=None)
        for number in range(legs):
            seed = chosen.seed + number

            def show(line: str, number: int = number) -> None:
                before = f", {all_legs.faults.total()} faults before" if number else ""
                progress.update(task, description=f"hour {number + 1} of {legs}{before}: {line}")

            leg = Leg(seed, (chosen.folder / f"{name}-{seed}").absolute())
            try:
                play(leg, chosen, seconds / legs, show)
            finally:
                # after each leg, and of a run that is ended by hand: none gets lost because of what came after it
                all_legs.add(leg)
                if chosen.keep:
                    print(f"the record: {record.keep(chosen.keep, figures())}")
    print(json.dumps(figures(), indent=1))
    print(f"seed {chosen.seed}")
    return 1 if all_legs.anomalies or all_legs.late else 0


if __name__ == "__main__":
    sys.exit(main())
