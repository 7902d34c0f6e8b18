"""What the simulation's histories show is what the specification allows; what broken code shows is not."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
from shares import SHARE

from model.simulated import SET_BACK, Replays, Watched
from model.traces import Refused, Traces
from simulation import plans
from simulation.explorer import Case, quiet, steps_of
from simulation.mutants import MUTANTS
from simulation.plans import Plan
from simulation.test_mutants import near

pytestmark = pytest.mark.plans

CAUGHT = {
    "ledger without a fence",
    "ledger overwritten",
    "no generation check",
    "replay not recorded",
    "no digest of the offsets",
    "commit before the decision",
    "abort at the re-run what is recorded",
    "abort at recovery what is recorded",
    "markers not compared at the start",
    "older ledger not noticed at the start",
    "conclusion without reading the ledger again",
    "spool listed after the ledger is read",
    "tidy beside an attempt",
    "abort after an unknown append",
    "a superseded driver ends what it has recorded",
    "a second replay is built from the parts before the first",
    "markers not compared in the commit",
}
"""Mutants whose histories the specification does not allow, whatever the simulation's own judge says of them."""


def expect_allowed(sinks: str, schedule: int, some: Iterable[Plan]) -> None:
    replays = Replays()
    for plan in SHARE.of(some):
        replays.play(Case(plan, sinks, schedule))
    print(replays.report())  # noqa: T201 - what was replayed is the result
    assert not replays.refused, replays.report()


@pytest.mark.parametrize("sinks", plans.SINKS)
def test_plans_with_one_fault(sinks: str) -> None:
    """A part of those that the simulation plays, in one of the three schedules."""
    schedule = (SHARE.place + plans.SINKS.index(sinks)) % 3
    faults = plans.possible(plans.QUICK, sinks)
    expect_allowed(sinks, schedule, itertools.islice(plans.one_fault(steps_of(sinks, schedule), faults), 0, None, 7))


@pytest.mark.parametrize("sinks", plans.SINKS)
def test_plans_with_two_faults(sinks: str) -> None:
    schedule = (SHARE.place + plans.SINKS.index(sinks)) % 3
    seed = 6_000 + plans.SINKS.index(sinks)
    two = plans.at_random(seed, steps_of(sinks, schedule) + 25, 2, plans.MEDIUM)
    expect_allowed(sinks, schedule, itertools.islice(two, 800))


@pytest.mark.parametrize("sinks", plans.SINKS)
def test_plans_in_which_a_target_is_set_back(sinks: str) -> None:
    schedule = (SHARE.place + plans.SINKS.index(sinks)) % 3
    seed = 7_000 + plans.SINKS.index(sinks)
    steps, backwards = steps_of(sinks, schedule) + 25, [one for one in plans.backwards(sinks) if one[0] in SET_BACK]
    expect_allowed(sinks, schedule, itertools.islice(plans.another_too(seed, steps, backwards, plans.SIMPLE), 160))


def test_a_stop_that_nothing_explains_is_not_allowed_after_a_set_back_either() -> None:
    """PostgreSQL repeats a commit that a failover has lost, if that is prepared again, and the query goes on."""
    stops = 0
    for step in range(1, steps_of("P", 0)):
        history = Watched(((step, ("failover", "P", 1)),), "P")
        with quiet():
            history.play()
        if not history.struck or history.loud is not None:
            continue
        stops += 1
        (watch,) = history.watches
        last = max(at for at, event in enumerate(watch.events) if event[0] == "ledger_is")
        stopped = [*watch.events[: last + 1], ("stops", history.active.number)]
        Traces().replay(watch.events, transactions=True, documents=False)
        with pytest.raises(Refused):
            Traces().replay(stopped, transactions=True, documents=False)
    assert stops > 10


@pytest.mark.parametrize("name", sorted(CAUGHT))
def test_a_mutant_shows_what_is_not_allowed(name: str) -> None:
    (mutant,) = (one for one in MUTANTS if one.name == name)
    replays = Replays()
    for case in near(mutant.case):
        if not replays.play(case, mutant.variant):
            assert Replays().play(case, mutant.control), case
            return
    pytest.fail(f"all that {name} shows is allowed")
