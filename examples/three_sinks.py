"""Orders to a topic, a table and a search index at once: one pass over each micro-batch, one decision for all.

    INPUT=/data/orders KAFKA=localhost:9092 DSN=postgresql://app@localhost/shop ELASTICSEARCH=http://localhost:9200 \
        CHECKPOINT=/tmp/orders python three_sinks.py

Each line is {"order_id": 7, "customer": "ann", "amount": 12.5, "placed_at": "2026-01-01T00:00:00Z"}. A crash at any
moment leaves no target with an epoch that another one never gets.
"""

import os

from pyspark.sql import SparkSession

from epochsink import Elasticsearch, ExactlyOnce, Kafka, NewTopic, Postgres

sink = ExactlyOnce(
    checkpoint=os.environ["CHECKPOINT"],
    sinks={
        "topic": Kafka(
            bootstrap_servers=os.environ["KAFKA"], topic="orders.paid", key="order_id", create=NewTopic(partitions=2)
        ),
        "table": Postgres(os.environ["DSN"], table="paid_orders", key="order_id", create=True),
        "index": Elasticsearch(os.environ["ELASTICSEARCH"], index="paid-orders", key="order_id"),
    },
)

if __name__ == "__main__":
    spark = SparkSession.builder.appName("orders").getOrCreate()
    orders = spark.readStream.schema("order_id BIGINT, customer STRING, amount DOUBLE, placed_at TIMESTAMP").json(
        os.environ["INPUT"]
    )
    sink.start(orders.where("amount > 0").writeStream.trigger(availableNow=True)).awaitTermination()
