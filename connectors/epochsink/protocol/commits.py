"""Commit what Spark has decided, and prepare again what a target has lost: steps 6 and 7."""

from __future__ import annotations

import logging
import uuid
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

from epochsink.errors import RowsRejected
from epochsink.failpoints import reach
from epochsink.protocol import consistency
from epochsink.protocol.ledger_entries import Done, Prepared, Replay
from epochsink.protocol.sweep import recorded_parts
from epochsink.sink import Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from epochsink.protocol.consistency import AppliedCheck
    from epochsink.protocol.run_state import RunState
    from epochsink.sink import Participant, Recorded

_log = logging.getLogger("epochsink")
_SET_ASIDE: Final = (
    "epoch %d, sink '%s': %d row(s) are dead letters now; see why: epochsink letters list %s --sinks MODULE:ATTRIBUTE"
)

REPLAY_TURNS: Final = 4
"""How often a part is prepared again before the query stops: each turn needs a new loss in the target."""


class Commits:
    """The commits of a run: in the commit thread, and at the start of a run those that an earlier one left."""

    def __init__(self, run: RunState, check: AppliedCheck) -> None:
        self._run = run
        self._check = check

    def commit_decided(self) -> bool:
        """Commit pending epochs that are decided, oldest first; return whether none is left pending."""
        queue = self._run.queue
        while queue.pending and self._is_decided(queue.pending[0]):
            self.commit(queue.pending[0])
            queue.remove_first()
            # after that: the next epoch's vote waits neither for it nor for the user's function
            self._trim()
            self._run.progress.tell()
        if not queue.pending:
            self._refuse_swallowed()
        return not queue.pending

    def _refuse_swallowed(self) -> None:
        """Raise `WentBack` if Spark has decided an epoch that this run was given and has not prepared.

        The user's function has caught our error then. Raised in the next epoch, this one would meet the same
        ``except``; so it is looked for here. Most such queries have ended before that, inside the failing call.
        """
        number = self._run.owed
        if number < 0 or not self._run.checkpoint.has_commit(number):
            return
        self._run.queue.raise_failure()
        # read again: the append that raised may have recorded it after all
        history = self._run.ledger.verify()
        if number > history.newest:
            self._check.refuse_other_newest(history)
            raise consistency.decided_without_us(number, number, attempted=number)

    def drain(self) -> None:
        """Commit what is decided, once the stream has ended."""
        reach("coordinator.drain.before")
        history = self._run.ledger.verify()
        for prepared in history.pending:
            if self._run.checkpoint.is_decided(prepared.epoch):
                self.commit(prepared.epoch)
        self._trim()
        self._run.progress.tell()
        # no next epoch may come in which `settle` would find it
        self._check.refuse_undocumented(history)

    def has_decided(self) -> bool:
        """Return whether a pending epoch is decided: its commit is under way or about to be."""
        queue = self._run.queue
        return bool(queue.pending) and not queue.failed and self._run.checkpoint.has_commit(queue.pending[0])

    def _is_decided(self, number: int) -> bool:
        # in this order: Spark runs a later epoch only when the commit of the one before exists
        running = self._run.queue.running
        if self._run.checkpoint.has_commit(number):
            return True
        if running <= number:
            return False
        if not self._run.checkpoint.is_decided(number):
            raise self._run.conclude(consistency.undecided_before(number, running))
        return True

    def _trim(self) -> None:
        try:
            self._run.ledger.trim()
        except OSError as failure:
            _log.warning("old entries of the ledger stay until the next epoch is done: %s", failure)

    def commit(self, number: int) -> None:
        """Commit one decided epoch in every sink, as the newest ledger entry says, and record that it is done.

        `RowsRejected` names the epoch's source, because a batch of a later epoch may be what raises it to the user.
        """
        try:
            self._commit(number)
        except RowsRejected as refused:
            # an unreadable checkpoint must not hide the refusal
            with suppress(Exception):
                refused.message += f"; source of epoch {number}: {self._run.checkpoint.source_of(number)}"
            raise

    def _commit(self, number: int) -> None:
        run = self._run
        history = run.ledger.verify()
        if number in history.done:
            return
        reach("coordinator.commit.before")
        recorded = history.epochs[number]
        if number not in run.recorded:
            # an earlier run has recorded it
            run.progress.recorded(recorded)
        run.progress.decided(number)
        # what this run has recorded, it has recorded with the offsets of then
        if number not in run.recorded:
            self._check.refuse_other_input(recorded)
        # what readers are about to see must not be undone by a power cut that takes the decision back
        run.checkpoint.make_durable(number)
        for participant, names in run.by_participant(recorded.shares):
            with run.progress.timed("commit_seconds", number, names):
                if not self._commit_parts(number, participant, names):
                    run.progress.done(number)
                    return
            reach("coordinator.commit.between")
        prepared = run.ledger.own().epochs[number]  # a replay has replaced parts
        for participant, names in run.by_participant(prepared.shares):
            ballots = run.ballots(prepared, names)
            with run.if_ours(participant):
                # before "done": a task attempt that Spark has not accepted may keep readers from the epoch
                ended = participant.unblock(prepared.at, ballots, partial(self._named, participant))
                participant.await_visible(prepared.at, ballots)
            for line in ended:
                _log.info("epoch %d: aborted what kept readers from it: %s", number, line)
        # before "done": a crash in between must not leave a done epoch whose rows the next sweep drops
        retained = run.retention.keep(prepared, run.ledger.known())
        reach("coordinator.done.before")
        # this very append finds out whether the ledger is still ours
        run.ledger.append(Done(number, run.progress.visible(number)))
        reach("coordinator.done.after")
        run.progress.done(number)
        run.recorded.discard(number)
        self._clear(prepared, retained=retained)

    def _named(self, participant: Participant) -> Recorded:
        return recorded_parts(participant, self._run.ledger.verify())

    def _commit_parts(self, number: int, participant: Participant, names: Sequence[str]) -> bool:
        """Commit a participant's parts, replaying what the target has lost; False if the epoch proves to be done."""
        ledger = self._run.ledger
        left = {name: list(range(len(ledger.own().epochs[number].parts_of(name)))) for name in names}
        # by index: the turn after a replay has a verdict on the parts that were prepared again alone
        aside: dict[str, dict[int, int | None]] = {}
        for _ in range(REPLAY_TURNS):
            # each sink before the commit: what they share becomes visible for all. And again after a replay, which
            # takes long enough for a driver on another copy of the checkpoint to commit
            for name in names:
                self._check.verify_before_commit(number, name)
            reach("coordinator.commit.compared")
            # the newest entry, not what was read before: the replays of the last turn are in it
            prepared = ledger.own().epochs[number]
            with self._run.if_ours(participant):
                verdicts = participant.commit(prepared.at, self._run.ballots(prepared, left, left))
            for name, answers in verdicts.items():
                noted = aside.setdefault(name, {})
                noted |= {at: answer.set_aside for at, answer in zip(left[name], answers, strict=True)}
                self._run.progress.set_aside(number, name, list(noted.values()))
                if found := sum(answer.set_aside or 0 for answer in answers):
                    _log.warning(_SET_ASIDE, number, name, found, self._run.location or "CHECKPOINT")
            open_parts = [
                (name, index, verdict)
                for name, indices in left.items()
                for index, verdict in zip(indices, verdicts[name], strict=True)
                if verdict.outcome is not Outcome.COMMITTED
            ]
            # before anything is concluded from the target, the ledger says whether the question is still ours
            if not open_parts or number in ledger.verify().done:
                return not open_parts
            left = {}
            for name, index, verdict in open_parts:
                if verdict.outcome is Outcome.UNKNOWN:
                    raise consistency.unknown_outcome(number, name, verdict.evidence)
                left.setdefault(name, []).append(index)
            # what several sinks share is prepared again once
            shared = ((self._sharers(prepared, participant, name), index) for name, index, _ in open_parts)
            for sinks, index in dict.fromkeys(shared):
                self._replay(number, participant, sinks, index)
        name = open_parts[0][0]
        raise consistency.unknown_outcome(number, name, f"prepared again {REPLAY_TURNS} times, and lost each time")

    @staticmethod
    def _sharers(prepared: Prepared, participant: Participant, name: str) -> tuple[str, ...]:
        return tuple(one for one in prepared.sharers(name) if one in participant.members and one in prepared.shares)

    def _replay(self, number: int, participant: Participant, sinks: Sequence[str], index: int) -> None:
        """Prepare a part of some sinks again, and record it."""
        # a marker that is missing proves nothing if those of earlier epochs are missing too
        for name in participant.members:
            self._check.verify_before_commit(number, name)
        with self._run.queue.replaying(), self._run.if_ours(participant):
            reach("coordinator.replay.before")
            prepared = self._run.ledger.verify().epochs[number]
            parts = prepared.parts_of(sinks[0])
            ballots = self._run.ballots(prepared, sinks)
            replayed = participant.replay(prepared.at, parts[index], ballots, uuid.uuid4().hex)
            if replayed == parts[index]:
                return
            reach("coordinator.replay.prepared")
            self._run.ledger.append(Replay(number, tuple(sinks), (*parts[:index], replayed, *parts[index + 1 :])))
        self._run.progress.replayed(number, sinks)
        reach("coordinator.replay.after")

    def _clear(self, prepared: Prepared, *, retained: bool) -> None:
        """Drop what a done epoch has left. A failure does no harm: the next sweep finds it."""
        run = self._run
        try:
            for participant, names in run.by_participant(prepared.shares):
                participant.finish(prepared.at, run.ballots(prepared, names))
            if retained:
                run.retention.expire()
                return
            known = [
                (run.identities[name], task)
                for name, share in prepared.shares.items()
                for task, file in share.files.items()
                if not file.carried
            ]
            run.spool.drop(run.query_id, prepared.at, known)
        except OSError as failure:
            _log.warning("leftovers of epoch %d stay for the next sweep: %s", prepared.epoch, failure)
