"""Queries on a server of Spark Connect, one case after another: see test_connect_queries.py.

    python connect_cases.py FOLDER [CASE...]

prints a line of JSON for each case: its name, and what came of it. The server is that of SPARK_REMOTE, else one that
ends with the program.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812 - its usual name
from streams import Stream, raising_after, wait_until

from epochsink.devkit.demo.connect_server import connect, start_server
from epochsink.spark.engines import engine_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pyspark.sql import DataFrame, SparkSession


def outcome(call: Callable[[], Any]) -> str:
    """Return the kind and the message of the error that a call raises; "" if it raises none."""
    try:
        call()
    except Exception as failure:  # noqa: BLE001 - whatever it is, the test looks at it
        return f"{type(failure).__name__}: {failure}"
    return ""


def restarts(stream: Stream) -> Any:
    """Run to the end of the input, and again with more input while the query runs."""
    stream.put([1, 2])
    stream.put([3])
    stream.run()
    stream.put([4])
    query = stream.start_endless(stream.exactly_once())
    query.processAllAvailable()
    seen = stream.sink.values()
    stream.put([5])
    query.processAllAvailable()
    query.stop()
    return {"seen": seen, "rows": stream.sink.values(), "done": stream.done(), "active": query.isActive}


def adopts(stream: Stream) -> Any:
    """Record an epoch that Spark does not decide; the next run adopts it."""
    stream.put([1])
    stream.put([2])
    once = stream.exactly_once()
    failed = outcome(lambda: stream.by_hand(raising_after(once, 1)).awaitTermination())
    before = stream.sink.values()
    stream.run()
    return {"failed": failed, "before": before, "rows": stream.sink.values(), "votes": stream.sink.calls("vote")}


def keeps_state(stream: Stream) -> Any:
    """Close groups by a watermark, in batches without data too."""
    for ids in ([1, 2], [40, 41], [90]):
        stream.put(ids)
    frame = stream.frame().withWatermark("at", "10 seconds")
    counted = frame.groupBy(F.window("at", "10 seconds")).count().selectExpr("count AS id", "window.start AS word")
    stream.run(frame=counted)
    return {"rows": stream.sink.values(), "epochs": len(stream.done()), "inputs": 3}


def rejects(stream: Stream) -> Any:
    """Refuse a row for good, in a task."""
    stream.put([1])
    stream.sink.faults.arm("write-rejects", 9)
    failed = outcome(stream.run)
    stream.sink.faults.disarm("write-rejects")
    stream.run()
    return {"failed": failed, "rows": stream.sink.values()}


def swallows(stream: Stream) -> Any:
    """Catch the error of an epoch in the user's function."""
    stream.put([1])
    stream.put([2])
    once = stream.exactly_once()

    def batch(frame: DataFrame, epoch: int) -> None:
        with suppress(Exception):
            once(frame, epoch)

    stream.sink.faults.arm("write-rejects", 9)
    failed = outcome(lambda: stream.by_hand(batch).awaitTermination())
    committed = stream.committed()
    stream.sink.faults.disarm("write-rejects")
    stream.run()
    return {"failed": failed, "committed": committed, "rows": stream.sink.values()}


def calls_twice(stream: Stream) -> Any:
    """Call two objects for one query."""
    stream.put([1])
    one, other = stream.exactly_once(), stream.exactly_once()

    def batch(frame: DataFrame, epoch: int) -> None:
        one(frame.where("id < 9"), epoch)
        other(frame, epoch)

    failed = outcome(lambda: stream.by_hand(batch).awaitTermination())
    stream.run()
    return {"failed": failed, "rows": stream.sink.values()}


def takes_over(stream: Stream) -> Any:
    """Take the checkpoint of a running query: the older run writes nothing any more."""
    stream.put([1])
    old = stream.start_endless(stream.exactly_once())
    old.processAllAvailable()
    # what another client does first: it takes the ledger
    stream.exactly_once().recover(stream.spark)
    stream.put([2])
    failed = outcome(old.awaitTermination)
    before = stream.sink.values()
    stream.run()
    return {"failed": failed, "before": before, "rows": stream.sink.values()}


