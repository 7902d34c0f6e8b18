"""A target that is slower than its source: epochs stay small, memory stays flat, and no row is lost.

PostgreSQL takes its time for every epoch (a trigger sleeps). `maxOffsetsPerTrigger` is what holds the source back:
Spark begins no epoch before the last one has voted, and epochsink lets one epoch commit beside the next, not more.

    python back_pressure.py
"""

import time
from collections.abc import Mapping
from typing import Any, Final

import psycopg

from epochsink import ExactlyOnce, Postgres
from experiment import Findings, Run, Table, finish, lines, main, make_topic, produce, spark_session

PAUSE_SECONDS: Final = 0.3
EPOCHS: Final = 12
_LOOK_SECONDS: Final = 0.2
_MEBIBYTE: Final = 2**20
_SLOW: Final = """
CREATE OR REPLACE FUNCTION {table}_sleep() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN PERFORM pg_sleep({seconds}); RETURN NULL; END $$;
CREATE TRIGGER slow AFTER INSERT ON {table} FOR EACH STATEMENT EXECUTE FUNCTION {table}_sleep()
"""


def pipeline(spec: dict[str, Any]) -> None:
    """Copy a topic into a table."""
    spark = spark_session(spec)
    source = {"kafka.bootstrap.servers": spec["kafka"], "subscribe": spec["topic"], "startingOffsets": "earliest"}
    messages = spark.readStream.format("kafka").options(**source, maxOffsetsPerTrigger=spec["epoch"]).load()
    table = Postgres(spec["dsn"], table=spec["table"], select=["CAST(CAST(value AS STRING) AS BIGINT) AS number"])
    sink = ExactlyOnce(checkpoint=spec["checkpoint"], sinks={"table": table})
    finish(sink.start(messages.writeStream.trigger(availableNow=True)), spec)


def experiment(run: Run) -> Findings:
    """Produce everything at once, and watch the pipeline's memory while it works through it."""
    count = run.size(small=1_200, usual=1_200_000, full=12_000_000)
    kafka, dsn, topic = run.kafka(), run.postgres(), f"pressed-{time.time_ns()}"
    table = topic.replace("-", "_")
    make_topic(kafka, topic, 2)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(f"CREATE TABLE {table} (number bigint)".encode())
        connection.execute(_SLOW.format(table=table, seconds=PAUSE_SECONDS).encode())
    produce(kafka, topic, ((str(number), str(number), 0) for number in range(count)))
    spec = {"kafka": kafka, "dsn": dsn, "topic": topic, "table": table, "epoch": count // EPOCHS}
    living = run.start({**spec, "checkpoint": str(run.folder / "checkpoint")})
    began, memory = time.monotonic(), []
    while living.process.running:
        memory.append((time.monotonic() - began, living.memory_bytes() / _MEBIBYTE))
        time.sleep(_LOOK_SECONDS)
    progress = living.wait()
    with psycopg.connect(dsn) as connection:
        query = f"SELECT count(*), count(DISTINCT number) FROM {table}"  # noqa: S608 - ours
        ((rows, distinct),) = connection.execute(query.encode()).fetchall()
    half = len(memory) // 2
    facts = [
        ("rows", rows),
        ("rows there twice", rows - distinct),
        ("rows lost", count - distinct),
        ("epochs", len(progress)),
        ("rows of the largest epoch", max(one["numInputRows"] for one in progress)),
        ("memory of all processes at half time, MiB", max(size for _, size in memory[:half])),
        ("memory of all processes at most, MiB", max(size for _, size in memory)),
    ]
    return Findings(
        [Table(f"{count:,} rows into a slow table", ("", "measured"), facts)],
        exact=rows == distinct == count,
        picture=lines(finding(dict(facts)), "memory of the pipeline", "MiB", "seconds", {"all processes": memory}),
    )


def finding(facts: Mapping[str, float]) -> str:
    """Return the title of the picture."""
    half, most = facts["memory of all processes at half time, MiB"], facts["memory of all processes at most, MiB"]
    grown = 100 * (most / half - 1)
    return f"{facts['rows']:,} rows wait for a slow table: memory grows by {grown:.0f} % after half time"


if __name__ == "__main__":
    main(__doc__, pipeline, experiment)
