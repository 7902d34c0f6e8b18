"""One run of a streaming query: its coordinator, its plan and its commit thread."""

from __future__ import annotations

import atexit
import logging
import shlex
import threading
import uuid
import weakref
from typing import TYPE_CHECKING, Final, NoReturn, cast

from epochsink.errors import ConfigurationError, EpochsinkError, PrepareFailed
from epochsink.identity import pipeline_name
from epochsink.protocol.checkpoint import Checkpoint
from epochsink.protocol.commit_thread import CommitThread
from epochsink.protocol.coordinator import Coordinator, Plan
from epochsink.protocol.ledger import Ledger
from epochsink.protocol.storage import LocalStorage
from epochsink.retry import retrying
from epochsink.sink import participants_of
from epochsink.spark.compat import keeps_first_state
from epochsink.spark.epoch_writer import EpochWriter
from epochsink.spark.error_translation import sinks_error
from epochsink.spark.query_plan import run_for_state
from epochsink.spark.retried_reads import RetriedReads

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import DataFrame

    from epochsink.protocol.spool import NoSpool, Spool
    from epochsink.protocol.storage import Storage
    from epochsink.sink import Executors, Sink
    from epochsink.spark.stream_execution import StreamExecution

_log = logging.getLogger("epochsink")

LOCAL_POLL_SECONDS: Final = 0.005
REMOTE_POLL_SECONDS: Final = 0.05
"""How often the commit log is looked at first while an epoch is pending: a system call, or a request to a store."""

_SOURCE_CHARACTERS: Final = 300
"""How much of a source's offsets an error quotes: of a topic with many partitions they are long."""

ATTEMPTS: Final = 5
FIRST_PAUSE_SECONDS: Final = 1.0
LONGEST_PAUSE_SECONDS: Final = 5.0
"""How often an epoch is attempted before the query ends, and the longest first and later pauses between attempts."""

_serving: Final[weakref.WeakValueDictionary[str, Run]] = weakref.WeakValueDictionary()
"""Which run serves which execution of a query, by Spark's run id, in this process."""


def run_of(execution: StreamExecution) -> Run | None:
    """Return the run that serves an execution of a query, whichever object has made it."""
    return _serving.get(execution.run_id)


