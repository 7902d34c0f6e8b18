"""THE two-phase-commit state machine: recover, settle, record, commit, drain. Plain calls, no Spark.

For each epoch Spark does: write ``offsets/N``, call ``foreachBatch(N)``, write ``commits/N``. So foreachBatch can only
prepare, ``commits/N`` is the decision, and the commit comes after it, from a second thread (the watcher):

    stream thread   recover | settle(N)  (write job)  record(N) | settle(N+1) ...
    watcher thread                        commit_decided(N-1)   | commit_decided(N) ...

Rules that everything here rests on: what is recorded is never aborted; whatever is recorded and decided may be
committed by any driver; aborting and replaying need the ledger to be still ours, read again just before; a conclusion
is drawn from a target only after the ledger was read again. The protocol was model-checked; each rule has a
mutant in tests/simulation that loses or duplicates rows without it.
"""

from __future__ import annotations

import enum
import logging
import threading
import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING

from epochsink.errors import ConfigurationError, EpochsinkError, OutcomeUnknown, WentBack
from epochsink.faults import reach
from epochsink.ledger import Done, History, Prepared, Replay, Share
from epochsink.protocol import Epoch, Identity, Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from epochsink.ledger import Ledger
    from epochsink.protocol import CheckpointReader, Committable, SinkCommitter, SpoolKeeper

_log = logging.getLogger("epochsink")

REPLAY_TURNS = 4
"""How often one part is prepared again before the query stops: each turn needs a new loss in the target."""


class Plan(enum.Enum):
    """What foreachBatch has to do with an epoch."""

    WRITE = "write its rows to the sinks"
    RUN_FOR_STATE = "execute the plan for its state only: a recorded attempt stands"


