"""Mutants of connectors/epochsink/kafka."""

from mutants.mutant import Mutant

MUTANTS: list[Mutant] = []
