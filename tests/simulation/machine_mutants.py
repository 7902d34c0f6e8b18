"""Mutants of the machine: ledger, checkpoint reader and coordinator with one part taken away or one rule broken."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from epochsink.kafka.committer import KafkaCommitter
from epochsink.protocol.checkpoint import Checkpoint
from epochsink.protocol.commits import Commits
from epochsink.protocol.consistency import AppliedCheck
from epochsink.protocol.coordinator import Coordinator, Plan
from epochsink.protocol.ledger import name_of
from epochsink.protocol.ledger_entries import Entry, Prepared, Replay, Summary, Take, encode
from epochsink.protocol.run_state import RunState
from epochsink.protocol.sweep import SPOOL_SWEPT_AFTER, Sweep, end_orphans, recorded_parts
from epochsink.sink import COMMITTED, Ballot, Ballots, Epoch
from simulation.kafka_sink import KafkaSink
from simulation.storage import QuickLedger, TrimmingLedger

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from epochsink.errors import EpochsinkError
    from epochsink.protocol.ledger_history import LedgerHistory
    from epochsink.sink import Participant

# ---- the ledger


class Unfenced(QuickLedger):
    """Appends at the next free number, whoever has taken the ledger."""

    def append(self, entry: Entry) -> None:
        while not self._create(self._end, entry, owned=True):
            self.read()


class BehindItsSuccessor(TrimmingLedger):
    """Appends behind its successor's entries once one of its threads has read these."""

    def _own_end(self) -> int:
        return self._end


class Overwriting(QuickLedger):
    """Writes its next number, whatever stands there."""

    def append(self, entry: Entry) -> None:
        files: Any = self._files
        folder, _, plain = name_of(self._end).rpartition("/")
        files.step(f"put {plain}", lambda: files._folders[folder].update({plain: encode(entry)}))
        self._remember(self._end, entry)


class Unchecked(QuickLedger):
    """Never asks whether the ledger is still its own."""

    def verify(self) -> LedgerHistory:
        return self.read()


class LaterOriginsWin(QuickLedger):
    """Lets a later take change what a sink fixed when it joined."""

    def take(
        self, query_id: str, origins: Mapping[str, Mapping[str, Any]], joined: int, *, above: int = 0, **_: Any
    ) -> Take:
        while True:
            owner = self.read().owner
            known = owner.origins if owner else {}
            generation = (owner.generation if owner else above) + 1
            entry = Take(generation, self._driver, query_id, {**known, **origins}, joined, summary=Summary())
            if self._create_take(entry):
                return entry


class BeginsAtTheClock(QuickLedger):
    """Begins above the clock alone, whatever the targets hold."""

    def take(self, *arguments: Any, above: int = 0, **options: Any) -> Take:
        del above
        return super().take(*arguments, **options)


# ---- the checkpoint


class OffsetsUnseen(Checkpoint):
    """Takes any two inputs of an epoch for the same."""

    def offsets_digest(self, epoch: int, *, durable: bool = False) -> str:
        del durable
        return ""


class DecidedAtOnce(Checkpoint):
    """Takes every recorded epoch for decided."""

    def has_commit(self, epoch: int) -> bool:
        return True

    def is_decided(self, epoch: int) -> bool:
        return True


# ---- the coordinator, and what it is made of


def made_of(**kinds: type[Any]) -> type[Coordinator]:
    """Return a coordinator of which some collaborators, by their names, are of another kind."""

    class Mutated(Coordinator):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            for name, kind in kinds.items():
                getattr(self, f"_{name}").__class__ = kind

    return Mutated


class AbortsWhatIsRecorded(Coordinator):
    """Aborts a recorded, undecided epoch when Spark runs it again, and writes it anew."""

    def settle(self, number: int) -> Plan:
        history = self._run.ledger.verify()
        if number not in history.epochs or number in history.done:
            return super().settle(number)
        abort_recorded(self._run, number)
        return Plan.WRITE


def abort_recorded(run: RunState, number: int) -> None:
    """End the parts of a recorded epoch."""
    others = [one for one in run.ledger.verify().pending if one.epoch != number]
    for participant in run.participants:
        kept = [part for one in others for name in participant.members for part in one.parts_of(name)]
        end_orphans(participant, (kept, []))
    for epoch in run.spool.attempts(run.query_id):
        if epoch.number == number:
            run.spool.drop(run.query_id, epoch)


class Supersedes(Coordinator):
    """Writes a recorded, undecided epoch anew: the later entry stands."""

    def settle(self, number: int) -> Plan:
        history = self._run.ledger.verify()
        if number not in history.epochs or number in history.done:
            return super().settle(number)
        return Plan.WRITE


class AbortsAtRecovery(Coordinator):
    """Aborts recorded epochs that are not decided when it starts, as a fresh start."""

    def recover(self) -> None:
        super().recover()
        for one in self._run.ledger.verify().pending:
            abort_recorded(self._run, one.epoch)


class IgnoresMarkers(AppliedCheck):
    """Never compares the targets' markers with the ledger."""

    def verify(self, name: str, *, but: int = -1) -> None:
        pass


class IgnoresOlderLedger(Coordinator):
    """Does not compare the checkpoint's decisions with the ledger when it starts."""

    def _refuse_disagreement(self, history: LedgerHistory) -> None:
        class Undecided:
            def newest_decided(self) -> int:
                return -1

        run: Any = self._run
        checkpoint, run.checkpoint = run.checkpoint, Undecided()
        try:
            super()._refuse_disagreement(history)
        finally:
            run.checkpoint = checkpoint


class ConcludesFromMemory(RunState):
    """Draws conclusions from a target without reading the ledger again."""

    def conclude(self, conclusion: EpochsinkError) -> EpochsinkError:
        return conclusion


