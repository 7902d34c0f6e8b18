"""`make bench ONLY=public`: rows whose shape anybody has, exactly once and as people write them today.

Kafka takes messages of 100 bytes, as its own `kafka-producer-perf-test` and most published figures do; PostgreSQL the
table pgbench_accounts, as `pgbench --initialize` makes it; Elasticsearch access logs with the fields, the mapping and
the five shards of Rally's track http_logs. All are made from a row's number, so they are the same everywhere.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import uuid
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import bench_kafka
import elasticsearch
import psycopg
from elasticsearch import helpers
from epochs import FIRST, make_rows, our_epoch, plain_epoch, session, stream
from measure import Report, console, sizes
from rich.table import Table

from epochsink import Elasticsearch, Postgres
from epochsink_devkit.services import LocalElasticsearch, LocalPostgres

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame, Row, SparkSession
    from results import Ratio

ACCOUNTS: Final = (
    "CAST(id + 1 AS INT) AS aid",
    "CAST(id DIV 100000 + 1 AS INT) AS bid",
    "0 AS abalance",
    "repeat(' ', 84) AS filler",
)
ACCOUNTS_TABLE: Final = "aid int NOT NULL, bid int, abalance int, filler char(84), PRIMARY KEY (aid)"
LOGS: Final = (
    "CAST(id AS STRING) AS id",
    "CAST(unix_timestamp(placed_at) AS INT) AS `@timestamp`",
    "concat_ws('.', pmod(hash(id), 223) + 1, pmod(hash(id, 1), 256), pmod(hash(id, 2), 256), '0') AS clientip",
    "concat('GET /images/', substr(payload, 1, 1 + CAST(pmod(hash(id, 3), 40) AS INT)), '.gif HTTP/1.0') AS request",
    "CASE WHEN pmod(hash(id, 4), 12) = 0 THEN 304 ELSE 200 END AS status",
    "pmod(hash(id, 5), 60000) AS size",
)
LOGS_MAPPING: Final = {
    "@timestamp": {"type": "date", "format": "strict_date_optional_time||epoch_second"},
    "clientip": {"type": "ip"},
    "request": {"type": "text", "fields": {"raw": {"type": "keyword", "ignore_above": 256}}},
    "status": {"type": "integer"},
    "size": {"type": "integer"},
}
EPOCHS: Final = 5
"""Elasticsearch's rows come in so many: one is applied while the next one is being kept."""


@dataclass(frozen=True)
class Side:
    """One way to write: what makes an empty target, how the rows go there, and what counts them and removes it."""

    make: Callable[[], str]
    write: Callable[[str], float]
    count: Callable[[str], int]
    rows: int

    def __call__(self) -> float:
        target = self.make()
        seconds = self.write(target)
        if (found := self.count(target)) != FIRST + self.rows:
            raise AssertionError(f"{found} rows instead of {FIRST + self.rows}: the measurement means nothing")
        return seconds


def kafka(spark: SparkSession, folder: Path, report: Report, rows: int) -> None:
    """Write messages of 100 bytes; the peer is Spark's own sink with the same options."""
    with bench_kafka.Broker(bench_kafka.AT_ONCE) as broker:
        bench = bench_kafka.Bench(spark, broker, rows, folder)
        ours = bench.ours(options=bench_kafka.OURS_TUNED)
        report.ratio("public-kafka-100-bytes", 1.2, rows, ours, bench.spark_sink(**bench_kafka.TUNED))


