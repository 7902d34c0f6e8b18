"""One run of a streaming query: its coordinator, its plan and its watcher."""

from __future__ import annotations

import atexit
import json
import logging
import re
import uuid
import weakref
from typing import TYPE_CHECKING, Final

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException

from epochsink.checkpoint import Checkpoint
from epochsink.coordinator import Coordinator, Plan
from epochsink.errors import EpochsinkError, PrepareFailed
from epochsink.files import LocalFiles
from epochsink.ledger import Ledger
from epochsink.plan import OnePass, one_pass, row_schemas
from epochsink.watcher import Watcher
from epochsink.writejob import ANSWER, WriteJob

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import DataFrame

    from epochsink.execution import StreamExecution
    from epochsink.files import Files
    from epochsink.protocol import Committable, Epoch, Sink
    from epochsink.spool import Spool

_log = logging.getLogger("epochsink")

LOCAL_POLL_SECONDS: Final = 0.005
REMOTE_POLL_SECONDS: Final = 0.05
"""How often the commit log is looked at while an epoch is pending: a system call, or a request to a store."""


INTERRUPTED: Final = "java.lang.InterruptedException"
INTERRUPTION: Final = re.compile(r"java\.lang\.InterruptedException|InterruptedIOException|ClosedByInterruptException")


class StreamInterrupted(Exception):
    """The query was stopped while it prepared an epoch, which the next start runs again."""


class Run:
    """Recovers when made; then prepares epochs in the stream thread and commits them in the watcher's.

    Raises what `epochsink.coordinator.Coordinator.recover` raises.
    """

    def __init__(
        self, *, sinks: Mapping[str, Sink], files: Files, spool: Spool, query_id: str, join_running: bool
    ) -> None:
        self._sinks = sinks
        self._poll_seconds = LOCAL_POLL_SECONDS if isinstance(files, LocalFiles) else REMOTE_POLL_SECONDS
        self._committers = {name: sink.committer() for name, sink in sinks.items()}
        self._spool = spool
        self._execution: StreamExecution | None = None
        self._watcher: Watcher | None = None
        self._in_batch = False
        self._plans: dict[str, OnePass] = {}
        self._coordinator = Coordinator(
            query_id=query_id,
            ledger=Ledger(files, uuid.uuid4().hex),
            checkpoint=Checkpoint(files),
            spool=self._spool,
            sinks=self._committers,
            join_running=join_running,
        )
        self._coordinator.recover()

    def belongs_to(self, execution: StreamExecution) -> bool:
        """Whether this run was recovered for, or is already bound to, an execution."""
        return self._execution is None or self._execution.run_id == execution.run_id

    def bind(self, execution: StreamExecution) -> None:
        """Start watching an execution's commits; once."""
        if self._watcher is None:
            execution.refuse_async_progress()
            self._execution = execution
            self._watcher = Watcher(self._coordinator, self, self._poll_seconds)
            self._watcher.start()
            _flush_at_exit(self._watcher)

    def ended(self) -> bool:
        """Whether the query has ended and the last commits with it."""
        return self._watcher is None or not self._watcher.is_alive()

    def join(self) -> None:
        """Wait for the last commits; raises what stopped them."""
        if self._watcher is not None:
            self._watcher.join()
            if self._watcher.failure is not None:
                raise self._watcher.failure
            for committer in self._committers.values():
                committer.close()

    def settled(self) -> None:
        """Wait until no epoch is pending."""
        self._coordinator.wait_settled()

    def is_alive(self) -> bool:
        """Whether the stream thread may still write to the checkpoint (see `epochsink.watcher.Stream`)."""
        return self._execution is not None and self._execution.is_alive()

    def is_in_batch(self) -> bool:
        """Whether foreachBatch runs now."""
        return self._in_batch

    def stop(self) -> None:
        """End the query."""
        if self._execution is not None:
            self._execution.stop()

    def foreach_batch(self, frame: DataFrame, number: int) -> None:
        """Prepare one epoch: steps 1 to 4 of the protocol."""
        self._in_batch = True
        try:
            self._prepare(frame, number)
        except (Py4JJavaError, PySparkException) as failure:
            brief = _brief(failure, number)
            _log.info("epoch %d failed in Spark; nothing of it became visible", number, exc_info=failure)
            raise brief from None
        finally:
            self._in_batch = False

    def _prepare(self, frame: DataFrame, number: int) -> None:
        if self._coordinator.settle(number) is Plan.RUN_FOR_STATE:
            _log.info("epoch %d stands as recorded by an earlier attempt: its plan runs for its state only", number)
            frame.write.format("noop").mode("overwrite").save()
            return
        epoch = self._coordinator.begin(number)
        try:
            written = self._write(frame, epoch)
        except BaseException:
            self._coordinator.abandon(epoch)
            raise
        self._coordinator.record(epoch, written)

    def _write(self, frame: DataFrame, epoch: Epoch) -> dict[str, list[tuple[str, Committable]]]:
        identities = {name: self._coordinator.identity(name) for name in self._sinks}
        job = WriteJob(epoch, self._sinks, identities, self._spool)
        session = frame.sparkSession
        passed = self._plan(frame).apply(frame, session.sparkContext.defaultParallelism)
        answers = passed.mapInArrow(job.write_partition, ANSWER).collect()
        written: dict[str, list[tuple[str, Committable]]] = {}
        for answer in sorted(answers, key=lambda row: row["slot"]):
            accepted = (answer["task"], json.loads(answer["committable"]))
            written.setdefault(answer["sink"], []).append(accepted)
        return written

    def _plan(self, frame: DataFrame) -> OnePass:
        key = frame.schema.json()
        if key not in self._plans:
            self._plans[key] = one_pass(self._sinks, row_schemas(frame, self._sinks))
        return self._plans[key]


def _brief(failure: Py4JJavaError | PySparkException, number: int) -> Exception:
    """Return a short exception that says what happened.

    Spark matches the message of what foreachBatch raises with a regular expression whose recursion overflows
    the stream thread's stack on a long one (a Java stack trace), so the long form goes to the log alone.
    """
    text = str(failure)
    if INTERRUPTION.search(text):
        # in these words, Spark knows that its own stop() was the cause
        return StreamInterrupted(f"py4j.protocol.Py4JJavaError: An error occurred while calling {INTERRUPTED}")
    known = EpochsinkError.from_text(text)
    if known is not None:
        return known
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith(("\tat ", "  File "))]
    return PrepareFailed(
        f"epoch {number}: Spark could not run the batch's plan: {' | '.join(lines[:4])[:1000]}",
        way_out="nothing of the epoch became visible, and it is run again at the next start; the whole trace is in "
        "the driver's log",
    )


def _flush_at_exit(watcher: Watcher) -> None:
    """Let the interpreter's exit wait for a decided epoch's commit: daemon threads are cut off after it."""
    known = weakref.ref(watcher)

    def flush() -> None:
        living = known()
        if living is not None:
            living.flush()

    atexit.register(flush)
