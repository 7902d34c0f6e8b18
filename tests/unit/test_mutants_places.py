"""Each mutant changes one place of the source: a change of the code that moves it is noticed at once."""

from __future__ import annotations

from mutants.run import FAMILIES, misplaced
from mutants.unseen import UNSEEN


def test_each_mutant_has_its_place_in_the_source() -> None:
    assert [fault for mutants in FAMILIES.values() for mutant in mutants if (fault := misplaced(mutant))] == []


def test_what_the_simulation_cannot_see_is_said_of_mutants() -> None:
    every = {(mutant.file, mutant.old) for mutants in FAMILIES.values() for mutant in mutants}
    assert UNSEEN.keys() - every == set()
