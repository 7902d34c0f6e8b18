"""The readers of the failure tests see what an ordinary consumer may see, all of it, and name what is left over."""

from __future__ import annotations

import itertools
import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from elasticsearch import Elasticsearch, helpers
from http_proxy import Lost, Proxy, Seen
from indices import RECOVERS_LATE
from waiting import wait_until

from epochsink_devkit.history import CheckedTarget, History, HistoryLog, Workload
from epochsink_devkit.history.readers import TargetUnreachable
from epochsink_devkit.history.readers.elasticsearch import ElasticsearchReader
from epochsink_devkit.history.readers.kafka import KafkaReader
from epochsink_devkit.history.readers.postgres import PostgresReader
from epochsink_devkit.history.rows import SCHEMA, stamp
from epochsink_devkit.history.sampling import Sampler

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa
    from fix_services import FreshName, PrivateElasticsearch, PrivatePostgres

    from epochsink_devkit.services import ElasticsearchService, KafkaService, PostgresService

MORE_THAN_A_PAGE = 10_500
DEADLINE = 30.0


def stamped(count: int) -> pa.Table:
    """Return stamped rows of one epoch."""
    return stamp(Workload().source({0: count}), run="r1", epoch=3, attempt="a" * 32)


def by_place(rows: pa.Table) -> list[dict[str, Any]]:
    """Return rows in the order of the source."""
    found: list[dict[str, Any]] = rows.select(SCHEMA.names).sort_by("src_off").to_pylist()
    return found


@pytest.fixture
def table(postgres: PostgresService, fresh_table: FreshName) -> str:
    """Create a table with the proof columns."""
    name = fresh_table()
    with psycopg.connect(postgres.dsn, autocommit=True) as connection:
        connection.execute(
            f"CREATE TABLE {name} (run text, src_part int, src_off bigint, epoch bigint, attempt text, key bigint, "
            "kver bigint, op text, crc bigint)".encode()
        )
    return name


def insert(connection: psycopg.Connection[Any], table: str, rows: pa.Table) -> None:
    with connection.cursor() as cursor:
        marks = ", ".join(["%s"] * len(SCHEMA.names))
        cursor.executemany(
            f"INSERT INTO {table} VALUES ({marks})".encode(),  # noqa: S608 - a name of this test
            [tuple(row.values()) for row in rows.to_pylist()],
        )


def test_postgres_rows_come_back_as_they_are(postgres: PostgresService, table: str) -> None:
    rows = stamped(50)
    with psycopg.connect(postgres.dsn) as connection:
        insert(connection, table, rows)
    reader = PostgresReader(postgres.dsn, table)
    assert reader.read().schema.equals(SCHEMA)
    assert by_place(reader.read()) == by_place(rows)
    reader.close()


def test_a_prepared_transaction_is_invisible_and_left_over(postgres: PostgresService, table: str) -> None:
    reader = PostgresReader(postgres.dsn, table)
    gid = f"epochsink:{'0' * 20}:1:3:{'a' * 32}:all"
    with psycopg.connect(postgres.dsn, autocommit=True) as connection:
        connection.execute("BEGIN")
        insert(connection, table, stamped(5))
        connection.execute(f"PREPARE TRANSACTION '{gid}'".encode())
        assert reader.read().num_rows == 0
        assert ("orphan", f"prepared transaction {gid}") in reader.leftovers()
        connection.execute(f"ROLLBACK PREPARED '{gid}'".encode())
    assert not [what for _, what in reader.leftovers() if gid in what]
    reader.close()


def test_a_table_that_does_not_exist_has_no_rows(postgres: PostgresService, fresh_table: FreshName) -> None:
    reader = PostgresReader(postgres.dsn, fresh_table())
    assert reader.read().num_rows == 0
    reader.close()


def test_a_server_that_is_down_is_unreachable_and_read_again_when_it_is_back(private_postgres: PrivatePostgres) -> None:
    server = private_postgres()
    reader = PostgresReader(server.dsn, "pg_no_such_table")
    assert reader.read().num_rows == 0
    server.kill()
    with pytest.raises(TargetUnreachable):
        reader.read()
    server.start()
    wait_until(lambda: reader.read().num_rows == 0)
    reader.close()


@pytest.fixture
def topic(kafka: KafkaService, fresh_topic: FreshName) -> str:
    """Create a topic of two partitions."""
    name = fresh_topic()
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    admin.create_topics([NewTopic(name, 2, 1)])[name].result(timeout=DEADLINE)
    return name


