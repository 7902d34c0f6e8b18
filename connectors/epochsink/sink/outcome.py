"""What became of something prepared."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Outcome(enum.Enum):
    """What became of something prepared. A time-out is UNKNOWN, never ABORTED."""

    COMMITTED = "committed"
    ABORTED = "aborted"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Verdict:
    """An outcome and the evidence for it, in words for the operator."""

    outcome: Outcome
    evidence: str = ""


COMMITTED = Verdict(Outcome.COMMITTED)
