"""How a pipeline is tested: its logic with a sink that needs no service, and with PostgreSQL in a container.

    pip install "epochsink[spark,postgres,docker]" pytest && pytest test_pipeline.py

The pipeline is a function of its input, its checkpoint and its sinks, so that a test can give it others.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from pyspark.sql import SparkSession
from testcontainers.community.postgres import PostgresContainer

from epochsink import ExactlyOnce, Postgres, Sink
from epochsink.errors import EpochsinkError
from epochsink.testing import LocalSink

IMAGE = os.environ.get("POSTGRES_IMAGE", "postgres:18.6")


def run_pipeline(spark: SparkSession, folder: Path, checkpoint: Path, sink: Sink) -> None:
    """Keep what was paid; runs until the input is read to its end."""
    orders = spark.readStream.schema("order_id BIGINT, amount DOUBLE").json(str(folder))
    exactly_once = ExactlyOnce(checkpoint=str(checkpoint), sinks={"paid": sink})
    exactly_once.start(orders.where("amount > 0").writeStream.trigger(availableNow=True)).awaitTermination()


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    session = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
    yield session
    session.stop()


@pytest.fixture
def orders(tmp_path: Path) -> Path:
    folder = tmp_path / "orders"
    folder.mkdir()
    rows = [{"order_id": 1, "amount": 9.5}, {"order_id": 2, "amount": 0}, {"order_id": 3, "amount": 1}]
    (folder / "1.json").write_text("\n".join(json.dumps(row) for row in rows))
    return folder


def test_only_paid_orders_arrive_and_a_restart_brings_none_twice(
    spark: SparkSession, orders: Path, tmp_path: Path
) -> None:
    sink = LocalSink(tmp_path / "sink")
    for _ in range(2):
        run_pipeline(spark, orders, tmp_path / "checkpoint", sink)
    assert sorted(row["order_id"] for row in sink.rows()) == [1, 3]


def test_a_commit_whose_reply_is_lost_is_finished_by_the_next_run(
    spark: SparkSession, orders: Path, tmp_path: Path
) -> None:
    sink = LocalSink(tmp_path / "sink")
    sink.lose_reply()
    with pytest.raises(EpochsinkError, match="reply"):
        run_pipeline(spark, orders, tmp_path / "checkpoint", sink)
    run_pipeline(spark, orders, tmp_path / "checkpoint", sink)
    assert sorted(row["order_id"] for row in sink.rows()) == [1, 3]


def test_rows_arrive_in_postgresql(spark: SparkSession, orders: Path, tmp_path: Path) -> None:
    server = PostgresContainer(IMAGE, driver=None).with_command("postgres --max_prepared_transactions=64")
    with server as running, psycopg.connect(running.get_connection_url(), autocommit=True) as connection:
        connection.execute("CREATE TABLE paid (order_id bigint PRIMARY KEY, amount double precision)")
        sink = Postgres(running.get_connection_url(), table="paid", key="order_id")
        run_pipeline(spark, orders, tmp_path / "checkpoint", sink)
        assert connection.execute("SELECT order_id FROM paid ORDER BY 1").fetchall() == [(1,), (3,)]
