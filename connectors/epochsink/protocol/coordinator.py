"""THE two-phase-commit state machine: recover, settle, record, commit, drain. Plain calls, no Spark.

For each epoch Spark does: write ``offsets/N``, call ``foreachBatch(N)``, write ``commits/N``. So foreachBatch can only
prepare, ``commits/N`` is the decision, and the commit comes after it, from a second thread:

    stream thread   recover | settle(N)  (write job)  record(N) | settle(N+1) ...
    commit thread                         commit_decided(N-1)   | commit_decided(N) ...

Rules that everything here rests on: what is recorded is never aborted; whatever is recorded and decided may be
committed by any driver; aborting and replaying need the ledger to be still ours, read again just before; a conclusion
is drawn from a target only after the ledger was read again. The protocol was model-checked; each rule has a
mutant in tests/simulation that loses or duplicates rows without it.
"""

from __future__ import annotations

import enum
import logging
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING

from epochsink.errors import EpochsinkError, Fenced
from epochsink.failpoints import reach
from epochsink.protocol import consistency
from epochsink.protocol.epoch_commit import EpochCommit
from epochsink.protocol.ledger_entries import Disputed, Prepared, Share, Withdrawn
from epochsink.protocol.run_state import addressed
from epochsink.protocol.takeover import Takeover
from epochsink.sink import NOTHING_SPOOLED, Epoch

if TYPE_CHECKING:
    from epochsink.protocol.ledger_history import History
    from epochsink.sink import Identity, Spooled, Written

_log = logging.getLogger("epochsink")


class Plan(enum.Enum):
    """What foreachBatch has to do with an epoch."""

    WRITE = "write its rows to the sinks"
    RUN_FOR_STATE = "execute the plan for its state only: a recorded attempt stands"


