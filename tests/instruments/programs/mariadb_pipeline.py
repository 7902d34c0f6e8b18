"""A pipeline from JSON files into MariaDB, an epoch a file, until all files are read: what the test kills."""

from __future__ import annotations

import sys

from pyspark.sql import SparkSession

from epochsink import ExactlyOnce
from mariadb_sink import MariaDB


def main(url: str, source: str, checkpoint: str) -> None:
    """Run until everything in ``source`` is in the table."""
    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    rows = spark.readStream.schema("id bigint, name string").option("maxFilesPerTrigger", 1).json(source)
    sink = ExactlyOnce(checkpoint=checkpoint, sinks={"lines": MariaDB(url=url, table="numbers")})
    sink.start(rows.repartition(2).writeStream.trigger(availableNow=True)).awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
