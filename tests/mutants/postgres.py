"""Mutants of connectors/epochsink/postgres."""

from mutants.mutant import Mutant

MUTANTS: list[Mutant] = []
