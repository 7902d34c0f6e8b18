"""Run in tasks the write jobs, and functions that need files or targets that the client cannot reach."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.errors import PySparkException

from epochsink.errors import ConfigurationError, EpochsinkError
from epochsink.spark.engine import WriteTasks
from epochsink.spark.error_translation import reason_of
from epochsink.spark.write_task import ANSWER, WriteJob, WriteOrder, with_same_version

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class ConnectWriteTasks(WriteTasks):
    """Tasks that get their order with the function: Spark Connect has no local properties."""

    def __init__(self, job: WriteJob) -> None:
        self._write: Any = with_same_version(job.write_in_order)

    def plan(self, passed: DataFrame) -> DataFrame:
        return passed

    def run(self, plan: DataFrame, order: WriteOrder) -> list[str]:
        write, text = self._write, order.to_json()

        def partition(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            # pickled as code, like `write`
            yield from write((text, batches))

        return [row[0] for row in plan.mapInArrow(partition, ANSWER).collect()]


def in_task(session: SparkSession, function: Callable[[], str]) -> str:
    """Run a function in one task, which reaches what tasks reach; return its answer, or raise its error.

    Raises `ConfigurationError` if the Python of the executors cannot run it.
    """

    def answer(_: None) -> str:
        try:
            return function()
        except EpochsinkError as failure:
            # as an answer: Spark would try a task that fails again
            return failure.to_line()

    sealed: Any = with_same_version(answer)

    def once(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa  # noqa: PLC0415 - pickled as code

        for _ in batches:
            pass
        yield pa.RecordBatch.from_arrays([pa.array([sealed(None)])], names=["answer"])

    try:
        [row] = session.range(0, 1, 1, 1).mapInArrow(once, ANSWER).collect()
    except PySparkException as failure:
        known = EpochsinkError.from_text(str(failure))
        raise (known or _cannot_run(failure)) from (None if known else failure)
    text = str(row[0])
    raised = EpochsinkError.from_text(text)
    if raised is not None:
        raise raised
    return text


def _cannot_run(failure: PySparkException) -> EpochsinkError:
    reason = reason_of(str(failure))[:1000]
    if "ModuleNotFoundError" in reason or "ImportError" in reason:
        return ConfigurationError(
            f"the executors' Python cannot run a task of epochsink: {reason}",
            hint="install epochsink, with the extras of your sinks, there and in the driver's Python; no row has moved",
        )
    return EpochsinkError(f"a task that asks checkpoint and targets failed: {reason}")