class ConcludesBeforeReading(Commits):
    """Takes a target's answer about an epoch for the last word, whoever has finished the epoch meanwhile."""

    def _commit_parts(self, number: int, participant: Participant, names: Sequence[str]) -> bool:
        run: Any = self._run
        ledger, known = run.ledger, run.ledger.verify()

        class Stale:
            def verify(self) -> LedgerHistory:
                found: LedgerHistory = known
                return found

            def known(self) -> LedgerHistory:
                return self.verify()

            def append(self, entry: Entry) -> None:
                ledger.append(entry)
                known.add(entry)

        run.ledger = Stale()
        try:
            return super()._commit_parts(number, participant, names)
        finally:
            run.ledger = ledger


class CommitsUnrecordedReplays(Commits):
    """Commits what it has prepared again without a record of it."""

    def _commit_parts(self, number: int, participant: Participant, names: Sequence[str]) -> bool:
        run, prepared = self._run, self._run.ledger.known().epochs[number]
        for name in names:
            rows = run.spool.rows(run.identities[name], prepared.at, prepared.shares[name].tasks, {})
            for part in prepared.shares[name].parts:
                ballots = {name: Ballot([part], rows)}
                if participant.commit(prepared.at, ballots)[name] != [COMMITTED]:
                    again = participant.replay(prepared.at, part, ballots, f"{number:032x}")
                    participant.commit(prepared.at, {name: Ballot([again], rows)})
        return True


class SweepsByAnOldLedger(Sweep):
    """Lists the spool after it has read the ledger."""

    def _end_in_spool(self) -> None:
        run = self._run
        kept = {one.at for one in run.ledger.verify().pending}
        for epoch in run.spool.attempts(run.query_id):
            if epoch not in kept:
                run.spool.drop(run.query_id, epoch)
        self._until_spool = SPOOL_SWEPT_AFTER


class SweepsAfterCommits(Coordinator):
    """Commits before it sweeps when it starts."""

    def recover(self) -> None:
        sweep: Any = self._sweep
        sweep.targets = lambda: None
        try:
            super().recover()
        finally:
            del sweep.targets
        sweep.targets()


class TidiesAnyTime(Sweep):
    """Sweeps from the commit thread while an attempt is under way."""

    def tidy(self) -> None:
        self._end_unrecorded()


class IgnoresReplays(Coordinator):
    """Records an attempt that was under way when the epoch before it was prepared again."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        queue: Any = self.queue
        queue.replaying = queue.alone


class _Waits(KafkaCommitter):
    def visible(self, epoch: Epoch, ballots: Ballots, recorded: Any) -> list[str]:
        del recorded
        (ballot,) = ballots.values()
        self._commits.await_visible(epoch, ballot)
        return []


class LeavesLosers(KafkaSink):
    """Leaves to the next sweep what is open before a committed epoch."""

    def participant(self, members: Mapping[str, Any]) -> KafkaCommitter:
        participant = super().participant(members)
        participant.__class__ = _Waits
        return participant


class AbandonsTheUnknown(Coordinator):
    """Aborts an attempt when appending its record has raised."""

    def record(self, epoch: Epoch, *written: Any, **named: Any) -> None:
        try:
            super().record(epoch, *written, **named)
        except OSError:
            end_everything(self._run, epoch)
            raise


def end_everything(run: RunState, epoch: Epoch) -> None:
    """Abort whatever the targets hold, recorded or not, and drop what an attempt has spooled."""
    for participant in run.participants:
        end_orphans(participant, ([], []))
    run.spool.drop(run.query_id, epoch)


class DropsFirst(Commits):
    """Drops the spool before the ledger says done."""

    def _commit_parts(self, number: int, participant: Participant, names: Sequence[str]) -> bool:
        committed = super()._commit_parts(number, participant, names)
        self._run.spool.drop(self._run.query_id, self._run.ledger.known().epochs[number].at)
        return committed


class LeavesItsOwn(Sweep):
    """Ends nothing of what it has prepared and could not record once it was superseded."""

    def own(self, epoch: Epoch) -> None:
        self._run.spool.drop(self._run.query_id, epoch)


class EndsWithoutTheFence(Sweep):
    """Ends that without shutting out the command that has abandoned the checkpoint."""

    def own(self, epoch: Epoch) -> None:
        history = self._run.ledger.read()
        for participant in self._run.participants:
            end_orphans(participant, recorded_parts(participant, history))
        self._run.spool.drop(self._run.query_id, epoch)


class EndsWhatIsRecorded(Sweep):
    """Ends, once it was superseded, all that is its own, recorded or not."""

    def own(self, epoch: Epoch) -> None:
        end_everything(self._run, epoch)


class ReplaysFromTheFirstRecord(Commits):
    """Builds each replay from the parts that stood before the first."""

    _recorded: Prepared

    def commit(self, number: int) -> None:
        self._recorded = self._run.ledger.verify().epochs[number]
        super().commit(number)

    def _commit_parts(self, number: int, participant: Participant, names: Sequence[str]) -> bool:
        run: Any = self._run
        ledger, shares = run.ledger, self._recorded.shares

        class Forgetful:
            def __getattr__(self, called: str) -> Any:
                return getattr(ledger, called)

            def append(self, entry: Replay) -> None:
                sink = entry.sinks[0]
                now, before = ledger.known().epochs[number].parts_of(sink), shares[sink].parts
                parts = zip(before, now, entry.parts, strict=True)
                ledger.append(replace(entry, parts=tuple(new if new != old else first for first, old, new in parts)))

        run.ledger = Forgetful()
        try:
            return super()._commit_parts(number, participant, names)
        finally:
            run.ledger = ledger
