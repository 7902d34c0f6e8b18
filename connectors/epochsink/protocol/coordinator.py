"""The two-phase-commit state machine: recover, settle, record, commit, drain. Plain calls, no Spark.

For each epoch Spark does: write ``offsets/N``, call ``foreachBatch(N)``, write ``commits/N``. So foreachBatch can only
prepare, ``commits/N`` is the decision, and the commit comes after it, from a second thread:

    stream thread   recover | settle(N)  (write job)  record(N) | settle(N+1) ...
    commit thread                         commit_decided(N-1)   | commit_decided(N) ...

Four rules hold everywhere. What is recorded is never aborted. Any driver may commit what is recorded and decided.
Before a driver aborts or replays, it reads the ledger again, which must still be its own. Before a driver concludes
anything from a target, it reads the ledger again. The protocol was model-checked; each rule has a mutant in
tests/simulation that loses or duplicates rows without it.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from epochsink.errors import EpochsinkError
from epochsink.protocol.applied_check import AppliedCheck
from epochsink.protocol.commit_queue import CommitQueue
from epochsink.protocol.commits import Commits
from epochsink.protocol.epochs import Epochs, Plan
from epochsink.protocol.recovery import Recovery
from epochsink.protocol.run_state import RunState
from epochsink.protocol.sweep import Sweep
from epochsink.sink import NOTHING_SPOOLED

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator, Sequence

    from epochsink.protocol.checkpoint import Checkpoint
    from epochsink.protocol.ledger import Ledger
    from epochsink.protocol.spool import NoSpool, Spool
    from epochsink.sink import Epoch, Identity, Participant, Spooled, Written

__all__ = ["Coordinator", "Plan"]


class Coordinator:
    """Ties one streaming query's epochs to its sinks. One object for each run of the query.

    ``join_running`` lets a ledger begin on a checkpoint that already holds commits. ``monitor`` guards ``queue``, which
    the two threads share. ``pipeline`` is the query's name for people, ``location`` the checkpoint's for commands.
    """

    def __init__(
        self,
        *,
        query_id: str,
        ledger: Ledger,
        checkpoint: Checkpoint,
        spool: Spool | NoSpool,
        participants: Sequence[Participant],
        join_running: bool = False,
        monitor: threading.Condition | None = None,
        pipeline: str = "",
        location: str = "",
    ) -> None:
        self.queue = CommitQueue(monitor)
        self._run = RunState(query_id, ledger, checkpoint, spool, participants, self.queue, pipeline, location)
        self._check = AppliedCheck(self._run)
        self._sweep = Sweep(self._run)
        self._commits = Commits(self._run, self._check)
        self._epochs = Epochs(self._run, self._check, self._sweep)
        self._recovery = Recovery(self._run, self._check, self._sweep, self._commits, join_running=join_running)

    @contextmanager
    def _addressed(self) -> Iterator[None]:
        """Let the commands in an error's hint name the checkpoint, which the code that raises it does not know."""
        try:
            yield
        except EpochsinkError as failure:
            failure.address(self._run.location)
            raise

    # ---- step 0

    def recover(self) -> None:
        """Take the ledger, compare it with checkpoint and targets, abort what nobody recorded, commit what is decided.

        A recorded epoch that is not decided yet is watched from now on: an earlier run may still be about to write its
        commit, and then Spark goes on to the next epoch, which may be long in coming. To be called once, before the
        first batch. Raises `WentBack`, `Fenced`, `OutcomeUnknown`.
        """
        with self._addressed():
            self._recovery.recover()

    def identity(self, sink: str) -> Identity:
        """Return who a sink is in this generation."""
        return self._run.identities[sink]

    # ---- steps 1 to 4, in the stream thread

    def settle(self, number: int) -> Plan:
        """Decide what to do with epoch ``number``, inside foreachBatch, before any row moves.

        Raises `WentBack` if the epoch's input differs from what is recorded of it, and whatever made the
        commit thread fail.
        """
        with self._addressed():
            return self._epochs.settle(number)

    def dispute(self, number: int) -> None:
        """Say in the ledger that the record of an epoch has only some of its rows: the query was called again in it.

        If nothing of it is recorded, there is nothing to say. May be repeated; until it stands, a later start takes
        the record for whole.
        """
        self._epochs.dispute(number)

    def begin(self, number: int) -> Epoch:
        """Return a fresh attempt at an epoch, with a place in the spool. `record` or `abandon` ends it."""
        return self._epochs.begin(number)

    def record(self, epoch: Epoch, written: Written, spooled: Spooled = NOTHING_SPOOLED) -> None:
        """Let the participants vote, then record the epoch. When this returns, foreachBatch may return.

        If this raises, the batch has to fail. If a vote raised, the attempt is abandoned; if the append did, it
        may be recorded, so it stands until the next driver reads.
        """
        with self._addressed():
            self._epochs.record(epoch, written, spooled)

    def abandon(self, epoch: Epoch) -> None:
        """Abort an attempt that failed before anything tried to record it.

        Best effort, so that the first error is the one that the user sees: what stays, `settle` or the
        next driver's `recover` sweeps.
        """
        self._epochs.abandon(epoch)

    # ---- steps 6 and 7, in the commit thread

    def commit_decided(self) -> bool:
        """Commit pending epochs that Spark has decided, oldest first; return whether none is left pending.

        Called by the commit thread, as often as it likes. An error is kept, and raised in the stream thread too.
        """
        with self._addressed():
            return self._commits.commit_decided()

    def has_decided(self) -> bool:
        """Return whether a pending epoch is decided: its commit is under way or about to be."""
        return self._commits.has_decided()

    def refuse_swallowed(self) -> None:
        """Refuse an error that did not reach Spark: raised in the next epoch, it would meet the same ``except``.

        Called by the commit thread while foreachBatch does not run: each look is a request to the store. Raises
        `WentBack` if Spark has decided an epoch that this run was given and could not prepare.
        """
        self._commits.refuse_swallowed()

    def tidy(self) -> None:
        """Abort what losing tasks have left since the last sweep; does nothing unless the stream is idle."""
        self._sweep.tidy()

    def drain(self) -> None:
        """Commit what is decided, once the stream thread has ended; never aborts.

        An epoch that is recorded and not decided stays for the next start, which adopts it. Raises `WentBack` if Spark
        has decided an epoch that is not in the ledger.
        """
        with self._addressed():
            self._commits.drain()

    def fail(self, failure: BaseException) -> None:
        """Keep the commit thread's failure for the stream thread, which raises it."""
        self._run.fail(failure)
