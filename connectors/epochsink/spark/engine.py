"""What epochsink asks of Spark: one interface, with an implementation for each kind of session.

`epochsink.spark.engines` chooses. Nothing else in this package knows which kind of session a query has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from epochsink.errors import ConfigurationError
from epochsink.protocol.checkpoint import OpenCheckpoint
from epochsink.sink import Sink
from epochsink.spark.write_task import WriteJob, WriteOrder

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter


@dataclass(frozen=True, slots=True)
class WriterSettings:
    """What has been set on a stream writer: the name of its format, its output mode, and its checkpointLocation."""

    source: str
    output_mode: str
    checkpoint: str | None


class Execution(Protocol):
    """Spark's execution of a query."""

    query_id: str
    run_id: str

    def is_alive(self) -> bool:
        """Return whether the stream may still write to the checkpoint."""

    def is_active(self) -> bool:
        """Return whether the query was neither stopped nor has failed."""

    def fail(self, failure: BaseException) -> None:
        """End the query so that everybody who waits for it gets this error."""

    def end_from_within(self, failure: BaseException) -> None:
        """End the query with an error, inside its foreachBatch: no further batch runs, even if the error is caught."""

    def raised(self, error: Exception) -> Exception:
        """Return what foreachBatch raises to tell Spark of an error."""

    def batch(self, epoch: int) -> int | None:
        """Return the number of the batch that runs on this thread, None if there is none.

        ``epoch`` is the number by which the function was called, which mostly is the same.
        """

    def wrong_number(self, epoch: int, own: int | None) -> ConfigurationError:
        """Return the error for a call with a number that is not the batch's own."""

    def stop(self) -> None:
        """Stop the query."""

    def output_mode(self) -> str:
        """Return the query's output mode: Append, Update or Complete."""

    def checkpoint(self) -> str:
        """Return the checkpoint folder that the query uses, as Spark resolved it."""

    def has_state(self) -> bool:
        """Return whether the query keeps state from batch to batch."""

    def unrepeatable_state(self) -> list[str]:
        """Return the SQL of what decides on the query's state and may give another result each time."""

    def refuse_unlike(self, location: str, used: str) -> None:
        """Raise unless commits/N at ``location`` is the decision on epoch N of the query, which uses ``used``.

        Raises `ConfigurationError` for another checkpoint, `UnsupportedQuery` for async progress tracking.
        """


class WriteTasks(Protocol):
    """The tasks of a run's write jobs."""

    def plan(self, passed: DataFrame) -> DataFrame:
        """Return a frame of the tasks' answers, one text a row, for the frame that `OnePass.apply` returned."""

    def run(self, plan: DataFrame, order: WriteOrder) -> list[str]:
        """Run a planned job, give its tasks the order, and return what the accepted ones answer."""


class Pipeline(Protocol):
    """What a server must know of an `ExactlyOnce`, which goes there by pickle."""

    checkpoint: str
    sinks: dict[str, Sink]
    spool: str | None
    storage_options: dict[str, Any]
    join_running: bool | str
    retain_seconds: float
    show_values: bool

    @property
    def reference(self) -> str:
        """MODULE:ATTRIBUTE by which the command line finds the sinks, "" if it is not known."""

    def __call__(self, frame: DataFrame, epoch: int) -> None:
        """Prepare one epoch."""


class Engine(Protocol):
    """One kind of Spark session."""

    def runs_here(self) -> bool:
        """Return whether the runs of queries live in this process, not in a server."""

    def location_of(self, session: SparkSession, checkpoint: str) -> str:
        """Return where Spark finds a checkpoint folder: a path for a local file system, else a URI.

        Raises `ConfigurationError` if Spark has no file system for it.
        """

    def open_checkpoint(
        self, session: SparkSession, checkpoint: str, storage_options: Mapping[str, Any], spool: str | None
    ) -> OpenCheckpoint:
        """Open a checkpoint folder, and its spool: beside the ledger if ``spool`` names no other place.

        ``storage_options`` replace what the session says of an object store. Raises `ConfigurationError` if the folder
        cannot be used. Whether the spool can be used is not tried.
        """

    def frame_of(self, writer: DataStreamWriter) -> DataFrame:
        """Return the frame that a stream writer writes."""

    def settings_of(self, writer: DataStreamWriter) -> WriterSettings:
        """Return what has been set on a stream writer."""

    def start(
        self, writer: DataStreamWriter, batch: Callable[[DataFrame, int], None], checkpoint: str
    ) -> StreamingQuery:
        """Start a query that calls ``batch`` for each epoch. Raises `ConfigurationError` if Spark refuses."""

    def handle_of(self, query: StreamingQuery) -> Any:
        """Return what a `StreamingQuery` is made of."""

    def execution_of_query(self, query: StreamingQuery) -> Execution:
        """Return the execution behind a query's handle."""

    def execution_of_batch(
        self, session: SparkSession, known: Execution | None, opened: Callable[[], OpenCheckpoint]
    ) -> Execution:
        """Return the execution whose foreachBatch runs on this thread, which mostly is ``known``.

        ``opened`` opens the checkpoint that `ExactlyOnce` was given. Raises `UnsupportedQuery` if there is none.
        """

    def refuse_bare_executors(self, session: SparkSession) -> None:
        """Raise `ConfigurationError` if the Python of an executor lacks what a task needs."""

    def start_id(self) -> str:
        """Return with what the names of the drivers of this start of the query begin."""

    def application(self, session: SparkSession) -> str:
        """Return the name by which the operator finds the application."""

    def schema_text(self, frame: DataFrame) -> str:
        """Return the schema of a frame as JSON. Frames with equal schemas can use the same SQL."""

    def changeable(self, frame: DataFrame, expressions: Sequence[str]) -> list[str]:
        """Return those SQL expressions over a frame that may give another result each time, such as ``rand()``."""

    def selection(self, expressions: Sequence[str]) -> Callable[[DataFrame], DataFrame]:
        """Return a function that selects SQL expressions from a frame; any number of frames can use it."""

    def parallelism(self, session: SparkSession) -> int:
        """Return how many tasks a shuffle should have."""

    def byte_limit_of_batches(self, session: SparkSession) -> int:
        """Return how many bytes a record batch for a Python worker may have."""

    def write_tasks(self, job: WriteJob) -> WriteTasks:
        """Return the tasks of a run."""
