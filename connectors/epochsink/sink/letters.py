"""The dead letters of a sink, as an operator sees them: rows that the target refused and that were set aside."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from epochsink.sink.values import LastDone


@dataclass(frozen=True, slots=True)
class Letter:
    """One dead letter. ``id`` names it among those of its sink, for as long as it is there.

    ``code`` is the target's code or type of the error, "" if epochsink itself found it. ``row`` is what JSON can hold
    of the row. ``set_aside_at`` is in ISO 8601. ``pending``: its epoch is not applied yet; the next start applies it.
    """

    id: str
    epoch: int
    code: str
    error: str
    row: Any
    set_aside_at: str
    pending: bool = False


@dataclass(frozen=True, slots=True)
class Chosen:
    """Which letters of a sink: those with one of ``ids`` (empty: any) and of ``epoch`` (None: any)."""

    ids: tuple[str, ...] = ()
    epoch: int | None = None


@dataclass(frozen=True, slots=True)
class Retried:
    """What a retry did with the chosen letters: each was written, or superseded, or is still a letter.

    ``superseded``: the target holds a newer row of the key, which stays; the letter is gone. ``kept`` letters were
    refused again or cannot be retried, ``reason`` is why one of them was.
    """

    written: int = 0
    superseded: int = 0
    kept: int = 0
    reason: str = ""

    def __add__(self, other: Retried) -> Retried:
        """Return the sum of both."""
        return Retried(
            self.written + other.written,
            self.superseded + other.superseded,
            self.kept + other.kept,
            self.reason or other.reason,
        )


def over_limit(refused: int, rows: int, limit: float) -> bool:
    """Return whether ``refused`` of ``rows`` are more than the share ``limit``, as it is written: 0.29 of 100 is 29."""
    return refused > Fraction(repr(limit)) * rows  # the product of floats is 28.999999999999996


class Letters(ABC):
    """The dead letters that one sink of one query has set aside; safe beside the running query.

    Methods may be called twice, by two processes at once, and again after a crash at any point: each letter's row
    reaches the target at most once, and is not lost. Letters of an epoch that is not yet applied are not touched. What
    the target raises may be passed on.
    """

    applied: LastDone | None = None
    """Set by the caller: the newest epoch of the sink that is done, as the ledger has it."""

    @abstractmethod
    def read(self, chosen: Chosen, limit: int) -> Sequence[Letter]:
        """Return at most ``limit`` of the chosen letters, newest first; pending ones too."""

    @abstractmethod
    def count(self, chosen: Chosen) -> int:
        """Return the number of chosen letters that are not pending: those that `retry` and `drop` take."""

    @abstractmethod
    def caution(self) -> str:
        """Return what a retry does to rows that the target holds by now, one sentence; "" if nothing."""

    @abstractmethod
    def retry(self, chosen: Chosen) -> Retried:
        """Write the chosen letters' rows to the target as the sink does, each once, and remove the letters.

        A row that is refused again stays a letter, or becomes a new one with the new reason.
        """

    @abstractmethod
    def drop(self, chosen: Chosen) -> int:
        """Delete the chosen letters for good; return how many."""