def produce(producer: Producer, topic: str, rows: pa.Table) -> None:
    for row in rows.to_pylist():
        producer.produce(topic, value=json.dumps(row), partition=row["src_off"] % 2)
        producer.poll(0)
    assert producer.flush(DEADLINE) == 0


def test_kafka_records_come_back_in_the_order_of_the_log(kafka: KafkaService, topic: str) -> None:
    rows = stamped(MORE_THAN_A_PAGE)
    produce(Producer({"bootstrap.servers": kafka.bootstrap_servers}), topic, rows)
    found = KafkaReader(kafka.bootstrap_servers, topic).read()
    assert by_place(found) == by_place(rows)
    for partition in (0, 1):
        offsets = [row["log_off"] for row in found.to_pylist() if row["log_part"] == partition]
        assert offsets == list(range(len(offsets)))


def test_an_open_transaction_is_invisible_left_over_and_a_pin(kafka: KafkaService, topic: str) -> None:
    name = f"epochsink.{'0' * 20}.g1.s0.p0.a1.{topic}"
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers, "transactional.id": name})
    producer.init_transactions(DEADLINE)
    producer.begin_transaction()
    produce(producer, topic, stamped(1))
    reader = KafkaReader(kafka.bootstrap_servers, topic)
    assert reader.read().num_rows == 0
    left = reader.leftovers()
    assert ("orphan", f"open transaction {name}") in left
    assert [what for kind, what in left if kind == "pin"] == [
        f"partition 0 of {topic}: last stable offset 0, high watermark 1"
    ]
    producer.commit_transaction(DEADLINE)
    wait_until(lambda: reader.read().num_rows == 1)
    assert not [what for kind, what in reader.leftovers() if topic in what and kind == "pin"]


def test_elasticsearch_that_has_just_started_is_unreachable_until_it_serves_its_indices(
    private_elasticsearch: PrivateElasticsearch, fresh_index: FreshName
) -> None:
    """It calls an index missing at first, and a missing index is an empty one to the reader."""
    rows, index = stamped(200), fresh_index()
    server = private_elasticsearch(**RECOVERS_LATE)
    with closing(Elasticsearch(server.url)) as client, closing(ElasticsearchReader(server.url, index)) as reader:
        client.indices.create(index=index, settings={"number_of_shards": 2, "number_of_replicas": 0})
        documents = ({"_index": index, "_id": str(row["src_off"]), "_source": row} for row in rows.to_pylist())
        helpers.bulk(client, documents)
        assert reader.read().num_rows == rows.num_rows
        server.kill()
        with ThreadPoolExecutor(1) as thread:
            started = thread.submit(server.start)
            while not started.done():
                with suppress(TargetUnreachable):
                    assert reader.read().num_rows == rows.num_rows
            started.result()
        assert reader.read().num_rows == rows.num_rows


def test_elasticsearch_documents_come_back_page_by_page(
    elasticsearch: ElasticsearchService, fresh_index: FreshName
) -> None:
    rows, index = stamped(MORE_THAN_A_PAGE), fresh_index()
    client = Elasticsearch(elasticsearch.url)
    mappings = {"properties": {"run": {"type": "keyword"}, "src_off": {"type": "long"}}}
    client.indices.create(index=index, mappings=mappings, settings={"refresh_interval": -1, "number_of_replicas": 0})
    documents = ({"_index": index, "_id": str(row["src_off"]), "_source": row} for row in rows.to_pylist())
    helpers.bulk(client, documents, chunk_size=5000)
    # the newest epoch's marker is a document like any other, and no row
    client.index(index=index, id="marker", document={"newest": 3})
    reader = ElasticsearchReader(elasticsearch.url, index)
    found = reader.read()
    assert found.schema.equals(SCHEMA)
    assert by_place(found) == by_place(rows)
    reader.close()
    client.close()


def test_an_index_that_does_not_exist_has_no_documents(
    elasticsearch: ElasticsearchService, fresh_index: FreshName
) -> None:
    reader = ElasticsearchReader(elasticsearch.url, fresh_index())
    assert reader.read().num_rows == 0
    reader.close()


