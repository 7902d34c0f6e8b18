"""Explores fault plans for as long as one likes: ``python tests/simulation/explore.py --seconds 600``.

First every plan with one fault for every set of sinks and every schedule, then plans with two and more faults at random
until the time is over. Prints the seed, the plans and the violations; ends with status 1 if there is one.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

# in place of this folder, in which simulation.py would hide the package
sys.path[0] = str(Path(__file__).resolve().parents[1])

from simulation import plans  # noqa: E402 - found by the path above
from simulation.explorer import Findings, explore, steps_of  # noqa: E402 - likewise

if TYPE_CHECKING:
    from collections.abc import Iterator


def main() -> int:
    """Run; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="time for all of it")
    parser.add_argument("--seed", type=int, default=None, help="of the random plans")
    parser.add_argument("--sinks", default=",".join(plans.SINKS), help="sets of sinks, with commas between")
    parser.add_argument(
        "--faults", choices=["quick", "medium", "full"], default="medium", help="grid of one-fault plans"
    )
    parser.add_argument("--only-random", action="store_true", help="leave the plans with one fault out")
    chosen = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if chosen.seed is None else chosen.seed
    deadline = time.monotonic() + chosen.seconds
    grid = {"quick": plans.QUICK, "medium": plans.MEDIUM, "full": plans.FULL}[chosen.faults]
    say(f"seed {seed}")
    findings = Findings()
    pairs = list(itertools.product(chosen.sinks.split(","), (0, 1, 2)))
    if not chosen.only_random:
        one_fault(pairs, grid, deadline, findings)
    at_random(pairs, seed, deadline, findings)
    say(findings.report())
    return 1 if findings.violations else 0


def one_fault(pairs: list[tuple[str, int]], grid: tuple[plans.Fault, ...], deadline: float, findings: Findings) -> None:
    """Play every plan with one fault."""
    for sinks, schedule in pairs:
        before = findings.plans
        every = plans.one_fault(steps_of(sinks, schedule), (*grid, *plans.outside(sinks), *plans.backwards(sinks)))
        explore(every, sinks, schedule, findings=findings, seconds=max(0.0, deadline - time.monotonic()))
        tell(f"one fault, {sinks}, schedule {schedule}", before, findings)


def at_random(pairs: list[tuple[str, int]], seed: int, deadline: float, findings: Findings) -> None:
    """Play random plans with two to five faults in turns, until the time is over."""
    sources: list[tuple[str, str, int, Iterator[plans.Plan]]] = []
    for sinks, schedule in pairs:
        steps, some = steps_of(sinks, schedule), (*plans.outside(sinks), *plans.backwards(sinks))
        sources += [
            (f"{depth} faults", sinks, schedule, plans.at_random(seed, steps + 25 * depth, depth, plans.MEDIUM))
            for depth in (2, 3, 4, 5)
        ]
        sources += [
            ("from outside and another", sinks, schedule, plans.another_too(seed, steps + 25, some, plans.MEDIUM)),
            ("set back and late", sinks, schedule, plans.late_and_backwards(seed, steps + 25, sinks)),
        ]
    while time.monotonic() < deadline:
        for what, sinks, schedule, source in sources:
            if time.monotonic() >= deadline:
                break
            before = findings.plans
            explore(source, sinks, schedule, findings=findings, most=500)
            tell(f"{what}, {sinks}, schedule {schedule}", before, findings)


def tell(what: str, before: int, findings: Findings) -> None:
    """Print one line of progress."""
    violations = sum(findings.violations.values())
    say(f"{what}: {findings.plans - before} plans; {findings.plans} in all, {violations} violations")


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
