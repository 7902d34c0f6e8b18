"""Visit every state that the specification reaches, breadth first, and show the way to a bad one.

    PYTHONPATH=tests python -m model.exploration 2

By hand: all plans of two faults, or three. They are explored by the kinds of their faults, one sequence after another,
so that the memory suffices; of each, the states by number of faults, the depth and whatever is wrong are printed.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from model.specification import FAULTS, Protocol, good, violation
from model.state import State


@dataclass
class Exploration:
    """The states visited so far, by number, and the move that reached each first.

    A state that was reached with fewer faults is not visited again: all that may follow it follows it there too.
    """

    protocol: Protocol = field(default_factory=Protocol)
    until_found: bool = False
    """Whether to stop at the first violation."""
    states: list[State] = field(default_factory=lambda: [State()])
    numbers: dict[State, int] = field(default_factory=lambda: {State(): 0})
    reached: list[tuple[int, int, str]] = field(default_factory=lambda: [(0, 0, "")])
    """The depth of each state, the state before it, and the move."""
    steps: list[tuple[int, int]] = field(default_factory=list)
    by_faults: list[int] = field(default_factory=list)
    """How many states were reached with no fault, with one, ..."""
    found: dict[str, int] = field(default_factory=dict)
    """The first state of each violation."""

    def explore(self, plan: Sequence[Collection[str]], place: int = 0, each: int = 1) -> Exploration:
        """Visit all states within a plan's faults: one of the kinds of each of its places, in this order, or fewer.

        Of the last fault's cases one of every ``each`` is taken.
        """
        first, faults = 0, list(plan)
        while True:
            later = self._visit_from(
                first, faults[0] if faults else (), *((place, each) if len(faults) == 1 else (0, 1))
            )
            self.by_faults.append(len(self.states) - first)
            first = len(self.states)
            if not faults or (self.found and self.until_found):
                return self if self.found and self.until_found else self._look_for_dead_ends()
            for source, name, state in later:
                self._number(source, name, state)
            faults = faults[1:]

    def _visit_from(self, at: int, kinds: Collection[str], place: int, each: int) -> list[tuple[int, str, State]]:
        """Visit the states from a number on, and those that steps reach from them; return what faults reach."""
        later, cases = [], itertools.count()
        while at < len(self.states) and not (self.found and self.until_found):
            if wrong := violation(self.states[at]):
                self.found.setdefault(wrong, at)
            for move in () if wrong else self.protocol.moves(self.states[at]):
                if not move.fault:
                    self.steps.append((at, self._number(at, move.name, move.to)))
                elif move.fault in kinds and next(cases) % each == place % each and move.to not in self.numbers:
                    later.append((at, f"-- {move.name}", move.to))
            at += 1
        return later

    def _number(self, source: int, name: str, state: State) -> int:
        number = self.numbers.setdefault(state, len(self.states))
        if number == len(self.states):
            self.states.append(state)
            self.reached.append((self.reached[source][0] + 1, source, name))
        return number

    def _look_for_dead_ends(self) -> Exploration:
        """Find a state from which no steps, without a further fault, lead to a good end."""
        before: list[list[int]] = [[] for _ in self.states]
        for source, target in self.steps:
            before[target].append(source)
        live = [at for at, state in enumerate(self.states) if good(state) or violation(state)]
        leads = bytearray(len(self.states))
        while live:
            at = live.pop()
            if not leads[at]:
                leads[at] = 1
                live += before[at]
        if (dead := leads.find(0)) >= 0:
            self.found["no progress"] = dead
        return self

    def path(self, at: int) -> list[str]:
        """Return the moves that lead to a state; faults begin with dashes."""
        names: list[str] = []
        while at:
            _, at, name = self.reached[at]
            names.append(name)
        return names[::-1]

    def report(self) -> Iterable[str]:
        """Yield what was visited and what is wrong, in lines."""
        depth = max(depth for depth, *_ in self.reached)
        yield f"{len(self.states):,} states ({' + '.join(f'{n:,}' for n in self.by_faults)} by faults), depth {depth}"
        for wrong, at in self.found.items():
            yield f"{wrong}: {', '.join(self.path(at))}"


def main() -> None:
    """Explore all plans with so many faults."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("faults", type=int)
    parser.add_argument("--lacks", default="", help="the rule that is taken away")
    parser.add_argument("--kinds", nargs="*", default=FAULTS, choices=FAULTS)
    arguments = parser.parse_args()
    for plan in itertools.product(arguments.kinds, repeat=arguments.faults):
        began = time.monotonic()
        exploration = Exploration(Protocol(arguments.lacks)).explore([[kind] for kind in plan])
        report = "\n    ".join(exploration.report())
        sys.stdout.write(f"{', '.join(plan)}: {report}; {time.monotonic() - began:.0f} s\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
