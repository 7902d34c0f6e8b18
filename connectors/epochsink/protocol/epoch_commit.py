"""Steps 6 and 7: commit what Spark has decided, part by part, and prepare again what a target has lost."""

from __future__ import annotations

import logging
import uuid
from typing import TYPE_CHECKING, Final

from epochsink.failpoints import reach
from epochsink.protocol import consistency
from epochsink.protocol.ledger_entries import Done, Prepared, Replay
from epochsink.protocol.run_state import addressed
from epochsink.protocol.sweep import Sweep
from epochsink.sink import Epoch, Outcome

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from epochsink.sink import Ballot, LastDone, Participant

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
        for participant, _names in self._by_participant(history.epochs[number].shares):
            if not self._commit_parts(number, participant, history.applied):
                return
            reach("coordinator.commit.between")
        prepared = self._ledger.known().epochs[number]  # a replay has put parts in the place of others
        for participant, names in self._by_participant(prepared.shares):
            ballots = {name: self._whole(name, prepared, history.applied) for name in names}
            with self._if_ours(participant):
                participant.await_visible(Epoch(number, prepared.attempt), ballots)
        reach("coordinator.done.before")
        # whether the ledger is still ours is found out by this very append
        self._ledger.append(Done(number))
        reach("coordinator.done.after")
        self._recorded_here.discard(number)
        self._clear(prepared)

    def _commit_parts(self, number: int, participant: Participant, applied: Mapping[str, LastDone]) -> bool:
        """Commit a participant's parts, replaying what the target has lost; False if the epoch proves to be done."""
        shares = self._ledger.known().epochs[number].shares
        left = {name: list(range(len(shares[name].parts))) for name in participant.members if name in shares}
        names = list(left)
        for _ in range(REPLAY_TURNS):
            # each of them before the commit: what they share becomes visible for all. And again after a replay, which
            # takes long enough for a driver on another copy of the checkpoint to commit
            for name in names:
                self._check.verify_before_commit(number, name)
            reach("coordinator.commit.compared")
            # the newest entry, not what was read before: the replays of the last turn are in it
            prepared = self._ledger.known().epochs[number]
            epoch, ballots = Epoch(number, prepared.attempt), {}
            for name, indices in left.items():
                share = prepared.shares[name]
                ballots[name] = self._ballot(name, epoch, share, [share.parts[index] for index in indices], applied)
            with self._if_ours(participant):
                verdicts = participant.commit(epoch, ballots)
            judged = [
                (name, index, verdict)
                for name, indices in left.items()
                for index, verdict in zip(indices, verdicts[name], strict=True)
                if verdict.outcome is not Outcome.COMMITTED
            ]
            if not judged:
                return True
            # before anything is concluded from the target, the ledger says whether the question is still ours
            if number in self._ledger.verify().done:
                return False
            for name, _index, verdict in judged:
                if verdict.outcome is Outcome.UNKNOWN:
                    raise consistency.unknown_outcome(number, name, verdict.evidence)
            left = {}
            for name, index, _verdict in judged:
                left.setdefault(name, []).append(index)
            self._replay_lost(number, participant, left, applied)
        name = judged[0][0]
        raise consistency.unknown_outcome(number, name, f"prepared again {REPLAY_TURNS} times, and lost each time")

    def _replay_lost(
        self, number: int, participant: Participant, lost: Mapping[str, Sequence[int]], applied: Mapping[str, LastDone]
    ) -> None:
        """Prepare again what the target has lost; what several of the sinks share, once."""
        prepared = self._ledger.known().epochs[number]
        for name, indices in lost.items():
            sharers = [one for one in prepared.sharers(name) if one in participant.members and one in prepared.shares]
            for index in indices:
                if next(one for one in sharers if index in lost.get(one, ())) == name:
                    self._replay(number, participant, sharers, index, applied)

    def _replay(
        self, number: int, participant: Participant, sinks: Sequence[str], index: int, applied: Mapping[str, LastDone]
    ) -> None:
        """Prepare a part of some sinks again, and record it."""
        # a marker that is missing proves nothing where those of earlier epochs are missing too
        for member in participant.members:
            self._check.verify_before_commit(number, member)
        with self._queue.replaying(), self._if_ours(participant):
            reach("coordinator.replay.before")
            prepared = self._ledger.verify().epochs[number]
            epoch, parts = Epoch(number, prepared.attempt), prepared.shares[sinks[0]].parts
            lost = parts[index]
            ballots = {name: self._ballot(name, epoch, prepared.shares[name], [lost], applied) for name in sinks}
            replayed = participant.replay(epoch, lost, ballots, uuid.uuid4().hex)
            reach("coordinator.replay.prepared")
            self._ledger.append(Replay(number, tuple(sinks), (*parts[:index], replayed, *parts[index + 1 :])))
        reach("coordinator.replay.after")

    def _whole(self, name: str, prepared: Prepared, applied: Mapping[str, LastDone]) -> Ballot:
        share = prepared.shares[name]
        return self._ballot(name, Epoch(prepared.epoch, prepared.attempt), share, share.parts, applied)

    def _clear(self, prepared: Prepared) -> None:
        """Drop what a done epoch has left. Failing to is no harm: the next sweep finds it."""
        epoch = Epoch(prepared.epoch, prepared.attempt)
        try:
            for participant, names in self._by_participant(prepared.shares):
                participant.finish(epoch, {name: self._whole(name, prepared, {}) for name in names})
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
