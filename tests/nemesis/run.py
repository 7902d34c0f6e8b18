"""One run of the nemesis: faults at random on a cluster of hosts, readers beside, and the checker's word at the end.

    python -m nemesis.run --sinks kafka,postgres --seconds 600 [--seed N] [--folder F]

Every few seconds a fault strikes and is healed again; some drivers are canaries, which kill themselves with an epoch
prepared. From time to time all is healed, and the next epoch has to come within 30 s. Status 0 only without an anomaly.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from nemesis.cluster import SINKS
from nemesis.faults import CLOCK_STEPS, NOTICED_SECONDS, Fault, Faults
from nemesis.hosts import SUBNET, missing
from nemesis.page import write_page
from nemesis.recovery import Recovery
from nemesis.rig import PROGRESS_SECONDS, Rig
from nemesis.store import STORES

if TYPE_CHECKING:
    from epochsink.testing import Report

CALM_EVERY_SECONDS: Final = 75.0


class Nemesis:
    """Makes faults and heals them."""

    def __init__(self, rig: Rig, chance: random.Random) -> None:
        self._rig = rig
        self._chance = chance
        self._faults = Faults(rig.cluster, chance)
        self.count = 0
        self.recoveries: list[Recovery] = []
        self.stuck: list[str] = []

    def play(self, seconds: float) -> None:
        """Let faults strike for so long."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            calm = time.monotonic() + CALM_EVERY_SECONDS
            while time.monotonic() < min(calm, end):
                self._strike()
            self._wait_for_progress()

    def _strike(self) -> None:
        faults = [self._draw() for _ in range(2 if self._chance.random() < 0.25 else 1)]
        for fault in faults:
            self._rig.timeline.tell("fault", kind=fault.kind, where=fault.where)
            self._rig.blindfold.cover(fault.blinds)
            self.count += 1
            try:
                fault.make()
            except (TimeoutError, RuntimeError) as failure:
                self._rig.timeline.tell("not made", kind=fault.kind, where=fault.where, why=str(failure))
        self._go_on(self._chance.uniform(3, 9))
        # the network first: a server that starts again has to be reached
        for fault in sorted(faults, key=lambda one: one.restarts):
            fault.undo()
            self._rig.timeline.tell("healed", kind=fault.kind, where=fault.where)
            self._rig.blindfold.uncover(fault.blinds)
        self._go_on(self._chance.uniform(1, 4))

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
        began = time.monotonic()
        try:
            ended = began + self._rig.progress()
        except TimeoutError as stuck:
            self.stuck.append(str(stuck))
            self._rig.timeline.tell("stuck", why=str(stuck))
            return
        # a canary that dies meanwhile is a fault like others
        began = max(began, self._rig.supervisor.canary_died)
        recovery = Recovery(began, max(0.0, ended - began), os.getloadavg()[0])
        self.recoveries.append(recovery)
        self._rig.timeline.tell("progress", took=str(recovery), epochs=self._rig.watch.epochs)


def play(folder: Path, chosen: argparse.Namespace) -> tuple[Report, Nemesis]:
    """Play one run; return what the checker says."""
    sinks, seed = chosen.sinks.split(","), chosen.seed
    with Rig(folder, sinks, seed + 1, canaries=True, store=chosen.store, subnet=chosen.subnet) as rig:
        rig.begin()
        nemesis = Nemesis(rig, random.Random(seed))
        nemesis.play(chosen.seconds)
        return rig.finish(), nemesis


def main() -> int:
    """Play what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sinks", default=",".join(SINKS), help="which of kafka, postgres, elasticsearch")
    parser.add_argument("--store", default="", choices=("", *STORES), help="where the checkpoint lies")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=random.randrange(10_000))
    parser.add_argument("--folder", type=Path, default=Path("artifacts/nemesis"))
    parser.add_argument("--subnet", default=SUBNET, help="three numbers; another one for each run at the same time")
    chosen = parser.parse_args()
    if absent := missing():
        print(absent)
        return 1
    # so that nothing is left: an exit runs what a signal would not
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    name = "-".join([*chosen.sinks.split(","), *filter(None, [chosen.store]), str(chosen.seed)])
    folder = (chosen.folder / name).absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    report, nemesis = play(folder, chosen)
    slowest = max(nemesis.recoveries, key=lambda one: one.seconds, default=None)
    late = [f"progress took {one}" for one in nemesis.recoveries if one.seconds > PROGRESS_SECONDS]
    summary = {
        "sinks": chosen.sinks,
        "checkpoint": chosen.store or "local",
        "seed": chosen.seed,
        "seconds": chosen.seconds,
        "faults": nemesis.count,
        "progress after healing": [str(one) for one in nemesis.recoveries],
        "the slowest one": slowest.steps(folder) if slowest else [],
        "counts": report.counts,
        f"later than {PROGRESS_SECONDS:.0f} s": late,
        "anomalies": [*nemesis.stuck, *map(str, report.anomalies)],
    }
    page = write_page(folder, summary)
    (folder / "summary.json").write_text(json.dumps(summary, indent=1))
    print(json.dumps(summary, indent=1))
    print(f"the timeline: {page}")
    return 1 if summary["anomalies"] or late else 0


if __name__ == "__main__":
    sys.exit(main())