class Coordinator(Takeover, EpochCommit):
    """Ties one streaming query's epochs to its sinks. One object for each run of the query.

    ``monitor`` guards what the two threads share. ``join_running`` allows a
    ledger to begin on a checkpoint that already holds commits. ``pipeline`` is the query's name for people.
    """

    # ---- step 0

    @addressed
    def recover(self) -> None:
        """Take the ledger, compare it with checkpoint and targets, abort what nobody recorded, commit what is decided.

        A recorded epoch that is not decided yet is watched from now on: an earlier run may still be about to write its
        commit, and then Spark goes on to the next epoch, which may be long in coming. To be called once, before the
        first batch. Raises `WentBack`, `Fenced`, `OutcomeUnknown`.
        """
        history = self._take_over()
        # first: what a superseded driver prepared again and could not record may hold locks that a commit needs
        self._fence_others()
        for prepared in history.pending:
            if self._checkpoint.is_decided(prepared.epoch):
                self._commit(prepared.epoch)
            elif prepared.epoch not in history.disputed:
                self._queue.add(prepared.epoch)
        reach("coordinator.recover.after")

    # ---- step 1

    @addressed
    def settle(self, number: int) -> Plan:
        """Decide what to do with epoch ``number``, inside foreachBatch, before any row moves.

        Raises `WentBack` if the epoch's input differs from what is recorded of it, and whatever made the
        commit thread fail.
        """
        # until it is prepared: whatever is raised from here on, the user's function may swallow
        self._owed = number if self._owed < 0 else self._owed
        self.raise_failure()
        reach("coordinator.settle.before")
        self._queue.run_epoch(number)
        history = self._ledger.verify()
        if history.newest < number - 1:
            self._refuse_undocumented(history)
        for prepared in history.pending:
            if prepared.epoch < number:
                self._expect_decided(prepared.epoch, number)
        if number in history.disputed:
            history = self._withdraw(number)
        recorded = history.epochs.get(number)
        if recorded is None:
            # a take names what was applied, also where somebody has removed the entries of those epochs
            newest = max(history.newest, *(last.epoch for last in history.applied.values() if last.parts), -1)
            if number <= newest:
                raise self._conclude(consistency.unknown_past(number, newest))
            # before anything is swept: what a target that was set back holds prepared is evidence, and may be the rows
            self._check.verify_all()
            self._abort_orphans_of_owner()
            return Plan.WRITE
        if recorded.offsets != self._checkpoint.offsets_digest(number):
            raise self._conclude(consistency.other_input(number))
        if number not in history.done and number not in self.pending:
            self.wait_settled()
            self._queue.add(number)
        self._owed = -1
        return Plan.RUN_FOR_STATE

    def dispute(self, number: int) -> None:
        """Say in the ledger that the record of an epoch has only some of its rows: the query was called again in it.

        Where nothing of it is recorded, there is nothing to say. May be repeated; until it stands, a later start takes
        the record for whole.
        """
        history = self._ledger.verify()
        if number in history.epochs.keys() - history.done - history.disputed:
            self._ledger.append(Disputed(number))

    def _withdraw(self, number: int) -> History:
        """Take back a disputed record: Spark has not decided the epoch, and runs it again.

        Not earlier: whoever caught the error in foreachBatch has let Spark decide the epoch, and then it must stand.
        """
        # its commits are not looked for: nothing in this run has put it on the queue
        if self._checkpoint.is_decided(number) or number in self.pending:
            return self._ledger.known()
        self._ledger.append(Withdrawn(number))
        return self._ledger.verify()

    def _expect_decided(self, epoch: int, running: int) -> None:
        # between its record in this run and this call Spark has written its commit; the commit thread sees it, or not
        if epoch in self._recorded_here and epoch in self.pending:
            return
        if not self._checkpoint.is_decided(epoch):
            raise self._conclude(consistency.undecided_before(epoch, running))
        if epoch not in self.pending and epoch not in self._ledger.known().done:
            self._queue.add(epoch)

    # ---- steps 2 to 4

    def begin(self, number: int) -> Epoch:
        """Return a fresh attempt at an epoch, with a place in the spool. `record` or `abandon` ends it."""
        if not self._begun:
            # what an earlier run has recorded may be lost by now: let its replay come first, not overtake this attempt
            self.wait_settled()
            self._begun = True
        self._queue.begin_attempt()
        self._attempted = number
        epoch = Epoch(number, uuid.uuid4().hex)
        self._spool.make(self._query_id, epoch)
        # while it is being written, Spark cannot decide it, and nobody has to look
        self._owed = -1
        reach("coordinator.write.before")
        return epoch

    def identity(self, sink: str) -> Identity:
        """Return who a sink is in this generation."""
        return self._identities[sink]

    @addressed
    def record(self, epoch: Epoch, written: Written, spooled: Spooled = NOTHING_SPOOLED) -> None:
        """Let each sink vote, then record the epoch. When this returns, foreachBatch may return.

        If this raises, the batch has to fail. Where a vote raised, the attempt is abandoned; where the append did, it
        may be recorded, so it stands until the next driver reads.
        """
        try:
            shares = self._vote(epoch, written, spooled)
            offsets = self._checkpoint.offsets_digest(epoch.number)
        except Exception:
            self.abandon(epoch)
            raise
        reach("coordinator.record.before")
        self._owed = epoch.number
        try:
            together = tuple(tuple(names) for _, names in self._by_participant(shares) if len(names) > 1)
            self._ledger.append(Prepared(epoch.number, epoch.attempt, offsets, shares, together))
        except Fenced:
            # the one error that says that nothing was written. Any other leaves the attempt under way for good: it may
            # be recorded, so nothing may end it
            self.abandon(epoch)
            raise
        reach("coordinator.record.after")
        self._owed = -1
        self._recorded_here.add(epoch.number)
        self._queue.add(epoch.number)
        self._queue.end_attempt()

    def _vote(self, epoch: Epoch, written: Written, spooled: Spooled) -> dict[str, Share]:
        self.wait_settled()
        if self._queue.overtaken:
            raise consistency.overtaken(epoch.number)
        reach("coordinator.vote.before")
        shares: dict[str, Share] = {}
        applied = self._ledger.known().applied
        for participant, names in self._by_participant(written):
            ballots = {}
            for name in names:
                tasks, answers = zip(*written[name], strict=True)
                shares[name] = Share((), tasks, spooled.get(name, {}))
                ballots[name] = self._ballot(name, epoch, shares[name], answers, applied)
            with self._if_ours(participant):
                voted = participant.vote(epoch, ballots)
            for name in names:
                shares[name] = replace(shares[name], parts=tuple(voted[name]))
                reach("coordinator.vote.between")
        return shares

    def abandon(self, epoch: Epoch) -> None:
        """Abort an attempt that failed before anything tried to record it.

        Best effort, so that the first error is the one that the user sees: what stays, `settle` or the
        next driver's `recover` sweeps.
        """
        self._owed = epoch.number
        try:
            try:
                self._abort_orphans()
            except Fenced:
                # after an operator has abandoned the checkpoint, there is no next sweep
                self._end_own(epoch)
            self._queue.end_attempt()
        except (EpochsinkError, OSError) as failure:
            self._until_spool_sweep = 0
            _log.warning("attempt %s at epoch %d is left for the next sweep: %s", epoch.attempt, epoch.number, failure)
