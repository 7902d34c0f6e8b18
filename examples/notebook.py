"""Orders into PostgreSQL from a notebook, on a platform that brings its own Spark.

Each `# %%` begins a cell: Jupyter (with jupytext), VS Code and PyCharm open this file as a notebook. Install epochsink
on the cluster first, not in the notebook alone: executors need it too.
"""

# %% Where things are. The checkpoint is in a place that driver and executors reach, such as s3://lake/checkpoints/orders
import os

from pyspark.sql import SparkSession

from epochsink import ExactlyOnce, Postgres

dsn, checkpoint, folder = os.environ["DSN"], os.environ["CHECKPOINT"], os.environ["INPUT"]
spark = SparkSession.builder.getOrCreate()  # the notebook's own session

# %% The stream, as before
orders = spark.readStream.schema("order_id BIGINT, amount DOUBLE, placed_at TIMESTAMP").json(folder)

# %% The sink. On a server that prepares no transactions, as many managed ones, its rows are staged until the decision
table = Postgres(dsn, table="notebook_orders", key="order_id", create=True)
sink = ExactlyOnce(checkpoint=checkpoint, sinks={"orders": table})

# %% What would a start make or change? This changes nothing
print(sink.check(orders))

# %% Run. Interrupt the cell, restart the cluster, run all cells again: no row is lost, and none is there twice
query = sink.start(orders.writeStream.trigger(availableNow=True))
query.awaitTermination()

# %% How far is it?
print(sink.progress())
