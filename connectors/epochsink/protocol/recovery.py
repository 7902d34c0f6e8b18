"""Step 0: take the ledger, compare it with checkpoint and targets, and commit what an earlier run has left."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from epochsink.failpoints import reach
from epochsink.protocol import consistency
from epochsink.sink import Identity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from epochsink.protocol.applied_check import AppliedCheck
    from epochsink.protocol.commits import Commits
    from epochsink.protocol.ledger_history import History
    from epochsink.protocol.run_state import RunState
    from epochsink.protocol.sweep import Sweep

_log = logging.getLogger("epochsink")


class Recovery:
    """The start of a run. ``join_running`` lets a ledger begin on a checkpoint that already holds commits."""

    def __init__(
        self, run: RunState, check: AppliedCheck, sweep: Sweep, commits: Commits, *, join_running: bool
    ) -> None:
        self._run = run
        self._check = check
        self._sweep = sweep
        self._commits = commits
        self._join_running = join_running

    def recover(self) -> None:
        """Recover, once, before the first batch."""
        reach("coordinator.take.before")
        self._take()
        reach("coordinator.take.after")
        history = self._run.ledger.verify()
        self._refuse_disagreement(history)
        # first: what a superseded driver prepared again and could not record may hold locks that a commit needs
        self._fence_others()
        for prepared in history.pending:
            if self._run.checkpoint.is_decided(prepared.epoch):
                self._commits.commit(prepared.epoch)
            elif prepared.epoch not in history.disputed:
                self._run.queue.add(prepared.epoch)
        reach("coordinator.recover.after")

    def _take(self) -> None:
        run = self._run
        # in this order: what is decided by now is recorded by the time that the ledger is read
        newest_decided = run.checkpoint.newest_decided()
        before = run.ledger.read()
        joined = -1
        if before.owner is None and newest_decided >= 0:
            if not self._join_running:
                raise consistency.no_ledger(newest_decided)
            self._check.refuse_known_targets()
            joined = newest_decided
        known = before.owner.origins if before.owner else {}
        joining = [name for name in run.participant_of if name not in known]
        if known:
            self._tell_changed(joining, [name for name in known if name not in run.participant_of], before.newest)
        new = {name: self._join(name) for name in joining}
        held = max((run.participant_of[name].newest_generation(name) for name in joining), default=0)
        # those that are known go along: two drivers that take a new ledger at once may remove each other's first entry
        take = run.ledger.take(run.query_id, {**known, **new}, joined, above=held)
        for name, participant in run.participant_of.items():
            who = Identity(run.query_id, name, take.generation, take.origins[name], run.pipeline)
            run.identities[name] = who
            participant.open(who)

    @staticmethod
    def _tell_changed(joining: Sequence[str], gone: Sequence[str], newest: int) -> None:
        """Say which sinks are new and which are gone: a new name is a new sink, also for the same target."""
        for name in gone:
            _log.warning(
                "sink '%s' is no longer part of this query: its target keeps what it holds and gets no more rows. If "
                "it was renamed, give it its old name back",
                name,
            )
        for name in joining:
            _log.warning(
                "sink '%s' joins this query after epoch %d: the rows of earlier epochs are not written to it",
                name,
                newest,
            )

    def _join(self, name: str) -> dict[str, Any]:
        # before the take, which records it in the ledger: what the ledger knows of a sink's beginning is in its target
        participant = self._run.participant_of[name]
        participant.open(Identity(self._run.query_id, name, pipeline=self._run.pipeline))
        return participant.initial_state(name)

    def _refuse_disagreement(self, history: History) -> None:
        self._check.refuse_undocumented(history)
        self._check.verify_all()
        for prepared in history.pending:
            for name in prepared.shares.keys() - self._run.participant_of.keys():
                raise self._run.conclude(consistency.sink_is_gone(prepared.epoch, name))

    def _fence_others(self) -> None:
        """End what drivers on other copies of this checkpoint may still do.

        In this order: who prepares after our fence sees it before it records; what was prepared before, the sweep ends,
        or it is committed by then, which the comparison finds.
        """
        for participant in self._run.participants:
            with self._run.if_ours(participant):
                participant.fence()
        self._sweep.all()
        self._check.verify_all()
