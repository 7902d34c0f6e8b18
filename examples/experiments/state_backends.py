"""Two state stores under the same stream: whole snapshots against a changelog, bytes and seconds a checkpoint.

Avro messages of 2,000 keys from Kafka; every message of the last ten minutes of event time is kept (so that none counts
twice), and how many of each key came is upserted into PostgreSQL. Three rates, each with the store that keeps its state
in the JVM's memory and writes it whole, and with RocksDB and its changelog.

    python state_backends.py [--full]

The original, at 10, 20 and 30 thousand messages a second: full snapshots of 4, 8.4 and 11.8 GB in 50, 50 and 65 s,
incremental ones of 207, 404 and 576 MB in 3, 3 and 5 s. Here rates are scaled down; the shape is compared.
"""

import io
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

import fastavro
import psycopg
from pyspark.sql import DataFrame
from pyspark.sql.avro.functions import from_avro

from epochsink import ExactlyOnce, Postgres
from epochsink_devkit.services.artifacts import spark_avro
from experiment import (
    CHANGELOG,
    WHOLE_SNAPSHOTS,
    Findings,
    Run,
    Table,
    finish,
    lines,
    main,
    make_topic,
    produce,
    short,
    spark_session,
)

LARGEST_HEAP: Final = "14g"
"""For undivided rates: whole snapshots keep two versions of 18 million messages in the JVM."""
STORES: Final = {"whole snapshots": WHOLE_SNAPSHOTS, "changelog": CHANGELOG}
RATES: Final = (10_000, 20_000, 30_000)
ORIGINAL: Final = (("4 GB, 50 s", "207 MB, 3 s"), ("8.4 GB, 50 s", "404 MB, 3 s"), ("11.8 GB, 65 s", "576 MB, 5 s"))
KEYS: Final = 2_000
START: Final = 1_767_225_600
CHECKPOINT_SECONDS: Final = 60
CHECKPOINTS: Final = 14
"""Of a minute of event time each: the window of ten minutes is full, and rows leave it."""

SCHEMA: Final = """{"type": "record", "name": "message", "fields": [
    {"name": "number", "type": "long"}, {"name": "key", "type": "int"},
    {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}}, {"name": "text", "type": "string"}]}"""
_MEBIBYTE: Final = 2**20


def pipeline(spec: dict[str, Any]) -> None:
    """Keep every message for ten minutes; add up what is new."""
    spark = spark_session(spec)
    source = {"kafka.bootstrap.servers": spec["kafka"], "subscribe": spec["topic"], "startingOffsets": "earliest"}
    messages = spark.readStream.format("kafka").options(**source, maxOffsetsPerTrigger=spec["epoch"]).load()
    rows = messages.select(from_avro("value", SCHEMA).alias("message")).select("message.*")
    fresh = rows.withWatermark("at", "10 minutes").dropDuplicates(["number", "key", "at", "text"])
    table = Postgres(spec["dsn"], table=spec["table"], select=["epoch", "key", "messages"])
    sink = ExactlyOnce(checkpoint=spec["checkpoint"], sinks={"counts": table})

    def count(frame: DataFrame, epoch: int) -> None:
        counts = frame.groupBy("key").count().selectExpr(f"{epoch}L AS epoch", "key", "`count` AS messages")
        sink(counts, epoch)

    writer = fresh.writeStream.option("checkpointLocation", spec["checkpoint"]).foreachBatch(count)
    finish(writer.trigger(availableNow=True).start(), spec)
    sink.await_committed()


