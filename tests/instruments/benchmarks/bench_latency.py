"""`make bench ONLY=latency`: how old a row is when a reader of the target sees it, since the record was created.

The same records come from a Kafka topic and go, by Spark, into a topic, a table or an index: with our sink as it comes,
and with Spark's own at-least-once sink, JDBC or `parallel_bulk` in foreachBatch. Flink's KafkaSink writes them exactly
once, at the shortest checkpoint interval of `INTERVALS` at which it keeps up. All in one run, in turn; records of the
first `WARM_SECONDS` and of the last one are not counted. Beside the ages stand processor seconds by process. At last
come ours at longer trigger intervals, and both into Kafka with the checkpoint file manager that writes Spark's files
sooner. Between two of a reader's looks are 5 ms; an index refreshes every `REFRESH`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import elasticsearch
import psutil
import psycopg
from bench_kafka import Broker
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from elasticsearch import helpers
from epochs import session
from flink_jars import kafka_jars
from latency_probe import Spec
from measure import console, processor_by_kind
from results import machine
from rich.table import Table

from epochsink import Elasticsearch, ExactlyOnce, Kafka, Postgres
from epochsink_devkit.services import LocalElasticsearch, LocalPostgres
from epochsink_devkit.svg import WIDTH, Svg

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from pyspark.sql import DataFrame, Row, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

HERE: Final = Path(__file__).parent
WARM_SECONDS: Final = 4
COUNTED_SECONDS: Final = 18
LAST_SECONDS: Final = 1
"""How long records go on after the counted ones: Spark's source waits for half a second more for the very last ones."""
INTERVALS: Final = (50, 100, 200, 400)
"""Milliseconds between two of Flink's checkpoints, the shortest first."""
BEHIND: Final = 1.5
"""A writer has not kept up if the records' age in the last third is more than so many times that in the first."""
REFRESH: Final = "100ms"
AIMS: Final = {("Kafka", "Spark's sink"): 2.2, ("PostgreSQL", "JDBC"): 1.25, ("Elasticsearch", "parallel_bulk"): 1.3}
TRIGGERS: Final = ("250 milliseconds", "500 milliseconds", "1 second", "2 seconds")
"""Longer intervals of the trigger, at the first load: older rows for fewer processor seconds."""
FILE_MANAGER: Final = "spark.sql.streaming.checkpointFileManagerClass"
RENAMES: Final = "org.apache.spark.sql.execution.streaming.FileSystemBasedCheckpointFileManager"
"""Spark's own, whose files on a local disk take a third of the time of the default's."""
KINDS: Final = ("Spark", "executors", "driver", "server", "others")
"""Whose processor seconds are told: the JVM, its Python workers, the driver's Python, all servers, and Flink."""
RESULTS: Final = "latency.json"
PICTURE: Final = "latency.svg"


@dataclass(frozen=True)
class Load:
    """So many records a second, in so many partitions."""

    rate: int
    partitions: int

    def __str__(self) -> str:
        return f"{self.rate:,} records a second, {self.partitions} partitions"


@dataclass
class Sample:
    """The records' ages in milliseconds, and processor seconds by kind of process in ``seconds``."""

    ages: list[float]
    processor: dict[str, float]
    seconds: float

    def __add__(self, other: Sample) -> Sample:
        both = {kind: self.processor.get(kind, 0.0) + other.processor.get(kind, 0.0) for kind in KINDS}
        return Sample(self.ages + other.ages, both, self.seconds + other.seconds)


@dataclass(frozen=True)
class Ages:
    """How old records of one way were when they were seen, in milliseconds, over all turns.

    ``processor`` has the processor seconds by kind of process, per second of the run.
    """

    target: str
    way: str
    rate: int
    partitions: int
    p50: float
    p95: float
    p99: float
    worst: float
    records: int
    processor: dict[str, float]

    @classmethod
    def of(cls, target: str, way: str, load: Load, sample: Sample) -> Ages:
        """Return what is told of them."""
        ordered = sorted(sample.ages)
        p50, p95, p99 = (ordered[int(len(ordered) * share)] for share in (0.50, 0.95, 0.99))
        used = {kind: round(sample.processor.get(kind, 0.0) / sample.seconds, 3) for kind in KINDS}
        return cls(target, way, load.rate, load.partitions, p50, p95, p99, ordered[-1], len(ordered), used)

    def line(self) -> str:
        """Return the figures."""
        return (
            f"p50 {self.p50:.0f} ms, p95 {self.p95:.0f}, p99 {self.p99:.0f}, worst {self.worst:.0f}; "
            f"{sum(self.processor.values()):.2f} processors busy"
        )


