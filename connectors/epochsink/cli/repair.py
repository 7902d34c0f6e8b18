"""Apply retained epochs again to targets that were set back, on an operator's word."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from epochsink.cli.operation import Operation, log, names
from epochsink.errors import ConfigurationError, WentBack, naming
from epochsink.protocol import repair
from epochsink.protocol.retained import Retention
from epochsink.sink import Identity

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from epochsink.cli.checkpoint_folder import Place
    from epochsink.protocol.ledger_entries import Take
    from epochsink.protocol.ledger_history import History
    from epochsink.protocol.repair import Lack
    from epochsink.sink import Participant, Rows, Sink


class Repair(Operation):
    """What the targets of one checkpoint lack of done epochs, and its application.

    Raises `ConfigurationError` if nothing is lacking, or if the rows of a lacking epoch are not there.
    """

    verb = "repair"

    def __init__(self, place: Place, sinks: Mapping[str, Sink]) -> None:
        super().__init__(place)
        self._sinks = sinks
        self._retention = Retention(place.spool, place.query_id)
        with self.reached(sinks) as participants:
            others = [name for one in participants if not one.repairs for name in one.members]
            lacks = [self._lacking(one, self.before) for one in participants if one.repairs]
        self._lacks = [lack for each in lacks for lack in each]
        if not self._lacks:
            raise ConfigurationError(
                f"no target of {names(sinks)} lacks a done epoch: there is nothing to repair",
                hint="start the query; it says what else is wrong",
            )
        repair.verify_rows(self._lacks, self._rows)
        self._others = others
        lacking = {name for lack in self._lacks for name in lack.parts}
        self._warnings = list(
            dict.fromkeys(one.repair_warning for one in participants if not lacking.isdisjoint(one.members))
        )

    def _steps(self) -> list[str]:
        steps = [f"apply epoch {lack.at.number} again to sink {names(lack.parts)}: {lack.size}" for lack in self._lacks]
        if self._others:
            steps.append(f"leave sink {names(self._others)} as it is: this kind of sink is not repaired")
        return steps + self._warnings

    def carry_out(self) -> None:
        """Do it. To be repeated if it was interrupted."""
        with self.reached(self._sinks) as participants:
            taken = self.take()
            for participant in participants:
                if participant.repairs:
                    self._repair(participant, taken)
            for participant in participants:
                self.open(participant, taken)
                self._compare(participant)
            log.info("the targets hold every done epoch: start the query")

    def _repair(self, participant: Participant, taken: Take) -> None:
        self.open(participant, taken)
        participant.fence()
        # what a failover has left prepared of the newest epoch is committed by the comparison
        with suppress(WentBack):
            self._compare(participant)
        # again, from the take on: another command may have applied some meanwhile
        history = self.ledger.verify()
        lacks = self._lacking(participant, history)
        repair.verify_rows(lacks, self._rows)
        for line in self._end_leftovers(participant, history, lacks):
            log.info("ended what no recorded epoch names: %s", line)
        # again: until the sweep, a driver on another copy of the checkpoint may have committed what it had prepared
        lacks = self._lacking(participant, history)
        repair.apply_again(participant, lacks, self.ledger, self._retention, self._rows)

    def _lacking(self, participant: Participant, history: History) -> list[Lack]:
        return repair.lacking(participant, history, self._retention)

    def _end_leftovers(self, participant: Participant, history: History, lacks: Sequence[Lack]) -> list[str]:
        return repair.end_leftovers(participant, history, lacks)

    def _compare(self, participant: Participant) -> None:
        history = self.ledger.verify()
        for name in participant.members:
            with naming(name):
                participant.verify_applied(name, history.applied.get(name), history.pending_of(name))

    def _rows(self, lack: Lack, name: str) -> Rows:
        share = lack.retained.prepared.shares[name]
        return self.place.spool.rows(Identity(self.place.query_id, name), lack.at, share.tasks, share.files)
