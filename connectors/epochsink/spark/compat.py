"""Spark's side of a running query, through the JVM: the one place that uses what PySpark keeps private.

PySpark has no public way from Python to the JVM's session, to a query's execution, or to the frame of a writer.
"""
# ruff: noqa: SLF001

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JNetworkError
from pyspark.sql import SparkSession

from epochsink.errors import ConfigurationError, UnsupportedQuery

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter


def jvm_of(session: SparkSession) -> tuple[Any, Any]:
    """Return the JVM's view and its SparkSession."""
    untyped: Any = session
    return untyped._jvm, untyped._jsparkSession


def byte_limit_of_batches(session: SparkSession) -> int:
    """Return how many bytes a record batch for a Python worker may have."""
    _, java = jvm_of(session)
    return int(java.sessionState().conf().arrowMaxBytesPerBatch())


def gateway_of(session: SparkSession) -> Any:
    """Return the py4j gateway."""
    context: Any = session.sparkContext
    return context._gateway


def frame_of(writer: DataStreamWriter) -> DataFrame:
    """Return the frame that a stream writer writes."""
    untyped: Any = writer
    frame: DataFrame = untyped._df
    return frame


def handle_of(query: StreamingQuery) -> Any:
    """Return the JVM's handle of a query."""
    untyped: Any = query
    return untyped._jsq


def changeable(frame: DataFrame, expressions: Sequence[str]) -> list[str]:
    """Return those SQL expressions over a frame that may give another answer each time, such as ``rand()``."""
    selected: Any = frame.selectExpr(*expressions)
    columns = selected._jdf.queryExecution().analyzed().expressions()
    return [expression for index, expression in enumerate(expressions) if not columns.apply(index).deterministic()]


def refuse_connect(session: SparkSession) -> None:
    """Raise `UnsupportedQuery` for a Spark Connect session."""
    if not isinstance(session, SparkSession):
        raise UnsupportedQuery(
            "Spark Connect runs foreachBatch in another process, which cannot read the checkpoint's decisions",
            hint="run the pipeline with classic PySpark (spark-submit, or SparkSession.builder without remote())",
        )


class StreamExecution:
    """Spark's execution of the query, in the JVM."""

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
    def of_batch(cls, session: SparkSession, known: StreamExecution | None) -> StreamExecution:
        """Return the execution whose foreachBatch runs on this thread: ``known``, mostly.

        Raises `UnsupportedQuery` where there is none.
        """
        # a stream thread's jobs are grouped by its run id; asking for that is one call, finding the execution a dozen
        if known is not None and session.sparkContext.getLocalProperty("spark.jobGroup.id") == known.run_id:
            return known
        query_id = session.sparkContext.getLocalProperty("sql.streaming.queryId")
        java = None
        if query_id is not None:
            jvm, java_session = jvm_of(session)
            active = java_session.sharedState().activeStreamingQueries()
            java = active.get(jvm.java.util.UUID.fromString(query_id))
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

    def interrupt(self) -> None:
        """Interrupt the stream thread, which Spark takes for a failure of the query as long as nobody stopped it."""
        self._thread.interrupt()

    def stop(self) -> None:
        """Stop the query."""
        self._java.stop()

    def checkpoint(self) -> str:
        """Return the checkpoint folder that the query uses."""
        return str(self._java.resolvedCheckpointRoot())

    def refuse_unlike(self, location: str, used: str) -> None:
        """Raise where commits/N at ``location`` is not the decision on epoch N.

        `ConfigurationError` if the query uses another checkpoint, `UnsupportedQuery` for async progress tracking.
        """
        if used != location:
            raise ConfigurationError(
                f"the query's checkpointLocation is {used}, and ExactlyOnce was given {location}",
                hint='set .option("checkpointLocation", sink.checkpoint)',
            )
        kind = str(self._java.getClass().getSimpleName())
        if kind != "MicroBatchExecution":
            raise UnsupportedQuery(
                f"this query runs as {kind}, in which a re-run epoch may get other offsets than the run before",
                hint="remove the options asyncProgressTrackingEnabled and "
                "_asyncProgressTrackingOverrideSinkSupportCheck, and use a processing-time or availableNow trigger",
            )
