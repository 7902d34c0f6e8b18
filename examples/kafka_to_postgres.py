"""A change stream from Kafka kept as a table in PostgreSQL: upserts and deletes, each exactly once.

    KAFKA=localhost:9092 DSN=postgresql://app@localhost/shop CHECKPOINT=/tmp/orders \
        spark-submit --packages org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0 kafka_to_postgres.py

The version in --packages is that of your PySpark. On Spark Connect the server has the package, and the command is
``SPARK_REMOTE=sc://localhost KAFKA=... DSN=... CHECKPOINT=... python kafka_to_postgres.py``.

The topic ``orders`` holds JSON: {"order_id": 7, "op": "U", "amount": 12.5, "updated_at": "2026-01-01T00:00:00Z"},
where op "D" deletes. Runs until the topic is read to its end; start it again for what came since.
"""

import os

from pyspark.sql import SparkSession

from epochsink import ExactlyOnce, Postgres

SCHEMA = "order_id BIGINT, op STRING, amount DOUBLE, updated_at TIMESTAMP"
sink = ExactlyOnce(
    checkpoint=os.environ["CHECKPOINT"],
    sinks={
        "table": Postgres(
            os.environ["DSN"],
            table="orders",
            key="order_id",
            order_by="updated_at",
            select=["order_id", "amount", "updated_at"],
            delete_when="op = 'D'",
        )
    },
)

if __name__ == "__main__":
    spark = SparkSession.builder.appName("orders").getOrCreate()
    changes = (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", os.environ["KAFKA"])
        .option("subscribe", "orders")
        .option("startingOffsets", "earliest")
        .load()
        .selectExpr(f"from_json(CAST(value AS STRING), '{SCHEMA}') AS change")
        .select("change.*")
    )
    sink.start(changes.writeStream.trigger(availableNow=True)).awaitTermination()