def experiment(run: Run) -> Findings:
    """Play each rate on both stores."""
    factor = run.size(small=20_000, usual=20, full=1)
    kafka, dsn = run.kafka(), run.postgres()
    heap = {"spark.driver.memory": LARGEST_HEAP if factor == 1 else "6g"}
    rows: list[Sequence[object]] = []
    drawn: dict[str, list[tuple[float, float]]] = {name: [] for name in STORES}
    exact = True
    played = list(zip(RATES, ORIGINAL, strict=True))[: run.size(small=1, usual=3, full=3)]
    for rate, originals in played:
        topic = f"messages-{time.time_ns()}"
        label = f"{rate:,} / {factor:,}" if factor > 1 else f"{rate:,}"
        make_topic(kafka, topic, 2)
        count = max(rate // factor, 1) * CHECKPOINT_SECONDS * CHECKPOINTS
        expected: Counter[int] = Counter(number * 7 % KEYS for number in range(count))
        produce(kafka, topic, _messages(count))
        for (name, settings), theirs in zip(STORES.items(), originals, strict=True):
            table = f"{topic}_{name[:5]}".replace("-", "_")
            with psycopg.connect(dsn, autocommit=True) as connection:
                connection.execute(f"CREATE TABLE {table} (epoch bigint, key int, messages bigint)".encode())
            checkpoint = run.folder / table
            spec = {"kafka": kafka, "dsn": dsn, "topic": topic, "table": table, "epoch": count // CHECKPOINTS}
            jars = {"spark.jars": ",".join(map(str, spark_avro()))}
            keep = {"spark.sql.streaming.minBatchesToRetain": "1000"}
            life = run.start({**spec, "checkpoint": str(checkpoint), "settings": {**jars, **keep, **heap, **settings}})
            progress = life.wait()
            with psycopg.connect(dsn) as connection:
                query = f"SELECT key, sum(messages)::bigint FROM {table} GROUP BY key"  # noqa: S608 - ours
                exact &= dict(connection.execute(query.encode()).fetchall()) == expected
            states = [one["stateOperators"][0] for one in progress]
            written = _bytes_a_checkpoint(checkpoint / "state") / _MEBIBYTE
            took = median(state["commitTimeMs"] for state in states) / 1000 + median(
                life.snapshot_seconds().values() or [0]
            )
            memory = max(state["memoryUsedBytes"] for state in states) / _MEBIBYTE
            rows.append((label, name, written, took, memory, life.processor_seconds, theirs))
            drawn[name].append((rate // factor, written))
    headings = (
        "messages a second",
        "written",
        "MiB",
        "seconds",
        "memory, MiB",
        "processor, s",
        "the original",
    )
    divided = f" (rates divided by {factor:,})" if factor > 1 else ", at the original's rates"
    title = f"What a checkpoint each minute writes, and how long that takes{divided}"
    last = [each[-1] for each in drawn.values()]
    picture = lines(finding(*last), "state that each checkpoint writes", "MiB", "messages a second", drawn)
    return Findings([Table(title, headings, rows)], exact, picture)


def finding(whole: tuple[float, float], changelog: tuple[float, float]) -> str:
    """Return the title of the picture, of messages a second and MiB a checkpoint."""
    (rate, size), (_, changed) = whole, changelog
    return f"At {rate:,.0f} messages a second snapshots write {short(size)} MiB, a changelog {short(changed)}"


def _bytes_a_checkpoint(state: Path) -> float:
    """Return what a checkpoint writes when the window is full, over all partitions: its snapshots, else changelogs."""
    versions: dict[int, int] = {}
    for file in list(state.rglob("*.snapshot")) or list(state.rglob("*.changelog")):
        versions[int(file.stem)] = versions.get(int(file.stem), 0) + file.stat().st_size
    return median(size for version, size in versions.items() if version > max(versions) // 2)


def _messages(count: int) -> Iterator[tuple[str, bytes, int]]:
    schema = fastavro.parse_schema(json.loads(SCHEMA))
    seconds = CHECKPOINT_SECONDS * CHECKPOINTS
    for number in range(count):
        at = (START + number * seconds // count) * 1000
        out = io.BytesIO()
        message = {"number": number, "key": number * 7 % KEYS, "at": at, "text": f"{number:032d}"}
        fastavro.schemaless_writer(out, schema, message)
        yield str(number), out.getvalue(), at


if __name__ == "__main__":
    main(__doc__, pipeline, experiment)
