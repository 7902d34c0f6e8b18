"""Ask and end Spark's execution of a running query, in the JVM.

PySpark has no public way to it. So the calls are private to Spark, like those of `epochsink.spark.classic.compat`, and
are tested with them.
"""
# ruff: noqa: SLF001

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from py4j.protocol import Py4JError, Py4JNetworkError
from pyspark import SparkContext

from epochsink.errors import ConfigurationError, UnsupportedQuery
from epochsink.spark.classic.compat import handle_of, has_state, jvm_of, unrepeatable_state
from epochsink.spark.engine import Execution

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery


_log = logging.getLogger("epochsink")

_END_SECONDS: Final = 10.0


class StreamExecution(Execution):
    """Spark's execution of a query."""

    def __init__(self, java: Any) -> None:
        self._java = java
        self._thread = java.queryExecutionThread()
        self.query_id = str(java.id().toString())
        self.run_id = str(java.runId().toString())

    @classmethod
    def of_query(cls, query: StreamingQuery) -> StreamExecution:
        """Return the execution behind a query's handle."""
        return cls(handle_of(query).streamingQuery())

    @classmethod
    def of_batch(cls, session: SparkSession, known: Execution | None) -> Execution:
        """Return the execution whose foreachBatch runs on this thread, which mostly is ``known``.

        Raises `UnsupportedQuery` if there is none.
        """
        property_of = session.sparkContext.getLocalProperty
        # asking for the run id, by which Spark groups the jobs of a query, is one call; finding the execution a dozen
        if known is not None and property_of("spark.jobGroup.id") == known.run_id:
            return known
        jvm, java_session = jvm_of(session)
        query_id = property_of("sql.streaming.queryId")
        queries = java_session.sharedState().activeStreamingQueries()
        java = None if query_id is None else queries.get(jvm.java.util.UUID.fromString(query_id))
        if java is None:
            raise UnsupportedQuery(
                "ExactlyOnce was called outside the foreachBatch of a running streaming query",
                hint="pass it to writeStream.foreachBatch(...), with PYSPARK_PIN_THREAD at its default (true)",
            )
        return cls(java)

    def is_alive(self) -> bool:
        """Return whether the stream thread lives; it may still do so after the query's state is stopped."""
        try:
            return bool(self._thread.isAlive())
        except (Py4JNetworkError, OSError):
            # the JVM has ended, and the thread with it
            return False

    def is_active(self) -> bool:
        try:
            return bool(self._java.isActive())
        except (Py4JNetworkError, OSError):
            return False

    def fail(self, failure: BaseException) -> None:
        """End the query so that everybody who waits for it gets this error; waits until it has ended."""
        try:
            # a line of its own for what Spark appends to the text, such as its SQLSTATE
            self._die_of(f"{type(failure).__name__}: {failure}\n")
        except Py4JError as unable:
            _log.warning("the query cannot be given its error, and ends with another one: %s", unable)
            self._thread.interrupt()

    def _die_of(self, error: str) -> None:
        # to interrupt its thread would end the query too, but Spark then reports what the thread did: its sleep
        jvm: Any = SparkContext._jvm
        parameters = {"id": self.query_id, "runId": self.run_id, "message": error, "queryDebugString": ""}
        cause = jvm.org.apache.spark.sql.streaming.StreamingQueryException(
            f"query {self.query_id}, run {self.run_id}",
            jvm.java.lang.RuntimeException(error),
            "",
            "",
            "STREAM_FAILED",
            jvm.PythonUtils.toScalaMap(parameters),
        )
        # before the stop: the stream thread then keeps this cause, and wakes everybody who waits
        getattr(self._java, "streamDeathCause_$eq")(cause)
        self._java.stop()

    def end_from_within(self, failure: BaseException) -> None:
        """End the query with an error, inside its foreachBatch: no further batch runs, even if the error is caught.

        Returns before the query has ended, because that waits for foreachBatch. Mostly Spark cannot write the commit of
        this batch any more, because its thread is interrupted again and again: it wrote 1 of 20 commits, and 7 of 20
        if the thread was interrupted once.
        """
        # in another thread: the end of the query waits for the stream thread, which runs this
        threading.Thread(target=self.fail, args=(failure,), name="epochsink-end", daemon=True).start()
        threading.Thread(target=self._keep_interrupting, name="epochsink-interrupt", daemon=True).start()
        deadline = time.monotonic() + _END_SECONDS
        while not self._is_told_to_end() and time.monotonic() < deadline:
            time.sleep(0.005)

    def _keep_interrupting(self) -> None:
        # an interrupt before the error is given would become the error
        while self.is_active():
            time.sleep(0.005)
        while self.is_alive():
            self._thread.interrupt()
            time.sleep(0.001)

    def _is_told_to_end(self) -> bool:
        return not self.is_active() and bool(self._thread.isInterrupted())

    def raised(self, error: Exception) -> Exception:
        """Return the error itself: `awaitTermination` raises it in this process."""
        return error

    def batch(self, epoch: int) -> int | None:
        """Return the number of the batch that Spark runs on this thread; None on any other thread."""
        del epoch
        number = SparkContext.getOrCreate().getLocalProperty("streaming.sql.batchId")
        return None if number is None else int(number)

    def wrong_number(self, epoch: int, own: int | None) -> ConfigurationError:
        return ConfigurationError(
            f"ExactlyOnce was called with the number {epoch!r} in Spark's batch {own}: a later start "
            "would take the epoch for another one that is done already, and its rows would be in no sink",
            hint="pass on the number that foreachBatch gives your function: "
            "def batch(frame, epoch): sink(frame, epoch)",
        )

    def stop(self) -> None:
        self._java.stop()

    def output_mode(self) -> str:
        return str(self._java.outputMode().toString())

    def checkpoint(self) -> str:
        return str(self._java.resolvedCheckpointRoot())

    def has_state(self) -> bool:
        return has_state(self._java.analyzedPlan())

    def unrepeatable_state(self) -> list[str]:
        return unrepeatable_state(self._java.analyzedPlan())

    def refuse_unlike(self, location: str, used: str) -> None:
        """Raise unless commits/N at ``location`` is the decision on epoch N.

        Raises `ConfigurationError` for another checkpoint, `UnsupportedQuery` for async progress tracking.
        """
        if used != location:
            raise ConfigurationError(
                f"the query's checkpointLocation is {used}, and ExactlyOnce was given {location}",
                hint='set .option("checkpointLocation", sink.checkpoint)',
            )
        kind = str(self._java.getClass().getSimpleName())
        if kind != "MicroBatchExecution":
            raise UnsupportedQuery(
                f"this query runs as {kind}, in which an epoch may have other offsets when it runs again",
                hint="remove the options asyncProgressTrackingEnabled and "
                "_asyncProgressTrackingOverrideSinkSupportCheck, and use a processing-time or availableNow trigger",
            )
