"""The engine of classic PySpark (see `epochsink.spark.engine.Engine`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from py4j.protocol import Py4JJavaError

from epochsink.errors import ConfigurationError
from epochsink.protocol.checkpoint import OpenCheckpoint
from epochsink.protocol.store_failure import remedy
from epochsink.spark.classic import compat, executors, hadoop_storage
from epochsink.spark.classic.stream_execution import StreamExecution
from epochsink.spark.engine import Engine, Execution, WriteTasks
from epochsink.spark.write_task import ANSWER, ORDER, WriteJob, WriteOrder, with_same_version

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter


_DESCRIPTION: Final = "spark.job.description"
"""What Spark's UI calls the jobs of a thread."""


class ClassicWriteTasks(WriteTasks):
    """Tasks that take their order from a local property of the job, so that one pickled function serves all epochs."""

    def __init__(self, job: WriteJob) -> None:
        self._function = compat.arrow_function(with_same_version(job.write_partition), ANSWER)
        self._sinks = ", ".join(job.sinks)
        log = logging.getLogger("py4j")
        if log.level == logging.NOTSET:
            # its INFO is a line for each epoch
            log.setLevel(logging.WARNING)

    def plan(self, passed: DataFrame) -> DataFrame:
        return compat.map_in_arrow(passed, self._function)

    def run(self, plan: DataFrame, order: WriteOrder) -> list[str]:
        context = plan.sparkSession.sparkContext
        context.setLocalProperty(ORDER, order.to_json())
        # the thread is the stream's, and the user's function may run jobs after this one
        before = context.getLocalProperty(_DESCRIPTION)
        context.setLocalProperty(_DESCRIPTION, f"epochsink epoch {order.epoch.number}: write to {self._sinks}")
        try:
            return [row[0] for row in plan.collect()]
        finally:
            context.setLocalProperty(_DESCRIPTION, before)  # type: ignore[arg-type] # None removes it


class ClassicEngine(Engine):
    """Asks the JVM through py4j."""

    location_of = staticmethod(hadoop_storage.location_of)
    open_checkpoint = staticmethod(hadoop_storage.open_checkpoint)
    frame_of = staticmethod(compat.frame_of)
    handle_of = staticmethod(compat.handle_of)
    settings_of = staticmethod(compat.settings_of)
    refuse_bare_executors = staticmethod(executors.refuse_bare_executors)
    schema_text = staticmethod(compat.schema_text)
    changeable = staticmethod(compat.changeable)
    byte_limit_of_batches = staticmethod(compat.byte_limit_of_batches)
    write_tasks = ClassicWriteTasks

    def runs_here(self) -> bool:
        return True

    def start(
        self, writer: DataStreamWriter, batch: Callable[[DataFrame, int], None], checkpoint: str
    ) -> StreamingQuery:
        try:
            return writer.foreachBatch(batch).option("checkpointLocation", checkpoint).start()
        except Py4JJavaError as refused:
            raise ConfigurationError(
                f"Spark does not start a query on checkpoint={checkpoint!r}: {hadoop_storage.first_line(refused)}",
                hint=remedy(refused, "give a folder that Spark can make and write"),
            ) from refused

    def execution_of_query(self, query: StreamingQuery) -> Execution:
        return StreamExecution.of_query(query)

    def execution_of_batch(
        self, session: SparkSession, known: Execution | None, opened: Callable[[], OpenCheckpoint]
    ) -> Execution:
        del opened
        return StreamExecution.of_batch(session, known)

    def start_id(self) -> str:
        """Return nothing: this process finishes its own commits."""
        return ""

    def application(self, session: SparkSession) -> str:
        return str(session.sparkContext.applicationId)

    def selection(self, expressions: Sequence[str]) -> Callable[[DataFrame], DataFrame]:
        """Return a selection whose SQL the JVM has parsed once."""
        columns: Any = compat.columns_of(expressions)
        return partial(_select, columns)

    def parallelism(self, session: SparkSession) -> int:
        """Return the application's default number of tasks."""
        return session.sparkContext.defaultParallelism


def _select(columns: Any, frame: DataFrame) -> DataFrame:
    return compat.select(frame, columns)


CLASSIC: Final[Engine] = ClassicEngine()
