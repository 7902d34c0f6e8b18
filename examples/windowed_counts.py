"""Counts per minute from files of JSON lines, kept in PostgreSQL: a stateful query with a watermark.

    INPUT=/data/clicks DSN=postgresql://app@localhost/shop CHECKPOINT=/tmp/clicks python windowed_counts.py

Each line is {"page": "/home", "at": "2026-01-01T00:00:00Z"}. A crash between state store and table leaves neither ahead
of the other: the epoch's state and its rows are decided by the same checkpoint.
"""

import os

from pyspark.sql import SparkSession, functions

from epochsink import ExactlyOnce, Postgres

sink = ExactlyOnce(
    checkpoint=os.environ["CHECKPOINT"],
    sinks={
        "counts": Postgres(os.environ["DSN"], table="clicks_per_minute", key=["minute", "page"], create=True),
    },
)

if __name__ == "__main__":
    # a state store for each shuffle partition: the default of 200 takes a minute on a laptop
    spark = SparkSession.builder.appName("clicks").config("spark.sql.shuffle.partitions", 2).getOrCreate()
    clicks = spark.readStream.schema("page STRING, at TIMESTAMP").json(os.environ["INPUT"])
    counts = (
        clicks.withWatermark("at", "10 minutes")
        .groupBy(functions.window("at", "1 minute").alias("minute"), "page")
        .count()
        .selectExpr("minute.start AS minute", "page", "`count` AS clicks")
    )
    sink.start(counts.writeStream.outputMode("update").trigger(availableNow=True)).awaitTermination()
