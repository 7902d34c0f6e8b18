"""The Spark session of the demo's pipelines: small, quick to start, and warm before there is work."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Final

from pyspark.sql import SparkSession

from epochsink.devkit.services import spark_packages
from epochsink.devkit.services.jvm import LIGHTLY

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pyarrow as pa

JVM_OPTIONS: Final = f"{LIGHTLY} -XX:+UseSerialGC"
LOCAL: Final = "local[2]"
_ARMED: Final = "EPOCHSINK_FAILPOINT"


def session(jvm_options: str, **settings: str) -> SparkSession:
    """Start Spark; ``settings`` are more of Spark's, or others."""
    defaults: dict[str, bool | float | int | str | None] = {
        "spark.master": LOCAL,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        # spark.jars would copy them at every start
        "spark.driver.extraClassPath": ":".join(str(jar) for jar in spark_packages()),
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
        "spark.driver.extraJavaOptions": jvm_options,
    }
    return SparkSession.builder.appName("epochsink-demo").config(map={**defaults, **settings}).getOrCreate()


def on_cluster(master: str) -> dict[str, str]:
    """Return what a session on a cluster is told besides; nothing where the driver runs the tasks itself."""
    if master.startswith("local"):
        return {"spark.master": master}
    # tasks run in the executors' environment, and reach the driver by its name
    armed = {f"spark.executorEnv.{name}": value for name, value in os.environ.items() if name.startswith(_ARMED)}
    where = {"spark.driver.host": socket.gethostname(), "spark.driver.bindAddress": "0.0.0.0"}  # noqa: S104 - likewise
    # the next run starts while this one works: none may take all that there is
    size = {"spark.executor.memory": "512m", "spark.executor.cores": "1", "spark.cores.max": "2"}
    return {"spark.master": master, **size, **where, **armed}


def warm_up(spark: SparkSession) -> None:
    """Start the Python workers, which then have the destinations' clients loaded."""
    spark.range(0, 2, 1, 2).mapInArrow(_pass_on, "id long").collect()


def _pass_on(batches: Iterable[pa.RecordBatch]) -> Iterable[pa.RecordBatch]:
    import epochsink.devkit.demo.settings  # noqa: F401, PLC0415 - loaded here is loaded for all tasks of this worker

    return batches
