"""Spark's execution of a running query, in the JVM: is it alive, which checkpoint does it use, stop it."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from py4j.protocol import Py4JError, Py4JNetworkError

from epochsink.errors import ConfigurationError, UnsupportedQuery
from epochsink.spark import compat

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_log = logging.getLogger("epochsink")

_END_SECONDS: Final = 10.0


class StreamExecution:
    """Spark's execution of the query, in the JVM."""

    def __init__(self, java: Any) -> None:
        self._java = java
        self._thread = compat.stream_thread_of(java)
        self.query_id = str(java.id().toString())
        self.run_id = str(java.runId().toString())

    @classmethod
    def of_query(cls, query: StreamingQuery) -> StreamExecution:
        """Return the execution behind a query's handle."""
        return cls(compat.execution_of(query))

    @classmethod
    def of_batch(cls, session: SparkSession, known: StreamExecution | None) -> StreamExecution:
        """Return the execution whose foreachBatch runs on this thread: ``known``, mostly.

        Raises `UnsupportedQuery` where there is none.
        """
        # asking for the run id is one call, finding the execution a dozen
        if known is not None and compat.run_id_of_thread(session) == known.run_id:
            return known
        java = compat.execution_of_thread(session)
        if java is None:
            raise UnsupportedQuery(
                "ExactlyOnce was called outside the foreachBatch of a running streaming query",
                hint="pass it to writeStream.foreachBatch(...), with PYSPARK_PIN_THREAD at its default (true)",
            )
        return cls(java)

    def is_alive(self) -> bool:
        """Return whether the stream thread lives: the query's state says stopped before that."""
        try:
            return bool(self._thread.isAlive())
        except (Py4JNetworkError, OSError):
            # the JVM is gone, and the thread with it
            return False

    def is_active(self) -> bool:
        """Return whether nobody has stopped the query so far."""
        try:
            return bool(self._java.isActive())
        except (Py4JNetworkError, OSError):
            return False

    def fail(self, failure: BaseException) -> None:
        """End the query with an error, as if its running batch had raised it; waits until it has ended."""
        try:
            # a line of its own for what Spark appends to the text, such as its SQLSTATE
            compat.end_with(self._java, f"{type(failure).__name__}: {failure}\n")
        except Py4JError as unable:
            # then it ends under another name, and the log has this one
            _log.warning("the query cannot be given its error: %s", unable)
            self._thread.interrupt()

    def end_from_within(self, failure: BaseException) -> None:
        """End the query with an error, called inside its foreachBatch: no further batch runs, whatever catches it.

        Returns before the query has ended, which waits for foreachBatch. Spark mostly cannot write the commit of this
        batch then, since the thread is interrupted again and again: of 20 batches it wrote 1, and 7 when it was
        interrupted once.
        """
        # not here: ending waits for the stream thread, which runs this
        threading.Thread(target=self.fail, args=(failure,), name="epochsink-end", daemon=True).start()
        threading.Thread(target=self._keep_interrupting, name="epochsink-interrupt", daemon=True).start()
        deadline = time.monotonic() + _END_SECONDS
        while not self._is_told_to_end() and time.monotonic() < deadline:
            time.sleep(0.005)

    def _keep_interrupting(self) -> None:
        while self.is_active():
            time.sleep(0.005)
        while self.is_alive():
            self._thread.interrupt()
            time.sleep(0.001)

    def _is_told_to_end(self) -> bool:
        return not self.is_active() and bool(self._thread.isInterrupted())

    def stop(self) -> None:
        """Stop the query."""
        self._java.stop()

    def output_mode(self) -> str:
        """Return the query's output mode: Append, Update or Complete."""
        return compat.output_mode_of(self._java)

    def checkpoint(self) -> str:
        """Return the checkpoint folder that the query uses."""
        return compat.checkpoint_of(self._java)

    def has_state(self) -> bool:
        """Return whether the query keeps state from batch to batch."""
        return compat.has_state(self._java)

    def unrepeatable_state(self) -> list[str]:
        """Return the SQL of what decides on the query's state and may give another result each time."""
        return compat.unrepeatable_state(self._java)

    def refuse_unlike(self, location: str, used: str) -> None:
        """Raise where commits/N at ``location`` is not the decision on epoch N.

        `ConfigurationError` if the query uses another checkpoint, `UnsupportedQuery` for async progress tracking.
        """
        if used != location:
            raise ConfigurationError(
                f"the query's checkpointLocation is {used}, and ExactlyOnce was given {location}",
                hint='set .option("checkpointLocation", sink.checkpoint)',
            )
        kind = compat.engine_of(self._java)
        if kind != "MicroBatchExecution":
            raise UnsupportedQuery(
                f"this query runs as {kind}, in which a re-run epoch may get other offsets than the run before",
                hint="remove the options asyncProgressTrackingEnabled and "
                "_asyncProgressTrackingOverrideSinkSupportCheck, and use a processing-time or availableNow trigger",
            )
