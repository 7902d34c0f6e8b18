"""The pipeline that is killed: one Kafka topic into one system. Run as ``python process.py SPEC.json``.

The rows are those of `epochsink_devkit.history.rows`, without epoch and attempt: a plain sink of Spark's knows neither,
and so nobody gets them. The judge tells a row by its place in the source.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Final

import elasticsearch
import psycopg
from elasticsearch import helpers
from pipeline import Spec, start_spark, stream

from epochsink import Elasticsearch, ExactlyOnce, Kafka, Postgres
from epochsink_devkit.history.rows import SCHEMA

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pyspark.sql import DataFrame, Row
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from epochsink.sink import Sink

    Batch = Callable[[DataFrame, int], None]

COLUMNS: Final = ", ".join(SCHEMA.names)
UPSERT: Final = (
    f"INSERT INTO {{target}} AS target ({COLUMNS}) "  # noqa: S608 - our own names, as below
    f"SELECT DISTINCT ON (key) {COLUMNS} FROM {{target}}_staging ORDER BY key, kver DESC "
    f"ON CONFLICT (key) DO UPDATE SET {', '.join(f'{name} = excluded.{name}' for name in SCHEMA.names)} "
    "WHERE target.kver <= excluded.kver"
)
APPLIED: Final = "INSERT INTO {target}_applied (app, batch) VALUES ('pipeline', %s) ON CONFLICT DO NOTHING RETURNING 1"
APPEND: Final = f"INSERT INTO {{target}} ({COLUMNS}) SELECT {COLUMNS} FROM {{target}}_staging"  # noqa: S608


class Places:
    """The servers, and the topic, table or index to write to."""

    def __init__(self, said: Mapping[str, str]) -> None:
        self.target = said["target"]
        self.servers = said.get("servers", "")
        self.dsn = said.get("dsn", "")
        self.jdbc_url = said.get("jdbc_url", "")
        self.url = said.get("url", "")
        self.transaction_timeout = float(said["transaction_timeout"])

    def jdbc(self, frame: DataFrame, table: str, mode: str, **options: str) -> None:
        """Write a frame with Spark's JDBC writer."""
        url = self.jdbc_url + ("&" if "?" in self.jdbc_url else "?") + "reWriteBatchedInserts=true"
        writer = frame.write.format("jdbc").option("url", url).option("driver", "org.postgresql.Driver")
        writer.option("dbtable", table).options(**options).mode(mode).save()


def spark_kafka(rows: DataFrame, to: Places) -> DataStreamWriter:
    """Spark's own sink."""
    settings = {"kafka.bootstrap.servers": to.servers, "topic": to.target}
    settings |= {"kafka.acks": "all", "kafka.enable.idempotence": "true"}
    return rows.selectExpr("to_json(struct(*)) AS value").writeStream.format("kafka").options(**settings)


def jdbc_append(to: Places) -> Batch:
    """Spark's JDBC writer, in append mode."""
    return lambda batch, _epoch: to.jdbc(batch, to.target, "append")


def batch_id_table(to: Places) -> Batch:
    """Append a batch in one transaction with its id, and only if its id is new."""

    def write(batch: DataFrame, epoch: int) -> None:
        to.jdbc(batch, f"{to.target}_staging", "overwrite", truncate="true")
        with psycopg.connect(to.dsn) as connection:
            if connection.execute(APPLIED.format(target=to.target).encode(), [epoch]).fetchone():
                connection.execute(APPEND.format(target=to.target).encode())

    return write


def staged_upsert(to: Places) -> Batch:
    """Upsert a batch from a staging table, in one transaction."""

    def write(batch: DataFrame, _epoch: int) -> None:
        to.jdbc(batch, f"{to.target}_staging", "overwrite", truncate="true")
        with psycopg.connect(to.dsn) as connection:
            connection.execute(UPSERT.format(target=to.target).encode())

    return write


def parallel_bulk(to: Places) -> Batch:
    """Index each row under an id of its own."""
    url, index = to.url, to.target

    def actions(rows: Iterator[Row]) -> Iterator[dict[str, object]]:
        for row in rows:
            yield {"_index": index, "_id": f"{row.run}-{row.src_part}-{row.src_off}", "_source": row.asDict()}

    def write_partition(rows: Iterator[Row]) -> None:
        with elasticsearch.Elasticsearch(url, request_timeout=60, retry_on_timeout=True, max_retries=5) as client:
            deque(helpers.parallel_bulk(client, actions(rows)), maxlen=0)

    return lambda batch, _epoch: batch.foreachPartition(write_partition)


BATCHES: Final[Mapping[str, Callable[[Places], Batch]]] = {
    "jdbc-append": jdbc_append,
    "batch-id-table": batch_id_table,
    "staged-upsert": staged_upsert,
    "parallel-bulk": parallel_bulk,
}
OURS: Final[Mapping[str, Callable[[Places], Sink]]] = {
    "epochsink-kafka": lambda to: Kafka(bootstrap_servers=to.servers, topic=to.target),
    "epochsink-kafka-late": lambda to: Kafka(
        bootstrap_servers=to.servers, topic=to.target, transaction_timeout=to.transaction_timeout
    ),
    "epochsink-append": lambda to: Postgres(to.dsn, table=to.target),
    "epochsink-upsert": lambda to: Postgres(to.dsn, table=to.target, key=["key"], order_by="kver"),
    "epochsink-elasticsearch": lambda to: Elasticsearch(to.url, index=to.target),
}


def start(name: str, rows: DataFrame, to: Places, checkpoint: str) -> StreamingQuery:
    """Start one system, to process all input that there is."""
    if name in OURS:
        writer = rows.writeStream.trigger(availableNow=True)
        return ExactlyOnce(checkpoint=checkpoint, sinks={"target": OURS[name](to)}).start(writer)
    writer = spark_kafka(rows, to) if name == "spark-kafka" else rows.writeStream.foreachBatch(BATCHES[name](to))
    return writer.trigger(availableNow=True).option("checkpointLocation", checkpoint).start()


def main() -> None:
    """Run until the input is drained, or somebody kills it."""
    spec = Spec(**json.loads(Path(sys.argv[1]).read_text()))
    rows = stream(spec, start_spark(spec))
    start(spec.peer["name"], rows, Places(spec.peer), spec.checkpoint).awaitTermination()


if __name__ == "__main__":
    main()
