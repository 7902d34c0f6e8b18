"""Small epochs on request: one process with one Spark, of whatever version of epochsink its PYTHONPATH names.

Its arguments name Spark's jars, and "connect" for a session of Spark Connect.
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
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

import epoch_steps
import psutil
from pyspark.sql import DataFrame, SparkSession

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import Row
    from pyspark.sql.streaming.query import StreamingQuery

ANSWER = "ANSWER "
SKIPPED = 8
"""Epochs at the start of a query that are not counted: classes are loaded, code is compiled."""
LOOK_SECONDS = 0.1
"""On Spark Connect each look is a request."""
DEADLINE = 180


@dataclass(frozen=True)
class Request:
    """Run so many epochs of so many rows through sinks (their names and arguments), or through a plain function.

    ``by_hand``: the plain function writes the rows into the same targets, as people do without epochsink; else it
    writes none. ``steps``: say also what each step takes. ``trigger``: how often an epoch begins. ``skipped``: how many
    epochs are not counted.
    """

    rows: int
    epochs: int
    sinks: dict[str, dict[str, Any]]
    by_hand: bool = False
    steps: bool = False
    trigger: str = "0 seconds"
    skipped: int = SKIPPED


@dataclass(frozen=True)
class Answer:
    """The median of a trigger, and the processor time that an epoch took in all processes of the driver.

    ``steps`` are rows of a table, ``processes`` the processor milliseconds of each process. ``decided`` is when Spark
    wrote ``commits/N`` of the epochs that counted (seconds since 1970), ``seen_after`` how much later our driver
    saw that (ms), if the steps are measured.
    """

    milliseconds: float
    processor_milliseconds: float
    processes: dict[str, float]
    steps: list[list[Any]]
    tasks: dict[str, float]
    decided: dict[str, float]
    seen_after: float


def serve() -> None:
    """Answer requests until there are no more."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    if sys.argv[2:] == ["connect"]:
        _serve_by_connect(sys.argv[1])
        return
    builder = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.memory", "1g")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.jars", sys.argv[1])
    )
    if epoch_steps.TASKS_FILE in os.environ:
        builder = builder.config("spark.python.daemon.module", "epoch_daemon")
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    try:
        _answer(spark)
    finally:
        spark.stop()


def _serve_by_connect(jars: str) -> None:
    # older versions have it elsewhere
    from epochsink_devkit.demo.connect_server import connect, start_server  # noqa: PLC0415 - see above

    settings = {"spark.driver.memory": "1g", "spark.jars": jars, "spark.log.level": "ERROR"}
    server, url = start_server(settings)
    try:
        spark = connect(url)
        _answer(spark)
        spark.stop()
    finally:
        server.kill()
        server.wait()


def _answer(spark: SparkSession) -> None:
    steps = epoch_steps.Steps()
    for line in sys.stdin:
        answer = _run(spark, Request(**json.loads(line)), steps)
        sys.stdout.write(f"{ANSWER}{json.dumps(asdict(answer))}\n")
        sys.stdout.flush()


def _run(spark: SparkSession, request: Request, steps: epoch_steps.Steps) -> Answer:
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", max(request.rows, 1)).load()
    frame = source.selectExpr("value AS id", "repeat('x', 100) AS payload")
    if request.rows == 0:
        frame = frame.where("id < 0")
    checkpoint = tempfile.mkdtemp(prefix="epochsink-bench-")
    function = _function(request, checkpoint)
    if request.steps:
        steps.install()
    try:
        writer = frame.writeStream.trigger(processingTime=request.trigger).option("checkpointLocation", checkpoint)
        query = writer.foreachBatch(steps.counting(function) if request.steps else function).start()
        _wait(lambda: _newest(query) >= request.skipped)
        steps.forget()
        first, before = _newest(query), _processor_seconds()
        _wait(lambda: _newest(query) >= first + request.epochs)
        after, epochs = _processor_seconds(), _newest(query) - first
        triggers = [one["durationMs"]["triggerExecution"] for one in query.recentProgress if one["batchId"] > first]
        query.stop()
        if hasattr(function, "await_committed"):
            # before its checkpoint goes
            if sys.argv[2:]:
                function.recover(spark)
            else:
                function.await_committed()
        decided = _decided(checkpoint, first)
    finally:
        shutil.rmtree(checkpoint, ignore_errors=True)
    processes = {name: (spent - before.get(name, 0.0)) / epochs * 1000 for name, spent in after.items()}
    return Answer(
        statistics.median(triggers),
        sum(processes.values()),
        processes,
        steps.rows() if request.steps else [],
        epoch_steps.task_medians(steps.jobs()) if request.steps else {},
        decided,
        steps.seen_after(decided) if request.steps else 0.0,
    )


