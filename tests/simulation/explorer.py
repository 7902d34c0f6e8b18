"""Plays many plans and gathers what they violate."""

from __future__ import annotations

import gc
import itertools
import logging
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from shares import SHARE

from simulation.driver import PRODUCTION, Variant
from simulation.invariants import verdict
from simulation.simulation import play

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from simulation.plans import Plan


_SEARCHED_AFTER: Final = (100_000, 20, 100)
"""How many more objects there are when Python looks for rings among them; the others as in `gc.set_threshold`."""


@dataclass(frozen=True, slots=True)
class Case:
    """Everything that it takes to play one history again."""

    plan: Plan
    sinks: str
    schedule: int

    def violations(self, variant: Variant = PRODUCTION) -> list[str]:
        """Play it and return what it violates."""
        return verdict(play(self.plan, self.sinks, self.schedule, variant), self.plan)

    def trace(self, variant: Variant = PRODUCTION) -> str:
        """Play it and return every step."""
        return "\n".join(play(self.plan, self.sinks, self.schedule, variant, trace=True).trace or [])


@dataclass(slots=True)
class Findings:
    """How many plans were judged, in how many of them every fault struck, and the first cases of each violation."""

    plans: int = 0
    struck: int = 0
    by_depth: Counter[int] = field(default_factory=Counter)
    violations: Counter[tuple[str, str]] = field(default_factory=Counter)
    first: dict[tuple[str, str], Case] = field(default_factory=dict)

    def add(self, case: Case, found: list[str], struck: int) -> None:
        """Count one played plan."""
        self.plans += 1
        self.struck += struck >= len(case.plan)
        self.by_depth[len(case.plan)] += 1
        faults = "+".join(fault[0] for _, fault in case.plan)
        for violation in found:
            key = (violation.splitlines()[0][:150], faults)
            self.violations[key] += 1
            self.first.setdefault(key, case)

    def merge(self, others: Findings) -> None:
        """Add what others have found."""
        self.plans += others.plans
        self.struck += others.struck
        self.by_depth += others.by_depth
        self.violations += others.violations
        self.first = {**others.first, **self.first}

    def report(self) -> str:
        """Return the violations, most frequent first, each with its first case."""
        lines = [f"{count} x {key}: {self.first[key]}" for key, count in self.violations.most_common()]
        return "\n".join(
            [f"{self.plans} plans ({self.struck} with every fault), {sum(self.violations.values())} violations", *lines]
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Silence all logs: thousands of faults are logged on purpose, and to make a record takes as long as a step."""
    before = logging.root.manager.disable
    logging.disable()
    try:
        yield
    finally:
        logging.disable(before)


@contextmanager
def seldom_searched() -> Iterator[None]:
    """Let Python look for rings of objects after some hundred plans only: each leaves few, and a look takes long."""
    before = gc.get_threshold()
    gc.set_threshold(*_SEARCHED_AFTER)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def steps_of(sinks: str, schedule: int, variant: Variant = PRODUCTION) -> int:
    """Return how many steps a run without faults makes before the healthy run."""
    return play((), sinks, schedule, variant).steps_before_healing


def explore(
    plans: Iterable[Plan],
    sinks: str,
    schedule: int,
    *,
    variant: Variant = PRODUCTION,
    findings: Findings | None = None,
    seconds: float | None = None,
    most: int | None = None,
) -> Findings:
    """Play this run's share of the plans, at most of ``most`` of them, and judge each, until the time is over."""
    findings = findings or Findings()
    deadline = None if seconds is None else time.monotonic() + seconds
    with quiet(), seldom_searched():
        for plan in SHARE.of(itertools.islice(plans, most)):
            if deadline and time.monotonic() > deadline:
                break
            simulation = play(plan, sinks, schedule, variant)
            findings.add(Case(plan, sinks, schedule), verdict(simulation, plan), simulation.struck)
            simulation.forget()
    return findings
