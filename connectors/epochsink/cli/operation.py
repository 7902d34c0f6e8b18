"""Take the ledger of a checkpoint for an operator, which stops a running driver, and change it."""

from __future__ import annotations

import logging
import uuid
from abc import ABC, abstractmethod
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

from epochsink.errors import ConfigurationError, naming
from epochsink.identity import pipeline_name
from epochsink.protocol.coordinator import Coordinator
from epochsink.protocol.joining import refuse_other_kind
from epochsink.protocol.ledger import Ledger
from epochsink.protocol.retained import Retention
from epochsink.sink import Identity, participants_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from epochsink.cli.checkpoint_folder import Place
    from epochsink.protocol.ledger_entries import Take
    from epochsink.sink import Participant, Sink

log = logging.getLogger("epochsink")


class Operation(ABC):
    """One command on one checkpoint: `plan` says what `carry_out` will do.

    Raises `ConfigurationError` if the checkpoint has no ledger: nothing says then what it holds.
    """

    verb: ClassVar[str]
    even_abandoned: ClassVar[bool] = False

    def __init__(self, place: Place) -> None:
        self.place = place
        self.ledger = Ledger(
            place.files, uuid.uuid4().hex, even_abandoned=self.even_abandoned, purpose=f"epochsink {self.verb}"
        )
        self.before = self.ledger.read()
        if self.before.owner is None:
            raise ConfigurationError(
                f"{place.location} has no ledger: epochsink has recorded nothing there",
                hint="if epochsink ran on this checkpoint, restore its folder epochsink/ from the copy that the rest "
                "came from; 'epochsink orphans' finds what is left in a server without a checkpoint",
            )
        self.owner: Take = self.before.owner

    def plan(self) -> list[str]:
        """Return what will be done, a line each."""
        return ["take the ledger: a driver that runs on this checkpoint now stops with Fenced", *self._steps()]

    @abstractmethod
    def _steps(self) -> list[str]:
        """Return what will be done after the take, a line each."""

    @abstractmethod
    def carry_out(self) -> None:
        """Do it; each thing done is logged, a line each. It may be repeated if it was interrupted.

        Raises `Fenced` if another driver takes the ledger meanwhile, and what the sinks raise.
        """

    def take(self) -> Take:
        """Take the ledger: from here on no earlier driver can record anything."""
        taken = self.ledger.take(self.place.query_id, {}, -1)
        log.info("took the ledger as generation %d", taken.generation)
        return taken

    def decided(self, epoch: int) -> bool:
        """Return whether Spark has decided an epoch."""
        return self.place.checkpoint.is_decided(epoch)

    @contextmanager
    def reached(self, sinks: Mapping[str, Sink]) -> Iterator[Sequence[Participant]]:
        """Yield the participants of the sinks, once each target has answered; close them in the end.

        Asked before the take, which ends a driver that runs: a target that is down keeps that driver its ledger. Sinks
        that have never been part of the query are left out.
        """
        for name in sinks.keys() - self.owner.origins.keys():
            log.info("sink '%s' has never been part of this query: there is nothing to look for", name)
        participants = participants_of({name: sinks[name] for name in sinks if name in self.owner.origins})
        try:
            for participant in participants:
                self.open(participant, self.owner)
                for name in participant.members:
                    with naming(name):
                        participant.newest(name)
            yield participants
        finally:
            for participant in participants:
                participant.close()

    def open(self, participant: Participant, take: Take) -> None:
        """Tell a participant who its sinks are in the generation of a take."""
        refuse_other_kind(participant, take.origins)
        participant.require_ours = self.ledger.verify
        pipeline = pipeline_name(self.place.location)
        for name in participant.members:
            who = Identity(self.place.query_id, name, take.generation, take.origins[name], pipeline)
            participant.open(who)

    def coordinator(self, participants: Sequence[Participant]) -> Coordinator:
        """Return what recovers the ledger by these participants."""
        return Coordinator(
            query_id=self.place.query_id,
            ledger=self.ledger,
            checkpoint=self.place.checkpoint,
            spool=self.place.spool,
            participants=participants,
            location=self.place.location,
            # the epochs that a command finishes must not be missing among those that the query retains
            retain_seconds=Retention(self.place.spool, self.place.query_id).newest_seconds(),
        )

    def recover(self, participants: Sequence[Participant]) -> None:
        """Take the ledger, commit what is decided and abort what is not recorded; log each pending epoch's state."""
        before = self.ledger.read()
        self.coordinator(participants).recover()
        after = self.ledger.read()
        told = [f"committed epoch {one.epoch}" for one in before.pending if one.epoch in after.done]
        told += [f"left epoch {one.epoch} as it is recorded: Spark has not decided it" for one in after.pending]
        for line in told or ["no recorded epoch is pending"]:
            log.info(line)


class Recovery(Operation):
    """Commit what is decided and abort what is not recorded, without the query."""

    verb = "recover"

    def __init__(self, place: Place, sinks: Mapping[str, Sink]) -> None:
        super().__init__(place)
        self._sinks = sinks

    def _steps(self) -> list[str]:
        decided = [prepared.epoch for prepared in self.before.pending if self.decided(prepared.epoch)]
        return ["abort what no recorded epoch names", *(f"commit epoch {number}" for number in decided)]

    def carry_out(self) -> None:
        """Do it; nothing is taken if a target is down."""
        with self.reached(self._sinks) as participants:
            self.recover(participants)


def names(sinks: Collection[str]) -> str:
    """Return names of sinks as text."""
    return ", ".join(f"'{name}'" for name in sinks)
