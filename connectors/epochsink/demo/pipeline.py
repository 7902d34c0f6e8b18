"""The pipeline that is killed: Kafka -> Spark Structured Streaming -> destinations, with epochsink or without.

    python -m epochsink.demo.pipeline SETTINGS

A line "stop" on standard input ends it in order. The end of standard input means that the demo has died: then it
kills its own process group.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pyspark.sql import SparkSession

from epochsink import ExactlyOnce
from epochsink.demo.settings import PipelineSettings
from epochsink.faults import reach
from epochsink.services import spark_packages

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

ORDER: Final = "order_id long, customer string, amount double, placed_at timestamp"


def main() -> None:
    """Run the pipeline until it is stopped or killed."""
    settings = PipelineSettings.load(Path(sys.argv[1]))
    stop = threading.Event()
    threading.Thread(target=_listen, args=[stop], daemon=True).start()
    spark = _session()
    query = _start(_orders(spark, settings), settings)
    threading.Thread(target=_stop, args=[query, stop], daemon=True).start()
    query.awaitTermination()
    spark.stop()


def _listen(stop: threading.Event) -> None:
    for line in sys.stdin:
        if line.strip() == "stop":
            stop.set()
    if not stop.is_set():
        os.killpg(os.getpgid(0), signal.SIGKILL)


def _stop(query: StreamingQuery, wanted: threading.Event) -> None:
    wanted.wait()
    query.stop()


def _session() -> SparkSession:
    settings: dict[str, bool | float | int | str | None] = {
        "spark.master": "local[2]",
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        # spark.jars would copy them at every start
        "spark.driver.extraClassPath": ":".join(str(jar) for jar in spark_packages()),
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
        # many short lives: what a JVM optimises late is never reached
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    }
    return SparkSession.builder.appName("epochsink-demo").config(map=settings).getOrCreate()


def _orders(spark: SparkSession, settings: PipelineSettings) -> DataFrame:
    messages = (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", settings.bootstrap_servers)
        .option("subscribe", settings.topic)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", settings.orders_per_epoch)
        .load()
    )
    parsed = messages.selectExpr(
        f"from_json(CAST(value AS STRING), '{ORDER}') AS parsed",
        "partition AS source_partition",
        "offset AS source_offset",
    )
    return parsed.selectExpr("parsed.*", "source_partition", "source_offset")


def _start(orders: DataFrame, settings: PipelineSettings) -> StreamingQuery:
    if settings.plain:
        return _start_plain(orders, settings)
    sinks = {name: destination.sink() for name, destination in settings.destinations.items()}
    return ExactlyOnce(checkpoint=settings.checkpoint, sinks=sinks).start(orders.writeStream)


def _start_plain(orders: DataFrame, settings: PipelineSettings) -> StreamingQuery:
    def append(frame: DataFrame, _epoch: int) -> None:
        reach("coordinator.settle.before")
        for destination in settings.destinations.values():
            destination.append(frame)
        # here epochsink, too, has yet to hear what the checkpoint decides
        reach("coordinator.record.after")

    return orders.writeStream.foreachBatch(append).option("checkpointLocation", settings.checkpoint).start()


if __name__ == "__main__":
    main()
