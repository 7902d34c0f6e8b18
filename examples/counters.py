"""Counters that are right: clicks per page, added to what the table holds.

    INPUT=/data/clicks DSN=postgresql://app@localhost/shop CHECKPOINT=/tmp/counters python counters.py

Each line is {"page": "/home", "at": "2026-01-01T00:00:00Z"}. Adding is not idempotent: with at-least-once a replayed
epoch counts its clicks twice. Here each epoch adds once, and the query needs no state store.
"""

import os

from pyspark.sql import SparkSession

from epochsink import ExactlyOnce, Postgres

sink = ExactlyOnce(
    checkpoint=os.environ["CHECKPOINT"],
    sinks={
        "pages": Postgres(
            os.environ["DSN"],
            table="page_counters",
            key="page",
            select=["page", "1L AS clicks", "at AS last_seen"],
            accumulate={"clicks": "sum", "last_seen": "max"},
            create=True,
        )
    },
)

if __name__ == "__main__":
    spark = SparkSession.builder.appName("counters").getOrCreate()
    clicks = spark.readStream.schema("page STRING, at TIMESTAMP").json(os.environ["INPUT"])
    sink.start(clicks.writeStream.trigger(availableNow=True)).awaitTermination()
