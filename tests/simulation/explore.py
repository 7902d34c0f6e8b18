"""Explores fault plans for as long as one likes: ``python -m simulation.explore --minutes 10``.

Plans with two to five faults at random until the time is over; before these, if asked for, every plan with one fault
for every set of sinks and schedule. Prints the seed, the plans and the violations; ends with status 1 if there is one.
In plans at random a fault waits for a step where it meets something: ``Case(...).trace(WAITING)`` plays one again.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import multiprocessing
import random
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from proof.record import Record
from simulation import plans
from simulation.driver import PRODUCTION, WAITING
from simulation.explorer import Findings, explore, steps_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.queues import Queue

    from simulation.driver import Variant

GRIDS: Final = {"quick": plans.QUICK, "medium": plans.MEDIUM, "full": plans.FULL}
AT_ONCE: Final = 500
"""Plans of one kind before the next kind's turn."""


def main() -> int:
    """Run; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="time for all of it")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="of the random plans")
    parser.add_argument("--processes", type=int, default=1, help="each plays plans of its own")
    parser.add_argument("--sinks", default=",".join(plans.SINKS), help="sets of sinks, with commas between")
    parser.add_argument("--one-fault", choices=GRIDS, help="before: every plan with one fault of a grid")
    parser.add_argument("--keep", type=Path, help="a folder for the record of the run")
    chosen = parser.parse_args()
    console = Console()
    console.print(f"seed {chosen.seed}")
    record, findings = Record("simulation", chosen.seed), Findings()
    context = multiprocessing.get_context("spawn")
    results: Queue[Findings] = context.Queue()
    workers = [context.Process(target=work, args=(chosen, me, results)) for me in range(chosen.processes)]
    for worker in workers:
        worker.start()
    with Progress(TextColumn("{task.description}"), TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("", total=None)
        while results.qsize() or any(worker.is_alive() for worker in workers):
            while not results.empty():
                findings.merge(results.get())
            violations = sum(findings.violations.values())
            progress.update(task, description=f"{findings.plans:,} plans, {violations} violations")
            time.sleep(0.1)
    seconds = record.seconds
    broken = [f"a process has ended with status {worker.exitcode}" for worker in workers if worker.exitcode]
    console.print(findings.report(), *broken, sep="\n", markup=False, highlight=False)
    if chosen.keep:
        figures = {
            "plans": findings.plans,
            "struck": findings.struck,
            "plans by faults": {str(depth): count for depth, count in sorted(findings.by_depth.items())},
            "processes": chosen.processes,
            "plans a second": round(findings.plans / seconds, 1),
            "anomalies": [*map(str, findings.first.items()), *broken],
        }
        console.print(f"the record: {record.keep(chosen.keep, figures)}", soft_wrap=True)
    return 1 if findings.violations or broken or not findings.plans else 0


def work(chosen: argparse.Namespace, me: int, results: Queue[Findings]) -> None:
    """Be one process: play plans until the time is over, and tell what they have shown."""
    # what is there by now is never looked at again for rings of objects
    gc.freeze()
    pairs = list(itertools.product(chosen.sinks.split(","), (0, 1, 2)))
    turns = list(at_random(pairs, chosen.seed + me * 1_000_003))
    # the first turns too, when the time is too short for a turn of each
    random.Random(chosen.seed + me).shuffle(turns)
    # plays without a fault have said by now how many steps there are
    deadline = time.monotonic() + 60 * chosen.minutes
    if chosen.one_fault:
        grid = GRIDS[chosen.one_fault]
        for sinks, schedule in pairs:
            every = plans.one_fault(steps_of(sinks, schedule), (*grid, *plans.outside(sinks), *plans.backwards(sinks)))
            mine = itertools.islice(every, me, None, chosen.processes)
            tell(mine, sinks, schedule, deadline, results, variant=PRODUCTION)
    while time.monotonic() < deadline:
        for sinks, schedule, source in turns:
            tell(itertools.islice(source, AT_ONCE), sinks, schedule, deadline, results)


def at_random(pairs: list[tuple[str, int]], seed: int) -> Iterator[tuple[str, int, Iterator[plans.Plan]]]:
    """Yield endless sources of random plans with two to five faults."""
    for sinks, schedule in pairs:
        steps, some = steps_of(sinks, schedule), (*plans.outside(sinks), *plans.backwards(sinks))
        faults = plans.possible(plans.MEDIUM, sinks)
        for depth in (2, 3, 4, 5):
            yield sinks, schedule, plans.at_random(seed, steps, depth, faults)
        yield sinks, schedule, plans.another_too(seed, steps, some, faults)
        yield sinks, schedule, plans.late_and_backwards(seed, steps, sinks)
        yield sinks, schedule, plans.of_others(seed, steps, sinks)


def tell(
    source: Iterator[plans.Plan],
    sinks: str,
    schedule: int,
    deadline: float,
    results: Queue[Findings],
    *,
    variant: Variant = WAITING,
) -> None:
    """Play plans until they or the time are over; tell after each hundred or two what they have shown."""
    while time.monotonic() < deadline:
        seconds = max(0.0, deadline - time.monotonic())
        findings = explore(source, sinks, schedule, variant=variant, seconds=seconds, most=AT_ONCE // 4)
        if not findings.plans:
            return
        results.put(findings)


if __name__ == "__main__":
    sys.exit(main())
