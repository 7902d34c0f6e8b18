"""The simulation can fail: each part of the protocol taken away, each rule broken, does harm in some plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from simulation.driver import PRODUCTION
from simulation.explorer import Case, quiet
from simulation.mutants import MUTANTS, Mutant

if TYPE_CHECKING:
    from collections.abc import Iterator

NEARBY = 40


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_killed(mutant: Mutant) -> None:
    """The recorded plan, or one a few steps off if the code has moved, kills the mutant and spares the real code."""
    with quiet():
        for case in near(mutant.case):
            if case.violations(mutant.variant):
                spared = not case.violations(mutant.control)
                assert spared or mutant.control is not PRODUCTION, case
                if spared:
                    return
    pytest.fail(f"{mutant.name} survived {mutant.case} and its neighbours: find it another plan")


def near(case: Case) -> Iterator[Case]:
    """Yield a case, and the same a few steps earlier and later."""
    yield case
    for shift in range(1, NEARBY + 1):
        for by in (shift, -shift):
            yield Case(tuple((number + by, fault) for number, fault in case.plan), case.sinks, case.schedule)