@pytest.mark.parametrize("answered", [True, False], ids=["search answers 404", "only the end answers 404"])
def test_a_point_in_time_that_a_killed_server_forgot_is_no_empty_index(
    elasticsearch: ElasticsearchService, fresh_index: FreshName, *, answered: bool
) -> None:
    index = fresh_index()

    def forget(seen: Seen) -> Lost | None:
        if seen.path.partition("?")[0] != "/_search":
            return None
        client.close_point_in_time(id=json.loads(seen.body)["pit"]["id"])
        return None if answered else Lost(0)

    with Elasticsearch(elasticsearch.url) as client, Proxy(elasticsearch.url, forget) as proxy:
        client.index(index=index, document={"src_off": 1})
        reader = ElasticsearchReader(proxy.url, index, max_retries=0)
        with pytest.raises(TargetUnreachable):
            reader.read()
        reader.close()


def test_what_is_committed_while_a_table_is_being_read_is_not_in_that_read(
    postgres: PostgresService, table: str
) -> None:
    """Else nobody could tell whether a row was there before the moment that its epoch was decided."""
    reader = PostgresReader(postgres.dsn, table)
    with psycopg.connect(postgres.dsn, autocommit=True) as connection:
        assert reader.read(lambda: insert(connection, table, stamped(5))).num_rows == 0
    assert reader.read().num_rows == 5
    reader.close()


def test_what_is_committed_while_a_topic_is_being_read_is_not_in_that_read(kafka: KafkaService, topic: str) -> None:
    """Neither a transaction that was open, nor records after it."""
    servers = kafka.bootstrap_servers
    producer = Producer({"bootstrap.servers": servers, "transactional.id": topic})
    producer.init_transactions(DEADLINE)
    produce(Producer({"bootstrap.servers": servers}), topic, stamped(2))
    producer.begin_transaction()
    produce(producer, topic, stamped(4))
    reader = KafkaReader(servers, topic)

    def commit() -> None:
        producer.commit_transaction(DEADLINE)
        produce(Producer({"bootstrap.servers": servers}), topic, stamped(3))
        wait_until(lambda: KafkaReader(servers, topic).read().num_rows == 9)

    assert reader.read(commit).num_rows == 2
    assert reader.read().num_rows == 9


def test_what_is_indexed_while_an_index_is_being_read_is_not_in_that_read(
    elasticsearch: ElasticsearchService, fresh_index: FreshName
) -> None:
    index = fresh_index()
    with Elasticsearch(elasticsearch.url) as client:
        client.index(index=index, document={"src_off": 1}, refresh=True)
        reader = ElasticsearchReader(elasticsearch.url, index)

        def add() -> None:
            client.index(index=index, document={"src_off": 2}, refresh=True)

        assert reader.read(add)["src_off"].to_pylist() == [1]
        assert sorted(reader.read()["src_off"].to_pylist()) == [1, 2]
        reader.close()


def test_a_sampler_writes_the_first_and_the_last_of_reads_that_saw_the_same(
    postgres: PostgresService, table: str, tmp_path: Path
) -> None:
    log, looks = HistoryLog(tmp_path), []
    sampler = Sampler(
        CheckedTarget(table), PostgresReader(postgres.dsn, table), log, lambda: looks.append(time.monotonic())
    )
    sampler.start()
    wait_until(lambda: len(looks) > 20)
    with psycopg.connect(postgres.dsn) as connection:
        insert(connection, table, stamped(7))
    seen = len(looks)
    wait_until(lambda: len(looks) > seen + 20)
    sampler.finish(DEADLINE)
    reads = History.load(tmp_path).reads
    assert [read.rows().num_rows for read in reads] == [0, 0, 7, 7, 7]
    assert [read.final for read in reads] == [False] * 4 + [True]
    assert all(one.ended <= other.began for one, other in itertools.pairwise(reads))
    for first, last in (reads[:2], reads[2:4]):
        moments = [first.began, *last.between, last.began]
        assert len(moments) > 5
        assert sorted(moments) == moments


def test_a_sampler_writes_when_a_target_could_not_be_read(private_postgres: PrivatePostgres, tmp_path: Path) -> None:
    server, log, looks = private_postgres(), HistoryLog(tmp_path), []
    reader = PostgresReader(server.dsn, "pg_no_such_table")
    sampler = Sampler(CheckedTarget("table"), reader, log, lambda: looks.append(time.monotonic()))
    sampler.start()
    wait_until(lambda: len(looks) > 5)
    looked = looks[-2]  # the read under way began after this look
    server.kill()
    time.sleep(0.5)
    server.start()
    sampler.finish(DEADLINE)
    history = History.load(tmp_path)
    [(name, began, ended)] = history.unreachable
    assert name == "table"
    assert looked <= began < ended
    assert all(ended <= read.began or read.ended <= began for read in history.reads)
