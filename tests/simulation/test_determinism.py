"""A plan plays the same way each time, whatever was played before it."""

from __future__ import annotations

import itertools

import pytest

from epochsink.protocol.ledger_entries import encode
from simulation import plans
from simulation.determinism import DECODED
from simulation.driver import WAITING
from simulation.explorer import Case, quiet, steps_of
from simulation.mutants import MUTANTS
from simulation.scheduler import Scheduler


def test_every_step_of_a_plan_and_every_byte_of_its_ledger_is_the_same_again() -> None:
    case = Case(((30, ("timeout",)), (60, ("before",))), "KPE", 0)
    with quiet():
        assert case.trace() == case.trace()


def test_nothing_changes_an_entry_of_the_ledger_that_plans_share() -> None:
    """Neither the protocol nor a mutant."""
    DECODED.clear()
    with quiet():
        for mutant in MUTANTS:
            mutant.case.violations(mutant.variant)
    assert len(DECODED) > 100
    assert [data for data, entry in DECODED.items() if encode(entry) != data] == []


@pytest.mark.parametrize("schedule", [0, 1, 2])
@pytest.mark.parametrize("sinks", ["K", "PE"])
def test_a_thread_that_goes_on_at_once_plays_what_it_would_play_after_handing_over(
    sinks: str, schedule: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = 9_000 + schedule
    print(f"seed {seed}")  # noqa: T201 - shown when the test fails
    random = plans.at_random(seed, steps_of(sinks, schedule), 2, (*plans.MEDIUM, *plans.outside(sinks)))
    cases = [Case(plan, sinks, schedule) for plan in itertools.islice(random, 25)]
    with quiet():
        played = [case.trace(WAITING) for case in cases]
        monkeypatch.setattr(Scheduler, "_goes_on", lambda _: False)
        assert [case.trace(WAITING) for case in cases] == played
