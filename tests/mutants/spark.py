"""Mutants of connectors/epochsink/spark."""

from mutants.mutant import Mutant

MUTANTS: list[Mutant] = []
