"""`make bench ONLY=kafka`: the Kafka sink against Spark's own at-least-once sink, as it comes and well tuned."""

from __future__ import annotations

import tempfile
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from epochs import FIRST, make_rows, our_epoch, plain_epoch, session, small_epochs, stream, ticks
from measure import Report, console, sizes, spread

from epochsink import Kafka
from epochsink_devkit.services import LocalKafka

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pyspark.sql import DataFrame, SparkSession

PARTITIONS = 4
DELETED_SECONDS = 60
MARKERS = 1_000
"""Offsets that the ends of transactions take, at the most."""
AT_ONCE = {"log.segment.delete.delay.ms": 100, "broker.session.timeout.ms": 30_000}
"""Deleted topics leave the disk before the next run, and a broker that is short of processors keeps its place."""
TUNED = {"kafka.linger.ms": "20", "kafka.batch.size": "1048576", "kafka.compression.type": "lz4"}
OURS_TUNED = {name.removeprefix("kafka."): value for name, value in TUNED.items()}


class Broker(LocalKafka):
    """A broker with the JVM options that Kafka's documentation recommends, and less memory than there.

    Brokers take requests of a megabyte. With G1's small regions, those of a small heap, each of them is an object of
    its own kind, after which G1 marks the whole heap: at times that took more processor time than all else.
    """

    jvm_options = (
        "-Xms2g",
        "-Xmx2g",
        "-XX:+UseG1GC",
        "-XX:MaxGCPauseMillis=20",
        "-XX:InitiatingHeapOccupancyPercent=35",
        "-XX:G1HeapRegionSize=16M",
        "-XX:+ExplicitGCInvokesConcurrent",
    )


class Bench:
    """The broker, the rows, and the ways to write them: both sides as they come, or both with the same options."""

    def __init__(self, spark: SparkSession, broker: Broker, rows: int, folder: Path) -> None:
        self.spark = spark
        self.servers = broker.bootstrap_servers
        self.data = broker.data
        self.rows = rows
        self.path = make_rows(spark, folder, rows)
        self.admin = AdminClient({"bootstrap.servers": self.servers})

    def topic(self) -> str:
        name = f"bench-{uuid.uuid4().hex[:8]}"
        self.admin.create_topics([NewTopic(name, PARTITIONS)])[name].result(30)
        return name

    def rows_of(self) -> DataFrame:
        return stream(self.spark, self.path).selectExpr("payload AS value")

    def check_and_delete(self, topic: str) -> None:
        """Compare the offsets with the rows (transactions add a marker each), and see the disk freed."""
        consumer = Consumer({"bootstrap.servers": self.servers, "group.id": "bench"})
        ends = [consumer.get_watermark_offsets(TopicPartition(topic, n))[1] for n in range(PARTITIONS)]
        consumer.close()
        if not FIRST + self.rows <= sum(ends) <= FIRST + self.rows + MARKERS:
            raise AssertionError(f"{sum(ends)} offsets for {self.rows} rows: the measurement means nothing")
        self.admin.delete_topics([topic])[topic].result(30)
        deadline = time.monotonic() + DELETED_SECONDS
        while list(self.data.glob(f"{topic}*")):
            if time.monotonic() > deadline:
                raise AssertionError(f"topic {topic} still takes disk space: the next measurement would pay for it")
            time.sleep(0.05)

    def ours(self, *, options: Mapping[str, str] | None = None) -> Callable[[], float]:
        def run() -> float:
            topic = self.topic()
            sink = Kafka(bootstrap_servers=self.servers, topic=topic, options=options or {})
            seconds = our_epoch(self.rows_of(), sink)
            self.check_and_delete(topic)
            return seconds

        return run

    def spark_sink(self, **options: str) -> Callable[[], float]:
        def run() -> float:
            topic = self.topic()

            def write(frame: DataFrame, _epoch: int) -> None:
                writer = frame.write.format("kafka").option("kafka.bootstrap.servers", self.servers)
                writer.option("topic", topic).options(**options).save()

            seconds = plain_epoch(self.rows_of(), write)
            self.check_and_delete(topic)
            return seconds

        return run

    def latencies(self, epochs: int) -> None:
        """Print the time of small epochs, and how long after ``commits/N`` their rows are visible."""
        frame = ticks(self.spark, 1000).selectExpr("payload AS value")
        sink = Kafka(bootstrap_servers=self.servers, topic=self.topic())
        trigger, delays = small_epochs(frame, sink, epochs, "200 milliseconds")
        console.print(f"an epoch of 1,000 rows: {trigger:.0f} ms a trigger (median)")
        console.print(f"from commits/N to visible rows: {spread(delays)}")


def main() -> None:
    """Measure everything."""
    options = sizes(__doc__, 4_000_000)
    with (
        tempfile.TemporaryDirectory(prefix="epochsink-bench-") as folder,
        Broker(AT_ONCE) as broker,
        session() as spark,
    ):
        bench, report = Bench(spark, broker, options.rows, Path(folder)), Report.of(options)
        rows = bench.rows
        if not options.only:
            bench.latencies(options.epochs)
        report.ratio("kafka-vs-spark-default", 1.3, rows, bench.ours(), bench.spark_sink())
        report.ratio("kafka-vs-spark-tuned", 1.2, rows, bench.ours(options=OURS_TUNED), bench.spark_sink(**TUNED))
        report.print()


if __name__ == "__main__":
    main()
