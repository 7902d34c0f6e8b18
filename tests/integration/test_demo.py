"""The demo on real services: it sees what is wrong in a table, and runs from end to end."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing
from typing import TYPE_CHECKING

import psycopg
import pytest
from confluent_kafka import Consumer, TopicPartition

from epochsink.demo.destination import Tally
from epochsink.demo.orders import PARTITIONS, Orders, make_topic
from epochsink.demo.table import PostgresTable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from epochsink.services import KafkaService, PostgresService
    from fix_services import FreshName

ORDERS = 2_000


@pytest.fixture
def table(postgres: PostgresService, fresh_table: FreshName) -> PostgresTable:
    """Return an empty destination."""
    made = PostgresTable(postgres.dsn, postgres.jdbc_url, postgres.jdbc_driver, fresh_table())
    made.create()
    return made


def insert(table: PostgresTable, rows: Sequence[tuple[int, int, int]]) -> None:
    """Insert rows of (order, partition, offset)."""
    statement = f"INSERT INTO {table.table} (order_id, source_partition, source_offset) VALUES (%s, %s, %s)"  # noqa: S608 - a name of ours
    with psycopg.connect(table.dsn) as connection:
        connection.cursor().executemany(statement, rows)


def test_a_tally_counts_what_is_lost_and_what_came_twice(table: PostgresTable) -> None:
    insert(table, [(0, 0, 0), (1, 1, 0), (2, 0, 1)])
    assert table.tally(3) == Tally(rows_out=3, lost=0, duplicated=0)
    assert table.tally(5) == Tally(rows_out=3, lost=2, duplicated=0)
    insert(table, [(2, 0, 1), (1, 1, 0)])
    assert table.tally(3) == Tally(rows_out=5, lost=0, duplicated=2)


def test_a_row_that_is_no_order_does_not_hide_a_loss(table: PostgresTable) -> None:
    insert(table, [(0, 0, 0), (99, 0, 1)])
    assert table.tally(2) == Tally(rows_out=2, lost=1, duplicated=1)


def test_an_eye_sees_the_rows_beyond_what_is_decided(table: PostgresTable) -> None:
    with closing(table.eye()) as eye:
        assert (eye.look(), eye.beyond({})) == (0, set())
        insert(table, [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)])
        assert eye.beyond({}) == set()
        assert eye.look() == 4
        assert eye.beyond({}) == {0, 1, 2, 3}
        assert eye.beyond({0: 1, 1: 2}) == {2}
        assert eye.beyond({0: 2, 1: 2}) == set()


def test_orders_are_dense_and_stop_where_they_are_told_to(kafka: KafkaService, fresh_topic: FreshName) -> None:
    topic = fresh_topic("orders")
    make_topic(kafka.bootstrap_servers, topic)
    orders = Orders(kafka.bootstrap_servers, topic, 3_000, lambda: 1_200, seed=1)
    orders.start()
    found = read_orders(kafka, topic, 1_000)
    orders.end()
    orders.raise_failure()
    assert orders.produced == 1_000
    assert sorted(found) == list(range(1_000))


def read_orders(kafka: KafkaService, topic: str, count: int) -> list[int]:
    consumer = Consumer({"bootstrap.servers": kafka.bootstrap_servers, "group.id": topic})
    try:
        consumer.assign([TopicPartition(topic, partition, 0) for partition in range(PARTITIONS)])
        found: list[int] = []
        while len(found) < count:
            messages = consumer.consume(count, timeout=20)
            assert messages, f"only {len(found)} orders came"
            found += [json.loads(message.value() or b"")["order_id"] for message in messages]
        return found
    finally:
        consumer.close()


@pytest.mark.timeout(900)
def test_the_demo_runs_from_end_to_end() -> None:
    """With this seed, both pipelines are killed once, after the write and before the checkpoint decides."""
    command = [sys.executable, "-m", "epochsink.cli", "demo", "--orders", str(ORDERS), "--kills", "1", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=880)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "epochsink: every order arrived exactly once" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if " PostgreSQL " in line]
    ours, plain = (row[2:] for row in rows if row[1] == "PostgreSQL")
    assert ours == ["1", "2,000", "2,000", "0", "0", "0"]
    duplicated, early = plain[4:]
    assert duplicated != "0" != early
