"""The demo on real services: it sees what is wrong in a destination, and runs from end to end."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing
from typing import TYPE_CHECKING

import psycopg
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from elasticsearch import Elasticsearch as Client
from elasticsearch import helpers

from epochsink_devkit.demo.index import ElasticsearchIndex
from epochsink_devkit.demo.orders import PARTITIONS, Orders, make_topic
from epochsink_devkit.demo.table import PostgresTable
from epochsink_devkit.demo.topic import KafkaTopic

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from fix_services import FreshName

    from epochsink_devkit.demo.destination import Destination, Offsets
    from epochsink_devkit.services import ElasticsearchService, KafkaService, PostgresService

    Insert = Callable[[Sequence[tuple[int, int, int]]], None]
    """Inserts rows of (order, partition, offset)."""

ORDERS = 2_000
DEADLINE = 30.0
COLUMNS = ("order_id", "source_partition", "source_offset")


@pytest.fixture
def table(postgres: PostgresService, fresh_table: FreshName) -> tuple[Destination, Insert]:
    """Return an empty table, and what inserts into it."""
    made = PostgresTable(postgres.dsn, postgres.jdbc_url, postgres.jdbc_driver, fresh_table())

    def insert(rows: Sequence[tuple[int, int, int]]) -> None:
        statement = f"INSERT INTO {made.table} ({', '.join(COLUMNS)}) VALUES (%s, %s, %s)"  # noqa: S608 - a name of ours
        with psycopg.connect(made.dsn) as connection:
            connection.cursor().executemany(statement, rows)

    made.create()
    return made, insert


@pytest.fixture
def topic(kafka: KafkaService, fresh_topic: FreshName) -> tuple[Destination, Insert]:
    """Return an empty topic, and what inserts into it."""
    made = KafkaTopic(kafka.bootstrap_servers, fresh_topic("out"))

    def insert(rows: Sequence[tuple[int, int, int]]) -> None:
        producer = Producer({"bootstrap.servers": made.bootstrap_servers})
        for row in rows:
            producer.produce(made.topic, json.dumps(dict(zip(COLUMNS, row, strict=True))))
        assert producer.flush(DEADLINE) == 0

    made.create()
    return made, insert


@pytest.fixture
def index(elasticsearch: ElasticsearchService, fresh_index: FreshName) -> tuple[Destination, Insert]:
    """Return an empty index, and what inserts into it."""
    made = ElasticsearchIndex(elasticsearch.url, fresh_index())

    def insert(rows: Sequence[tuple[int, int, int]]) -> None:
        with closing(Client(made.url)) as client:
            helpers.bulk(client, [dict(zip(COLUMNS, row, strict=True)) for row in rows], index=made.index)

    made.create()
    return made, insert


@pytest.fixture(params=["table", "topic", "index"])
def place(request: pytest.FixtureRequest) -> tuple[Destination, Insert]:
    """Return each kind of destination, empty, and what inserts into it."""
    made: tuple[Destination, Insert] = request.getfixturevalue(request.param)
    return made


def test_copies_of_an_order_are_counted(place: tuple[Destination, Insert]) -> None:
    destination, insert = place
    assert destination.copies() == Counter()
    insert([(0, 0, 0), (1, 1, 0), (2, 0, 1), (2, 0, 1)])
    assert destination.copies() == Counter({0: 1, 1: 1, 2: 2})


def test_an_eye_sees_the_rows_beyond_what_is_decided(place: tuple[Destination, Insert]) -> None:
    destination, insert = place
    with closing(destination.eye()) as eye:
        assert (eye.look(), eye.beyond({})) == (0, set())
        insert([(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)])
        # nobody has looked again
        assert eye.beyond({}) == set()
    assert early(destination, 4, {}) == {0, 1, 2, 3}
    assert early(destination, 4, {0: 1, 1: 2}) == {2}
    assert early(destination, 4, {0: 2, 1: 2}) == set()


def early(destination: Destination, rows: int, decided: Offsets) -> set[int]:
    """Look until so many rows were seen; return those beyond what is decided."""
    deadline = time.monotonic() + DEADLINE
    found: set[int] = set()
    with closing(destination.eye()) as eye:
        while time.monotonic() < deadline:
            visible = eye.look()
            found |= eye.beyond(decided)
            if visible == rows:
                return found
    raise AssertionError(f"never {rows} rows")


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
def test_the_demo_runs_from_end_to_end(tmp_path: Path) -> None:
    """With this seed, one is killed in the middle of an Elasticsearch apply, the other between two of its writes."""
    command = [
        sys.executable,
        "-m",
        "epochsink.cli.app",
        "demo",
        "--connect",
        "--orders",
        str(ORDERS),
        "--kills",
        "1",
        "--seed",
        "27",
        "--page",
        str(tmp_path / "demo.html"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=880)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": every order arrived exactly once") == 6
    rows = [line.split() for line in done.stdout.splitlines()]
    ours, connect, plain, upsert = (
        {row[1]: row[2:] for row in rows if row[:1] == [name]} for name in ("epochsink", "connect", "plain", "upsert")
    )
    exact = ["2,000", "2,000", "0", "0", "0", "0"]
    assert ours == connect == {"PostgreSQL": exact, "Elasticsearch": exact, "Kafka": exact}
    _, _, _, duplicated, divergent, seen_early = plain["PostgreSQL"]
    assert "0" not in (duplicated, divergent, seen_early)
    # an upsert hides what comes twice, and readers see it as early
    assert upsert["PostgreSQL"][:-1] == exact[:-1]
    assert upsert["PostgreSQL"][-1] != "0"
    page = (tmp_path / "demo.html").read_text()
    assert "One kill -9: with epochsink every order arrives exactly once" in page
    # ours have their kill in two pictures: in that of the epochs, too; and each picture is there in two widths
    assert page.count('class="red killed"') == 12
    assert "epoch 0, table: " in page
    assert "seen before the decision" in page
