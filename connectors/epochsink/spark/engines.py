"""Choose the engine of a session: the JVM's for classic PySpark."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from epochsink.errors import UnsupportedQuery

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from epochsink.spark.engine import Engine


def is_remote(value: object) -> bool:
    """Return whether a session, frame or stream writer is one of Spark Connect."""
    return any(kind.__module__.startswith("pyspark.sql.connect.") for kind in type(value).__mro__)


def refuse_remote() -> NoReturn:
    """Raise `UnsupportedQuery` for what belongs to Spark Connect."""
    raise UnsupportedQuery(
        "Spark Connect is not supported: it runs foreachBatch in another process than the query",
        hint="run the pipeline with classic PySpark (spark-submit, or SparkSession.builder without remote())",
    )


def engine_of(session: SparkSession) -> Engine:
    """Return the engine of a session. Raises `UnsupportedQuery` for a Spark Connect session."""
    return _engine_of(session)


def engine_of_writer(writer: DataStreamWriter) -> Engine:
    """Return the engine of a stream writer. Raises `UnsupportedQuery` for one of Spark Connect."""
    return _engine_of(writer)


def _engine_of(value: object) -> Engine:
    if is_remote(value):
        refuse_remote()
    from epochsink.spark.classic.engine import CLASSIC  # noqa: PLC0415 - imports py4j, which only this engine needs

    return CLASSIC
