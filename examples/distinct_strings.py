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
from typing import Any, Final

from elasticsearch import Elasticsearch as Client
from elasticsearch.helpers import scan
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its usual name

from epochsink import Elasticsearch, ExactlyOnce
from experiment import CHANGELOG, WHOLE_SNAPSHOTS, Findings, Run, Table, bytes_below, finish, lines, main, spark_session

IN_MEMORY, ROCKSDB, SKETCH = "in memory", "RocksDB with changelog", "sketch"
SETTINGS: Final[Mapping[str, Mapping[str, str]]] = {
    IN_MEMORY: WHOLE_SNAPSHOTS,
    ROCKSDB: CHANGELOG,
    SKETCH: {},
}
SHARES: Final = (1, 1, 2, 4)
"""How many strings an epoch adds: after each, there are as many as in one of the original's four runs."""

ERROR: Final = 0.01
_MEBIBYTE: Final = 2**20


def pipeline(spec: dict[str, Any]) -> None:
    """Make the input, or count what is new in it."""
    spark = spark_session(spec)
    if "make" in spec:
        text = "rpad(sha2(CAST(id AS STRING), 256), 100, '0') AS text"
        at = "timestamp_seconds(1767225600 + id % 864000) AS at"
        first = 0
        for _pass in range(2):
            first = 0
            for share in SHARES:
                count = spec["make"] * share // sum(SHARES)
                spark.range(first, first + count, 1, 2).selectExpr(text, at).write.mode("append").parquet(
                    f"{spec['input']}/{_pass}-{first}"
                )
                first += count
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
    total = run.size(small=8_000, usual=520_000, full=5_200_000)
    elasticsearch, source = run.elasticsearch(), str(run.folder / "input")
    run.run({"make": total, "input": source})
    rows: list[Sequence[object]] = []
    sizes: dict[str, list[tuple[float, float]]] = {}
    exact = True
    for name, settings in SETTINGS.items():
        index = f"distinct-{time.time_ns()}"
        spec = {"input": source, "elasticsearch": elasticsearch, "index": index, "sketch": name == SKETCH}
        checkpoint = run.folder / index
        progress = run.run({**spec, "checkpoint": str(checkpoint), "settings": settings})
        states = [one["stateOperators"][0] for one in progress]
        for after, state in enumerate(states[: len(SHARES)], 1):
            strings = total * sum(SHARES[:after]) // sum(SHARES)
            sizes.setdefault(name, []).append((strings, state["memoryUsedBytes"] / _MEBIBYTE))
        found = _found(elasticsearch, index)
        if name == SKETCH:
            right = abs(found - total) <= 5 * ERROR * total
        else:
            right = found == total == states[-1]["numRowsTotal"] == states[len(SHARES) - 1]["numRowsTotal"]
        exact &= right
        slowest = max(one["durationMs"]["triggerExecution"] for one in progress) / 1000
        commit = max(state["commitTimeMs"] for state in states) / 1000
        stored = bytes_below(checkpoint / "state") / _MEBIBYTE
        used = max(state["memoryUsedBytes"] for state in states) / _MEBIBYTE
        rows.append((name, found, states[-1]["numRowsTotal"], used, stored, commit, slowest, right))
    headings = (
        "state store",
        "strings found",
        "rows of state after two passes",
        "memory, MiB",
        "files of state, MiB",
        "slowest commit of state, s",
        "slowest epoch, s",
        "exact",
    )
    original = ("strings", "state, MB", "a snapshot, s")
    theirs = [("2.6 million", "260", "6.3"), ("5.2 million", "", "13 to 42")]
    picture = lines("State of distinct strings", "MiB", "strings", sizes)
    tables = [Table(f"{total:,} distinct strings, read twice", headings, rows), Table("The original", original, theirs)]
    return Findings(tables, exact, picture)


def _found(url: str, index: str) -> int:
    with closing(Client(url)) as client:
        client.indices.refresh(index=index)
        return sum(hit["_source"]["found"] for hit in scan(client, index=index))


if __name__ == "__main__":
    main(__doc__, pipeline, experiment)
