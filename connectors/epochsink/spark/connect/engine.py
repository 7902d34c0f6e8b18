"""The engine of Spark Connect (see `epochsink.spark.engine.Engine`): in its client, and where foreachBatch runs."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn

from pyspark.sql import functions as F  # noqa: N812 - its usual name

from epochsink.errors import ConfigurationError, UnsupportedQuery
from epochsink.protocol.checkpoint import Checkpoint, OpenCheckpoint
from epochsink.spark.connect import checkpoint_files, compat, expressions
from epochsink.spark.connect.execution import ConnectExecution, has_own_session, never_caught, start_id
from epochsink.spark.connect.tasks import ConnectWriteTasks, in_task
from epochsink.spark.engine import Engine, Execution

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter


_IN_SERVER: Final = "SPARK_CONNECT_LOCAL_URL"
"""Spark sets it in the environment of the processes in which its server calls foreachBatch."""

_checked: list[bool] = []


class ConnectEngine(Engine):
    """Asks Spark by its public interface."""

    location_of = staticmethod(checkpoint_files.location_of)
    frame_of = staticmethod(compat.frame_of)
    settings_of = staticmethod(compat.settings_of)
    changeable = staticmethod(expressions.changeable)
    start_id = staticmethod(start_id)
    write_tasks = ConnectWriteTasks

    def runs_here(self) -> bool:
        return _IN_SERVER in os.environ

    def open_checkpoint(
        self, session: SparkSession, checkpoint: str, storage_options: Mapping[str, Any], spool: str | None
    ) -> OpenCheckpoint:
        return checkpoint_files.place_of(session, checkpoint, storage_options, spool).open()

    def start(self, writer: DataStreamWriter, batch: Callable[[DataFrame, int], None], checkpoint: str) -> NoReturn:
        """Never called: the client has `epochsink.spark.connect.server` start queries."""
        raise RuntimeError(f"{batch} is not started on {checkpoint} by the server of Spark Connect: {writer}")

    def handle_of(self, query: StreamingQuery) -> NoReturn:
        """Never called: the client has `epochsink.spark.connect.server` start queries."""
        raise RuntimeError(f"query {query.id} of Spark Connect has no handle of the JVM")

    def execution_of_query(self, query: StreamingQuery) -> NoReturn:
        """Never called: the execution is the server's."""
        raise RuntimeError(f"the execution of query {query.id} is in the server of Spark Connect")

    def execution_of_batch(
        self, session: SparkSession, known: Execution | None, opened: Callable[[], OpenCheckpoint]
    ) -> Execution:
        if known is not None:
            return known
        with never_caught():
            if not self.runs_here():
                raise UnsupportedQuery(
                    "ExactlyOnce was called outside the foreachBatch of a running streaming query",
                    hint="use sink.start(writer), or pass it to writeStream.foreachBatch(...)",
                )
            place = opened()
            checkpoint = Checkpoint(place.files)
            query_id = checkpoint.query_id()
            if query_id is None:
                raise ConfigurationError(
                    f"no query has begun on the checkpoint at {place.location}, and ExactlyOnce was called for it",
                    hint="set .option('checkpointLocation', sink.checkpoint) on the writer. If it is set: the process "
                    "in which Spark's server calls foreachBatch, beside the driver, must see the same folder under "
                    "this path",
                )
            return ConnectExecution(session, query_id, checkpoint, place.location)

    def refuse_bare_executors(self, session: SparkSession) -> None:
        if not _checked:
            in_task(session, str)
            _checked.append(True)

    def application(self, session: SparkSession) -> str:
        return session.conf.get("spark.app.id", None) or ""

    def schema_text(self, frame: DataFrame) -> str:
        return frame.schema.json()

    def selection(self, given: Sequence[str]) -> Callable[[DataFrame], DataFrame]:
        return lambda frame: frame.selectExpr(*given)

    def parallelism(self, session: SparkSession) -> int:
        """Return the application's default number of tasks: by which Spark cuts a range."""
        parts = session.range(_MANY).select(F.spark_partition_id().alias("part")).distinct()
        return parts.count()

    def byte_limit_of_batches(self, session: SparkSession) -> int:
        """Return the limit; 0 if other queries may have the session: its settings stay as they are."""
        if not has_own_session(session):
            return 0
        given = re.fullmatch(r"(\d+)([kmg]?)b?", str(session.conf.get(_MAX_BYTES)).lower())
        return int(given[1]) << _SHIFTS[given[2]] if given else 0


_MAX_BYTES: Final = "spark.sql.execution.arrow.maxBytesPerBatch"
_SHIFTS: Final = {"": 0, "k": 10, "m": 20, "g": 30}
_MANY: Final = 10_000


CONNECT: Final[Engine] = ConnectEngine()
