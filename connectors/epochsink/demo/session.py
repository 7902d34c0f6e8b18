"""The Spark session of the demo's pipelines: small, and quick to start."""

from __future__ import annotations

from typing import Final

from pyspark.sql import SparkSession

from epochsink.services import spark_packages

JVM_OPTIONS: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Many short lives: what a JVM optimises late is never reached."""


def session(jvm_options: str) -> SparkSession:
    """Start Spark."""
    settings: dict[str, bool | float | int | str | None] = {
        "spark.master": "local[2]",
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        # spark.jars would copy them at every start
        "spark.driver.extraClassPath": ":".join(str(jar) for jar in spark_packages()),
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
        "spark.driver.extraJavaOptions": jvm_options,
    }
    return SparkSession.builder.appName("epochsink-demo").config(map=settings).getOrCreate()