class Bench:
    """The servers, and the ways to write."""

    def __init__(self, spark: SparkSession, broker: str, dsn: str, url: str, flink: str) -> None:
        self.spark = spark
        self.broker = broker
        self.dsn = dsn
        self.url = url
        self.flink = flink
        self.trigger = "0 seconds"
        self.admin = AdminClient({"bootstrap.servers": broker})
        self.client = elasticsearch.Elasticsearch(url)

    def topic(self, partitions: int) -> str:
        name = f"latency-{uuid.uuid4().hex[:8]}"
        self.admin.create_topics([NewTopic(name, partitions)])[name].result(30)
        return name

    def table(self) -> str:
        name = f"latency_{uuid.uuid4().hex[:8]}"
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            connection.execute(f"CREATE TABLE {name} (id bigint, created bigint, payload text)")
            connection.execute(f"CREATE INDEX ON {name} (id)")
        return name

    def index(self) -> str:
        name = f"latency-{uuid.uuid4().hex[:8]}"
        kinds = {"id": {"type": "long"}, "created": {"type": "long"}, "payload": {"type": "keyword"}}
        settings = {"number_of_shards": 1, "number_of_replicas": 0, "refresh_interval": REFRESH}
        self.client.indices.create(index=name, settings=settings, mappings={"properties": kinds})
        return name

    def records(self, source: str) -> DataFrame:
        reader = self.spark.readStream.format("kafka").option("kafka.bootstrap.servers", self.broker)
        return reader.option("subscribe", source).option("startingOffsets", "earliest").load().select("value")

    def rows(self, source: str) -> DataFrame:
        text = "CAST(value AS STRING)"
        parts = (
            f"CAST(split_part({text}, ' ', {place}) AS BIGINT) AS {name}" for place, name in ((1, "id"), (2, "created"))
        )
        return self.records(source).selectExpr(*parts, f"{text} AS payload")

    # ---- the ways to write: each is a context in which the records of a topic go into a target

    @contextmanager
    def _query(self, frame: DataFrame, start: Callable[[Any, str], StreamingQuery]) -> Iterator[None]:
        with tempfile.TemporaryDirectory(prefix="epochsink-bench-", ignore_cleanup_errors=True) as folder:
            query = start(frame.writeStream.trigger(processingTime="0 seconds"), f"{folder}/checkpoint")
            try:
                yield
            finally:
                query.stop()

    @contextmanager
    def _ours(self, frame: DataFrame, sink: Any) -> Iterator[None]:
        with tempfile.TemporaryDirectory(prefix="epochsink-bench-", ignore_cleanup_errors=True) as folder:
            once = ExactlyOnce(checkpoint=f"{folder}/checkpoint", sinks={f"latency-{uuid.uuid4().hex[:8]}": sink})
            query = once.start(frame.writeStream.trigger(processingTime=self.trigger))
            try:
                yield
            finally:
                query.stop()
                once.await_committed()

    def _batches(self, frame: DataFrame, write: Callable[[DataFrame, int], None]) -> AbstractContextManager[None]:
        return self._query(
            frame, lambda writer, place: writer.foreachBatch(write).option("checkpointLocation", place).start()
        )

    def ours_kafka(self, source: str, target: str) -> AbstractContextManager[None]:
        return self._ours(self.records(source), Kafka(bootstrap_servers=self.broker, topic=target))

    def spark_kafka(self, source: str, target: str) -> AbstractContextManager[None]:
        options = {"kafka.bootstrap.servers": self.broker, "topic": target}
        return self._query(
            self.records(source),
            lambda writer, place: writer.format("kafka").options(**options, checkpointLocation=place).start(),
        )

    def ours_postgres(self, source: str, target: str) -> AbstractContextManager[None]:
        return self._ours(self.rows(source), Postgres(self.dsn, table=target))

    def jdbc(self, source: str, target: str) -> AbstractContextManager[None]:
        said = psycopg.conninfo.conninfo_to_dict(self.dsn)
        url = f"jdbc:postgresql://{said['host']}:{said['port']}/{said['dbname']}?user={said['user']}"
        options = {"url": f"{url}&password={said.get('password', '')}", "driver": "org.postgresql.Driver"}

        def write(batch: DataFrame, _epoch: int) -> None:
            batch.write.format("jdbc").options(**options, dbtable=target, reWriteBatchedInserts="true").mode(
                "append"
            ).save()

        return self._batches(self.rows(source), write)

    def ours_elasticsearch(self, source: str, target: str) -> AbstractContextManager[None]:
        return self._ours(self.rows(source), Elasticsearch(self.url, index=target, key="id"))

    def parallel_bulk(self, source: str, target: str) -> AbstractContextManager[None]:
        url = self.url

        def write_partition(rows: Iterator[Row]) -> None:
            client = elasticsearch.Elasticsearch(url, request_timeout=120)
            actions = ({"_index": target, "_id": str(row.id), "_source": row.asDict()} for row in rows)
            for succeeded, item in helpers.parallel_bulk(client, actions):
                if not succeeded:
                    raise RuntimeError(item)

        return self._batches(self.rows(source), lambda batch, _epoch: batch.foreachPartition(write_partition))

    def flink_kafka(self, interval: int) -> Callable[[str, str], AbstractContextManager[None]]:
        @contextmanager
        def write(source: str, target: str) -> Iterator[None]:
            spec = {"jar": kafka_jars()[0], "servers": self.broker, "source": source, "target": target}
            command = [
                self.flink,
                str(HERE / "latency_flink.py"),
                json.dumps(spec | {"interval": interval, "parallelism": 2}),
            ]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            try:
                if process.stdout is None or process.stdout.readline().strip() != "READY":
                    raise RuntimeError("Flink's process has ended: see its errors above")
                yield
            finally:
                if process.stdin is not None:
                    process.stdin.close()
                process.wait(120)

        return write

    # ---- measuring

    def ages(
        self,
        load: Load,
        kind: str,
        write: Callable[[str, str], AbstractContextManager[None]],
        seconds: int = COUNTED_SECONDS,
    ) -> Sample:
        """Let one way write; return the counted records' ages, and the processor seconds of the whole."""
        source = self.topic(load.partitions)
        server, target = {
            "topic": lambda: (self.broker, self.topic(load.partitions)),
            "table": lambda: (self.dsn, self.table()),
            "index": lambda: (self.url, self.index()),
        }[kind]()
        sent = load.rate * (WARM_SECONDS + seconds + LAST_SECONDS)
        spec = Spec(self.broker, source, load.rate, sent, kind, server, target)
        with write(source, target):
            probe = [sys.executable, str(HERE / "latency_probe.py"), json.dumps(asdict(spec))]
            before, began = _processor(), time.monotonic()
            answer = subprocess.run(probe, check=True, stdout=subprocess.PIPE, text=True).stdout
            after, took = _processor(), time.monotonic() - began
        ages = json.loads(answer.splitlines()[-1])[load.rate * WARM_SECONDS : -load.rate * LAST_SECONDS]
        return Sample(
            list(ages), {kind: max(after.get(kind, 0.0) - before.get(kind, 0.0), 0.0) for kind in KINDS}, took
        )

    def flink_ways(self, load: Load) -> Iterator[tuple[str, Sample]]:
        """Yield Flink's ages at the shortest interval at which it keeps up."""
        for interval in INTERVALS:
            sample = self.ages(load, "topic", self.flink_kafka(interval))
            if kept_up(sample.ages):
                yield f"Flink, a checkpoint every {interval} ms", sample
                return
            console.print(f"Flink does not keep up with a checkpoint every {interval} ms")


