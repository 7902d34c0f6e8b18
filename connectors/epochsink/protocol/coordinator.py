"""The two-phase-commit state machine: recover, settle, record, commit, drain. Plain calls, no Spark.

For each epoch Spark does: write ``offsets/N``, call ``foreachBatch(N)``, write ``commits/N``. So foreachBatch can only
prepare, ``commits/N`` is the decision, and the commit comes after it, from a second thread:

    stream thread   recover | settle(N)  (write job)  record(N) | settle(N+1) ...
    commit thread                         commit_decided(N-1)   | commit_decided(N) ...

Four rules hold everywhere. What is recorded is never aborted. Any driver may commit what is recorded and decided.
Before a driver aborts or replays, it reads the ledger again, which must still be its own. Before a driver concludes
anything from a target, it reads the ledger again. tests/model explores the protocol; each rule has a mutant in
tests/simulation that loses or duplicates rows without it.
"""

from __future__ import annotations

import enum
import logging
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pyarrow as pa

from epochsink.errors import Addresses, EpochsinkError, Fenced, without_values
from epochsink.failpoints import reach
from epochsink.protocol import consistency
from epochsink.protocol.checkpoint import Checkpoint
from epochsink.protocol.commits import Commits
from epochsink.protocol.consistency import AppliedCheck
from epochsink.protocol.joining import REWRITE, family_of, log_changed_sinks, refuse_begun, refuse_other_kind
from epochsink.protocol.ledger import Ledger
from epochsink.protocol.ledger_entries import Disputed, Prepared, Share, Stopped, Withdrawn
from epochsink.protocol.ledger_history import LedgerHistory
from epochsink.protocol.progress import EpochProgress
from epochsink.protocol.progress_tracker import ProgressTracker, log_recovery
from epochsink.protocol.run_state import CommitQueue, CurrentEpoch, Phase, RunState
from epochsink.protocol.spool import Spool
from epochsink.protocol.sweep import Sweep
from epochsink.sink import (
    NOTHING_COUNTED,
    NOTHING_SPOOLED,
    Counts,
    Epoch,
    Identity,
    Joining,
    Participant,
    RowCount,
    Spooled,
    WriterContext,
    Written,
)

_log = logging.getLogger("epochsink")


class Plan(enum.Enum):
    """What foreachBatch has to do with an epoch."""

    WRITE = "write its rows to the sinks"
    RUN_FOR_STATE = "execute the plan for its state only: a recorded attempt exists"


