"""A plan plays the same way each time, whatever was played before it."""

from __future__ import annotations

from epochsink.protocol.ledger_entries import encode
from simulation.determinism import DECODED
from simulation.explorer import Case, quiet
from simulation.mutants import MUTANTS


def test_every_step_of_a_plan_and_every_byte_of_its_ledger_is_the_same_again() -> None:
    case = Case(((30, ("timeout",)), (60, ("before",))), "KPE", 0)
    with quiet():
        assert case.trace() == case.trace()


def test_nothing_changes_an_entry_of_the_ledger_that_plans_share() -> None:
    """Neither the protocol nor a mutant."""
    DECODED.clear()
    with quiet():
        for mutant in MUTANTS:
            for variant in (mutant.variant, mutant.control):
                mutant.case.violations(variant)
    assert len(DECODED) > 100
    assert [data for data, entry in DECODED.items() if encode(entry) != data] == []
