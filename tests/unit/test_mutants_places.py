"""Each mutant changes one place of the source: a change of the code that moves it is noticed at once."""

from __future__ import annotations

from mutants.run import FAMILIES, misplaced


def test_each_mutant_has_its_place_in_the_source() -> None:
    assert [fault for mutants in FAMILIES.values() for mutant in mutants if (fault := misplaced(mutant))] == []