def mistakes_checkpoint(stream: Stream) -> Any:
    """Give the query another checkpoint than the object."""
    stream.put([1])
    once = stream.exactly_once()
    other = str(stream.folder / "other")
    writer = stream.frame().writeStream.foreachBatch(once).option("checkpointLocation", other)
    failed = outcome(lambda: writer.trigger(availableNow=True).start().awaitTermination())
    stream.put([2])
    stream.run()
    stream.put([3])
    again = stream.frame().writeStream.foreachBatch(stream.exactly_once()).option("checkpointLocation", other)
    also = outcome(lambda: again.trigger(availableNow=True).start().awaitTermination())
    return {"failed": failed, "also": also, "rows": stream.sink.values()}


def fails_between(stream: Stream) -> Any:
    """Fail a commit while no batch comes."""
    stream.put([1])
    stream.sink.faults.arm("commit-unknown", 30)
    query = stream.start_endless(stream.exactly_once())
    failed = outcome(query.processAllAvailable)
    wait_until(lambda: not query.isActive, "the query ends")
    stream.sink.faults.disarm("commit-unknown")
    stream.run()
    return {"failed": failed, "rows": stream.sink.values()}


def fails_idle(stream: Stream) -> Any:
    """Fail a commit while no batch comes, and the client does no more than wait for the end."""
    stream.put([1])
    stream.sink.faults.arm("commit-unknown", 30)
    query = stream.start_endless(stream.exactly_once())
    failed = outcome(lambda: query.awaitTermination(60))
    ended = not query.isActive
    stream.sink.faults.disarm("commit-unknown")
    query.stop()
    return {"failed": failed, "ended": ended, "rows": stream.sink.values()}


def refuses(stream: Stream) -> Any:
    """Make mistakes that are known before the query starts."""
    stream.put([1])
    writer = stream.frame().writeStream
    made = stream.exactly_once
    unfit = made({"folder": type(stream.sink)(stream.sink.folder, findings=["the disk is full"])})
    waits = made()
    stream.by_hand(waits).awaitTermination()
    return {
        "finding": outcome(lambda: unfit.start(stream.frame().writeStream)),
        "format": outcome(lambda: made().start(stream.frame().writeStream.format("console"))),
        "complete": outcome(lambda: made().start(stream.frame().writeStream.outputMode("complete"))),
        "async": outcome(lambda: made().start(writer.option("asyncProgressTrackingEnabled", "true"))),
        "waits": outcome(waits.await_committed),
        "rows": stream.sink.values(),
    }


def tells_expressions(stream: Stream) -> Any:
    """Tell what expressions depend on."""
    frame, engine = stream.frame(), engine_of(stream.spark)
    cases = [("upper(word)", ["word"]), ("concat(word, id)", ["word"]), ("current_date()", ["id"]), ("uuid()", ["id"])]
    return {
        "changeable": engine.changeable(frame, ["id + 1", "rand()", "concat(word, uuid())", "current_date()"]),
        "loose": [engine.loose_parts(frame, expression, key) for expression, key in cases],
        "plain": engine.loose_parts(frame, "'current_date()'", ["id"]),
        "parallelism": engine.parallelism(stream.spark),
    }


CASES = (
    restarts,
    adopts,
    keeps_state,
    rejects,
    swallows,
    calls_twice,
    takes_over,
    mistakes_checkpoint,
    fails_between,
    fails_idle,
    refuses,
    tells_expressions,
)


def main(folder: Path, *names: str) -> None:
    """Run the cases."""
    remote = os.environ.get("SPARK_REMOTE")
    if remote:
        run(connect(remote), folder, names)
        return
    process, url = start_server({"spark.sql.warehouse.dir": str(folder / "warehouse")})
    try:
        run(connect(url), folder, names)
    finally:
        process.kill()
        process.wait()


def run(spark: SparkSession, folder: Path, names: Sequence[str]) -> None:
    """Run the cases in a session, and end it."""
    for case in CASES:
        if not names or case.__name__ in names:
            began = time.monotonic()
            (folder / case.__name__).mkdir()
            came = outcome_of(case, Stream(spark, folder / case.__name__))
            print(json.dumps([case.__name__, came, round(time.monotonic() - began, 1)]), flush=True)  # noqa: T201
    # the interpreter's exit would try for minutes to tell a server that has ended that the session has
    spark.stop()


def outcome_of(case: Callable[[Stream], Any], stream: Stream) -> Any:
    """Return what came of a case, or the error that it raised."""
    found: list[Any] = []
    failed = outcome(lambda: found.append(case(stream)))
    return found[0] if found else {"broken": failed}


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