def postgres(spark: SparkSession, folder: Path, report: Report, rows: int) -> None:
    """Write the table pgbench_accounts with its primary key; the peer is Spark's JDBC writer, tuned."""
    path = make_rows(spark, folder, rows)
    with LocalPostgres() as server, closing(psycopg.connect(server.dsn, autocommit=True)) as connection:

        def table() -> str:
            connection.execute("DROP TABLE IF EXISTS pgbench_accounts")
            connection.execute(f"CREATE TABLE pgbench_accounts ({ACCOUNTS_TABLE}) WITH (fillfactor = 100)")
            connection.execute("CHECKPOINT")
            return "pgbench_accounts"

        def count(_table: str) -> int:
            answer = connection.execute("SELECT count(*) FROM pgbench_accounts").fetchone()
            return int(answer[0]) if answer else 0

        def frame() -> DataFrame:
            return stream(spark, path).selectExpr(*ACCOUNTS)

        def theirs(name: str) -> float:
            url = server.jdbc_url + ("&" if "?" in server.jdbc_url else "?") + "reWriteBatchedInserts=true"
            options = {"url": url, "dbtable": name, "driver": "org.postgresql.Driver", "batchsize": "10000"}
            return plain_epoch(
                frame(), lambda batch, _: batch.write.format("jdbc").options(**options).mode("append").save()
            )

        def ours(name: str) -> float:
            return our_epoch(frame(), Postgres(server.dsn, table=name))

        sides = (Side(table, each, count, rows) for each in (ours, theirs))
        report.ratio("public-pgbench-accounts", 1.2, rows, *sides)


def search(spark: SparkSession, folder: Path, report: Report, rows: int) -> None:
    """Write access logs; the peer is parallel_bulk with an id of its own for each row."""
    path = make_rows(spark, folder, rows, EPOCHS)
    with LocalElasticsearch() as server, elasticsearch.Elasticsearch(server.url, request_timeout=120) as client:
        url = server.url

        def index() -> str:
            name = f"logs-{uuid.uuid4().hex[:8]}"
            settings = {"number_of_shards": 5, "number_of_replicas": 0}
            client.indices.create(index=name, settings=settings, mappings={"properties": LOGS_MAPPING})
            return name

        def count(name: str) -> int:
            client.indices.refresh(index=name)
            found = int(client.count(index=name)["count"])
            client.indices.delete(index=name)
            return found

        def frame() -> DataFrame:
            return stream(spark, path).selectExpr(*LOGS)

        def theirs(name: str) -> float:
            def write_partition(logs: Iterator[Row]) -> None:
                with elasticsearch.Elasticsearch(url, request_timeout=120) as own:
                    for _ in helpers.parallel_bulk(own, (_action(name, log.asDict()) for log in logs)):
                        pass

            return plain_epoch(frame(), lambda batch, _: batch.foreachPartition(write_partition))

        def ours(name: str) -> float:
            return our_epoch(frame(), Elasticsearch(url, index=name, key="id"))

        sides = (Side(index, each, count, rows) for each in (ours, theirs))
        report.ratio("public-http-logs", 1.5, rows, *sides)


def _action(index: str, log: dict[str, Any]) -> dict[str, Any]:
    return {"_index": index, "_id": log["id"], "_source": log}


def summary(ratios: list[Ratio]) -> Table:
    """Return rows a second, rows a processor second (of all: Spark, Python, server), and what exactly once costs."""
    table = Table(title="Rows of public shapes", title_justify="left")
    for heading in ("data", "rows/s", "at least once", "rows/processor s", "at least once", "exactly-once overhead"):
        table.add_column(heading, justify="left" if heading == "data" else "right")
    for ratio in ratios:
        medians = [
            statistics.median(ratio.rows / getattr(pair, name) for pair in ratio.pairs)
            for name in ("ours", "peer", "ours_processor", "peer_processor")
        ]
        table.add_row(ratio.name, *(f"{each:,.0f}" for each in medians), f"{(1 / ratio.median - 1) * 100:+.0f} %")
    return table


def main() -> None:
    """Measure everything."""
    options = sizes(__doc__, 1_000_000)
    report = Report.of(options)
    folder = Path(tempfile.mkdtemp(prefix="epochsink-bench-"))
    try:
        with session() as spark:
            kafka(spark, folder, report, options.rows * 10)
            postgres(spark, folder, report, options.rows * 4)
            search(spark, folder, report, options.rows)
    finally:
        shutil.rmtree(folder)
    console.print(summary(report.ratios))
    report.print()


if __name__ == "__main__":
    main()
