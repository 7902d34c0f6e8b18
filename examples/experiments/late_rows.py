"""Rows that come too late for their window go to a topic of their own, and none of either is lost or doubled.

Late is a row whose event is older than 10 minutes when Kafka takes it. That depends on the row alone, not on how far
the query has come, so a second run calls the same rows late. What is not late is never behind the watermark, so Spark
drops nothing by itself. Both queries are killed in the middle.

    python late_rows.py
"""

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any, Final

import psycopg
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its usual name

from epochsink import ExactlyOnce, Kafka, Postgres
from experiment import Findings, Run, Table, bars, finish, main, make_topic, produce, read_topic, spark_session

START: Final = 1_767_225_600
MINUTE: Final = 60
LATE: Final = "timestamp - at > INTERVAL 10 MINUTES"


def pipeline(spec: dict[str, Any]) -> None:
    """Count what is in time, or pass on what is late."""
    spark = spark_session(spec)
    source = {"kafka.bootstrap.servers": spec["kafka"], "subscribe": spec["topic"], "startingOffsets": "earliest"}
    messages = spark.readStream.format("kafka").options(**source, maxOffsetsPerTrigger=spec["epoch"]).load()
    parsed = "from_json(CAST(value AS STRING), 'number LONG, at TIMESTAMP') AS event"
    rows = messages.selectExpr(parsed, "timestamp").select("event.*", "timestamp")
    query = _counts(rows, spec) if spec["counts"] else _late(rows, spec)
    finish(query, spec)


def _counts(rows: DataFrame, spec: dict[str, Any]) -> Any:
    counts = (
        rows.where(f"NOT ({LATE})")
        .withWatermark("at", "10 minutes")
        .groupBy(F.window("at", "1 minute").alias("during"))
        .count()
        .selectExpr("during.start AS minute", "`count` AS events")
    )
    table = Postgres(spec["dsn"], table=spec["table"], key="minute")
    sink = ExactlyOnce(checkpoint=spec["checkpoint"], sinks={"counts": table})
    return sink.start(counts.writeStream.outputMode("update").trigger(availableNow=True))


def _late(rows: DataFrame, spec: dict[str, Any]) -> Any:
    topic = Kafka(bootstrap_servers=spec["kafka"], topic=spec["late"], where=LATE, select=["number", "at"])
    sink = ExactlyOnce(checkpoint=spec["checkpoint"], sinks={"late": topic})
    return sink.start(rows.writeStream.trigger(availableNow=True))


def experiment(run: Run) -> Findings:
    """Run both with a kill each, and compare with what a plain loop says."""
    count = run.size(small=1_000, usual=50_000, full=500_000)
    kafka, dsn, topic = run.kafka(), run.postgres(), f"events-{time.time_ns()}"
    table, late = topic.replace("-", "_"), f"{topic}-late"
    for name in (topic, late):
        make_topic(kafka, name, 2)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(f"CREATE TABLE {table} (minute timestamptz PRIMARY KEY, events bigint)".encode())
    minutes: Counter[int] = Counter()
    too_late = []

    def messages() -> Iterator[tuple[str, str, int]]:
        random = Random(3)  # noqa: S311 - made-up events
        for number in range(count):
            arrived = START + number * 3600 // count
            at = arrived - (random.randrange(601, 7200) if random.random() < 0.1 else random.randrange(600))  # noqa: PLR2004
            if arrived - at > 10 * MINUTE:
                too_late.append(number)
            else:
                minutes[at // MINUTE * MINUTE] += 1
            yield str(number), json.dumps({"number": number, "at": at}), arrived * 1000

    produce(kafka, topic, messages())
    spec = {"kafka": kafka, "dsn": dsn, "topic": topic, "table": table, "late": late, "epoch": count // 5}
    for counts in (True, False):
        one = {**spec, "counts": counts, "checkpoint": str(run.folder / f"checkpoint-{counts}")}
        run.run(one, failpoint="coordinator.record.after:3")
        run.run(one)
    with psycopg.connect(dsn) as connection:
        query = f"SELECT extract(epoch FROM minute)::bigint, events FROM {table}"  # noqa: S608 - ours
        found: dict[int, int] = dict(connection.execute(query.encode()).fetchall())
    passed_on = sorted(row["number"] for row in read_topic(kafka, late))
    rows = [
        ("counted in their minute", sum(minutes.values()), sum(found.values()), found == minutes),
        ("late, in a topic of their own", len(too_late), len(passed_on), passed_on == too_late),
    ]
    title = f"{count:,} events, each query killed once"
    drawn: dict[str, float] = {}
    for what, expected, there, _ in rows:
        drawn |= {f"{what}: expected": expected, f"{what}: found": there}
    table_of_events = Table(title, ("events", "expected", "found", "exact"), rows)
    return Findings([table_of_events], all(row[-1] for row in rows), bars(finding(rows), "events", drawn))


def finding(rows: Sequence[tuple[str, int, int, bool]]) -> str:
    """Return the title of the picture."""
    (_, _, counted, _), (_, _, late, _) = rows
    if not all(exact for *_, exact in rows):
        return "Killed once: events are missing or there twice"
    return f"Killed once: {counted:,} events are counted once, {late:,} late ones kept"


if __name__ == "__main__":
    main(__doc__, pipeline, experiment)