class Run:
    """Recovers when made; then prepares epochs in the stream thread and commits them in the commit thread's.

    Raises what `epochsink.protocol.coordinator.Coordinator.recover` raises.
    """

    def __init__(
        self,
        *,
        sinks: Mapping[str, Sink],
        files: Storage,
        spool: Spool | NoSpool,
        query_id: str,
        location: str,
        join_running: bool,
        executors: Executors | None,
        application: str,
        show_values: bool,
    ) -> None:
        self._query_id = query_id
        self._location = location
        self._poll_seconds = LOCAL_POLL_SECONDS if isinstance(files, LocalStorage) else REMOTE_POLL_SECONDS
        self._participants = participants_of(sinks)
        for participant in self._participants:
            participant.executors = executors
        self.execution: StreamExecution | None = None
        self._commit_thread: CommitThread | None = None
        self._released = False
        self._in_batch = False
        self._call = threading.RLock()
        self._called = -1
        self._has_state = False
        self._recording = False
        read_again = cast("Storage", RetriedReads(files))
        self._checkpoint = Checkpoint(read_again)
        self._coordinator = Coordinator(
            query_id=query_id,
            ledger=Ledger(read_again, uuid.uuid4().hex, application=application),
            checkpoint=self._checkpoint,
            spool=spool,
            participants=self._participants,
            join_running=join_running,
            pipeline=pipeline_name(location),
            location=location,
        )
        self._show_values = show_values
        self._writer = EpochWriter(
            sinks, self._participants, self._coordinator.identity, spool, show_values=show_values
        )
        try:
            self._coordinator.recover()
        except BaseException:
            # nobody will join this run: its sessions would look like those of a driver that lives
            self.release()
            raise

    def serves(self, execution: StreamExecution) -> bool:
        """Whether this run is bound to an execution."""
        return self.execution is not None and self.execution.run_id == execution.run_id

    def awaits(self, execution: StreamExecution) -> bool:
        """Whether this run was recovered for the query of an execution, and is not bound yet."""
        return self.execution is None and self._query_id == execution.query_id

    def bind(self, execution: StreamExecution) -> None:
        """Start watching an execution's commits; once."""
        self.execution = execution
        _serving[execution.run_id] = self
        self._has_state = execution.has_state()
        if found := execution.unrepeatable_state():
            _log.warning(
                "the query's state depends on expressions that may give another result when an epoch runs again: %s. "
                "If an epoch was recorded before a crash, the next start keeps its rows and repeats it for the state, "
                "which may then differ from these rows. Let rows bring such values with them, or compute them after "
                "the stateful operator",
                ", ".join(found),
            )
        self._commit_thread = CommitThread(self._coordinator, self, self._poll_seconds)
        self._commit_thread.start()
        _flush_at_exit(self._commit_thread)

    def ends(self) -> bool:
        """Whether the query has ended; if so, waits for the last commits."""
        if self._commit_thread is not None and self._commit_thread.is_alive() and not self.is_alive():
            self._commit_thread.join()
        return self._commit_thread is None or not self._commit_thread.is_alive()

    def join(self) -> None:
        """Wait for the last commits; raises what stopped them."""
        if self._commit_thread is not None:
            self._commit_thread.join()
            self.release()
            failure = self._commit_thread.failure
            if isinstance(failure, EpochsinkError):
                # its frames and causes, which may quote rows, are those of another thread
                raise failure.fresh()
            if failure is not None:
                raise failure

    def source_of(self, number: int) -> str:
        """Return from where to where an epoch reads its sources; for people."""
        begins, ends = (self._checkpoint.offsets_text(epoch)[:_SOURCE_CHARACTERS] for epoch in (number - 1, number))
        return f"{begins or 'the beginning'} to {ends}"

    def report(self, failure: BaseException) -> None:
        """Add the command to type to what stops the commits, and leave values of rows out unless they may be shown."""
        if isinstance(failure, EpochsinkError):
            failure.notes = failure.notes or (f"Type: epochsink status {shlex.quote(self._location)}",)
            if not self._show_values:
                failure.hide_values()

    def release(self) -> None:
        """Close the participants, once. May be repeated."""
        if self._released:
            return
        self._released = True
        self._writer.close()
        for participant in self._participants:
            participant.close()

    def settled(self) -> None:
        """Wait until no epoch is pending."""
        self._coordinator.queue.wait_settled()

    def is_alive(self) -> bool:
        """Whether the stream thread may still write to the checkpoint (see `Stream`)."""
        return self.execution is not None and self.execution.is_alive()

    def is_in_batch(self) -> bool:
        """Whether foreachBatch runs now."""
        return self._in_batch

    def interrupt(self) -> None:
        """Make the query fail."""
        failure = self._commit_thread.failure if self._commit_thread is not None else None
        if self.execution is not None and failure is not None:
            self.execution.fail(failure)

    def stop(self) -> None:
        """End the query."""
        if self.execution is not None:
            self.execution.stop()

    def foreach_batch(self, frame: DataFrame, number: int) -> None:
        """Prepare one epoch: steps 1 to 4 of the protocol.

        Raises `ConfigurationError` where an earlier call has already prepared it.
        """
        # one call after another: a user's function may have threads of its own
        with self._call:
            if number == self._called:
                self.refuse_call(number, _called_twice(number))
            self._in_batch = True
            try:
                self._prepare(frame, number)
                self._called = number
            finally:
                self._in_batch = False

    def refuse_call(self, number: int, mistake: ConfigurationError) -> NoReturn:
        """Refuse another call in an epoch, also if the caller goes on: nothing that follows is prepared."""
        with self._call:
            _log.error("epoch %d: %s", number, mistake)
            if unrecorded := self._dispute(number):
                mistake = ConfigurationError(
                    f"{mistake.message}. That the record of epoch {number} lacks rows could not be noted: {unrecorded}",
                    hint="start the query once more with the code as it is, until this error comes without that; then "
                    f"correct it: {mistake.hint}",
                )
            self._coordinator.fail(mistake)
        raise mistake

    def _dispute(self, number: int) -> str:
        """Note that the record of an epoch lacks rows; return why that could not be done, "" if it was."""
        try:
            retrying(_is_of_store, attempts=ATTEMPTS)(self._coordinator.dispute, number)
        except (EpochsinkError, OSError) as failure:
            return str(failure)
        return ""

    def _prepare(self, frame: DataFrame, number: int) -> None:
        """Attempt an epoch, and once more with a fresh attempt where a failure may pass: a target that fails over."""
        attempts = ATTEMPTS
        if self._has_state and keeps_first_state(frame.sparkSession):
            attempts = 1
        again = retrying(
            self._may_pass, attempts=attempts, first_pause=FIRST_PAUSE_SECONDS, longest_pause=LONGEST_PAUSE_SECONDS
        )
        again(self._attempt, frame, number)

    def _attempt(self, frame: DataFrame, number: int) -> None:
        self._recording = False
        # Spark analyses beside what the ledger and the targets are asked
        with self._writer.planned(frame) as planned:
            # again for each attempt: it ends what the one before has left
            settled = self._coordinator.settle(number)
        if settled is Plan.RUN_FOR_STATE:
            run_for_state(frame)
            _log.info("epoch %d stands as recorded by an earlier attempt: its plan runs for its state only", number)
            return
        epoch = self._coordinator.begin(number)
        try:
            written, spooled = self._writer.write(planned.result(), epoch)
        except BaseException:
            self._coordinator.abandon(epoch)
            raise
        self._recording = True
        self._coordinator.record(epoch, written, spooled)

    def _may_pass(self, failure: BaseException) -> bool:
        """Whether another attempt may succeed: a target was away, or an earlier epoch has overtaken this one.

        Not if the sink says that somebody has to act first (rows or a missing right are refused), and not if the epoch
        may be recorded already: the next driver reads whether it is.
        """
        ours = sinks_error(failure) or failure
        passing = isinstance(ours, PrepareFailed) and ours.may_pass
        unread = isinstance(ours, OSError) and not self._recording
        if not (passing or unread) or self._has_failed() or not self._is_active():
            return False
        _log.warning("an attempt at an epoch has failed, and may be repeated: %s", ours)
        return True

    def _has_failed(self) -> bool:
        return self._commit_thread is not None and self._commit_thread.failure is not None

    def _is_active(self) -> bool:
        return self.execution is not None and self.execution.is_active()


def _is_of_store(failure: BaseException) -> bool:
    return isinstance(failure, OSError)


def _called_twice(number: int) -> ConfigurationError:
    return ConfigurationError(
        f"ExactlyOnce was called twice in epoch {number}, and an epoch is recorded once: the rows of the second call "
        "would be in no sink",
        hint="call it once in each epoch; for several targets, give one object several sinks, each with its where=: "
        "sinks={'paid': Postgres(..., where=\"state = 'paid'\"), 'all': Kafka(...)}. "
        f"The next start runs epoch {number} again, and writes it whole; only if the function caught this error "
        "does the epoch stand with the rows of the first call alone",
    )


def _flush_at_exit(commit_thread: CommitThread) -> None:
    """Let the interpreter's exit wait for a decided epoch's commit: daemon threads are cut off after it."""
    known = weakref.ref(commit_thread)

    def flush() -> None:
        living = known()
        if living is not None:
            living.flush()

    # not `atexit` itself, if it can be had: by then concurrent.futures takes no more work, of which commits have some
    getattr(threading, "_register_atexit", atexit.register)(flush)
