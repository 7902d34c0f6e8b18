"""The fixtures of test_spark_compat.py, in an environment that has no more than users have, and pytest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from pyspark.sql import SparkSession
from streams import Stream

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """Return a session of whatever PySpark is installed."""
    started = SparkSession.builder.getOrCreate()
    started.sparkContext.setLogLevel("OFF")
    yield started
    started.stop()


@pytest.fixture
def stream(spark: SparkSession, tmp_path: Path) -> Iterator[Stream]:
    """Return a stream of small files with a checkpoint of its own; its queries are stopped at the end."""
    made = Stream(spark, tmp_path)
    yield made
    for query in spark.streams.active:
        query.stop()
    made.end()
