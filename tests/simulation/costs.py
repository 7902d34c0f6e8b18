"""Where the time of a plan goes: ``python -m simulation.costs`` plays a few thousand under a profiler.

Prints the milliseconds of a plan (two to three times as many as without the profiler) and the share of each part of the
code. What a function of C takes counts for its caller.
"""

from __future__ import annotations

import cProfile
import itertools
import pstats
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Final

from simulation import plans
from simulation.driver import WAITING
from simulation.explore import at_random
from simulation.explorer import explore

SEED: Final = 9
PLANS: Final = 20
"""Of each kind, for each set of sinks and schedule."""
_PLAYED: Final = frozenset({"scheduler.py", "threads.py"})


def main() -> int:
    """Play, and print; return the exit status."""
    pairs = list(itertools.product(plans.SINKS, (0, 1, 2)))
    turns = [
        (sinks, schedule, list(itertools.islice(source, PLANS))) for sinks, schedule, source in at_random(pairs, SEED)
    ]
    profiler, played = cProfile.Profile(), 0
    for sinks, schedule, some in turns:
        profiler.enable()
        played += explore(some, sinks, schedule, variant=WAITING).plans
        profiler.disable()
    seconds = _seconds_of(pstats.Stats(profiler))
    total = seconds.total()
    print(f"seed {SEED}, {played} plans, {1000 * total / played:.1f} ms a plan under the profiler")  # noqa: T201
    for part, its in seconds.most_common():
        print(f"{100 * its / total:5.1f} %  {part}")  # noqa: T201
    return 0


def _seconds_of(profile: Any) -> Counter[str]:
    """Return the seconds of each part of the code, without what it calls in other parts."""
    seconds: Counter[str] = Counter()
    for (file, _, _), (_, _, own, _, callers) in profile.stats.items():
        if file != "~":
            seconds[_part(file)] += own
            continue
        for (caller, _, _), (_, _, at_caller, _) in callers.items():
            seconds[_part(caller)] += at_caller
    return seconds


def _part(file: str) -> str:
    path = Path(file)
    if "epochsink" in path.parts:
        return "epochsink"
    if "simulation" in path.parts:
        return "the scheduler and the threads that it plays" if path.name in _PLAYED else "the simulated world"
    return "Python's library"


if __name__ == "__main__":
    sys.exit(main())
