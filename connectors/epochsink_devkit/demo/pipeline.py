"""Run the pipeline to kill: Kafka -> Spark Structured Streaming -> destinations, with or without epochsink.

    python -m epochsink_devkit.demo.pipeline SETTINGS

The process starts Spark and waits for a line "start" on standard input. A line "stop" ends it in order. If standard
input ends, the demo has died, and the process kills its own process group.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from epochsink import EpochProgress, ExactlyOnce
from epochsink.failpoints import reach
from epochsink_devkit.demo.connect_server import connect, start_server
from epochsink_devkit.demo.destination import Appendable
from epochsink_devkit.demo.session import on_cluster, session, warm_up
from epochsink_devkit.demo.settings import PipelineSettings
from epochsink_devkit.services import spark_packages

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery


ORDER: Final = "order_id long, customer string, amount double, placed_at timestamp"


def main() -> None:
    """Start Spark, wait for "start", and run the pipeline until it is stopped or killed."""
    settings = PipelineSettings.load(Path(sys.argv[1]))
    signals = {what: threading.Event() for what in ("start", "stop")}
    threading.Thread(target=_listen, args=[signals], daemon=True).start()
    with _session(settings) as spark:
        _serve(spark, settings, signals)


@contextmanager
def _session(settings: PipelineSettings) -> Iterator[SparkSession]:
    own = on_cluster(settings.master)
    if not settings.connect:
        spark = session(settings.jvm_options, **own)
        yield spark
        spark.stop()
        return
    jars = {"spark.driver.extraClassPath": ":".join(map(str, spark_packages()))}
    server, url = start_server(jars | own, settings.jvm_options)
    spark = connect(url)
    yield spark
    spark.stop()
    server.kill()
    server.wait()


def _serve(spark: SparkSession, settings: PipelineSettings, signals: Mapping[str, threading.Event]) -> None:
    if not settings.plain:
        # The plain pipeline runs no Python in its tasks.
        warm_up(spark)
    signals["start"].wait()
    query = _start(_orders(spark, settings), settings)
    threading.Thread(target=_stop, args=[query, signals["stop"]], daemon=True).start()
    query.awaitTermination()


def _listen(signals: Mapping[str, threading.Event]) -> None:
    for line in sys.stdin:
        signals[line.strip()].set()
    if not signals["stop"].is_set():
        os.killpg(os.getpgid(0), signal.SIGKILL)


def _stop(query: StreamingQuery, wanted: threading.Event) -> None:
    wanted.wait()
    query.stop()


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
    epochs = Path(settings.epochs)

    def note(epoch: EpochProgress) -> None:
        with epochs.open("a") as file:
            file.write(json.dumps(asdict(epoch)) + "\n")

    return ExactlyOnce(checkpoint=settings.checkpoint, sinks=sinks, on_progress=note).start(orders.writeStream)


def _start_plain(orders: DataFrame, settings: PipelineSettings) -> StreamingQuery:
    # The demo gives only such destinations to the plain pipeline.
    destinations = cast("Sequence[Appendable]", list(settings.destinations.values()))

    def append(frame: DataFrame, _epoch: int) -> None:
        reach("coordinator.settle.before")
        for number, destination in enumerate(destinations):
            if number:
                reach("coordinator.vote.between")
            destination.append(frame)
        # At this point the checkpoint has not decided for epochsink either.
        reach("coordinator.record.after")

    return orders.writeStream.foreachBatch(append).option("checkpointLocation", settings.checkpoint).start()


if __name__ == "__main__":
    main()
