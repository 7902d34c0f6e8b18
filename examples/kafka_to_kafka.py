"""From topic to topic: messages that are worth keeping, each once, in place of Spark's own Kafka sink.

    KAFKA=localhost:9092 CHECKPOINT=/tmp/errors \
        spark-submit --packages org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0 kafka_to_kafka.py

The version in --packages is that of your PySpark. Columns ``key``, ``value`` and ``headers`` are written as they are.
Consumers need isolation.level=read_committed: without it they see what was rolled back, too.
"""

import os

from pyspark.sql import SparkSession

from epochsink import ExactlyOnce, Kafka, NewTopic

sink = ExactlyOnce(
    checkpoint=os.environ["CHECKPOINT"],
    sinks={"errors": Kafka(bootstrap_servers=os.environ["KAFKA"], topic="log.errors", create=NewTopic(partitions=2))},
)

if __name__ == "__main__":
    spark = SparkSession.builder.appName("errors").getOrCreate()
    lines = (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", os.environ["KAFKA"])
        .option("subscribe", "log.lines")
        .option("startingOffsets", "earliest")
        .option("includeHeaders", "true")
        .load()
    )
    errors = lines.where("get_json_object(CAST(value AS STRING), '$.level') = 'ERROR'").select(
        "key", "value", "headers"
    )
    sink.start(errors.writeStream.trigger(availableNow=True)).awaitTermination()