def _decided(checkpoint: str, after: int) -> dict[str, float]:
    files = [file for file in Path(checkpoint, "commits").iterdir() if file.name.isdigit() and int(file.name) > after]
    return {file.name: file.stat().st_mtime for file in files}


def _newest(query: StreamingQuery) -> int:
    if (failure := query.exception()) is not None:
        raise failure
    progress = query.lastProgress
    return -1 if progress is None else int(progress["batchId"])


def _function(request: Request, checkpoint: str) -> Any:
    if request.by_hand:
        return _by_hand(request.sinks)
    if not request.sinks:
        return _noop
    import epochsink  # noqa: PLC0415 - whichever version this process is given

    mark = uuid.uuid4().hex[:8]
    sinks = {f"{kind}-{mark}": getattr(epochsink, kind)(**given) for kind, given in request.sinks.items()}
    return epochsink.ExactlyOnce(checkpoint=checkpoint, sinks=sinks)


def _noop(batch: DataFrame, _epoch: int) -> None:
    """Run a batch's plan, and write nothing: the least that a foreachBatch function does."""
    batch.write.format("noop").mode("overwrite").save()


def _by_hand(sinks: dict[str, dict[str, Any]]) -> Callable[[DataFrame, int], None]:
    """Return the function that people write: each target by what Spark, or its own client, has for it."""
    writers = [_BY_HAND[kind](given) for kind, given in sinks.items()]

    def write(batch: DataFrame, _epoch: int) -> None:
        # read once, though it is written several times
        batch.persist()
        for writer in writers:
            writer(batch)
        batch.unpersist()

    return write


def _postgres_by_hand(given: dict[str, Any]) -> Callable[[DataFrame], None]:
    place = urlparse(given["dsn"])
    url = f"jdbc:postgresql://{place.hostname}:{place.port}{place.path}?user={place.username}&password={place.password}"

    def write(batch: DataFrame) -> None:
        writer = batch.write.format("jdbc").option("url", f"{url}&reWriteBatchedInserts=true")
        writer.option("driver", "org.postgresql.Driver").option("dbtable", given["table"]).mode("append").save()

    return write


def _kafka_by_hand(given: dict[str, Any]) -> Callable[[DataFrame], None]:
    def write(batch: DataFrame) -> None:
        rows = batch.selectExpr("to_json(struct(*)) AS value")
        writer = rows.write.format("kafka").option("kafka.bootstrap.servers", given["bootstrap_servers"])
        writer.option("topic", given["topic"]).save()

    return write


def _elasticsearch_by_hand(given: dict[str, Any]) -> Callable[[DataFrame], None]:
    def write_partition(rows: Iterator[Row]) -> None:
        import elasticsearch  # noqa: PLC0415 - in the task
        from elasticsearch import helpers  # noqa: PLC0415 - in the task

        with elasticsearch.Elasticsearch(given["hosts"]) as client:
            actions = ({"_index": given["index"], "_id": row.id, "_source": row.asDict()} for row in rows)
            helpers.bulk(client, actions)

    return lambda batch: batch.foreachPartition(write_partition)


_BY_HAND: dict[str, Callable[[dict[str, Any]], Callable[[DataFrame], None]]] = {
    "Postgres": _postgres_by_hand,
    "Kafka": _kafka_by_hand,
    "Elasticsearch": _elasticsearch_by_hand,
}


def _processor_seconds() -> dict[str, float]:
    """Return the processor time so far of this process, of the JVM and of the Python workers."""
    me = psutil.Process()
    found = {"driver's Python": 0.0, "JVM": 0.0, "Python workers": 0.0}
    for process in [me, *me.children(recursive=True)]:
        try:
            times, name = process.cpu_times(), process.name()
        except psutil.Error:
            continue
        whose = "driver's Python" if process == me else "JVM" if name == "java" else "Python workers"
        # what has ended counts for who waited for it
        found[whose] += times.user + times.system + times.children_user + times.children_system
    return found


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the query makes no progress")
        time.sleep(LOOK_SECONDS)


if __name__ == "__main__":
    serve()
