"""What an operator asks of the sinks of one participant, beside their epochs."""
# ruff: noqa: ARG002 - the defaults take what subclasses need

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Final

from epochsink.sink.audit import Comparison, Receipt
from epochsink.sink.letters import Letters
from epochsink.sink.marks import ReadMarks
from epochsink.sink.remnants import Remnant
from epochsink.sink.values import Committable, Committables, Finding, LastDone

TRUSTS_MARKERS: Final = (
    "THIS IS RIGHT only if a restore or a failover took back these rows together with their markers: if only "
    "markers were deleted, the rows are there already, and a table without a key would have them twice"
)
"""What an operator must know before a repair that looks at markers alone."""


class Losses:
    """One search for what a target lacks, from its newest done epoch back. By default, its marks tell.

    ``marks`` is that of the participant, and ``warning`` what an operator must know before epochs are applied again.
    The search begins after `Participant.open`.
    """

    def __init__(self, marks: ReadMarks, warning: str = TRUSTS_MARKERS) -> None:
        self._marks = marks
        self.warning = warning

    def lacking(self, sink: str, done: LastDone) -> Committables:
        """Return the parts of a done epoch that the target lacks. Raises `WentBack` if that cannot be told."""
        newest = self._marks(sink, done, None).newest
        return done.parts if newest is None or newest < done.epoch else ()

    def holds_earlier(self, sink: str) -> bool:
        """Whether the answers of `lacking` prove that the target holds all earlier epochs."""
        return True


class Operator:
    """Answers an operator's commands; `Participant.operator` returns it. No epoch needs it.

    Each method has a default, so a kind of sink overrides what it can say. What the target raises may be passed on.
    """

    def examine(self, sink: str) -> Iterable[Finding]:
        """Look at one sink's live target as an operator does before a start; before `Participant.open`. No row moves.

        Server, clock, settings, rights, and an epoch without rows that is prepared and rolled back. Creates what
        `Participant.check` creates without knowing the columns.
        """
        return ()

    def pending(self) -> Sequence[Remnant]:
        """Return what these sinks have pending in the target, of any generation, and what it blocks."""
        return ()

    def audit(self, sink: str, receipts: Sequence[Receipt], newest: int) -> Sequence[Comparison]:
        """Compare receipts of done epochs with what the target holds, whose marks agree with the ledger. Reads only.

        ``newest`` is the epoch that no later one has begun to replace; -1 if there is none.
        """
        return [receipt.not_compared("this kind of sink counts no rows") for receipt in receipts]

    def letters(self, sink: str) -> Letters | None:
        """Return one sink's dead letters. None if this kind of sink has none."""
        return None

    def losses(self) -> Losses | None:
        """Return a search for what targets that were set back lack; before `Participant.open` too.

        None if done epochs of this kind of sink cannot be applied again.
        """
        return None

    def describe(self, part: Committable) -> str:
        """Return a recorded part in words; before `Participant.open`."""
        return json.dumps(part)
