"""Small epochs on request: one process with one Spark, of whatever version of epochsink its PYTHONPATH names.

Takes one request a line (JSON), answers each with one line that begins with `ANSWER`.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import uuid
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import psutil
from pyspark.sql import DataFrame, SparkSession

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql.streaming.query import StreamingQuery

ANSWER = "ANSWER "
SKIPPED = 8
"""Epochs at the start of a query that are not counted: classes are loaded, code is compiled."""
DEADLINE = 180


@dataclass(frozen=True)
class Request:
    """Run so many epochs of so many rows through a sink (its name and arguments), or through a plain function."""

    rows: int
    epochs: int
    sink: str = ""
    arguments: dict[str, Any] | None = None


@dataclass(frozen=True)
class Answer:
    """The median of a trigger, and the processor time that an epoch took in all processes of the driver."""

    milliseconds: float
    processor_milliseconds: float


def serve() -> None:
    """Answer requests until there are no more."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.memory", "1g")
        .config("spark.sql.shuffle.partitions", "2")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    try:
        for line in sys.stdin:
            answer = _run(spark, Request(**json.loads(line)))
            sys.stdout.write(f"{ANSWER}{json.dumps(asdict(answer))}\n")
            sys.stdout.flush()
    finally:
        spark.stop()


def _run(spark: SparkSession, request: Request) -> Answer:
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", max(request.rows, 1)).load()
    frame = source.selectExpr("value AS id", "repeat('x', 100) AS payload")
    if request.rows == 0:
        frame = frame.where("id < 0")
    checkpoint = tempfile.mkdtemp(prefix="epochsink-bench-")
    function = _function(request, checkpoint)
    try:
        writer = frame.writeStream.trigger(processingTime="0 seconds").option("checkpointLocation", checkpoint)
        query = writer.foreachBatch(function).start()
        _wait(lambda: _newest(query) >= SKIPPED)
        first, before = _newest(query), _processor_seconds()
        _wait(lambda: _newest(query) >= first + request.epochs)
        spent, epochs = _processor_seconds() - before, _newest(query) - first
        triggers = [one["durationMs"]["triggerExecution"] for one in query.recentProgress if one["batchId"] > first]
        query.stop()
        if function is not _noop:
            # before its checkpoint goes
            function.await_committed()
    finally:
        shutil.rmtree(checkpoint, ignore_errors=True)
    return Answer(statistics.median(triggers), spent / epochs * 1000)


def _newest(query: StreamingQuery) -> int:
    if (failure := query.exception()) is not None:
        raise failure
    progress = query.lastProgress
    return -1 if progress is None else int(progress["batchId"])


def _function(request: Request, checkpoint: str) -> Any:
    if not request.sink:
        return _noop
    import epochsink  # noqa: PLC0415 - whichever version this process is given

    sink = getattr(epochsink, request.sink)(**(request.arguments or {}))
    return epochsink.ExactlyOnce(checkpoint=checkpoint, sinks={f"bench-{uuid.uuid4().hex[:8]}": sink})


def _noop(batch: DataFrame, _epoch: int) -> None:
    """Run a batch's plan, and write nothing: the least that a foreachBatch function does."""
    batch.write.format("noop").mode("overwrite").save()


def _processor_seconds() -> float:
    """Return the processor time of this process, of the JVM and of the Python workers so far."""
    me = psutil.Process()
    total = 0.0
    for process in [me, *me.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the query makes no progress")
        time.sleep(0.02)


if __name__ == "__main__":
    serve()
