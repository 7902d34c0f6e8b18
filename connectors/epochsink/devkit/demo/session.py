"""The Spark session of the demo's pipelines: small, quick to start, and warm before there is work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql import SparkSession

from epochsink.devkit.services import spark_packages
from epochsink.devkit.services.jvm import LIGHTLY

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pyarrow as pa

JVM_OPTIONS: Final = f"{LIGHTLY} -XX:+UseSerialGC"


def session(jvm_options: str, **settings: str) -> SparkSession:
    """Start Spark; ``settings`` are more of Spark's, or others."""
    defaults: dict[str, bool | float | int | str | None] = {
        "spark.master": "local[2]",
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


def warm_up(spark: SparkSession) -> None:
    """Start the Python workers, which then have the destinations' clients loaded."""
    spark.range(0, 2, 1, 2).mapInArrow(_pass_on, "id long").collect()


def _pass_on(batches: Iterable[pa.RecordBatch]) -> Iterable[pa.RecordBatch]:
    import epochsink.devkit.demo.settings  # noqa: F401, PLC0415 - loaded here is loaded for all tasks of this worker

    return batches
