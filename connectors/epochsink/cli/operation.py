"""Take the ledger of a checkpoint for an operator, which stops a running driver, and change it."""

from __future__ import annotations

import logging
import uuid
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import ClassVar

from epochsink.cli.checkpoint_folder import QueryCheckpoint
from epochsink.errors import ConfigurationError, EpochsinkError, naming
from epochsink.protocol.coordinator import Coordinator
from epochsink.protocol.joining import refuse_other_kind
from epochsink.protocol.ledger import Ledger
from epochsink.protocol.ledger_entries import Stopped, Take
from epochsink.protocol.run_state import CommitQueue, RunState
from epochsink.sink import Participant, Sink, comparing, participants_of

log = logging.getLogger("epochsink")


class Operation(ABC):
    """One command on one checkpoint: `plan` says what `carry_out` will do.

    Raises `ConfigurationError` if the checkpoint has no ledger: nothing says then what it holds.
    """

    verb: ClassVar[str]
    even_abandoned: ClassVar[bool] = False

    def __init__(self, place: QueryCheckpoint) -> None:
        self.place = place
        self.ledger = Ledger(
            place.files, uuid.uuid4().hex, even_abandoned=self.even_abandoned, purpose=f"epochsink {self.verb}"
        )
        self.before = self.ledger.read()
        if self.before.owner is None:
            raise ConfigurationError(
                f"{place.location} has no ledger: epochsink has recorded nothing there",
                hint="if epochsink ran on this checkpoint, restore its folder epochsink/ from the same copy as the "
                "rest; 'epochsink orphans' finds what is left in a server without a checkpoint",
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

    @contextmanager
    def noting_failure(self) -> Iterator[None]:
        """Keep a failure of `carry_out` in the ledger, as that of a start: `epochsink status` shows it.

        Best effort, and only after the take.
        """
        try:
            yield
        except Exception as failure:
            with suppress(EpochsinkError, OSError):
                self.ledger.append(Stopped.of(failure))
            raise

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

        They are asked before the take, which stops a running driver: if a target is down, that driver keeps its ledger.
        Sinks that have never been part of the query are left out.
        """
        for name in sinks.keys() - self.owner.origins.keys():
            log.info("sink '%s' has never been part of this query: nothing to do there", name)
        participants = participants_of({name: sinks[name] for name in sinks if name in self.owner.origins})
        place = self.place
        self.run = RunState(
            place.query_id,
            self.ledger,
            place.checkpoint,
            place.spool,
            participants,
            CommitQueue(),
            place.location,
            place.reference,
        )
        try:
            for participant in participants:
                self.open(participant, self.owner)
                for name in participant.members:
                    with naming(name), comparing():
                        participant.marks(name, self.before.applied.get(name), None)
            yield participants
        finally:
            for participant in participants:
                participant.close()

    def open(self, participant: Participant, take: Take) -> None:
        """Give a participant the identities of its sinks in the generation of a take."""
        refuse_other_kind(participant, take.origins)
        for name in participant.members:
            self.run.identities[name] = self.place.identity(name, take)
            participant.open(self.run.identities[name])

    def coordinator(self, participants: Sequence[Participant]) -> Coordinator:
        """Return what recovers the ledger by these participants."""
        return Coordinator(
            query_id=self.place.query_id,
            ledger=self.ledger,
            checkpoint=self.place.checkpoint,
            spool=self.place.spool,
            participants=participants,
            location=self.place.location,
            reference=self.place.reference,
        )

    def recover(self, participants: Sequence[Participant]) -> None:
        """Take the ledger, commit what is decided and abort what is not recorded; log each pending epoch's state."""
        before = self.ledger.read()
        self.coordinator(participants).recover()
        after = self.ledger.read()
        lines = [f"committed epoch {one.epoch}" for one in before.pending if one.epoch in after.done]
        lines += [f"left epoch {one.epoch} recorded: Spark has not decided it" for one in after.pending]
        for line in lines or ["no recorded epoch is pending"]:
            log.info(line)


class Recovery(Operation):
    """Commit what is decided and abort what is not recorded, without the query."""

    verb = "recover"

    def __init__(self, place: QueryCheckpoint, sinks: Mapping[str, Sink]) -> None:
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
