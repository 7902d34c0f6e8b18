"""Mutants of the machine: ledger, checkpoint reader and coordinator with one part taken away or one rule broken."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from epochsink.protocol import sweep
from epochsink.protocol.coordinator import Coordinator, Plan
from epochsink.protocol.ledger import _name
from epochsink.protocol.ledger_entries import Entry, Prepared, Replay, Take, encode
from epochsink.sink import COMMITTED, NOTHING_SPOOLED, Ballot, Epoch
from epochsink.spark.checkpoint import Checkpoint
from simulation.storage import QuickLedger

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from epochsink.errors import EpochsinkError
    from epochsink.protocol.ledger_history import History
    from epochsink.sink import LastDone, Participant, Spooled, Written

# ---- the ledger


class Unfenced(QuickLedger):
    """Appends at the next free number, whoever has taken the ledger."""

    def append(self, entry: Entry) -> None:
        while not self._create(self._end, entry):
            self.read()


class Overwriting(QuickLedger):
    """Writes its next number, whatever stands there."""

    def append(self, entry: Entry) -> None:
        files: Any = self._files
        folder, _, plain = _name(self._end).rpartition("/")
        files.step(f"put {plain}", lambda: files._folders[folder].update({plain: encode(entry)}))
        self._remember(self._end, entry)


class Unchecked(QuickLedger):
    """Never asks whether the ledger is still its own."""

    def verify(self) -> History:
        return self.read()


class LaterOriginsWin(QuickLedger):
    """Lets a later take change what a sink fixed when it joined."""

    def take(self, query_id: str, origins: Mapping[str, Mapping[str, Any]], joined: int, *, above: int = 0) -> Take:
        while True:
            owner = self.read().owner
            known = owner.origins if owner else {}
            generation = (owner.generation if owner else above) + 1
            entry = Take(generation, self._driver, query_id, {**known, **origins}, joined)
            if self._create(self._end, entry):
                return entry


class BeginsAtTheClock(QuickLedger):
    """Begins above the clock alone, whatever the targets hold."""

    def take(self, query_id: str, origins: Mapping[str, Mapping[str, Any]], joined: int, *, above: int = 0) -> Take:
        return super().take(query_id, origins, joined, above=0)


# ---- the checkpoint


class OffsetsUnseen(Checkpoint):
    """Takes any two inputs of an epoch for the same."""

    def offsets_digest(self, epoch: int) -> str:
        return ""


class DecidedAtOnce(Checkpoint):
    """Takes every recorded epoch for decided."""

    def has_commit(self, epoch: int) -> bool:
        return True

    def is_decided(self, epoch: int) -> bool:
        return True


# ---- the coordinator


class AbortsWhatIsRecorded(Coordinator):
    """Aborts a recorded, undecided epoch when Spark runs it again, and writes it anew."""

    def settle(self, number: int) -> Plan:
        history = self._ledger.verify()
        if number not in history.epochs or number in history.done:
            return super().settle(number)
        self.abort_recorded(number)
        return Plan.WRITE

    def abort_recorded(self, number: int) -> None:
        """End the parts of a recorded epoch."""
        others = [one for one in self._ledger.verify().pending if one.epoch != number]
        for participant in self._participants:
            participant.abort_orphans(
                [part for one in others for name in participant.members for part in one.parts_of(name)]
            )
        for epoch in self._spool.attempts(self._query_id):
            if epoch.number == number:
                self._spool.drop(self._query_id, epoch)


class Supersedes(Coordinator):
    """Writes a recorded, undecided epoch anew: the later entry stands."""

    def settle(self, number: int) -> Plan:
        history = self._ledger.verify()
        if number not in history.epochs or number in history.done:
            return super().settle(number)
        return Plan.WRITE


class AbortsAtRecovery(AbortsWhatIsRecorded):
    """Aborts recorded epochs that are not decided when it starts, as a fresh start."""

    def recover(self) -> None:
        super().recover()
        for one in self._ledger.verify().pending:
            self.abort_recorded(one.epoch)

    def settle(self, number: int) -> Plan:
        return Coordinator.settle(self, number)


class IgnoresMarkers(Coordinator):
    """Never compares the targets' markers with the ledger."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._check.verify = lambda name: None  # type: ignore[method-assign] # noqa: ARG005 - that is the mutation


class IgnoresOlderLedger(Coordinator):
    """Does not compare the checkpoint's decisions with the ledger when it starts."""

    def _refuse_other_stories(self, history: History) -> None:
        class Undecided:
            def newest_decided(self) -> int:
                return -1

        checkpoint, self._checkpoint = self._checkpoint, Undecided()  # type: ignore[assignment]
        try:
            super()._refuse_other_stories(history)
        finally:
            self._checkpoint = checkpoint


class ConcludesFromMemory(Coordinator):
    """Draws conclusions from a target without reading the ledger again."""

    def _conclude(self, conclusion: EpochsinkError) -> EpochsinkError:
        return conclusion


