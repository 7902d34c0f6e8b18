"""`make bench ONLY=checkpoint`: small epochs into PostgreSQL with the checkpoint on a local folder, on HDFS and on S3.

Against a plain foreachBatch with Spark's JDBC writer on the same checkpoint, with 0 and 20 ms added to each round trip
to the store (to HDFS's NameNode; data go to the DataNode directly). Spark's own files on S3 need hadoop-aws and its
SDK, 530 MB that are fetched once.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import threading
import time
import uuid
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psycopg
from epochs import session, ticks
from far_away import FarAway
from measure import Report, console

from epochsink import ExactlyOnce, Postgres
from epochsink.protocol.object_storage import ObjectStorage
from epochsink.protocol.spool import Spool
from epochsink.protocol.storage import LocalStorage
from epochsink.spark.classic.hadoop_storage import HadoopStorage
from epochsink_devkit.services import LocalHdfs, LocalPostgres, LocalS3
from epochsink_devkit.services.artifacts import fetch
from epochsink_devkit.services.versions import Artifact, Bundle, hadoop

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

ROWS = 1_000
FAR_SECONDS = 0.02
SETTLED = 4
"""Epochs at the beginning of a query that are not counted."""
PATIENCE_SECONDS = 300
COLUMNS = "id bigint, payload text, amount double precision, placed_at timestamptz"
S3A = Bundle(
    f"s3a-{hadoop()}",
    (
        Artifact("org.apache.hadoop", "hadoop-aws", hadoop()),
        Artifact("software.amazon.awssdk", "bundle", "2.24.6"),
    ),
    locked=False,
)
NEEDED = ("hadoop-aws", "bundle-", "wildfly-openssl")
CALLS = ("create", "read", "read_many", "exists", "names", "remove", "remove_many")


@dataclass
class Place:
    """Where checkpoints are made, and with which settings Spark reaches it."""

    name: str
    root: str
    settings: dict[str, str] = field(default_factory=dict)


class Calls:
    """Counts and times the calls to the store that the driver makes, by thread.

    Looks for a commit that is not there are counted apart.
    """

    def __init__(self) -> None:
        self.counted: Counter[str] = Counter()
        self.seconds: dict[str, float] = {}
        self.waiting = 0
        for kind in (LocalStorage, HadoopStorage, ObjectStorage):
            for name in CALLS:
                self._count(kind, name)
        for name in ("make", "drop", "attempts"):
            self._count(Spool, name)

    def _count(self, kind: type, name: str) -> None:
        call: Any = getattr(kind, name)

        def counting(*arguments: Any, **options: Any) -> Any:
            begun = time.perf_counter()
            answer = call(*arguments, **options)
            thread = threading.current_thread().name
            if name == "read" and answer is None and str(arguments[1]).startswith("commits/"):
                self.waiting += 1
            else:
                self.counted[thread] += 1
                self.seconds[thread] = self.seconds.get(thread, 0.0) + time.perf_counter() - begun
            return answer

        setattr(kind, name, counting)


@dataclass
class Measured:
    """Medians of a run's epochs, in seconds: a whole trigger, and foreachBatch alone."""

    trigger: float
    batch: float


