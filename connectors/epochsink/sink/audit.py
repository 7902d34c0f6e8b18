"""What an audit compares: the receipt of a done epoch with what the target holds of it."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from epochsink.sink.values import Committables


class Compared(enum.StrEnum):
    """How receipt and target compare."""

    AGREES = "agrees"
    DIFFERS = "differs"
    NOT_COMPARED = "not compared"


@dataclass(frozen=True, slots=True)
class Comparison:
    """How one epoch's receipt compares with the target. ``found`` rows are counted there, None if none were counted."""

    epoch: int
    result: Compared
    rows: int
    found: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class Receipt:
    """What the ledger says that a done epoch did in one sink.

    ``rows`` were written, ``deleted`` of them delete a key, ``set_aside`` became dead letters (None: not known).
    ``parts`` are as recorded; they are empty if the ledger no longer keeps them.
    """

    epoch: int
    rows: int
    deleted: int
    set_aside: int | None
    parts: Committables

    def counted(self, found: int, expected: int, doubt: str) -> Comparison:
        """Return how the ``found`` rows compare with the ``expected`` ones; ``doubt`` says what explains a difference.

        If it is not known how many rows were set aside, a lower count is not compared.
        """
        if found == expected:
            return Comparison(self.epoch, Compared.AGREES, self.rows, found, "")
        if self.set_aside is None and found < expected:
            return self.not_compared(f"{found} of {expected} row(s) found, and how many were set aside is not known")
        reason = f"the target holds {found} row(s) in place of {expected}: {doubt}"
        return Comparison(self.epoch, Compared.DIFFERS, self.rows, found, reason)

    def differs(self, reason: str) -> Comparison:
        """Return that the target does not hold what it must hold."""
        return Comparison(self.epoch, Compared.DIFFERS, self.rows, None, reason)

    def not_compared(self, reason: str) -> Comparison:
        """Return that nothing was compared, or nothing follows from what was."""
        return Comparison(self.epoch, Compared.NOT_COMPARED, self.rows, None, reason)
