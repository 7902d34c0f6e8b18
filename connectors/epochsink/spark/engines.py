"""Choose the engine of a session: classic PySpark's, or that of Spark Connect."""

from __future__ import annotations

from typing import TYPE_CHECKING

from epochsink.spark.engine import Engine

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter


def is_remote(value: object) -> bool:
    """Return whether a session, frame or stream writer is one of Spark Connect."""
    return any(kind.__module__.startswith("pyspark.sql.connect.") for kind in type(value).__mro__)


def engine_of(value: SparkSession | DataStreamWriter) -> Engine:
    """Return the engine of a session or stream writer."""
    # imported here: each of them needs what the other has not, py4j or grpcio
    if is_remote(value):
        from epochsink.spark.connect.engine import CONNECT  # noqa: PLC0415 - see above

        return CONNECT
    from epochsink.spark.classic.engine import CLASSIC  # noqa: PLC0415 - see above

    return CLASSIC
