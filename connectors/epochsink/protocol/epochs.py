"""Steps 1 to 4, inside foreachBatch: settle earlier epochs, begin an attempt, let the participants vote, record it."""

from __future__ import annotations

import enum
import logging
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING

from epochsink.errors import EpochsinkError, Fenced
from epochsink.failpoints import reach
from epochsink.protocol import consistency
from epochsink.protocol.ledger_entries import Disputed, Prepared, Share, Withdrawn
from epochsink.sink import Epoch

if TYPE_CHECKING:
    from epochsink.protocol.applied_check import AppliedCheck
    from epochsink.protocol.ledger_history import History
    from epochsink.protocol.run_state import RunState
    from epochsink.protocol.sweep import Sweep
    from epochsink.sink import Spooled, Written

_log = logging.getLogger("epochsink")


class Plan(enum.Enum):
    """What foreachBatch has to do with an epoch."""

    WRITE = "write its rows to the sinks"
    RUN_FOR_STATE = "execute the plan for its state only: a recorded attempt stands"


class Epochs:
    """The epochs of a run, up to their record, in the stream thread."""

    def __init__(self, run: RunState, check: AppliedCheck, sweep: Sweep) -> None:
        self._run = run
        self._check = check
        self._sweep = sweep
        self._begun = False

    def settle(self, number: int) -> Plan:
        """Decide what to do with an epoch, before any row moves."""
        run = self._run
        # until it is prepared: whatever is raised from here on, the user's function may swallow
        run.owed = number if run.owed < 0 else run.owed
        run.queue.raise_failure()
        reach("coordinator.settle.before")
        run.queue.run_epoch(number)
        history = run.ledger.verify()
        if history.newest < number - 1:
            self._check.refuse_undocumented(history)
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
                raise run.conclude(consistency.unknown_past(number, newest))
            # before anything is swept: what a target that was set back holds prepared is evidence, and may be the rows
            self._check.verify_all()
            self._sweep.targets()
            return Plan.WRITE
        if recorded.offsets != run.checkpoint.offsets_digest(number):
            raise run.conclude(consistency.other_input(number))
        if number not in history.done and number not in run.queue.pending:
            run.queue.wait_settled()
            run.queue.add(number)
        run.owed = -1
        return Plan.RUN_FOR_STATE

    def _expect_decided(self, epoch: int, running: int) -> None:
        run = self._run
        # between its record in this run and this call Spark has written its commit; the commit thread sees it, or not
        if epoch in run.recorded and epoch in run.queue.pending:
            return
        if not run.checkpoint.is_decided(epoch):
            raise run.conclude(consistency.undecided_before(epoch, running))
        if epoch not in run.queue.pending and epoch not in run.ledger.known().done:
            run.queue.add(epoch)

    def dispute(self, number: int) -> None:
        """Record that the record of an epoch has only some of its rows."""
        history = self._run.ledger.verify()
        if number in history.epochs.keys() - history.done - history.disputed:
            self._run.ledger.append(Disputed(number))

    def _withdraw(self, number: int) -> History:
        """Take back a disputed record: Spark has not decided the epoch, and runs it again.

        Not earlier: whoever caught the error in foreachBatch has let Spark decide the epoch, and then it must stand.
        """
        # its commits are not looked for: nothing in this run has put it on the queue
        if not self._run.checkpoint.is_decided(number) and number not in self._run.queue.pending:
            self._run.ledger.append(Withdrawn(number))
            self._run.ledger.verify()
        return self._run.ledger.known()

    def begin(self, number: int) -> Epoch:
        """Return a fresh attempt at an epoch."""
        run = self._run
        if not self._begun:
            # what an earlier run has recorded may be lost by now: let its replay come first, not overtake this attempt
            run.queue.wait_settled()
            self._begun = True
        run.queue.begin_attempt()
        run.attempted = number
        epoch = Epoch(number, uuid.uuid4().hex)
        run.spool.make(run.query_id, epoch)
        # while it is being written, Spark cannot decide it, and nobody has to look
        run.owed = -1
        reach("coordinator.write.before")
        return epoch

    def record(self, epoch: Epoch, written: Written, spooled: Spooled) -> None:
        """Let the participants vote, then record the epoch."""
        run = self._run
        try:
            prepared = self._vote(epoch, written, spooled)
        except Exception:
            self.abandon(epoch)
            raise
        reach("coordinator.record.before")
        run.owed = epoch.number
        try:
            run.ledger.append(prepared)
        except Fenced:
            # the one error that says that nothing was written. Any other leaves the attempt under way for good: it may
            # be recorded, so nothing may end it
            self.abandon(epoch)
            raise
        reach("coordinator.record.after")
        run.owed = -1
        run.recorded.add(epoch.number)
        run.queue.add(epoch.number)
        run.queue.end_attempt()

    def _vote(self, epoch: Epoch, written: Written, spooled: Spooled) -> Prepared:
        run = self._run
        run.queue.wait_settled()
        if run.queue.overtaken:
            raise consistency.overtaken(epoch.number)
        reach("coordinator.vote.before")
        shares: dict[str, Share] = {}
        together = []
        applied = run.ledger.known().applied
        for participant, names in run.by_participant(written):
            ballots = {}
            for name in names:
                tasks, answers = zip(*written[name], strict=True)
                shares[name] = Share((), tasks, spooled.get(name, {}))
                ballots[name] = run.ballot(name, epoch, shares[name], answers, applied)
            with run.if_ours(participant):
                voted = participant.vote(epoch, ballots)
            for name in names:
                shares[name] = replace(shares[name], parts=tuple(voted[name]))
                reach("coordinator.vote.between")
            if len(names) > 1:
                together.append(tuple(names))
        offsets = run.checkpoint.offsets_digest(epoch.number)
        return Prepared(epoch.number, epoch.attempt, offsets, shares, tuple(together))

    def abandon(self, epoch: Epoch) -> None:
        """Abort an attempt that nothing has tried to record."""
        self._run.owed = epoch.number
        try:
            try:
                self._sweep.all()
            except Fenced:
                # after an operator has abandoned the checkpoint, there is no next sweep
                self._sweep.own(epoch)
            self._run.queue.end_attempt()
        except (EpochsinkError, OSError) as failure:
            self._sweep.look_into_spool()
            _log.warning("attempt %s at epoch %d is left for the next sweep: %s", epoch.attempt, epoch.number, failure)
