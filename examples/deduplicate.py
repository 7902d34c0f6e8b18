"""The first of messages that a producer sent several times, appended to a table.

    INPUT=/data/payments DSN=postgresql://app@localhost/shop CHECKPOINT=/tmp/payments python deduplicate.py

Each line is {"payment_id": "a1", "amount": 12.5, "at": "2026-01-01T00:00:00Z"}. Exactly-once output writes each row of
the stream once; duplicates in the input are removed by Spark, whose state is decided together with the rows.
"""

import os

from pyspark.sql import SparkSession

from epochsink import ExactlyOnce, Postgres

sink = ExactlyOnce(
    checkpoint=os.environ["CHECKPOINT"],
    sinks={"payments": Postgres(os.environ["DSN"], table="payments", create=True)},
)

if __name__ == "__main__":
    # a state store for each shuffle partition: the default of 200 takes a minute on a laptop
    spark = SparkSession.builder.appName("payments").config("spark.sql.shuffle.partitions", 2).getOrCreate()
    payments = spark.readStream.schema("payment_id STRING, amount DOUBLE, at TIMESTAMP").json(os.environ["INPUT"])
    first = payments.withWatermark("at", "1 day").dropDuplicatesWithinWatermark(["payment_id"])
    sink.start(first.writeStream.trigger(availableNow=True)).awaitTermination()
