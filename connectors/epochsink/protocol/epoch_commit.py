"""Steps 6 and 7: commit what Spark has decided, part by part, and prepare again what a target has lost."""

from __future__ import annotations

import logging
import uuid
from typing import TYPE_CHECKING, Final, cast

from epochsink.failpoints import reach
from epochsink.protocol import consistency, transaction_groups
from epochsink.protocol.ledger_entries import Done, Prepared, Replay
from epochsink.protocol.run_state import addressed
from epochsink.protocol.sweep import Sweep
from epochsink.sink import Epoch, Outcome

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from epochsink.sink import LastDone

_log = logging.getLogger("epochsink")

REPLAY_TURNS: Final = 4
"""How often one part is prepared again before the query stops: each turn needs a new loss in the target."""


class EpochCommit(Sweep):
    """The commits of a run: in the commit thread, and at its start for what an earlier run has left."""

    @addressed
    def commit_decided(self) -> bool:
        """Commit pending epochs that Spark has decided, oldest first; return whether none is left pending.

        Called by the commit thread, as often as it likes. An error is kept, and raised in the stream thread too.
        """
        try:
            while self.pending and self._is_decided(self.pending[0]):
                self._commit(self.pending[0])
                self._queue.remove_first()
                # after that: the next epoch's vote does not wait for it
                self._trim()
        except BaseException as failure:
            self.fail(failure)
            raise
        return not self.pending

    def refuse_swallowed(self) -> None:
        """Refuse an error that did not reach Spark: raised in the next epoch, it would meet the same ``except``.

        Called by the commit thread while foreachBatch does not run: each look is a request to the store. Raises
        `WentBack` if Spark has decided an epoch that this run was given and could not prepare.
        """
        try:
            self._refuse_swallowed()
        except BaseException as failure:
            self.fail(failure)
            raise

    def _refuse_swallowed(self) -> None:
        number = self._owed
        if number < 0 or not self._checkpoint.has_commit(number):
            return
        self.raise_failure()
        # read again: the append that raised may have recorded it after all
        if number > self._ledger.verify().newest:
            raise consistency.decided_without_us(number, number, attempted=number)

    def _is_decided(self, number: int) -> bool:
        # in this order: Spark runs a later epoch only when the commit of the one before stands
        running = self._queue.running
        if self._checkpoint.has_commit(number):
            return True
        if running <= number:
            return False
        if not self._checkpoint.is_decided(number):
            raise self._conclude(consistency.undecided_before(number, running))
        return True

    def _trim(self) -> None:
        try:
            self._ledger.trim()
        except OSError as failure:
            _log.warning("old entries of the ledger stay until the next epoch is done: %s", failure)

    def _commit(self, number: int) -> None:
        """Commit one decided epoch in every sink, as the newest ledger entry says, and record that it is done."""
        history = self._ledger.verify()
        if number in history.done:
            return
        reach("coordinator.commit.before")
        # what this run has recorded, it has recorded with the offsets that stood there
        if number not in self._recorded_here and history.epochs[number].offsets != self._checkpoint.offsets_digest(
            number
        ):
            raise self._conclude(consistency.other_input(number))
        # what readers are about to see must not be undone by a power cut that takes the decision back
        self._checkpoint.make_durable(number)
        recorded = history.epochs[number].shares
        for names in transaction_groups.in_groups(self._sinks, recorded):
            # each of them before the first: what they share, the first one's commit makes visible for all
            for name in names:
                self._check.verify_before_commit(number, name)
            reach("coordinator.commit.compared")
            for name in names:
                committed = self._commit_at_once(number, name, history.applied)
                for index in range(len(recorded[name].parts)):
                    if index not in committed and not self._commit_part(number, name, index, history.applied):
                        return
                    reach("coordinator.commit.between")
        prepared = self._ledger.known().epochs[number]  # a replay has put parts in the place of others
        for name, share in prepared.shares.items():
            with self._if_ours(name):
                after = history.applied.get(name)
                self._sinks[name].await_visible(Epoch(number, prepared.attempt), share.parts, after)
        reach("coordinator.done.before")
        # whether the ledger is still ours is found out by this very append
        self._ledger.append(Done(number))
        reach("coordinator.done.after")
        self._recorded_here.discard(number)
        self._clear(prepared)

    def _commit_at_once(self, number: int, name: str, applied: Mapping[str, LastDone]) -> Collection[int]:
        """Let a sink commit what it can of its parts side by side; return which. The others are committed by one."""
        at_once = getattr(self._sinks[name], "commit_at_once", None)
        if at_once is None:  # a committer need not know of that
            return ()
        prepared = self._ledger.known().epochs[number]
        with self._if_ours(name):
            return cast(
                "Collection[int]",
                at_once(Epoch(number, prepared.attempt), prepared.shares[name].parts, applied.get(name)),
            )

    def _commit_part(self, number: int, name: str, index: int, applied: Mapping[str, LastDone]) -> bool:
        """Commit one part, replaying it if the target has lost it; False if the epoch proves to be done."""
        for _ in range(REPLAY_TURNS):
            # the newest entry, not what was read before an earlier part: that part's replay is in it
            prepared = self._ledger.known().epochs[number]
            epoch, share = Epoch(number, prepared.attempt), prepared.shares[name]
            ballot = self._ballot(name, epoch, share, applied)
            with self._if_ours(name):
                verdict = self._sinks[name].commit(epoch, share.parts[index], ballot.rows, ballot.after)
            if verdict.outcome is Outcome.COMMITTED:
                return True
            # before anything is concluded from the target, the ledger says whether the question is still ours
            if number in self._ledger.verify().done:
                return False
            if verdict.outcome is Outcome.UNKNOWN:
                raise consistency.unknown_outcome(number, name, verdict.evidence)
            self._replay(number, name, index, applied)
        raise consistency.unknown_outcome(number, name, f"prepared again {REPLAY_TURNS} times, and lost each time")

    def _replay(self, number: int, name: str, index: int, applied: Mapping[str, LastDone]) -> None:
        """Prepare a part again that the target has lost, and record it."""
        # a marker that is missing proves nothing where those of earlier epochs are missing too
        for member in transaction_groups.group(self._sinks, name):
            self._check.verify_before_commit(number, member)
        with self._queue.replaying(), self._if_ours(name):
            reach("coordinator.replay.before")
            prepared = self._ledger.verify().epochs[number]
            epoch, parts = Epoch(number, prepared.attempt), prepared.shares[name].parts
            ballots = {member: self._ballot(member, epoch, share, applied) for member, share in prepared.shares.items()}
            replayed = transaction_groups.replay(epoch, parts[index], name, ballots, uuid.uuid4().hex)
            reach("coordinator.replay.prepared")
            self._ledger.append(Replay(number, name, (*parts[:index], replayed, *parts[index + 1 :])))
        reach("coordinator.replay.after")

    def _clear(self, prepared: Prepared) -> None:
        """Drop what a done epoch has left. Failing to is no harm: the next sweep finds it."""
        epoch = Epoch(prepared.epoch, prepared.attempt)
        try:
            for name, share in prepared.shares.items():
                self._sinks[name].finish(epoch, share.parts)
            shares = prepared.shares.items()
            known = [
                (self._identities[name], task)
                for name, share in shares
                for task, file in share.files.items()
                if not file.carried
            ]
            self._spool.drop(self._query_id, epoch, known)
        except OSError as failure:
            _log.warning("leftovers of epoch %d stay for the next sweep: %s", prepared.epoch, failure)

    @addressed
    def drain(self) -> None:
        """Commit what is decided, once the stream thread has ended; never aborts.

        An epoch that is recorded and not decided stays for the next start, which adopts it. Raises `WentBack` if Spark
        has decided an epoch that is not in the ledger.
        """
        reach("coordinator.drain.before")
        history = self._ledger.verify()
        for prepared in history.pending:
            if self._checkpoint.is_decided(prepared.epoch):
                self._commit(prepared.epoch)
        self._trim()
        # no next epoch may come that would say so
        self._refuse_undocumented(history)