class ConcludesBeforeReading(Coordinator):
    """Takes a target's answer about an epoch for the last word, whoever has finished the epoch meanwhile."""

    def _commit_parts(self, number: int, participant: Participant, applied: Mapping[str, LastDone]) -> bool:
        known = self._ledger.verify()
        ledger: Any = self._ledger

        class Stale:
            def verify(self) -> History:
                return known

            def known(self) -> History:
                return known

            def append(self, entry: Entry) -> None:
                ledger.append(entry)
                known.add(entry)

        self._ledger = Stale()  # type: ignore[assignment]
        try:
            return super()._commit_parts(number, participant, applied)
        finally:
            self._ledger = ledger


class CommitsUnrecordedReplays(Coordinator):
    """Commits what it has prepared again without a record of it."""

    def _commit_parts(self, number: int, participant: Participant, applied: Mapping[str, LastDone]) -> bool:
        prepared = self._ledger.known().epochs[number]
        epoch = Epoch(prepared.epoch, prepared.attempt)
        for name in participant.members:
            rows = self._spool.rows(self._identities[name], epoch, prepared.shares[name].tasks, {})
            for part in prepared.shares[name].parts:
                ballots = {name: Ballot([part], rows)}
                if participant.commit(epoch, ballots)[name] != [COMMITTED]:
                    again = participant.replay(epoch, part, ballots, f"{epoch.number:032x}")
                    participant.commit(epoch, {name: Ballot([again], rows)})
        return True


class SweepsByAnOldLedger(Coordinator):
    """Lists the spool after it has read the ledger."""

    def _end_unrecorded(self) -> None:
        class Kept:
            def attempts(self, _query_id: str) -> list[Epoch]:
                return []

        spool, self._spool = self._spool, Kept()  # type: ignore[assignment]
        try:
            super()._end_unrecorded()
        finally:
            self._spool = spool
        kept = {Epoch(one.epoch, one.attempt) for one in self._ledger.verify().pending}
        for epoch in self._spool.attempts(self._query_id):
            if epoch not in kept:
                self._spool.drop(self._query_id, epoch)


class SweepsAfterCommits(Coordinator):
    """Commits before it sweeps when it starts."""

    def recover(self) -> None:
        sweep = self._abort_orphans
        self._abort_orphans = lambda: None  # type: ignore[method-assign]
        try:
            super().recover()
        finally:
            self._abort_orphans = sweep  # type: ignore[method-assign]
        self._abort_orphans()


class TidiesAnyTime(Coordinator):
    """Sweeps from the commit thread while an attempt is under way."""

    def tidy(self) -> None:
        self._end_unrecorded()


class IgnoresReplays(Coordinator):
    """Records an attempt that was under way when the epoch before it was prepared again."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        queue: Any = self._queue
        queue.replaying = queue.alone


class AbandonsTheUnknown(Coordinator):
    """Aborts an attempt when appending its record has raised."""

    def record(self, epoch: Epoch, written: Written, spooled: Spooled = NOTHING_SPOOLED) -> None:
        try:
            super().record(epoch, written, spooled)
        except OSError:
            self._sinks_abort(epoch)
            raise

    def _sinks_abort(self, epoch: Epoch) -> None:
        for participant in self._participants:
            participant.abort_orphans([])
        self._spool.drop(self._query_id, epoch)


class DropsFirst(Coordinator):
    """Drops the spool before the ledger says done."""

    def _commit_parts(self, number: int, participant: Participant, applied: Mapping[str, LastDone]) -> bool:
        committed = super()._commit_parts(number, participant, applied)
        prepared = self._ledger.known().epochs[number]
        self._spool.drop(self._query_id, Epoch(prepared.epoch, prepared.attempt))
        return committed


class LeavesItsOwn(Coordinator):
    """Ends nothing of what it has prepared and could not record once it was superseded."""

    def _end_own(self, epoch: Epoch) -> None:
        self._spool.drop(self._query_id, epoch)


class EndsWithoutTheFence(Coordinator):
    """Ends that without shutting out the command that has abandoned the checkpoint."""

    def _end_own(self, epoch: Epoch) -> None:
        history = self._ledger.read()
        for participant in self._participants:
            sweep._abort_orphans(participant, history)
        self._spool.drop(self._query_id, epoch)


class EndsWhatIsRecorded(Coordinator):
    """Ends, once it was superseded, all that is its own, recorded or not."""

    def _end_own(self, epoch: Epoch) -> None:
        for participant in self._participants:
            participant.abort_orphans([])
        self._spool.drop(self._query_id, epoch)


class ReplaysFromTheFirstRecord(Coordinator):
    """Builds each replay from the parts that stood before the first."""

    _recorded: Prepared

    def _commit(self, number: int) -> None:
        self._recorded = self._ledger.verify().epochs[number]
        super()._commit(number)

    def _replay(
        self, number: int, participant: Participant, sinks: Sequence[str], index: int, applied: Mapping[str, LastDone]
    ) -> None:
        ledger: Any = self._ledger
        before = self._recorded.shares[sinks[0]].parts

        class Forgetful:
            def __getattr__(self, called: str) -> Any:
                return getattr(ledger, called)

            def append(self, entry: Replay) -> None:
                ledger.append(replace(entry, parts=(*before[:index], entry.parts[index], *before[index + 1 :])))

        self._ledger = Forgetful()  # type: ignore[assignment]
        try:
            super()._replay(number, participant, sinks, index, applied)
        finally:
            self._ledger = ledger
