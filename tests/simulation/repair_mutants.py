"""Mutants of the repair of a target that was set back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from epochsink.cli.repair import Repair
from epochsink.protocol.sweep import end_orphans, recorded_parts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from epochsink.protocol.ledger_history import LedgerHistory
    from epochsink.protocol.repair import Lack
    from epochsink.sink import Participant


class NewestFirst(Repair):
    """Applies the newest lacking epoch first: a repair that is killed then looks complete."""

    def _lacking(self, participant: Participant, history: LedgerHistory) -> list[Lack]:
        return super()._lacking(participant, history)[::-1]


class NewestAlone(Repair):
    """Applies only the newest lacking epoch."""

    def _lacking(self, participant: Participant, history: LedgerHistory) -> list[Lack]:
        return super()._lacking(participant, history)[-1:]


class SweepsDoneParts(Repair):
    """Aborts what is still prepared of lacking epochs."""

    def _end_leftovers(self, participant: Participant, history: LedgerHistory, lacks: Sequence[Lack]) -> list[str]:
        del lacks
        history = history.copy()
        history.applied, history.done = {}, set()
        return end_orphans(participant, recorded_parts(participant, history))