class Bench:
    """The session, the server, and the two ways to write."""

    def __init__(self, spark: SparkSession, server: LocalPostgres, epochs: int) -> None:
        self.spark = spark
        self.server = server
        self.epochs = epochs
        self.calls = Calls()
        self.report = Report()
        self.batches: dict[str, list[float]] = {}

    def ours(self, place: Place) -> float:
        table = self._empty_table()
        checkpoint = f"{place.root}/{uuid.uuid4().hex}"
        once = ExactlyOnce(checkpoint=checkpoint, sinks={"bench": Postgres(self.server.dsn, table=table)})
        return self._noted(f"{place.name} ours", self._run(once.start))

    def plain(self, place: Place) -> float:
        table = self._empty_table()
        checkpoint = f"{place.root}/{uuid.uuid4().hex}"

        def write(frame: DataFrame, _epoch: int) -> None:
            writer = frame.write.format("jdbc").option("url", self.server.jdbc_url).option("dbtable", table)
            writer.option("driver", "org.postgresql.Driver").mode("append").save()

        def start(writer: Any) -> Any:
            return writer.foreachBatch(write).option("checkpointLocation", checkpoint).start()

        return self._noted(f"{place.name} plain", self._run(start))

    def compare(self, place: Place) -> None:
        """Print the ratio on one place, time in foreachBatch, and calls for each epoch."""
        for name, value in place.settings.items():
            self.spark.conf.set(name.removeprefix("spark.hadoop."), value)
            self.spark._jsc.hadoopConfiguration().set(name.removeprefix("spark.hadoop."), value)
        self.report.ratio(
            f"checkpoint-{place.name}-vs-plain", 0.7, ROWS, lambda: self.ours(place), lambda: self.plain(place)
        )
        self.calls.counted.clear()
        self.calls.seconds.clear()
        self.calls.waiting = 0
        self.ours(place)
        epochs = self.epochs + SETTLED
        commit, stream = self._shares(self.calls.counted, epochs)
        committing, streaming = (share * 1000 for share in self._shares(self.calls.seconds, epochs))
        batch = {who: statistics.median(self.batches[f"{place.name} {who}"][1:]) * 1000 for who in ("ours", "plain")}
        looks = self.calls.waiting / epochs
        console.print(
            f"{place.name}: foreachBatch {batch['ours']:.0f} ms, plain {batch['plain']:.0f} ms (medians); calls an "
            f"epoch, starts among them: {stream:.1f} on the stream's thread ({streaming:.0f} ms), {commit:.1f} on the "
            f"commit thread ({committing:.0f} ms), and {looks:.1f} looks for commits/N before it is there"
        )

    @staticmethod
    def _shares(by_thread: Mapping[str, float], epochs: int) -> tuple[float, float]:
        """Return what an epoch takes of the commit thread and of the stream's."""
        stream = sum(share for thread, share in by_thread.items() if thread.startswith("Thread"))
        return by_thread.get("epochsink-commit", 0) / epochs, stream / epochs

    def _noted(self, name: str, measured: Measured) -> float:
        self.batches.setdefault(name, []).append(measured.batch)
        return measured.trigger

    def _run(self, start: Any) -> Measured:
        query = start(ticks(self.spark, ROWS).writeStream)
        last = self.epochs + SETTLED - 1
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (query.lastProgress or {"batchId": -1})["batchId"] < last:
            if query.exception() is not None or time.monotonic() > deadline:
                raise AssertionError(f"the query did not come to epoch {last}: {query.exception()}")
            time.sleep(0.05)
        times = [one["durationMs"] for one in query.recentProgress if SETTLED <= one["batchId"] <= last]
        query.stop()
        triggers = [one["triggerExecution"] / 1000 for one in times]
        return Measured(statistics.median(triggers), statistics.median(one["addBatch"] / 1000 for one in times))

    def _empty_table(self) -> str:
        """Make a table for one run: a query that stops in mid-epoch keeps its locks on the last one."""
        name = f"target_{uuid.uuid4().hex}"
        with psycopg.connect(self.server.dsn, autocommit=True) as connection:
            connection.execute(f"CREATE TABLE {name} ({COLUMNS})")
        return name


def hdfs_place(service: LocalHdfs, far: ExitStack, seconds: float) -> Place:
    """Return HDFS as it is, or far away."""
    port, web_port = service.port, service.web_port
    if seconds:
        port, web_port = (far.enter_context(FarAway(each, seconds)).port for each in (port, web_port))
    name = f"hdfs-{seconds * 1000:.0f}ms" if seconds else "hdfs"
    return Place(
        name, f"hdfs://127.0.0.1:{port}/bench", {"spark.hadoop.dfs.namenode.http-address": f"127.0.0.1:{web_port}"}
    )


def s3_place(service: LocalS3, far: ExitStack, seconds: float) -> Place:
    """Return S3 as it is, or far away, each with a bucket of its own: Hadoop keeps a connection for each bucket."""
    port = far.enter_context(FarAway(service.port, seconds)).port if seconds else service.port
    name = f"s3-{seconds * 1000:.0f}ms" if seconds else "s3"
    bucket = f"bench-{name}"
    service.make_bucket(bucket)
    endpoint = f"http://127.0.0.1:{port}"
    settings = {**service.spark_settings, f"spark.hadoop.fs.s3a.bucket.{bucket}.endpoint": endpoint}
    return Place(name, f"s3a://{bucket}/bench", settings)


def s3a_packages() -> list[Path]:
    """Return the jars that Spark needs for its own files on S3; fetched at the first call."""
    return [jar for jar in sorted(fetch(S3A).glob("*.jar")) if jar.name.startswith(NEEDED)]


def main() -> None:
    """Measure everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=15, help="epochs of each run (default: %(default)s)")
    parser.add_argument("--stores", default="local,hdfs,s3", help="which (default: %(default)s)")
    options = parser.parse_args()
    stores = options.stores.split(",")
    folder = tempfile.mkdtemp(prefix="epochsink-bench-")
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        server = stack.enter_context(LocalPostgres())
        places = [Place("local", folder)] if "local" in stores else []
        if "hdfs" in stores:
            service = stack.enter_context(LocalHdfs())
            places += [hdfs_place(service, stack, seconds) for seconds in (0, FAR_SECONDS)]
        if "s3" in stores:
            api = stack.enter_context(LocalS3())
            places += [s3_place(api, stack, seconds) for seconds in (0, FAR_SECONDS)]
        s3a = s3a_packages() if "s3" in stores else []
        spark = stack.enter_context(session(s3a, **{"spark.hadoop.fs.s3a.connection.ssl.enabled": "false"}))
        bench = Bench(spark, server, options.epochs)
        for place in places:
            bench.compare(place)
        bench.report.print()


if __name__ == "__main__":
    main()
