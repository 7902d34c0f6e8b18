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
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streams import Stream, raising_after

from epochsink.spark.engines import engine_of
from epochsink.spark.placement import loose_columns, texts_as_times
from epochsink_devkit.demo.connect_server import connect, start_server

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


def dies_in_its_last_commit(stream: Stream) -> Any:
    """Kill the process of the second run after Spark's last decision, before the commit."""
    stream.put([1])
    stream.run()
    stream.put([2])
    stream.sink.faults.arm("commit-dies")
    stream.run()
    return {"rows": stream.sink.values(), "done": stream.done()}


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


def mistakes_an_epoch_under_way(stream: Stream) -> Any:
    """Give the query another checkpoint than the object, on which the same epoch is under way."""
    stream.put([1])
    stream.sink.faults.arm("write-rejects", 9)
    outcome(stream.run)
    stream.sink.faults.disarm("write-rejects")
    writer = stream.frame().writeStream.foreachBatch(stream.exactly_once())
    writer = writer.option("checkpointLocation", str(stream.folder / "other"))
    failed = outcome(lambda: writer.trigger(availableNow=True).start().awaitTermination())
    return {"failed": failed, "prepared": stream.sink.prepared()}


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
    cases = [("upper(word)", ["word"]), ("concat(word, id)", ["word"]), ("id % 7", ["id"])]
    return {
        "changeable": engine.changeable(frame, ["id + 1", "rand()", "concat(word, uuid())", "current_date()"]),
        "loose": [loose_columns(frame, expression, key) for expression, key in cases],
        "times": [texts_as_times(frame, each) for each in ("CAST(word AS DATE)", "hour(word)", "year('to' || 'day')")],
        "parallelism": engine.parallelism(stream.spark),
        "refused": [
            _placed_by(stream, each) for each in ("curdate()", "unix_timestamp()", "(SELECT max(1))", "id % 7")
        ],
    }


def _placed_by(stream: Stream, expression: str) -> str:
    """Start a query with rows placed by an expression; return what refuses it."""
    placed = stream.exactly_once({"folder": replace(stream.sink, placed_by=expression)})
    return outcome(lambda: placed.start(stream.frame().writeStream.trigger(availableNow=True)).awaitTermination())


CASES = (
    restarts,
    adopts,
    dies_in_its_last_commit,
    swallows,
    calls_twice,
    mistakes_checkpoint,
    mistakes_an_epoch_under_way,
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
