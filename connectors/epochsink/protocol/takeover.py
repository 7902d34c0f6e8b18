"""Step 0: a driver takes the ledger, and compares what ledger, checkpoint and targets say before it changes any."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from epochsink.failpoints import reach
from epochsink.protocol import consistency
from epochsink.protocol.sweep import Sweep
from epochsink.sink import Identity

if TYPE_CHECKING:
    from epochsink.protocol.ledger_history import History


class Takeover(Sweep):
    """The start of a run, as far as it changes nothing but the ledger."""

    def _take_over(self) -> History:
        reach("coordinator.take.before")
        self._take()
        reach("coordinator.take.after")
        history = self._ledger.verify()
        self._refuse_other_stories(history)
        return history

    def _fence_others(self) -> None:
        """End what drivers on other copies of this checkpoint may still do.

        In this order: who prepares after our fence sees it before it records; what was prepared before, the sweep ends,
        or it is committed by then, which the comparison finds.
        """
        for participant in self._participants:
            with self._if_ours(participant):
                participant.fence()
        self._abort_orphans()
        self._check.verify_all()

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
        joining = [name for name in self._of if name not in known]
        new = {name: self._join(name) for name in joining}
        held = max((self._of[name].newest_generation(name) for name in joining), default=0)
        # those that are known go along: two drivers that take a new ledger at once may remove each other's first entry
        origins = {**known, **new}
        take = self._ledger.take(self._query_id, origins, joined, above=held)
        for name, participant in self._of.items():
            who = Identity(self._query_id, name, take.generation, take.origins[name], self._pipeline)
            self._identities[name] = who
            participant.open(who)

    def _join(self, name: str) -> dict[str, Any]:
        # before the take, which tells it to the ledger: what the ledger knows of a sink's beginning is in its target
        self._of[name].open(Identity(self._query_id, name, pipeline=self._pipeline))
        return self._of[name].initial_state(name)

    def _refuse_other_stories(self, history: History) -> None:
        self._refuse_undocumented(history)
        self._check.verify_all()
        for prepared in history.pending:
            for name in prepared.shares.keys() - self._of.keys():
                raise self._conclude(consistency.sink_is_gone(prepared.epoch, name))
