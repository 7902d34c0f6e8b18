"""Apply retained epochs again to targets that were set back, on an operator's word."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

from epochsink.cli.checkpoint_folder import QueryCheckpoint
from epochsink.cli.operation import Operation, log, names
from epochsink.errors import ConfigurationError, WentBack, naming
from epochsink.protocol import repair
from epochsink.protocol.consistency import AppliedCheck
from epochsink.protocol.ledger_entries import Take
from epochsink.protocol.ledger_history import LedgerHistory
from epochsink.protocol.repair import Lack
from epochsink.sink import Participant, Sink


class Repair(Operation):
    """What the targets of one checkpoint lack of done epochs, and its application.

    Raises `ConfigurationError` if nothing is lacking, or if the rows of a lacking epoch are not there.
    """

    verb = "repair"

    def __init__(self, place: QueryCheckpoint, sinks: Mapping[str, Sink]) -> None:
        super().__init__(place)
        self._sinks = sinks
        with self.reached(sinks) as participants:
            losses = {name: one.operator().losses() for one in participants for name in one.members}
            lacks = [self._lacking(one, self.before) for one in participants]
        self._lacks = [lack for each in lacks for lack in each]
        if not self._lacks:
            raise ConfigurationError(
                f"no target of {names(sinks)} lacks a done epoch: there is nothing to repair",
                hint="start the query; it says what else is wrong",
            )
        repair.verify_rows(self.run, self._lacks)
        self._others = [name for name, loss in losses.items() if loss is None]
        lacking = {name for lack in self._lacks for name in lack.parts}
        self._warnings = list(dict.fromkeys(loss.warning for name, loss in losses.items() if loss and name in lacking))

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
                if participant.operator().losses():
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
        repair.verify_rows(self.run, lacks)
        for line in self._end_leftovers(participant, history, lacks):
            log.info("ended what no recorded epoch names: %s", line)
        # again: until the sweep, a driver on another copy of the checkpoint may have committed what it had prepared
        lacks = self._lacking(participant, history)
        repair.apply_again(self.run, participant, lacks)

    def _lacking(self, participant: Participant, history: LedgerHistory) -> list[Lack]:
        return repair.lacking(participant, history, self.run.retention)

    def _end_leftovers(self, participant: Participant, history: LedgerHistory, lacks: Sequence[Lack]) -> list[str]:
        return repair.end_leftovers(participant, history, lacks)

    def _compare(self, participant: Participant) -> None:
        self.ledger.verify()
        for name in participant.members:
            with naming(name):
                AppliedCheck(self.run).verify(name)
