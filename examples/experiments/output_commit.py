"""The output commit problem: what a reader of the target sees that the pipeline then takes back, or writes twice.

The same stream goes into PostgreSQL by a plain foreachBatch and by epochsink. Each is killed when its rows are written
and the checkpoint has not decided the epoch; a reader looks into the table at that moment, and again at the end.

    python output_commit.py
"""

import json
from typing import Any, Final

import psycopg
from pyspark.sql import DataFrame

from epochsink import ExactlyOnce, Postgres
from epochsink.failpoints import reach
from experiment import Findings, Run, Table, bars, finish, main, spark_session

FILES: Final = 4
FIRST_LIFE: Final = "coordinator.record.after:3"


def pipeline(spec: dict[str, Any]) -> None:
    """Copy the rows of files, one file an epoch."""
    spark = spark_session(spec)
    rows = spark.readStream.schema("number LONG").option("maxFilesPerTrigger", 1).json(spec["input"])
    writer = rows.writeStream.trigger(availableNow=True)
    if spec["exactly_once"]:
        sink = ExactlyOnce(checkpoint=spec["checkpoint"], sinks={"table": Postgres(spec["dsn"], table=spec["table"])})
        finish(sink.start(writer), spec)
        return

    def write(frame: DataFrame, _epoch: int) -> None:
        with psycopg.connect(spec["dsn"]) as connection, connection.cursor() as cursor:
            rows = [(row["number"],) for row in frame.collect()]
            cursor.executemany(f"INSERT INTO {spec['table']} VALUES (%s)".encode(), rows)  # noqa: S608 - ours
        reach("coordinator.record.after")

    finish(writer.option("checkpointLocation", spec["checkpoint"]).foreachBatch(write).start(), spec)


def experiment(run: Run) -> Findings:
    """Kill both at the same point of the same epoch."""
    count = run.size(small=10, usual=1_000, full=10_000)
    dsn, source = run.postgres(), run.folder / "input"
    source.mkdir()
    for file in range(FILES):
        numbers = range(file * count, (file + 1) * count)
        (source / f"{file}.json").write_text("\n".join(json.dumps({"number": number}) for number in numbers))
    found = []
    for name, exactly_once in (("plain foreachBatch", False), ("epochsink", True)):
        table = f"output_commit_{'exact' if exactly_once else 'plain'}"
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(f"DROP TABLE IF EXISTS {table}".encode())
            connection.execute(f"CREATE TABLE {table} (number bigint)".encode())
        checkpoint = run.folder / table
        spec = {"dsn": dsn, "input": str(source), "table": table, "checkpoint": str(checkpoint)}
        run.run({**spec, "exactly_once": exactly_once}, failpoint=FIRST_LIFE)
        decided = count * sum(1 for file in (checkpoint / "commits").iterdir() if file.name.isdigit())
        early = _rows(dsn, f"SELECT count(*) FROM {table}") - decided  # noqa: S608 - ours
        run.run({**spec, "exactly_once": exactly_once})
        twice = _rows(dsn, f"SELECT count(*) - count(DISTINCT number) FROM {table}")  # noqa: S608 - ours
        lost = FILES * count - _rows(dsn, f"SELECT count(DISTINCT number) FROM {table}")  # noqa: S608 - ours
        found.append((name, max(early, 0), twice, lost))
    headings = ("", "seen before they were decided", "there twice at the end", "lost")
    (_, *plain), (_, *exact) = found
    picture = {
        f"{name}: {what}": float(value)
        for name, *values in found
        for what, value in zip(headings[1:], values, strict=True)
    }
    title = f"{FILES * count:,} rows, killed between writing and checkpoint"
    drawn = bars(finding(plain[1], exact[1]), "rows", picture)
    return Findings([Table(title, headings, found)], not any(exact), drawn)


def finding(plain: int, exact: int) -> str:
    """Return the title of the picture, of how many rows are there twice."""
    return f"After a kill, foreachBatch has written {plain:,} rows twice, epochsink {exact:,}"


def _rows(dsn: str, query: str) -> int:
    with psycopg.connect(dsn) as connection:
        (found,) = connection.execute(query.encode()).fetchall()
    return int(found[0])


if __name__ == "__main__":
    main(__doc__, pipeline, experiment)
