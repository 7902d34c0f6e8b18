"""All totals in each epoch (output mode "complete"), of which only those that changed are written.

    INPUT=/data/orders DSN=postgresql://app@localhost/shop CHECKPOINT=/tmp/totals python running_totals.py

Each line is {"customer": "ann", "amount": 12}. Late rows count as well: there is no watermark.
"""

import os

from pyspark.sql import SparkSession

from epochsink import ExactlyOnce, Postgres

sink = ExactlyOnce(
    checkpoint=os.environ["CHECKPOINT"],
    sinks={
        "totals": Postgres(os.environ["DSN"], table="customer_totals", key="customer", skip_unchanged=True, create=True)
    },
)

if __name__ == "__main__":
    # a state store for each shuffle partition: the default of 200 takes a minute on a laptop
    spark = SparkSession.builder.appName("totals").config("spark.sql.shuffle.partitions", 2).getOrCreate()
    orders = spark.readStream.schema("customer STRING, amount BIGINT").json(os.environ["INPUT"])
    totals = orders.groupBy("customer").sum("amount").withColumnRenamed("sum(amount)", "total")
    sink.start(totals.writeStream.outputMode("complete").trigger(availableNow=True)).awaitTermination()