class Coordinator:
    """Ties one streaming query's epochs to its sinks. One object for each run of the query.

    ``sinks`` are committers by name; ``monitor`` guards what the two threads share. ``join_running`` allows a
    ledger to begin on a checkpoint that already holds commits.
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
    ) -> None:
        self._query_id = query_id
        self._ledger = ledger
        self._checkpoint = checkpoint
        self._spool = spool
        self._sinks = dict(sinks)
        self._join_running = join_running
        self._monitor = monitor or threading.Condition()
        self._identities: dict[str, Identity] = {}
        self._pending: list[int] = []
        self._failure: BaseException | None = None
        self._occupied = False

    # ---- step 0

    def recover(self) -> None:
        """Take the ledger, compare the stories, commit what is decided, and abort what nobody recorded.

        To be called once, before the first batch. Raises `WentBack`, `Fenced`, `OutcomeUnknown`.
        """
        reach("coordinator.take.before")
        self._take()
        reach("coordinator.take.after")
        history = self._ledger.verify()
        self._refuse_other_stories(history)
        for prepared in history.pending:
            if self._checkpoint.is_decided(prepared.epoch):
                self._commit(prepared.epoch)
        self._sweep()
        reach("coordinator.recover.after")

    def _take(self) -> None:
        before = self._ledger.read()
        newest_decided = self._checkpoint.newest_decided()
        joined = -1
        if before.newest < 0 <= newest_decided:
            if not self._join_running:
                raise WentBack(
                    f"the checkpoint has decided epochs up to {newest_decided} and holds no record of them by "
                    "epochsink: either this pipeline ran without epochsink, or the folder epochsink/ is lost",
                    way_out="if epochsink is being added to a running pipeline, start once with "
                    "join_running=True: epochs from here on are exactly-once. Otherwise restore epochsink/ from "
                    "the copy that the rest of the checkpoint came from",
                )
            joined = newest_decided
        known = before.owner.origins if before.owner else {}
        origins = {name: sink.found() for name, sink in self._sinks.items() if name not in known}
        take = self._ledger.take(self._query_id, origins, joined)
        for name, sink in self._sinks.items():
            identity = Identity(self._query_id, name, take.generation, take.origins[name])
            self._identities[name] = identity
            sink.open(identity)

    def _refuse_other_stories(self, history: History) -> None:
        decided = self._checkpoint.newest_decided()
        if decided > history.newest:
            raise self._conclude(
                WentBack(
                    f"the checkpoint has decided epochs up to {decided} and the ledger knows only those up to "
                    f"{history.newest}: the ledger is the older copy",
                    way_out="restore the checkpoint folder and its epochsink/ folder from one and the same copy",
                )
            )
        for name, sink in self._sinks.items():
            applied = sink.newest()
            if applied is not None and applied > history.newest:
                raise self._conclude(
                    WentBack(
                        f"sink '{name}' already holds epoch {applied} of this query, and the ledger knows only "
                        f"epochs up to {history.newest}: the checkpoint is the older copy",
                        way_out="restore the newer copy of the checkpoint; or, to process the input since then "
                        "again, start with a new checkpoint folder after removing those epochs' rows",
                    )
                )
        for prepared in history.pending:
            for name in prepared.shares.keys() - self._sinks.keys():
                raise ConfigurationError(
                    f"epoch {prepared.epoch} is recorded and not yet committed in sink '{name}', which this query "
                    "no longer has",
                    way_out=f"start once more with the sink '{name}', let it commit, then remove it; or close the "
                    f"epoch by hand with 'epochsink resolve'",
                )

    # ---- step 1

    def settle(self, number: int) -> Plan:
        """Decide what to do with epoch ``number``, inside foreachBatch, before any row moves.

        Raises `WentBack` if the epoch's input differs from what is recorded of it, and whatever made the
        watcher fail.
        """
        self.raise_failure()
        reach("coordinator.settle.before")
        history = self._ledger.verify()
        for prepared in history.pending:
            if prepared.epoch < number:
                self._expect_decided(prepared.epoch, number)
        recorded = history.epochs.get(number)
        if recorded is None:
            if number <= history.newest:
                raise self._conclude(self._unknown_past(number, history))
            self._sweep()
            return Plan.WRITE
        if recorded.offsets != self._checkpoint.offsets_digest(number):
            raise self._conclude(
                WentBack(
                    f"epoch {number} is recorded with other offsets than the checkpoint now holds: its rows were "
                    "prepared from different input",
                    way_out="an older copy of the checkpoint was restored: put the newer one back; or start with a "
                    "new checkpoint folder and remove the rows of the epochs that would come twice",
                )
            )
        if number not in history.done:
            self.wait_settled()
            self._enqueue(number)
        return Plan.RUN_FOR_STATE

    def _expect_decided(self, epoch: int, running: int) -> None:
        if epoch in self._pending:
            return
        if not self._checkpoint.is_decided(epoch):
            raise self._conclude(
                WentBack(
                    f"Spark runs epoch {running}, and epoch {epoch} before it is recorded but not decided",
                    way_out="commits/ of the checkpoint was changed by hand or restored from an older copy: put "
                    "the newer copy back",
                )
            )
        self._enqueue(epoch)

    def _unknown_past(self, number: int, history: History) -> WentBack:
        return WentBack(
            f"Spark runs epoch {number}, the ledger has later ones (up to {history.newest}) and not this one",
            way_out="the checkpoint is an old copy, older than what the ledger keeps: restore the newer copy",
        )

    # ---- steps 2 to 4

    def begin(self, number: int) -> Epoch:
        """Return a fresh attempt at an epoch, with a place in the spool."""
        epoch = Epoch(number, uuid.uuid4().hex)
        self._spool.make(self._query_id, epoch)
        reach("coordinator.write.before")
        return epoch

    def identity(self, sink: str) -> Identity:
        """Return who a sink is in this generation."""
        return self._identities[sink]

    def record(self, epoch: Epoch, written: Mapping[str, Sequence[tuple[str, Committable]]]) -> None:
        """Let each sink vote, then record the epoch. When this returns, foreachBatch may return.

        ``written`` has, for each sink with rows, the (task uuid, committable) of every task that Spark
        accepted, by slot. If this raises, the batch has to fail. Where a vote raised, the attempt is
        abandoned; where the append did, it may be recorded, so it stands until the next driver reads.
        """
        try:
            shares = self._vote(epoch, written)
        except Exception:
            self.abandon(epoch)
            raise
        reach("coordinator.record.before")
        offsets = self._checkpoint.offsets_digest(epoch.number)
        self._ledger.append(Prepared(epoch.number, epoch.attempt, offsets, shares))
        reach("coordinator.record.after")
        self._enqueue(epoch.number)

    def _vote(self, epoch: Epoch, written: Mapping[str, Sequence[tuple[str, Committable]]]) -> dict[str, Share]:
        self.wait_settled()
        reach("coordinator.vote.before")
        shares: dict[str, Share] = {}
        for name, accepted in written.items():
            tasks = tuple(task for task, _ in accepted)
            rows = self._spool.rows(self._identities[name], epoch, tasks)
            parts = self._sinks[name].vote(epoch, [committable for _, committable in accepted], rows)
            shares[name] = Share(tuple(parts), tasks)
            reach("coordinator.vote.between")
        return shares

    def abandon(self, epoch: Epoch) -> None:
        """Abort an attempt that failed before anything tried to record it.

        Best effort, so that the first error is the one that the user sees: what stays, `settle` or the
        next driver's `recover` sweeps.
        """
        try:
            self._sweep()
        except (EpochsinkError, OSError) as failure:
            _log.warning("attempt %s at epoch %d is left for the next sweep: %s", epoch.attempt, epoch.number, failure)

    # ---- step 6

    def commit_decided(self) -> bool:
        """Commit pending epochs that Spark has decided, oldest first; return whether none is left pending.

        Called by the watcher, as often as it likes. An error is kept, and raised in the stream thread too.
        """
        try:
            while self._pending and self._checkpoint.has_commit(self._pending[0]):
                self._commit(self._pending[0])
                self._dequeue()
        except BaseException as failure:
            self.fail(failure)
            raise
        return not self._pending

    def _commit(self, number: int) -> None:
        """Commit one decided epoch in every sink, as the newest ledger entry says, and record that it is done."""
        history = self._ledger.verify()
        if number in history.done:
            return
        reach("coordinator.commit.before")
        prepared = history.epochs[number]
        for name, share in prepared.shares.items():
            for index in range(len(share.parts)):
                if not self._commit_part(prepared, name, index):
                    return
                reach("coordinator.commit.between")
        reach("coordinator.done.before")
        self._ledger.append(Done(number))
        reach("coordinator.done.after")
        self._clear(self._ledger.read().epochs[number])

    def _commit_part(self, prepared: Prepared, name: str, index: int) -> bool:
        """Commit one part, replaying it if the target has lost it; False if the epoch proves to be done."""
        number = prepared.epoch
        epoch = Epoch(number, prepared.attempt)
        rows = self._spool.rows(self._identities[name], epoch, prepared.shares[name].tasks)
        for _ in range(REPLAY_TURNS):
            parts = prepared.shares[name].parts
            verdict = self._sinks[name].commit(epoch, parts[index], rows)
            if verdict.outcome is Outcome.COMMITTED:
                return True
            # before anything is concluded from the target, the ledger says whether the question is still ours
            if number in self._ledger.verify().done:
                return False
            if verdict.outcome is Outcome.UNKNOWN:
                raise self._unknown(number, name, verdict.evidence)
            with self._alone():
                reach("coordinator.replay.before")
                replayed = self._sinks[name].replay(epoch, parts[index], rows, uuid.uuid4().hex)
                reach("coordinator.replay.prepared")
                self._ledger.append(Replay(number, name, (*parts[:index], replayed, *parts[index + 1 :])))
            reach("coordinator.replay.after")
            prepared = self._ledger.verify().epochs[number]
        raise self._unknown(number, name, f"prepared again {REPLAY_TURNS} times, and lost each time")

    def _unknown(self, number: int, name: str, evidence: str) -> OutcomeUnknown:
        return OutcomeUnknown(
            f"epoch {number} is decided, and whether sink '{name}' committed it is unknown: {evidence}",
            way_out="nothing is lost: the epoch stays in the ledger and is committed at the next start. If the "
            "target cannot answer any more, 'epochsink status' shows the evidence and 'epochsink resolve' closes it",
            epoch=number,
            sink=name,
        )

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

    # ---- step 7

    def drain(self) -> None:
        """Commit what is decided, once the stream thread has ended; never aborts.

        An epoch that is recorded and not decided stays for the next start, which adopts it.
        """
        reach("coordinator.drain.before")
        for prepared in self._ledger.verify().pending:
            if self._checkpoint.is_decided(prepared.epoch):
                self._commit(prepared.epoch)

    # ---- between the two threads

    def wait_settled(self) -> None:
        """Wait until no earlier epoch is pending, so that at most one ever is; raises the watcher's failure."""
        with self._monitor:
            self._monitor.wait_for(lambda: not self._pending or self._failure is not None)
        self.raise_failure()

    def wait_pending(self, seconds: float) -> None:
        """Wait until an epoch is pending, for so many seconds at the most."""
        with self._monitor:
            self._monitor.wait_for(lambda: bool(self._pending), seconds)

    def has_decided(self) -> bool:
        """Return whether a pending epoch is decided: its commit is under way or about to be."""
        pending = self._pending[:1]
        return bool(pending) and self._failure is None and self._checkpoint.has_commit(pending[0])

    def fail(self, failure: BaseException) -> None:
        """Remember the watcher's failure for the stream thread."""
        with self._monitor:
            self._failure = self._failure or failure
            self._monitor.notify_all()

    def raise_failure(self) -> None:
        """Raise the watcher's failure, if there is one."""
        if self._failure is not None:
            raise self._failure

    @property
    def pending(self) -> Sequence[int]:
        """The recorded epochs that this run has yet to commit."""
        return tuple(self._pending)

    def _enqueue(self, number: int) -> None:
        with self._monitor:
            self._pending.append(number)
            self._monitor.notify_all()

    def _dequeue(self) -> None:
        with self._monitor:
            self._pending.pop(0)
            self._monitor.notify_all()

    # ---- shared

    def _sweep(self) -> None:
        """Abort what the ledger does not name. Only the owner may: the ledger is read again for each sink."""
        with self._alone():
            for name, sink in self._sinks.items():
                pending = self._ledger.verify().pending
                for ended in sink.sweep([part for prepared in pending for part in prepared.parts_of(name)]):
                    _log.info("sink '%s': aborted what no recorded epoch names: %s", name, ended)
            kept = [Epoch(prepared.epoch, prepared.attempt) for prepared in self._ledger.verify().pending]
            self._spool.sweep(self._query_id, kept)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep a sweep from aborting what a replay has just prepared and not yet recorded."""
        with self._monitor:
            self._monitor.wait_for(lambda: not self._occupied)
            self._occupied = True
        try:
            yield
        finally:
            with self._monitor:
                self._occupied = False
                self._monitor.notify_all()

    def _conclude(self, conclusion: EpochsinkError) -> EpochsinkError:
        """Return a conclusion if the ledger is still ours; raises `Fenced` if it is not."""
        self._ledger.verify()
        return conclusion
