"""Epochs of a running streaming query, mostly one, timed from foreachBatch's call until their rows are visible.

The query has written a small epoch before, so that what happens once in a query's life is not counted.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from pyspark.sql import DataFrame, SparkSession

from epochsink import ExactlyOnce
from epochsink_devkit.services import spark_packages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pyspark.sql.streaming.query import StreamingQuery

    from epochsink.sink import Sink

FIRST = 1_000
"""Rows of the epoch before the timed one."""

TIMED = 1
FILES = 2


@contextmanager
def session(more_jars: Sequence[Path] = (), **settings: str) -> Iterator[SparkSession]:
    """Yield the Spark session that all benchmarks use: two cores, everything but ``settings`` at its default."""
    # the workers' Python has to be the one that has this package
    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = (
        SparkSession.builder.master("local[2]")
        .appName("epochsink benchmarks")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.memory", "2g")
        .config("spark.jars", ",".join(map(str, [*spark_packages(), *more_jars])))
        .config(map=dict(settings))
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    try:
        yield spark
    finally:
        spark.stop()


def make_rows(spark: SparkSession, folder: Path, rows: int, epochs: int = 1) -> str:
    """Write Parquet files of (bigint, 100-byte text, double, timestamp): `FIRST` rows, and then so many.

    Return their folder. A stream reads the older files first, and takes ``epochs`` epochs for those after the first.
    """
    path = str(folder / f"rows-{rows}")
    if Path(path).exists():
        return path
    each = rows // epochs
    for first, last in ((rows, rows + FIRST), *((start, start + each) for start in range(0, rows, each))):
        frame = spark.range(first, last, 1, FILES).selectExpr(
            "id",
            "concat(sha2(cast(id AS string), 256), substr(sha2(cast(-id AS string), 256), 1, 36)) AS payload",
            "id * 0.25D AS amount",
            "timestamp_micros(1700000000000000 + id * 1000) AS placed_at",
        )
        frame.write.mode("append").parquet(path)
    return path


def timed_files(path: str) -> list[Path]:
    """Return the files of the timed epochs."""
    return sorted(Path(path).glob("*.parquet"), key=lambda file: file.stat().st_size)[FILES:]


def ticks(spark: SparkSession, rows: int) -> DataFrame:
    """Return an endless stream of the same columns, so many rows an epoch."""
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", rows).load()
    return source.selectExpr(
        "value AS id", "repeat('x', 100) AS payload", "value * 0.25D AS amount", "timestamp AS placed_at"
    )


def noop(batch: DataFrame, _epoch: int) -> None:
    """Run a batch's plan, and write nothing: the least that a foreachBatch function does."""
    batch.write.format("noop").mode("overwrite").save()


def stream(spark: SparkSession, path: str) -> DataFrame:
    """Return the stream of a folder's rows: a small epoch, and the one to time."""
    reader = spark.readStream.schema(spark.read.parquet(path).schema)
    return reader.option("maxFilesPerTrigger", FILES).parquet(path)


class _Timed:
    """Notes when foreachBatch was called for the first epoch to time, and when it has returned from the last one."""

    def __init__(self, function: Callable[[DataFrame, int], None]) -> None:
        self._function = function
        self.begun = 0.0
        self.ended = 0.0

    def __call__(self, frame: DataFrame, epoch: int) -> None:
        if epoch == TIMED:
            self.begun = time.time()
        self._function(frame, epoch)
        self.ended = time.time()


def plain_epoch(frame: DataFrame, function: Callable[[DataFrame, int], None]) -> float:
    """Run the timed epochs with a plain foreachBatch function; return their seconds."""
    timed = _Timed(function)
    with _checkpoint() as checkpoint:
        _run(frame, timed, checkpoint)
    return timed.ended - timed.begun


def our_epoch(frame: DataFrame, sink: Sink) -> float:
    """Run the timed epochs through ExactlyOnce; return the seconds from foreachBatch's call until all are committed."""
    with _checkpoint() as checkpoint:
        exactly_once = ExactlyOnce(checkpoint=checkpoint, sinks={"bench": sink})
        timed = _Timed(exactly_once)
        _run(frame, timed, checkpoint)
        exactly_once.await_committed()
        done = done_times(checkpoint)
        return done[max(done)] - timed.begun


def our_apply(frame: DataFrame, sink: Sink) -> float:
    """Run one epoch through ExactlyOnce; return the seconds from its decision until it is committed."""
    with _checkpoint() as checkpoint:
        exactly_once = ExactlyOnce(checkpoint=checkpoint, sinks={"bench": sink})
        _run(frame, exactly_once, checkpoint)
        exactly_once.await_committed()
        return done_times(checkpoint)[TIMED] - decided_times(checkpoint)[TIMED]


def small_epochs(
    frame: DataFrame, what: Sink | Callable[[DataFrame, int], None], epochs: int, trigger: str = "0 seconds"
) -> tuple[float, list[float]]:
    """Run so many epochs of an endless stream through a sink or a plain function.

    Return the median of a trigger (ms), and how long after ``commits/N`` each epoch was committed (ms).
    """
    with _checkpoint() as checkpoint:
        writer = frame.writeStream.trigger(processingTime=trigger)
        query: StreamingQuery
        if callable(what):
            query = writer.foreachBatch(what).option("checkpointLocation", checkpoint).start()
        else:
            query = ExactlyOnce(checkpoint=checkpoint, sinks={"bench": what}).start(writer)
        deadline = time.monotonic() + 180
        while (query.lastProgress or {"batchId": -1})["batchId"] < epochs and time.monotonic() < deadline:
            time.sleep(0.05)
        durations = [progress["durationMs"]["triggerExecution"] for progress in query.recentProgress[5:]]
        query.stop()
        done = {} if callable(what) else done_times(checkpoint)
        decided = decided_times(checkpoint)
    delays = [(done[epoch] - decided[epoch]) * 1000 for epoch in sorted(done) if epoch in decided][5:]
    return statistics.median(durations), delays


def done_times(checkpoint: str) -> dict[int, float]:
    """Return when the ledger said of each epoch that it is committed (seconds since 1970)."""
    times = {}
    for entry in Path(checkpoint, "epochsink", "ledger").iterdir():
        content = json.loads(entry.read_text()) if entry.name.isdigit() else {}
        if content.get("entry") == "done":
            times[content["epoch"]] = entry.stat().st_mtime
    return times


def decided_times(checkpoint: str) -> dict[int, float]:
    """Return when Spark wrote each ``commits/N`` (seconds since 1970)."""
    commits = Path(checkpoint, "commits").iterdir()
    return {int(file.name): file.stat().st_mtime for file in commits if file.name.isdigit()}


@contextmanager
def _checkpoint() -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="epochsink-bench-")
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def _run(frame: DataFrame, function: Any, checkpoint: str) -> None:
    writer = frame.writeStream.foreachBatch(function).option("checkpointLocation", checkpoint)
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()


@contextmanager
def peak_of_workers() -> Iterator[list[float]]:
    """Yield a list that holds, at the end, the largest memory (MB) that one Python worker of Spark took meanwhile."""
    peak = [0.0]
    over = threading.Event()

    def sample() -> None:
        me = psutil.Process()
        while not over.wait(0.05):
            for process in me.children(recursive=True):
                try:
                    if "pyspark.daemon" in " ".join(process.cmdline()):
                        peak[0] = max(peak[0], process.memory_info().rss / 1e6)
                except psutil.Error:
                    continue

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    try:
        yield peak
    finally:
        over.set()
        sampler.join()
