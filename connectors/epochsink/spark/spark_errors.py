"""Recognise what PySpark raises, without py4j: a client of Spark Connect has none."""

from __future__ import annotations

from pyspark.errors import PySparkException


def is_of_spark(failure: BaseException) -> bool:
    """Return whether Spark, or the way to its JVM, raised an error."""
    return isinstance(failure, PySparkException) or any(
        kind.__module__.partition(".")[0] == "py4j" for kind in type(failure).__mro__
    )


def is_of_lost_jvm(failure: BaseException | None) -> bool:
    """Return whether an error says that the JVM has ended."""
    return any(kind.__name__ == "Py4JNetworkError" for kind in type(failure).__mro__)
