"""Mutants of the repair of a target that was set back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from epochsink.cli.repair import Repair
from epochsink.protocol.sweep import abort_orphans
from simulation.by_task_port import ByTaskPort
from simulation.kafka_port import KafkaPort
from simulation.port import PortBase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from epochsink.protocol.ledger_history import History
    from epochsink.protocol.repair import Lack
    from epochsink.sink import Committable, LastDone, Participant


class NewestFirst(Repair):
    """Applies the newest lacking epoch first: a repair that is killed then looks complete."""

    def _lacking(self, participant: Participant, history: History) -> list[Lack]:
        return super()._lacking(participant, history)[::-1]


class NewestAlone(Repair):
    """Applies only the newest lacking epoch."""

    def _lacking(self, participant: Participant, history: History) -> list[Lack]:
        return super()._lacking(participant, history)[-1:]


class SweepsDoneParts(Repair):
    """Aborts what is still prepared of lacking epochs."""

    def _end_leftovers(self, participant: Participant, history: History, lacks: Sequence[Lack]) -> list[str]:
        del lacks
        history = history.copy()
        history.applied, history.done = {}, set()
        return abort_orphans(participant, history)


class TrustsMarkersAlone(KafkaPort):
    """Takes a part of a topic for lost if its marker is."""

    def lacks(self, done: LastDone, part: Committable) -> bool:
        """Look at the marker."""
        return not self.is_marked(done, part)


class TrustsTheLogAlone(KafkaPort):
    """Takes a part for lost if the log has others' rows, or none, at its place."""

    def lacks(self, done: LastDone, part: Committable) -> bool:
        """Look at the log."""
        del done
        return not self.is_in_log(part)


class LooksAtTheNewestMarker(ByTaskPort):
    """Takes a part for applied if any part of its epoch is."""

    def lacks(self, done: LastDone, part: Committable) -> bool:
        """Look at the newest marker."""
        return PortBase.lacks(self, done, part)
