"""`make bench ONLY=postgres`: the PostgreSQL sink against what users run today, and against the server's limit."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
from epochs import (
    FIRST,
    make_rows,
    noop,
    our_epoch,
    peak_of_workers,
    plain_epoch,
    session,
    small_epochs,
    stream,
    ticks,
    timed_files,
)
from measure import Report, console, sizes, spread
from pgpq import ArrowToPostgresBinaryEncoder
from pyarrow import parquet

from epochsink import Postgres
from epochsink_devkit.services import LocalPostgres

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import pyarrow as pa
    from pyspark.sql import DataFrame, Row, SparkSession

    from epochsink_devkit.services import PostgresService

COLUMNS = "id bigint, payload text, amount double precision, placed_at timestamptz"
UPSERT = (
    "INSERT INTO target (id, payload, amount, placed_at) VALUES (%s, %s, %s, %s) ON CONFLICT (id) DO UPDATE SET "
    "payload = excluded.payload, amount = excluded.amount, placed_at = excluded.placed_at"
)


class Bench:
    """The target table, the ways to write it, and the data."""

    def __init__(self, spark: SparkSession, server: PostgresService, rows: int, folder: Path) -> None:
        self.spark = spark
        self.server = server
        self.rows = rows
        self.upserts = rows * 3 // 10
        self.path = make_rows(spark, folder, rows)
        self.upsert_path = make_rows(spark, folder, self.upserts)

    def empty_table(self, primary_key: str = "") -> None:
        with psycopg.connect(self.server.dsn, autocommit=True) as connection:
            connection.execute("DROP TABLE IF EXISTS target")
            connection.execute(f"CREATE TABLE target ({COLUMNS}{primary_key})")
            connection.execute("CHECKPOINT")

    def count(self, expected: int) -> None:
        with psycopg.connect(self.server.dsn) as connection:
            found = connection.execute("SELECT count(*), count(DISTINCT id) FROM target").fetchone()
        if found != (expected, expected):
            raise AssertionError(f"{found} rows and keys instead of {expected}: the measurement means nothing")

    def ours(self, **options: Any) -> Callable[[], float]:
        def run() -> float:
            self.empty_table()
            sink = Postgres(self.server.dsn, table="target", **options)
            seconds = our_epoch(stream(self.spark, self.path), sink)
            self.count(FIRST + self.rows)
            return seconds

        return run

    def jdbc(self, **options: str) -> Callable[[], float]:
        url = self.server.jdbc_url + ("&" if "?" in self.server.jdbc_url else "?")

        def write(frame: DataFrame, _epoch: int) -> None:
            rewrite = "reWriteBatchedInserts=true" if options else ""
            writer = frame.write.format("jdbc").option("url", url + rewrite).option("dbtable", "target")
            writer.option("driver", "org.postgresql.Driver").options(**options).mode("append").save()

        def run() -> float:
            self.empty_table()
            seconds = plain_epoch(stream(self.spark, self.path), write)
            self.count(FIRST + self.rows)
            return seconds

        return run

    def bare_copy(self) -> float:
        self.empty_table()
        files = timed_files(self.path)
        context = multiprocessing.get_context("spawn")
        barrier = context.Barrier(len(files) + 1)
        workers = [context.Process(target=copy_file, args=(self.server.dsn, file, barrier)) for file in files]
        for worker in workers:
            worker.start()
        barrier.wait(60)
        begun = time.perf_counter()
        barrier.wait(120)
        seconds = time.perf_counter() - begun
        for worker in workers:
            worker.join(30)
        self.count(self.rows)
        return seconds

    def fair_copy(self) -> float:
        """Return the seconds of Spark's pass, into Python workers that discard the rows, and of the bare COPY."""

        def write(frame: DataFrame, epoch: int) -> None:
            noop(frame.mapInArrow(discard, "id bigint"), epoch)

        return plain_epoch(stream(self.spark, self.path), write) + self.bare_copy()

    def our_upsert(self, *, existing: bool) -> Callable[[], float]:
        def run() -> float:
            self.prepare_upsert(existing=existing)
            sink = Postgres(self.server.dsn, table="target", key=["id"])
            seconds = our_epoch(stream(self.spark, self.upsert_path), sink)
            self.count(FIRST + self.upserts)
            return seconds

        return run

    def executemany(self, *, existing: bool) -> Callable[[], float]:
        dsn = self.server.dsn

        def write_partition(rows: Iterator[Row]) -> None:
            with psycopg.connect(dsn) as connection, connection.cursor() as cursor:
                cursor.executemany(UPSERT, rows)

        def run() -> float:
            self.prepare_upsert(existing=existing)
            frame = stream(self.spark, self.upsert_path)
            seconds = plain_epoch(frame, lambda batch, _epoch: batch.foreachPartition(write_partition))
            self.count(FIRST + self.upserts)
            return seconds

        return run

    def prepare_upsert(self, *, existing: bool) -> None:
        self.empty_table(", PRIMARY KEY (id)")
        if existing:
            with psycopg.connect(self.server.dsn, autocommit=True) as connection:
                connection.execute(
                    "INSERT INTO target SELECT i, 'before', 0, now() FROM generate_series(0, %s) AS i",
                    (FIRST + self.upserts - 1,),
                )
                connection.execute("VACUUM ANALYZE target")
                connection.execute("CHECKPOINT")

    # ---- figures beside the ratios

    def latencies(self, epochs: int) -> None:
        """Print what an empty epoch costs, and how long after ``commits/N`` rows are visible."""
        sink = Postgres(self.server.dsn, table="target")
        self.empty_table()
        nothing = ticks(self.spark, 100).where("id < 0")
        plain, _ = small_epochs(nothing, noop, epochs)
        empty, _ = small_epochs(nothing, sink, epochs)
        console.print(f"an empty epoch: {empty:.0f} ms a trigger, a plain foreachBatch {plain:.0f} ms (medians)")
        small, delays = small_epochs(ticks(self.spark, 100), sink, epochs)
        console.print(f"an epoch of 100 rows: {small:.0f} ms a trigger (median)")
        console.print(f"from commits/N to visible rows: {spread(delays)}")

    def memory(self, folder: Path) -> None:
        """Print a task's peak memory for an epoch and for one ten times as large."""
        for rows in (self.rows // 10, self.rows):
            path = make_rows(self.spark, folder, rows)
            self.empty_table()
            with peak_of_workers() as peak:
                our_epoch(stream(self.spark, path), Postgres(self.server.dsn, table="target"))
            console.print(f"peak memory of a Python worker, {rows:,} rows in the epoch: {peak[0]:.0f} MB")


def discard(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Take rows as the sinks' tasks do, and do nothing with them."""
    for _ in batches:
        pass
    yield from ()


def copy_file(dsn: str, file: Path, barrier: Any) -> None:
    """Copy a file's Arrow batches by one connection: nothing but encoding and COPY between the barriers."""
    table = parquet.read_table(file)
    batches = table.to_batches(max_chunksize=10_000)
    encoder = ArrowToPostgresBinaryEncoder(table.schema)
    with psycopg.connect(dsn) as connection, connection.cursor() as cursor:
        barrier.wait(60)
        with cursor.copy("COPY target FROM STDIN WITH (FORMAT binary)") as copy:
            copy.write(encoder.write_header())
            for batch in batches:
                copy.write(encoder.write_batch(batch))
            copy.write(encoder.finish())
        connection.commit()
        barrier.wait(120)


def main() -> None:
    """Measure everything."""
    options = sizes(__doc__, 1_000_000)
    with (
        tempfile.TemporaryDirectory(prefix="epochsink-bench-") as folder,
        LocalPostgres() as server,
        session() as spark,
    ):
        bench, report = Bench(spark, server, options.rows, Path(folder)), Report.of(options)
        rows, upserts = bench.rows, bench.upserts
        direct = bench.ours(atomic=False)
        tuned = bench.jdbc(batchsize="10000")
        if not options.only:
            bench.latencies(options.epochs)
            bench.memory(Path(folder))
        report.ratio("postgres-append-vs-jdbc-default", 3.0, rows, direct, bench.jdbc())
        report.ratio("postgres-append-vs-jdbc-tuned", 2.0, rows, direct, tuned)
        report.ratio("postgres-append-vs-fair-copy", 0.85, rows, direct, bench.fair_copy)
        report.ratio("postgres-atomic-append-vs-jdbc-tuned", 1.4, rows, bench.ours(), tuned)
        for name, aim, existing in (("new", 1.5, False), ("existing", 1.0, True)):
            ours, peer = bench.our_upsert(existing=existing), bench.executemany(existing=existing)
            report.ratio(f"postgres-upsert-{name}-vs-executemany", aim, upserts, ours, peer)
        report.print()


if __name__ == "__main__":
    main()
