"""An archive of Spark's loaded classes: each of the many starts in these tests takes less than half the CPU time.

Run as ``python spark_archive.py FILE`` it starts Spark, runs a small stream, and leaves the archive behind.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pyspark
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from epochsink.services import spark_packages
from epochsink.services.cache import build_once, cache_folder
from epochsink.services.java import java

JVM_OPTIONS: Final = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
_FILE: Final = "spark.jsa"
_SECONDS: Final = 240


def class_path() -> str:
    """Return the jars of Spark's Kafka source and of PostgreSQL's JDBC driver, as a class path."""
    return ":".join(map(str, spark_packages()))


def jvm_options() -> str:
    """Return the options of a JVM that starts from the archive, which is made at the first call on a machine."""
    installed = f"{Path(pyspark.__file__).parent} {class_path()} {Path(java()).resolve()}"
    digest = hashlib.sha256(installed.encode()).hexdigest()[:12]
    archive = build_once(cache_folder() / "archives" / f"spark-{digest}", _fill) / _FILE
    return f"{JVM_OPTIONS} -XX:SharedArchiveFile={archive} -Xlog:cds=off -Xlog:class+path=off"


def _fill(draft: Path) -> None:
    command = [sys.executable, __file__, str(draft / _FILE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False, cwd=draft)
    if not (draft / _FILE).exists():
        raise RuntimeError(f"no archive of Spark's classes came about:\n{done.stdout}{done.stderr}")


def _make(archive: str) -> None:
    builder: Any = SparkSession.builder.master("local[2]")
    options = f"{JVM_OPTIONS} -XX:ArchiveClassesAtExit={archive} -Xlog:cds=off -Xlog:cds+dynamic=off"
    settings = {
        "spark.driver.extraJavaOptions": options,
        "spark.driver.extraClassPath": class_path(),
        "spark.driver.memory": "512m",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
    }
    for name, value in settings.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    gateway = session.sparkContext._gateway
    rows = session.readStream.format("rate-micro-batch").option("rowsPerBatch", 10).load()
    stream = rows.selectExpr("value % 3 AS a", "crc32(cast(value AS string)) AS b").writeStream
    stream.trigger(availableNow=True).foreachBatch(lambda frame, _: frame.collect() and None).start().awaitTermination()
    # of a broker that does not exist nothing can be read, and all classes for it are loaded
    source = session.read.format("kafka").option("kafka.bootstrap.servers", "127.0.0.1:1").option("subscribe", "none")
    with suppress(PySparkException, Py4JJavaError):
        source.option("kafka.default.api.timeout.ms", "2000").load().collect()
    session.stop()
    gateway.shutdown()
    # at the end of its input the JVM exits, and writes the archive
    gateway.proc.stdin.close()
    gateway.proc.wait(_SECONDS)


if __name__ == "__main__":
    _make(sys.argv[1])
