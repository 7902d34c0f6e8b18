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
from contextlib import contextmanager
from typing import TYPE_CHECKING

from epochsink.errors import EpochsinkError, Fenced
from epochsink.failpoints import reach
from epochsink.protocol import consistency
from epochsink.protocol.applied_check import AppliedCheck
from epochsink.protocol.commit_queue import CommitQueue
from epochsink.protocol.ledger_entries import Done, Prepared, Replay, Share
from epochsink.protocol.two_threads import TwoThreads
from epochsink.sink import NOTHING_SPOOLED, Epoch, Identity, Outcome

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator, Mapping

    from epochsink.protocol.ledger import History, Ledger
    from epochsink.sink import CheckpointReader, LastDone, SinkCommitter, Spooled, SpoolKeeper, Written

_log = logging.getLogger("epochsink")

REPLAY_TURNS = 4
"""How often one part is prepared again before the query stops: each turn needs a new loss in the target."""


class Plan(enum.Enum):
    """What foreachBatch has to do with an epoch."""

    WRITE = "write its rows to the sinks"
    RUN_FOR_STATE = "execute the plan for its state only: a recorded attempt stands"


class Coordinator(TwoThreads):
    """Ties one streaming query's epochs to its sinks. One object for each run of the query.

    ``sinks`` are committers by name; ``monitor`` guards what the two threads share. ``join_running`` allows a
    ledger to begin on a checkpoint that already holds commits. ``pipeline`` is the query's name for people.
    """

    def __init__(
        self,
        *,
        query_id: str,
        ledger: Ledger,
        checkpoint: CheckpointReader,
        spool: SpoolKeeper,
        sinks: Mapping[str, SinkCommitter],
        join_running: bool = False,
        monitor: threading.Condition | None = None,
        pipeline: str = "",
    ) -> None:
        self._query_id, self._pipeline = query_id, pipeline
        self._ledger, self._checkpoint = ledger, checkpoint
        self._spool = spool
        self._sinks = dict(sinks)
        self._join_running = join_running
        self._check = AppliedCheck(ledger, self._sinks)
        self._queue = CommitQueue(monitor)
        self._begun = False
        self._attempted = -1
        self._identities: dict[str, Identity] = {}

    # ---- step 0

    def recover(self) -> None:
        """Take the ledger, compare the stories, abort what nobody recorded, and commit what is decided.

        A recorded epoch that is not decided yet is watched from now on: an earlier run may still be about to write its
        commit, and then Spark goes on to the next epoch, which may be long in coming. To be called once, before the
        first batch. Raises `WentBack`, `Fenced`, `OutcomeUnknown`.
        """
        history = self._take_over()
        # first: what a superseded driver prepared again and could not record may hold locks that a commit needs
        self._abort_orphans()
        for prepared in history.pending:
            if self._checkpoint.is_decided(prepared.epoch):
                self._commit(prepared.epoch)
            else:
                self._queue.add(prepared.epoch)
        reach("coordinator.recover.after")

    def abort_leftovers(self) -> None:
        """Take the ledger, compare the stories, and abort what nobody recorded; commits nothing.

        For an operator, in place of `recover`. Raises `WentBack`, `Fenced`.
        """
        self._take_over()
        self._abort_orphans()

    def _take_over(self) -> History:
        reach("coordinator.take.before")
        self._take()
        reach("coordinator.take.after")
        history = self._ledger.verify()
        self._refuse_other_stories(history)
        return history

    def _take(self) -> None:
        # in this order: what is decided by now is recorded by the time that the ledger is read
        newest_decided = self._checkpoint.newest_decided()
        before = self._ledger.read()
        joined = -1
        if before.owner is None and newest_decided >= 0:
            if not self._join_running:
                raise consistency.no_ledger(newest_decided)
            self._check.refuse_known_targets(self._query_id)
            joined = newest_decided
        known = before.owner.origins if before.owner else {}
        new = {name: sink.initial_state() for name, sink in self._sinks.items() if name not in known}
        # those that are known go along: two drivers that take a new ledger at once may remove each other's first entry
        origins = {**known, **new}
        take = self._ledger.take(self._query_id, origins, joined)
        for name, sink in self._sinks.items():
            who = Identity(self._query_id, name, take.generation, take.origins[name], self._pipeline)
            self._identities[name] = who
            sink.open(who)

    def _refuse_other_stories(self, history: History) -> None:
        self._refuse_undocumented(history)
        self._check.verify_all()
        for prepared in history.pending:
            for name in prepared.shares.keys() - self._sinks.keys():
                raise self._conclude(consistency.sink_is_gone(prepared.epoch, name))

    def _refuse_undocumented(self, history: History) -> None:
        """Everything that is decided is in the ledger."""
        decided = self._checkpoint.newest_decided()
        if decided > history.newest:
            raise self._conclude(self._check.why_undocumented(history.newest, decided, self._attempted))

    # ---- step 1

    def settle(self, number: int) -> Plan:
        """Decide what to do with epoch ``number``, inside foreachBatch, before any row moves.

        Raises `WentBack` if the epoch's input differs from what is recorded of it, and whatever made the
        commit thread fail.
        """
        self.raise_failure()
        reach("coordinator.settle.before")
        history = self._ledger.verify()
        if history.newest < number - 1:
            self._refuse_undocumented(history)
        for prepared in history.pending:
            if prepared.epoch < number:
                self._expect_decided(prepared.epoch, number)
        recorded = history.epochs.get(number)
        if recorded is None:
            if number <= history.newest:
                raise self._conclude(consistency.unknown_past(number, history.newest))
            # before anything is swept: what a target that was set back holds prepared is evidence, and may be the rows
            self._check.verify_all()
            self._abort_orphans()
            return Plan.WRITE
        if recorded.offsets != self._checkpoint.offsets_digest(number):
            raise self._conclude(consistency.other_input(number))
        if number not in history.done and number not in self.pending:
            self.wait_settled()
            self._queue.add(number)
        return Plan.RUN_FOR_STATE

    def _expect_decided(self, epoch: int, running: int) -> None:
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
        reach("coordinator.write.before")
        return epoch

    def identity(self, sink: str) -> Identity:
        """Return who a sink is in this generation."""
        return self._identities[sink]

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
        # an error from here on leaves the attempt under way for good: it may be recorded, so nothing may end it
        self._ledger.append(Prepared(epoch.number, epoch.attempt, offsets, shares))
        reach("coordinator.record.after")
        self._queue.add(epoch.number)
        self._queue.end_attempt()

    def _vote(self, epoch: Epoch, written: Written, spooled: Spooled) -> dict[str, Share]:
        self.wait_settled()
        if self._queue.overtaken:
            raise consistency.overtaken(epoch.number)
        reach("coordinator.vote.before")
        shares: dict[str, Share] = {}
        applied = self._ledger.known().applied
        for name, accepted in written.items():
            tasks = tuple(task for task, _ in accepted)
            files = spooled.get(name, {})
            rows = self._spool.rows(self._identities[name], epoch, tasks, files)
            with self._if_ours():
                parts = self._sinks[name].vote(
                    epoch, [committable for _, committable in accepted], rows, applied.get(name)
                )
            shares[name] = Share(tuple(parts), tasks, files)
            reach("coordinator.vote.between")
        return shares

    def abandon(self, epoch: Epoch) -> None:
        """Abort an attempt that failed before anything tried to record it.

        Best effort, so that the first error is the one that the user sees: what stays, `settle` or the
        next driver's `recover` sweeps.
        """
        try:
            self._abort_orphans()
            self._queue.end_attempt()
        except (EpochsinkError, OSError) as failure:
            _log.warning("attempt %s at epoch %d is left for the next sweep: %s", epoch.attempt, epoch.number, failure)

    # ---- step 6

    def commit_decided(self) -> bool:
        """Commit pending epochs that Spark has decided, oldest first; return whether none is left pending.

        Called by the commit thread, as often as it likes. An error is kept, and raised in the stream thread too.
        """
        try:
            while self.pending and self._checkpoint.has_commit(self.pending[0]):
                self._commit(self.pending[0])
                self._queue.remove_first()
        except BaseException as failure:
            self.fail(failure)
            raise
        return not self.pending

    def _commit(self, number: int) -> None:
        """Commit one decided epoch in every sink, as the newest ledger entry says, and record that it is done."""
        history = self._ledger.verify()
        if number in history.done:
            return
        reach("coordinator.commit.before")
        if history.epochs[number].offsets != self._checkpoint.offsets_digest(number):
            raise self._conclude(consistency.other_input(number))
        # what readers are about to see must not be undone by a power cut that takes the decision back
        self._checkpoint.make_durable(number)
        for name, share in history.epochs[number].shares.items():
            self._check.verify_before_commit(number, name)
            for index in range(len(share.parts)):
                if not self._commit_part(number, name, index, history.applied.get(name)):
                    return
                reach("coordinator.commit.between")
        prepared = self._ledger.verify().epochs[number]  # a replay has put parts in the place of others
        for name, share in prepared.shares.items():
            with self._if_ours():
                after = history.applied.get(name)
                self._sinks[name].await_visible(Epoch(number, prepared.attempt), share.parts, after)
        reach("coordinator.done.before")
        self._ledger.append(Done(number))
        reach("coordinator.done.after")
        self._clear(prepared)

    def _commit_part(self, number: int, name: str, index: int, after: LastDone | None) -> bool:
        """Commit one part, replaying it if the target has lost it; False if the epoch proves to be done."""
        for _ in range(REPLAY_TURNS):
            # the newest entry, not what was read before an earlier part: that part's replay is in it
            prepared = self._ledger.known().epochs[number]
            epoch, share = Epoch(number, prepared.attempt), prepared.shares[name]
            rows = self._spool.rows(self._identities[name], epoch, share.tasks, share.files)
            with self._if_ours():
                verdict = self._sinks[name].commit(epoch, share.parts[index], rows, after)
            if verdict.outcome is Outcome.COMMITTED:
                return True
            # before anything is concluded from the target, the ledger says whether the question is still ours
            if number in self._ledger.verify().done:
                return False
            if verdict.outcome is Outcome.UNKNOWN:
                raise consistency.unknown_outcome(number, name, verdict.evidence)
            # a marker that is missing proves nothing where those of earlier epochs are missing too
            self._check.verify_before_commit(number, name)
            with self._queue.replaying(), self._if_ours():
                reach("coordinator.replay.before")
                parts = self._ledger.verify().epochs[number].shares[name].parts
                replayed = self._sinks[name].replay(epoch, parts[index], rows, uuid.uuid4().hex, after)
                reach("coordinator.replay.prepared")
                self._ledger.append(Replay(number, name, (*parts[:index], replayed, *parts[index + 1 :])))
            reach("coordinator.replay.after")
        raise consistency.unknown_outcome(number, name, f"prepared again {REPLAY_TURNS} times, and lost each time")

    def _clear(self, prepared: Prepared) -> None:
        """Drop what a done epoch has left. Failing to is no harm: the next sweep finds it."""
        epoch = Epoch(prepared.epoch, prepared.attempt)
        try:
            for name, share in prepared.shares.items():
                self._sinks[name].finish(epoch, share.parts)
            self._spool.drop(self._query_id, epoch)
            self._ledger.trim()
        except OSError as failure:
            _log.warning("leftovers of epoch %d stay for the next sweep: %s", prepared.epoch, failure)

    def tidy(self) -> None:
        """Abort what losing tasks have left since the last sweep; does nothing unless the stream is idle.

        For the commit thread, now and then while nothing is pending: an open transaction of a task that lost late holds
        readers back until it ends, and without input no `settle` would end it. An attempt that begins meanwhile
        waits. A target that cannot be reached now is no failure: the next sweep finds what is left.
        """
        try:
            with self._queue.alone_if_idle() as idle:
                if idle:
                    self._end_unrecorded()
        except OSError as failure:
            _log.warning("leftovers of losing tasks stay for the next sweep: %s", failure)
        except BaseException as failure:
            self.fail(failure)
            raise

    # ---- step 7

    def drain(self) -> None:
        """Commit what is decided, once the stream thread has ended; never aborts.

        An epoch that is recorded and not decided stays for the next start, which adopts it.
        """
        reach("coordinator.drain.before")
        for prepared in self._ledger.verify().pending:
            if self._checkpoint.is_decided(prepared.epoch):
                self._commit(prepared.epoch)

    # ---- shared

    def _abort_orphans(self) -> None:
        with self._queue.alone():
            self._end_unrecorded()

    def _end_unrecorded(self) -> None:
        """Abort what the ledger does not name. Only the owner may: the ledger is read again for each sink."""
        for name, sink in self._sinks.items():
            history = self._ledger.verify()
            keep = [part for prepared in history.pending for part in prepared.parts_of(name)]
            with self._if_ours():
                ended = sink.abort_orphans(keep, history.done_parts(name))
            for line in ended:
                _log.info("sink '%s': aborted what no recorded epoch names: %s", name, line)
        # listed before the ledger is read: a newer driver's attempts cannot be among them, if it is still ours
        spooled = self._spool.attempts(self._query_id)
        kept = {Epoch(prepared.epoch, prepared.attempt) for prepared in self._ledger.verify().pending}
        for epoch in spooled:
            if epoch not in kept:
                self._spool.drop(self._query_id, epoch)

    @contextmanager
    def _if_ours(self) -> Iterator[None]:
        """Let a sink's conclusion pass if the ledger is still ours; raises `Fenced` if it is not."""
        try:
            yield
        except Fenced:
            raise
        except EpochsinkError as conclusion:
            raise self._conclude(conclusion) from conclusion

    def _conclude(self, conclusion: EpochsinkError) -> EpochsinkError:
        """Return a conclusion if the ledger is still ours; raises `Fenced` if it is not."""
        self._ledger.verify()
        return conclusion