class Coordinator:
    """Ties one streaming query's epochs to its sinks. One object for each run of the query.

    ``join_running`` lets a ledger begin on a checkpoint that already holds commits; `REWRITE` also in the middle of an
    epoch. ``monitor`` guards ``queue``, which the two threads share. ``location`` is the checkpoint's, for people: in a
    warning's command, and its last folder in targets; ``reference`` is MODULE:ATTRIBUTE of the sinks, for commands.
    ``listener`` gets the progress of each done epoch. Rows of the epochs that this run records are retained for
    ``retain_seconds`` once they are done.
    """

    def __init__(
        self,
        *,
        query_id: str,
        ledger: Ledger,
        checkpoint: Checkpoint,
        spool: Spool,
        participants: Sequence[Participant],
        join_running: bool | str = False,
        monitor: threading.Condition | None = None,
        location: str = "",
        reference: str = "",
        listener: Callable[[EpochProgress], None] | None = None,
        retain_seconds: float = 0.0,
    ) -> None:
        self.queue = CommitQueue(monitor)
        self.progress = ProgressTracker(listener, checkpoint.begun_at)
        self._run = RunState(
            query_id, ledger, checkpoint, spool, participants, self.queue, location, reference, self.progress
        )
        self._retain_seconds = retain_seconds
        self._check = AppliedCheck(self._run)
        self._sweep = Sweep(self._run, self._check)
        self._commits = Commits(self._run, self._check)
        self._join_running = join_running
        self._begun = False

    @property
    def addresses(self) -> Addresses:
        """What completes the commands of errors."""
        return self._run.addresses

    def identity(self, sink: str) -> Identity:
        """Return who a sink is in this generation."""
        return self._run.identities[sink]

    # ---- step 0

    def recover(self) -> None:
        """Take the ledger, compare it with checkpoint and targets, abort what is not recorded, commit what is decided.

        A recorded epoch that is not decided yet is watched from now on: an earlier run may still be about to write its
        commit, and the next epoch may come much later. To be called once, before the first batch. Raises `WentBack`,
        `Fenced`, `OutcomeUnknown`, and `UnsupportedQuery` for logs of Spark's of an unknown version.
        """
        reach("coordinator.take.before")
        self._take()
        reach("coordinator.take.after")
        history = self._run.ledger.verify()
        self._refuse_disagreement(history)
        # first: what a superseded driver prepared again and could not record may hold locks that a commit needs
        self._fence_others()
        for prepared in history.pending:
            if self._run.checkpoint.is_decided(prepared.epoch):
                self._commits.commit(prepared.epoch)
            elif prepared.epoch not in history.disputed:
                self._run.progress.recorded(prepared)
                self.queue.add(prepared.epoch)
        self.progress.tell()
        reach("coordinator.recover.after")
        log_recovery(history, self.queue.pending)

    def _take(self) -> None:
        run = self._run
        run.checkpoint.refuse_unknown_formats()
        # in this order: what is decided by now is recorded by the time that the ledger is read
        newest_decided = run.checkpoint.newest_decided()
        before = run.ledger.read()
        beside = -1
        if before.owner is None and newest_decided >= 0:
            if not self._join_running:
                raise consistency.no_ledger(newest_decided)
            self._check.refuse_known_targets()
            refuse_begun(run.checkpoint, newest_decided, rewrite=self._join_running == REWRITE)
            beside = newest_decided
        known = before.owner.origins if before.owner else {}
        for participant in run.participants:
            refuse_other_kind(participant, known)
        joining = [name for name in run.participant_of if name not in known]
        if before.owner is not None:
            log_changed_sinks(before.owner, run.participant_of, before.newest)
        new = {name: self._join(name) for name in joining}
        held = max((joined.generation for joined in new.values()), default=0)
        origins = {**known, **{name: joined.origin for name, joined in new.items()}}
        # those that are known go along: two drivers that take a new ledger at once may remove each other's first entry
        take = run.ledger.take(run.query_id, origins, beside, above=held, present=run.participant_of)
        for name, participant in run.participant_of.items():
            who = Identity(run.query_id, name, take.generation, take.origins[name], run.pipeline)
            run.identities[name] = who
            participant.open(who)

    def _join(self, name: str) -> Joining:
        # before the take, which records it: what the ledger knows of a sink's beginning must be in its target
        participant = self._run.participant_of[name]
        joined = participant.open(Identity(self._run.query_id, name, pipeline=self._run.pipeline))
        left = (each.generation for each in participant.remnants(((), ())))
        origin = {**joined.origin, "family": family_of(participant)}
        return Joining(origin, max(joined.generation, *left, 0))

    def _refuse_disagreement(self, history: LedgerHistory) -> None:
        self._check.refuse_undocumented(history)
        self._check.verify_all()
        for prepared in history.pending:
            for name in prepared.shares.keys() - self._run.participant_of.keys():
                raise self._run.conclude(consistency.sink_is_gone(prepared.epoch, name))

    def _fence_others(self) -> None:
        """End what drivers on other copies of this checkpoint may still do.

        In this order: a driver that prepares after our fence sees it before it records; what was prepared before, the
        sweep ends, or it is committed by then, which the comparison finds.
        """
        for participant in self._run.participants:
            # the comparison may have taken minutes, and a fence that is taken from our successor stops it
            self._run.ledger.verify()
            with self._run.if_ours(participant):
                participant.fence()
        self._run.ledger.verify()
        self._sweep.targets()
        self._check.verify_all()

    # ---- steps 1 to 4, in the stream thread

    def settle(self, number: int) -> Plan:
        """Decide what to do with epoch ``number``, inside foreachBatch, before any row moves.

        Raises `WentBack` if the epoch's input differs from what is recorded of it, and whatever made the
        commit thread fail.
        """
        run = self._run
        # until it is prepared: the user's function may catch whatever is raised from here on
        run.current = run.current.followed_by(number)
        run.queue.raise_failure()
        reach("coordinator.settle.before")
        run.queue.run_epoch(number)
        history = run.ledger.verify()
        self._check.refuse_gap(history, number)
        self._check.refuse_other_past(history, number - 1)
        for prepared in history.pending:
            if prepared.epoch < number:
                self._expect_decided(prepared.epoch, number)
        if number in history.disputed:
            history = self._withdraw(number)
        recorded = history.epochs.get(number)
        if recorded is None:
            # a take names what was applied, even if the entries of those epochs were removed by hand
            newest = max(history.newest, *(last.epoch for last in history.applied.values() if last.parts), -1)
            if number <= newest:
                raise run.conclude(consistency.unknown_past(number, newest))
            # before anything is swept: what a target that was set back holds prepared is evidence, and may be the rows
            self._check.verify_all()
            self._sweep.targets()
            run.current = CurrentEpoch(number, Phase.COMPARED)
            return Plan.WRITE
        self._check.refuse_other_input(recorded)
        if number not in history.done and number not in run.queue.pending:
            run.queue.wait_settled()
            run.queue.add(number)
        run.current = CurrentEpoch(number)
        return Plan.RUN_FOR_STATE

    def _expect_decided(self, epoch: int, running: int) -> None:
        run = self._run
        # between its record in this run and this call Spark has written its commit; if not, the commit thread finds out
        if epoch in run.recorded and epoch in run.queue.pending:
            return
        if not run.checkpoint.is_decided(epoch):
            raise run.conclude(consistency.undecided_before(epoch, running))
        if epoch not in run.queue.pending and epoch not in run.ledger.known().done:
            run.queue.add(epoch)

    def _withdraw(self, number: int) -> LedgerHistory:
        """Take back a disputed record: Spark has not decided the epoch, and runs it again.

        Not earlier: if foreachBatch caught the error, Spark decides the epoch, and then what is recorded is committed.
        """
        # its commits are not looked for: nothing in this run has put it on the queue
        if not self._run.checkpoint.is_decided(number) and number not in self._run.queue.pending:
            self._run.ledger.append(Withdrawn(number))
            self._run.ledger.verify()
        return self._run.ledger.known()

    def dispute(self, number: int) -> None:
        """Note in the ledger that the record of an epoch has only some of its rows: the query was called again in it.

        If nothing of it is recorded, there is nothing to note. May be repeated; until it is noted, a later start takes
        the record to be complete.
        """
        history = self._run.ledger.verify()
        if number in history.epochs.keys() - history.done - history.disputed:
            self._run.ledger.append(Disputed(number))

    def begin(self, number: int) -> Epoch:
        """Return a fresh attempt at an epoch, with a place in the spool. `record` or `abandon` ends it."""
        run = self._run
        # what an earlier run has recorded may be lost by now: let its replay come first, not overtake this attempt
        if not self._begun or any(sink.writers_read for one in run.participants for sink in one.members.values()):
            run.queue.wait_settled()
            self._begun = True
        run.queue.begin_attempt()
        epoch = Epoch(number, uuid.uuid4().hex)
        run.progress.begin(number)
        run.spool.make(run.query_id, epoch)
        run.current = CurrentEpoch(number, Phase.WRITING)
        reach("coordinator.write.before")
        return epoch

    def contexts(self, epoch: Epoch, schemas: Mapping[str, pa.Schema]) -> Mapping[str, WriterContext]:
        """Return what the writers of each sink are told in an attempt; ``schemas`` are those of their rows, by sink.

        Call it just before the write job: a target may note its present state, such as the end of its log.
        """
        contexts: dict[str, WriterContext] = {}
        for participant in self._run.participants:
            of_members = {name: schemas[name] for name in participant.members}
            contexts |= participant.begin(epoch, of_members, retained=self._retain_seconds > 0)
        return contexts

    def record(
        self,
        epoch: Epoch,
        written: Written,
        spooled: Spooled = NOTHING_SPOOLED,
        counts: Counts = NOTHING_COUNTED,
    ) -> None:
        """Let the participants vote, then record the epoch. When this returns, foreachBatch may return.

        If this raises, the batch has to fail. If a vote raised, the attempt is abandoned; if the append did, the epoch
        may be recorded, so nothing of it is aborted until the next driver has read the ledger.
        """
        run = self._run
        run.progress.written(epoch.number)
        try:
            prepared = self._vote(epoch, written, spooled, counts)
        except Exception:
            self.abandon(epoch)
            raise
        reach("coordinator.record.before")
        run.current = CurrentEpoch(epoch.number, Phase.RECORDING)
        try:
            run.ledger.append(prepared)
        except Fenced:
            # the one error that says that nothing was written. Any other leaves the attempt under way for good: it
            # may be recorded, so nothing may end it
            self.abandon(epoch)
            raise
        reach("coordinator.record.after")
        run.progress.recorded(prepared)
        run.current = CurrentEpoch(epoch.number)
        run.recorded.add(epoch.number)
        run.queue.add(epoch.number)
        run.queue.end_attempt()

    def _vote(self, epoch: Epoch, written: Written, spooled: Spooled, counts: Counts) -> Prepared:
        run = self._run
        run.queue.wait_settled()
        if run.queue.overtaken:
            raise consistency.overtaken(epoch.number)
        reach("coordinator.vote.before")
        shares: dict[str, Share] = {}
        for name, accepted in written.items():
            tasks, answers = zip(*accepted, strict=True)
            shares[name] = Share(answers, tasks, spooled.get(name, {}), counts.get(name, RowCount()))
        # each share holds what its tasks have answered, until its participant has voted
        prepared = Prepared(epoch.number, epoch.attempt, "", shares)
        by_participant = run.by_participant(written)
        for participant, names in by_participant:
            with run.if_ours(participant), run.progress.timed("vote_seconds", epoch.number, names):
                voted = participant.vote(epoch, run.ballots(prepared, names))
            for name in names:
                shares[name] = replace(shares[name], parts=tuple(voted[name]))
                reach("coordinator.vote.between")
        together = tuple(tuple(names) for _, names in by_participant if len(names) > 1)
        digest = run.checkpoint.offsets_digest(epoch.number, durable=True)
        return replace(prepared, offsets=digest, together=together, retain=self._retain_seconds)

    def abandon(self, epoch: Epoch) -> None:
        """Abort an attempt that failed before anything tried to record it.

        Best effort, so that the first error is the one that the user sees: what stays, `settle` or the
        next driver's `recover` sweeps.
        """
        self._run.current = CurrentEpoch(epoch.number, Phase.FAILED)
        try:
            try:
                self._sweep.all()
            except Fenced:
                # after an operator has abandoned the checkpoint, there is no next sweep
                self._sweep.own(epoch)
            self.queue.end_attempt()
        except (EpochsinkError, OSError) as failure:
            self._sweep.look_into_spool()
            _log.warning("attempt %s at epoch %d is left for the next sweep: %s", epoch.attempt, epoch.number, failure)

    # ---- steps 6 and 7, in the commit thread

    def commit_decided(self) -> bool:
        """Commit pending epochs that Spark has decided, oldest first; return whether none is left pending.

        May be repeated at any time. The caller tells the stream thread of an error, by `fail`. Raises `WentBack` if
        Spark has decided an epoch that this run was given and could not prepare.
        """
        return self._commits.commit_decided()

    def has_decided(self) -> bool:
        """Return whether a pending epoch is decided: its commit is under way or about to be."""
        return self._commits.has_decided()

    def tidy(self) -> None:
        """Abort what losing tasks have left since the last sweep; does nothing unless the stream is idle."""
        self._sweep.tidy()

    def drain(self) -> None:
        """Commit what is decided, once the stream thread has ended; never aborts.

        An epoch that is recorded and not decided stays for the next start, which adopts it. Raises `WentBack` if Spark
        has decided an epoch that is not in the ledger.
        """
        self._commits.drain()

    def note_failure(self, failure: BaseException) -> None:
        """Keep why the query stops, in words without values of rows: for `progress`, and for `epochsink status`.

        Best effort: the store or another driver may refuse it, and a start that has not taken the ledger notes nothing.
        """
        self.progress.failed(without_values(failure))
        try:
            self._run.ledger.append(Stopped.of(failure))
        except (EpochsinkError, OSError) as refused:
            _log.info("the failure is not in the ledger: %s", refused)

    def fail(self, failure: BaseException) -> None:
        """Keep the commit thread's failure for the stream thread, which raises it."""
        self.queue.fail(failure)
