"""Orders to Kafka as Avro, with the id of their schema in a schema registry.

    INPUT=/data/orders KAFKA=localhost:9092 REGISTRY=http://localhost:8081 CHECKPOINT=/tmp/avro \
        spark-submit --packages org.apache.spark:spark-avro_2.13:4.2.0 orders_as_avro.py

The version in --packages is that of your PySpark; pip install "epochsink[kafka,avro]". The schema follows from the
columns, and is registered before the first row.
"""

import os

from pyspark.sql import SparkSession

from epochsink import Avro, ExactlyOnce, Kafka, NewTopic

sink = ExactlyOnce(
    checkpoint=os.environ["CHECKPOINT"],
    sinks={
        "orders": Kafka(
            bootstrap_servers=os.environ["KAFKA"],
            topic="orders.avro",
            key="order_id",
            value=Avro(registry=os.environ["REGISTRY"], subject="orders.avro-value", name="com.example.Order"),
            create=NewTopic(partitions=2),
        )
    },
)

if __name__ == "__main__":
    spark = SparkSession.builder.appName("orders").getOrCreate()
    orders = spark.readStream.schema("order_id BIGINT, amount DOUBLE").json(os.environ["INPUT"])
    sink.start(orders.writeStream.trigger(availableNow=True)).awaitTermination()
