"""Commit what Spark has decided, and prepare again what a target has lost: steps 6 and 7."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from epochsink.errors import RowsRejected
from epochsink.failpoints import reach
from epochsink.protocol import consistency
from epochsink.protocol.commit_engine import CommitEngine, Policy
from epochsink.protocol.consistency import AppliedCheck
from epochsink.protocol.ledger_entries import Done, Prepared
from epochsink.protocol.run_state import RunState
from epochsink.sink import Participant, Verdict

_log = logging.getLogger("epochsink")
_SET_ASIDE: Final = "epoch %d, sink '%s': %d row(s) are dead letters now; see why: %s"
_SEE_WHY: Final = "epochsink letters list CHECKPOINT --sinks MODULE:ATTRIBUTE"


@dataclass(frozen=True)
class Decided(Policy):
    """A run commits an epoch that Spark has decided."""

    check: AppliedCheck
    _aside: dict[str, dict[int, int | None]] = field(default_factory=dict, init=False)

    def compare(self, sink: str) -> None:
        """Compare it; if the target cannot be asked, the outcome is unknown."""
        self.check.verify_before_commit(self.number, sink)

    def note(self, sink: str, verdicts: Mapping[int, Verdict]) -> None:
        """Count dead letters."""
        # by index: the turn after a replay has a verdict on the parts that were prepared again alone
        noted = self._aside.setdefault(sink, {})
        noted |= {index: verdict.set_aside for index, verdict in verdicts.items()}
        self.run.progress.set_aside(self.number, sink, list(noted.values()))
        if letters := sum(verdict.set_aside or 0 for verdict in verdicts.values()):
            _log.warning(_SET_ASIDE, self.number, sink, letters, self.run.addresses.complete(_SEE_WHY))


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
        current = self._run.current
        number = current.number
        if not current.is_owed or not self._run.checkpoint.has_commit(number):
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
        # this run recorded its own epochs with the offsets of that moment, after it had made them durable
        is_own = number in run.recorded
        if not is_own:
            self._check.refuse_other_input(recorded)
        # what readers are about to see must not be undone by a power cut that takes the decision back
        run.checkpoint.make_durable(number, offsets=not is_own)
        for participant, names in run.by_participant(recorded.shares):
            with run.progress.timed("commit_seconds", number, names):
                if not self._commit_parts(number, participant, names):
                    run.progress.done(number)
                    return
            reach("coordinator.commit.between")
        prepared = run.ledger.own().epochs[number]  # a replay has replaced parts
        for participant, names in run.by_participant(prepared.shares):
            # before "done": a task attempt that Spark has not accepted may keep readers from the epoch
            for line in CommitEngine(Decided(run, participant, number, self._check)).await_visible(names):
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

    def _commit_parts(self, number: int, participant: Participant, names: Sequence[str]) -> bool:
        """Commit a participant's parts; False if the epoch proves to be done."""
        prepared = self._run.ledger.own().epochs[number]
        parts = {name: range(len(prepared.parts_of(name))) for name in names}
        return CommitEngine(Decided(self._run, participant, number, self._check)).commit(parts)

    def _clear(self, prepared: Prepared, *, retained: bool) -> None:
        """Drop what a done epoch has left. A failure does no harm: the next sweep finds it."""
        run = self._run
        try:
            for participant, names in run.by_participant(prepared.shares):
                participant.finish(prepared.at, run.ballots(prepared, names))
            if retained:
                run.retention.expire([pending.at for pending in run.ledger.known().pending])
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
