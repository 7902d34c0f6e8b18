"""Mutants of connectors/epochsink/elasticsearch."""

from mutants.mutant import Mutant

MUTANTS: list[Mutant] = []
