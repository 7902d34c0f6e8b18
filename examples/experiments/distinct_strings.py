"""Distinct strings of 100 bytes in a window of ten days, with a result for every epoch in Elasticsearch.

The state holds every string once, in Spark's two state stores: the one that keeps it in the JVM's memory and writes
whole snapshots, and RocksDB with a changelog. The same input a second time must not let the state grow. Beside them a
sketch (HyperLogLog), whose state is one row. Each epoch's document holds how many strings were new in it: their sum is
the number of distinct strings only if no epoch is lost and none is there twice.

    python distinct_strings.py [--full]

The original had a result every 5 seconds, and a state of 260 MB with 6.3 s a snapshot at 2.6 million strings; at 5.2
million a snapshot took 13 to 42 s, and the throughput collapsed.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from statistics import median
from typing import Any, Final

from elasticsearch import Elasticsearch as Client
from elasticsearch.helpers import scan
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its usual name

from epochsink import Elasticsearch, ExactlyOnce
from experiment import (
    CHANGELOG,
    WHOLE_SNAPSHOTS,
    Findings,
    Run,
    Table,
    bytes_below,
    finish,
    lines,
    main,
    short,
    spark_session,
)

IN_MEMORY, ROCKSDB, SKETCH = "in memory", "RocksDB with changelog", "sketch"
SETTINGS: Final[Mapping[str, Mapping[str, str]]] = {
    IN_MEMORY: WHOLE_SNAPSHOTS,
    ROCKSDB: CHANGELOG,
    SKETCH: {},
}
HEAP: Final = {"spark.driver.memory": "6g"}
SHOWN: Final = (1, 2, 4, 8)
"""After so many eighths of the epochs there are as many strings as in one of the original's four runs."""

ORIGINAL: Final = ("", "", "260 MB, 6.3 s", "13 to 42 s")

WINDOW_SECONDS: Final = 10 * 24 * 3600
WINDOW_START: Final = 2045 * WINDOW_SECONDS
"""Spark's windows are counted from 1970: all strings are in this one, of December 2025."""

ERROR: Final = 0.01
_MEBIBYTE: Final = 2**20


def pipeline(spec: dict[str, Any]) -> None:
    """Make the input, or count what is new in it."""
    spark = spark_session(spec)
    if "make" in spec:
        text = "rpad(sha2(CAST(id AS STRING), 256), 100, '0') AS text"
        at = f"timestamp_seconds({WINDOW_START} + id % {WINDOW_SECONDS}) AS at"
        # the second time in larger files, so that it takes fewer epochs
        for size in (spec["make"] // spec["epochs"], spec["make"] // 2):
            for first in range(0, spec["make"], size):
                strings = spark.range(first, first + size, 1, 2).selectExpr(text, at)
                strings.write.mode("append").parquet(f"{spec['input']}/{size}-{first}")
        return
    read = spark.readStream.schema("text STRING, at TIMESTAMP").option("maxFilesPerTrigger", 2)
    strings = read.parquet(f"{spec['input']}/*").withWatermark("at", "10 days")
    index = Elasticsearch(spec["elasticsearch"], index=spec["index"], key="epoch")
    sink = ExactlyOnce(checkpoint=spec["checkpoint"], sinks={"index": index})

    def count_new(frame: DataFrame, epoch: int) -> None:
        sink(frame.agg(F.count("*").alias("found")).selectExpr(f"{epoch}L AS epoch", "found"), epoch)

    if spec["sketch"]:
        estimate = F.approx_count_distinct("text", ERROR).alias("found")
        found = strings.groupBy(F.window("at", "10 days")).agg(estimate).selectExpr("0L AS epoch", "found")
        finish(sink.start(found.writeStream.outputMode("update").trigger(availableNow=True)), spec)
        return
    fresh = strings.dropDuplicates(["text"])
    writer = fresh.writeStream.option("checkpointLocation", spec["checkpoint"]).foreachBatch(count_new)
    finish(writer.trigger(availableNow=True).start(), spec)
    sink.await_committed()


def experiment(run: Run) -> Findings:
    """Feed the input twice to each."""
    total = run.size(small=8_000, usual=5_200_000, full=5_200_000)
    epochs = run.size(small=8, usual=16, full=16)
    elasticsearch, source = run.elasticsearch(), str(run.folder / "input")
    run.run({"make": total, "epochs": epochs, "input": source})
    rows: list[Sequence[object]] = []
    growing: list[Sequence[object]] = []
    sizes: dict[str, list[tuple[float, float]]] = {}
    exact = True
    for name, settings in SETTINGS.items():
        index = f"distinct-{time.time_ns()}"
        spec = {"input": source, "elasticsearch": elasticsearch, "index": index, "sketch": name == SKETCH}
        checkpoint = run.folder / index
        life = run.start({**spec, "checkpoint": str(checkpoint), "settings": {**HEAP, **settings}})
        progress = life.wait()
        states = [one["stateOperators"][0] for one in progress]
        found = _found(elasticsearch, index)
        if name == SKETCH:
            right = abs(found - total) <= 5 * ERROR * total
        else:
            right = found == total == states[-1]["numRowsTotal"] == states[epochs - 1]["numRowsTotal"]
        exact &= right
        snapshots = life.snapshot_seconds()
        shown = [epochs * eighths // 8 for eighths in SHOWN]
        for before, epoch, theirs in zip((0, *shown), shown, ORIGINAL, strict=False):
            strings, memory = total * epoch // epochs, states[epoch - 1]["memoryUsedBytes"] / _MEBIBYTE
            took = median(one["durationMs"]["triggerExecution"] for one in progress[before:epoch]) / 1000
            growing.append((name, strings, memory, snapshots.get(epoch, ""), took, theirs))
            sizes.setdefault(name, []).append((strings, memory))
        stored = bytes_below(checkpoint / "state") / _MEBIBYTE
        rows.append((name, found, states[-1]["numRowsTotal"], stored, right))
    twice = ("state", "found", "rows of state", "files of state, MiB", "exact")
    by_size = ("state", "strings", "memory, MiB", "snapshot, s", "epoch, s", "the original")
    tables = [Table(f"{total:,} distinct strings, read twice", twice, rows), Table("As it grows", by_size, growing)]
    last = {name: each[-1][1] for name, each in sizes.items()}
    return Findings(tables, exact, lines(finding(total, last), "memory of the state", "MiB", "strings", sizes))


def finding(strings: int, mebibytes: Mapping[str, float]) -> str:
    """Return the title of the picture."""
    memory, rocksdb, sketch = map(short, mebibytes.values())
    return f"{strings:,} strings take {memory} MiB in memory, {rocksdb} in RocksDB, {sketch} as a sketch"


def _found(url: str, index: str) -> int:
    with closing(Client(url)) as client:
        client.indices.refresh(index=index)
        return sum(hit["_source"]["found"] for hit in scan(client, index=index))


if __name__ == "__main__":
    main(__doc__, pipeline, experiment)
