"""Compare what checkpoint, ledger and targets say.

A target must hold what the ledger calls done, and nothing that the ledger does not know. That is checked at every
start, in every epoch before anything is swept, and around each commit: a target may be set back (a backup restored, a
failover to a standby that lacked the last commits) while the query runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from epochsink.errors import PrepareFailed, WentBack
from epochsink.protocol import consistency
from epochsink.sink import Identity

if TYPE_CHECKING:
    from epochsink.protocol.ledger_history import History
    from epochsink.protocol.run_state import RunState


class AppliedCheck:
    """The comparisons of one run. Each may raise `WentBack`, `Fenced`, and what the participants raise."""

    def __init__(self, run: RunState) -> None:
        self._run = run

    def refuse_known_targets(self) -> None:
        """Refuse to begin a ledger if a target knows the query: ``join_running=True`` was left in the code."""
        for name, participant in self._run.participant_of.items():
            participant.open(Identity(self._run.query_id, name))
            applied, left = participant.newest(name), participant.leftovers(name)
            if applied is not None or left:
                raise consistency.ledger_is_lost(name, applied, left)

    def refuse_undocumented(self, history: History) -> None:
        """Raise `WentBack` if Spark has decided an epoch that the ledger does not know."""
        decided = self._run.checkpoint.newest_decided()
        if decided > history.newest:
            spooled = [attempt.number for attempt in self._run.spool.attempts(self._run.query_id)]
            raise self._run.conclude(self._why_undocumented(history.newest, decided, spooled))

    def _why_undocumented(self, newest: int, decided: int, spooled: list[int]) -> WentBack:
        """Say why: the targets, or what is prepared, tell if the ledger is an older copy."""
        try:
            self.verify_all()
        except WentBack:
            return consistency.ledger_is_older(decided, newest)
        attempted = self._run.attempted
        if attempted <= newest:
            # not this run's, then: what is prepared of decided epochs may be all that is left of them
            traces = [f"the spool has rows of epoch {epoch}" for epoch in spooled if newest < epoch <= decided]
            for name, participant in self._run.participant_of.items():
                traces += [f"sink '{name}' has {left}" for left in participant.leftovers(name)]
            if traces:
                return consistency.ledger_lost_prepared(decided, newest, traces[0])
        return consistency.decided_without_us(newest + 1, decided, attempted=attempted)

    def verify_all(self) -> None:
        """Compare every sink's target with the ledger."""
        for name in self._run.participant_of:
            self.verify(name)

    def verify_before_commit(self, number: int, name: str) -> None:
        """Compare one sink's target with the ledger; if it cannot be reached, the epoch's outcome is unknown."""
        try:
            self.verify(name)
        except PrepareFailed as failure:
            if not failure.may_pass:
                # it has answered: a right or a setting is missing, which the next start finds mended or not
                raise consistency.refused_after_decision(number, name, failure) from failure
            raise consistency.unknown_outcome(number, name, failure.message) from failure

    def verify(self, name: str) -> None:
        """Compare one sink's target with the ledger, which the caller has just found to be its own."""
        history = self._run.ledger.known()
        while True:
            done, pending = history.applied.get(name), history.pending_of(name)
            try:
                self._run.participant_of[name].verify_applied(name, done, pending)
            except WentBack as disagreement:
                # the other thread, or a newer driver, may have recorded a replay or finished the epoch meanwhile
                history = self._run.ledger.verify()
                if (done, pending) == (history.applied.get(name), history.pending_of(name)):
                    raise consistency.named(disagreement, name) from disagreement
            else:
                return
