"""Mutants of connectors/epochsink/spark that tests without a JVM notice."""

from mutants.mutant import Mutant

MUTANTS: list[Mutant] = []