def _processor() -> dict[str, float]:
    """Return the processor seconds so far; without those of processes that have ended, such as the probes."""
    used = processor_by_kind()
    used["driver"] -= sum(psutil.Process().cpu_times()[2:4])
    return used


def kept_up(ages: Sequence[float]) -> bool:
    """Say whether records were not older and older."""
    third = len(ages) // 3
    first, last = (sorted(part)[third // 2] for part in (ages[:third], ages[-third:]))
    return last <= BEHIND * first


def measured(bench: Bench, load: Load, turns: int) -> list[Ages]:
    """Let every way write, in turn; return the ages of each."""
    ways: dict[tuple[str, str, str], Callable[[str, str], AbstractContextManager[None]]] = {
        ("Kafka", "epochsink", "topic"): bench.ours_kafka,
        ("Kafka", "Spark's sink", "topic"): bench.spark_kafka,
        ("PostgreSQL", "epochsink", "table"): bench.ours_postgres,
        ("PostgreSQL", "JDBC", "table"): bench.jdbc,
        ("Elasticsearch", "epochsink", "index"): bench.ours_elasticsearch,
        ("Elasticsearch", "parallel_bulk", "index"): bench.parallel_bulk,
    }
    for (_, _, kind), write in ways.items():
        # Spark's classes are loaded and its code is compiled before anything counts
        bench.ages(load, kind, write, seconds=WARM_SECONDS)
    samples: dict[tuple[str, str], Sample] = {}

    def add(target: str, way: str, sample: Sample) -> None:
        samples[target, way] = samples[target, way] + sample if (target, way) in samples else sample

    for turn in range(1, turns + 1):
        for (target, way, kind), write in ways.items():
            sample = bench.ages(load, kind, write)
            line = Ages.of(target, way, load, sample).line()
            console.print(f"{load}, turn {turn} of {turns}: {target}, {way}: {line}")
            add(target, way, sample)
        if bench.flink:
            for way, sample in bench.flink_ways(load):
                add("Kafka", way, sample)
    return [Ages.of(target, way, load, sample) for (target, way), sample in samples.items()]


def at_intervals(bench: Bench, load: Load) -> list[Ages]:
    """Let ours write into a topic at each longer interval of the trigger."""
    found = []
    for bench.trigger in TRIGGERS:
        sample = bench.ages(load, "topic", bench.ours_kafka)
        found.append(Ages.of("Kafka", f"epochsink, a trigger each {bench.trigger}", load, sample))
        console.print(f"{load}: {found[-1].way}: {found[-1].line()}")
    bench.trigger = "0 seconds"
    return found


def with_file_manager(bench: Bench, load: Load, turns: int) -> list[Ages]:
    """Let ours and Spark's sink write into a topic, in turn, while Spark's own files take less time."""
    ways = {
        "epochsink, the other file manager": bench.ours_kafka,
        "Spark's sink, the other file manager": bench.spark_kafka,
    }
    bench.spark.conf.set(FILE_MANAGER, RENAMES)
    samples: dict[str, Sample] = {}
    for _ in range(turns):
        for way, write in ways.items():
            sample = bench.ages(load, "topic", write)
            samples[way] = samples[way] + sample if way in samples else sample
    bench.spark.conf.unset(FILE_MANAGER)
    found = [Ages.of("Kafka", way, load, sample) for way, sample in samples.items()]
    for one in found:
        console.print(f"{load}: {one.way}: {one.line()}")
    return found


def printed(found: Sequence[Ages]) -> None:
    """Print the table, and the ratios as the last lines."""
    table = Table(title="milliseconds from a record's creation until a reader sees it", title_justify="left")
    for heading in ("a second", "parts", "target", "by", "p50", "p95", "p99", "worst", *KINDS):
        table.add_column(heading, no_wrap=True)
    for one in found:
        figures = (f"{value:,.0f}" for value in (one.p50, one.p95, one.p99, one.worst))
        used = (f"{one.processor[kind]:.2f}" for kind in KINDS)
        table.add_row(f"{one.rate:,}", str(one.partitions), one.target, one.way, *figures, *used)
    console.print(table)
    for one in found:
        ours = next(
            other
            for other in found
            if other.way == "epochsink"
            and (other.target, other.rate, other.partitions) == (one.target, one.rate, one.partitions)
        )
        if not one.way.startswith("epochsink") and not one.way.endswith("file manager"):
            aim = AIMS.get((one.target, one.way), 1.0)
            name = f"latency-{one.target}-vs-{one.way}-{one.rate}-{one.partitions}".translate(
                {32: "-", 39: None, 44: None}
            ).lower()
            console.print(
                f"RATIO {name} p50 {ours.p50 / one.p50:.2f}, p99 {ours.p99 / one.p99:.2f} (aim at most {aim})",
                highlight=False,
                soft_wrap=True,
            )


_LEFT: Final = 330
_LANE: Final = 26


def picture(found: Sequence[Ages]) -> str:
    """Draw a line for each way: from the median to p99, at the first load."""
    load = Load(found[0].rate, found[0].partitions)
    first = [
        one
        for one in found
        if Load(one.rate, one.partitions) == load
        and "file manager" not in one.way
        and not one.way.startswith("epochsink,")
    ]
    svg = Svg()
    title = "How old a row is when a reader sees it"
    svg.text(16, 30, title, class_="title")
    svg.text(16, 52, f"milliseconds from the record's creation, median to p99; {load}", class_="weak")
    top = svg.legend(
        16, 80, [("blue", "epochsink, exactly once"), ("grey", "at least once"), ("violet", "Flink, exactly once")]
    )
    most = max(one.p99 for one in first) * 1.1
    scale = (WIDTH - _LEFT - 120) / most
    rows = sorted(first, key=lambda one: (one.target, one.way != "epochsink"))
    for place, one in enumerate(rows):
        y = top + _LANE * place + 14
        colour = "violet" if one.way.startswith("Flink") else "blue" if one.way == "epochsink" else "grey"
        svg.text(_LEFT - 14, y + 5, f"{one.target}: {one.way}", text_anchor="end")
        svg.box(_LEFT + one.p50 * scale, y - 4, max((one.p99 - one.p50) * scale, 2), 8, class_=f"{colour} part")
        svg.dot(_LEFT + one.p50 * scale, y, f"median {one.p50:.0f} ms, p99 {one.p99:.0f} ms", class_=colour)
        svg.text(WIDTH - 16, y + 5, f"{one.p50:.0f}, {one.p99:.0f}", text_anchor="end", class_="head")
    return svg.document(top + _LANE * len(rows) + 20, title)


def main() -> None:
    """Measure every load."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=2, help="turns over all ways (default: %(default)s)")
    parser.add_argument(
        "--loads",
        default="1000:2,10000:2,1000:4",
        help="records a second:partitions, with commas (default: %(default)s)",
    )
    parser.add_argument(
        "--python", default="", help="the Python of an environment that has apache-flink; without it, Flink is left out"
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave results (JSON) and picture there")
    said = parser.parse_args()
    found: list[Ages] = []
    with ExitStack() as stack:
        broker = stack.enter_context(Broker({"broker.session.timeout.ms": 30_000})).bootstrap_servers
        dsn = stack.enter_context(LocalPostgres()).dsn
        url = stack.enter_context(LocalElasticsearch()).url
        spark = stack.enter_context(session())
        bench = Bench(spark, broker, dsn, url, said.python)
        loads = [Load(*map(int, load.split(":"))) for load in said.loads.split(",")]
        for load in loads:
            found += measured(bench, load, said.turns)
        found += at_intervals(bench, loads[0])
        found += with_file_manager(bench, loads[0], said.turns)
    printed(found)
    if said.keep:
        said.keep.mkdir(parents=True, exist_ok=True)
        kept = {"machine": machine(), "measured": time.strftime("%Y-%m-%d"), "ages": [asdict(one) for one in found]}
        (said.keep / RESULTS).write_text(json.dumps(kept, indent=1) + "\n")
        (said.keep / PICTURE).write_text(picture(found))


if __name__ == "__main__":
    main()
