"""Start the Spark session of the demo's pipelines quickly, and warm it up before there is work."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyspark
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from pyspark.sql import SparkSession

from epochsink.errors import ServiceError
from epochsink.spark.classic.compat import gateway_of
from epochsink_devkit.services import LocalKafka, spark_packages
from epochsink_devkit.services.cache import build_once, cache_folder
from epochsink_devkit.services.java import LIGHTLY, fingerprint, from_archive, java

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

JVM_OPTIONS: Final = f"{LIGHTLY} -XX:+UseSerialGC"
LOCAL: Final = "local[2]"
_ARMED: Final = "EPOCHSINK_FAILPOINT"


def session(jvm_options: str, **settings: str) -> SparkSession:
    """Start Spark. ``settings`` add to or replace Spark's settings."""
    defaults: dict[str, bool | float | int | str | None] = {
        "spark.master": LOCAL,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        # spark.jars would copy them at every start.
        "spark.driver.extraClassPath": ":".join(str(jar) for jar in spark_packages()),
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
        "spark.driver.extraJavaOptions": jvm_options,
    }
    return SparkSession.builder.appName("epochsink-demo").config(map={**defaults, **settings}).getOrCreate()


def on_cluster(master: str) -> dict[str, str]:
    """Return the additional settings for a session on a cluster; empty if the driver runs the tasks itself."""
    if master.startswith("local"):
        return {"spark.master": master}
    # Tasks run in the executors' environment and reach the driver by its host name.
    armed = {f"spark.executorEnv.{name}": value for name, value in os.environ.items() if name.startswith(_ARMED)}
    where = {"spark.driver.host": socket.gethostname(), "spark.driver.bindAddress": "0.0.0.0"}  # noqa: S104 - likewise
    # The next run starts while this one works, so no run may take all cores.
    size = {"spark.executor.memory": "512m", "spark.executor.cores": "1", "spark.cores.max": "2"}
    return {"spark.master": master, **size, **where, **armed}


def warm_up(spark: SparkSession) -> None:
    """Start the Python workers, and load the destinations' clients in them."""
    spark.range(0, 2, 1, 2).mapInArrow(_pass_on, "id long").collect()


def _pass_on(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    import epochsink_devkit.demo.settings  # noqa: F401, PLC0415 - loaded here is loaded for all tasks of this worker

    return iter(batches)


_FILE: Final = "spark.jsa"
_SECONDS: Final = 240.0
_TOPIC: Final = "classes"
_MESSAGES: Final = 20


def jvm_options() -> str:
    """Return the options of a JVM that starts from the class archive. The first call on a machine creates the archive.

    Raises `ServiceError` if it cannot be created.
    """
    archive = build_once(_folder(), _fill) / _FILE
    return " ".join([JVM_OPTIONS, *from_archive(archive)])


def is_made() -> bool:
    """Return whether the archive exists."""
    return _folder().is_dir()


def _folder() -> Path:
    jars = [*Path(pyspark.__file__).with_name("jars").glob("*.jar"), *spark_packages()]
    made_so = Path(__file__).read_text()
    return cache_folder() / "archives" / f"demo-{fingerprint(java(), jars, JVM_OPTIONS, made_so)}"


def _fill(draft: Path) -> None:
    command = [sys.executable, "-m", __name__, str(draft / _FILE)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False, cwd=draft)
    except subprocess.TimeoutExpired as late:
        raise ServiceError(f"the archive of Spark's classes was not created within {_SECONDS:.0f} s") from late
    if not (draft / _FILE).exists():
        raise ServiceError(f"the archive of Spark's classes was not created:\n{done.stdout}{done.stderr}")


def _make(archive: str) -> None:
    spark = session(f"{JVM_OPTIONS} -XX:ArchiveClassesAtExit={archive} -Xlog:cds=off -Xlog:cds+dynamic=off")
    gateway = gateway_of(spark)
    _load_classes(spark)
    spark.stop()
    gateway.shutdown()
    # When its standard input ends, the JVM writes the archive and exits.
    gateway.proc.stdin.close()
    gateway.proc.wait(_SECONDS)


def _load_classes(spark: SparkSession) -> None:
    """Do what the pipelines do: parse and render a few messages of a topic, through Python, in batches."""
    with LocalKafka(short_lived=True) as broker, tempfile.TemporaryDirectory() as checkpoint:
        admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
        admin.create_topics([NewTopic(_TOPIC, 1, 1)])[_TOPIC].result(timeout=30)
        producer = Producer({"bootstrap.servers": broker.bootstrap_servers})
        for _ in range(_MESSAGES):
            producer.produce(_TOPIC, b'{"a": 1}')
        producer.flush(30)
        options = {"kafka.bootstrap.servers": broker.bootstrap_servers, "subscribe": _TOPIC}
        # Two batches, because the second one runs code that the first one does not.
        options |= {"startingOffsets": "earliest", "maxOffsetsPerTrigger": str(_MESSAGES // 2)}
        rows = spark.readStream.format("kafka").options(**options).load()
        writer = rows.writeStream.option("checkpointLocation", checkpoint).trigger(availableNow=True)
        writer.foreachBatch(_batch).start().awaitTermination()


def _batch(frame: DataFrame, _epoch: int) -> None:
    parsed = frame.selectExpr("from_json(CAST(value AS STRING), 'a long') AS parsed", "*").selectExpr("parsed.*", "*")
    rendered = parsed.selectExpr("struct(to_json(struct(*)) AS value) AS row")
    rendered.mapInArrow(lambda batches: batches, rendered.schema).collect()


if __name__ == "__main__":
    _make(sys.argv[1])
