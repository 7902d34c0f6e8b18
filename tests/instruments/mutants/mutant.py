"""What a mutant is: one change of the source that would do harm, and the tests that have to notice it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one file below ``connectors/epochsink``."""

    file: str
    old: str
    """Stands exactly once in the file."""
    new: str
    tests: str
    """Arguments of pytest: files of the repository, and ``-k`` if one of their tests is meant."""
    harm: str
    """What users would suffer."""
    equivalent: str = ""
    """Why no test can notice it; then it is not tried."""
