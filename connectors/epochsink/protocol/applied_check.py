"""The targets must hold what the ledger calls done, and nothing that it does not know.

Asked at every start, in every epoch before anything is swept, and around each commit: a target may be set back (a
backup restored, a failover to a standby that lacked the last commits) while the query runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from epochsink.errors import PrepareFailed, WentBack
from epochsink.protocol import consistency
from epochsink.sink import Identity

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from epochsink.protocol.ledger import Ledger
    from epochsink.sink import Participant


class AppliedCheck:
    """Compares ledger and targets. Raises `WentBack`, `Fenced` and what the participants raise."""

    def __init__(self, ledger: Ledger, participants: Mapping[str, Participant]) -> None:
        self._ledger = ledger
        self._of = participants

    def verify_all(self) -> None:
        """Compare every sink's target with the ledger."""
        for name in self._of:
            self.verify(name)

    def refuse_known_targets(self, query_id: str) -> None:
        """Refuse to begin a ledger where there must have been one: ``join_running=True`` was left in the code."""
        for name, participant in self._of.items():
            participant.open(Identity(query_id, name))
            applied, left = participant.newest(name), participant.leftovers(name)
            if applied is not None or left:
                raise consistency.ledger_is_lost(name, applied, left)

    def why_undocumented(self, newest: int, decided: int, attempted: int, spooled: Iterable[int]) -> WentBack:
        """Say why decided epochs are not in the ledger: the targets, or what is prepared, tell if it is an older copy.

        ``attempted`` is the newest epoch that this run has begun, ``spooled`` those that the spool has rows of.
        """
        try:
            self.verify_all()
        except WentBack:
            return consistency.ledger_is_older(decided, newest)
        if attempted <= newest:
            # not this run's, then: what is prepared of decided epochs may be all that is left of them
            traces = [f"the spool has rows of epoch {epoch}" for epoch in spooled if newest < epoch <= decided]
            for name, participant in self._of.items():
                traces += [f"sink '{name}' has {left}" for left in participant.leftovers(name)]
            if traces:
                return consistency.ledger_lost_prepared(decided, newest, traces[0])
        return consistency.decided_without_us(newest + 1, decided, attempted=attempted)

    def verify_before_commit(self, number: int, name: str) -> None:
        """Compare one sink's target with the ledger; that it cannot be reached leaves the epoch's outcome unknown."""
        try:
            self.verify(name)
        except PrepareFailed as failure:
            if not failure.may_pass:
                # it has answered: a right or a setting is missing, which the next start finds mended or not
                raise consistency.refused_after_decision(number, name, failure) from failure
            raise consistency.unknown_outcome(number, name, failure.message) from failure

    def verify(self, name: str) -> None:
        """Compare one sink's target with the ledger, which the caller has just found to be its own."""
        history = self._ledger.known()
        while True:
            done, pending = history.applied.get(name), history.pending_of(name)
            try:
                self._of[name].verify_applied(name, done, pending)
            except WentBack as disagreement:
                # the other thread, or a newer driver, may have recorded a replay or finished the epoch meanwhile
                history = self._ledger.verify()
                if (done, pending) == (history.applied.get(name), history.pending_of(name)):
                    raise consistency.named(disagreement, name) from disagreement
            else:
                return
