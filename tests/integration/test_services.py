"""The services are the real ones: what they acknowledged survives SIGKILL, and nothing of them survives its owner."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import psycopg
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from elasticsearch import Elasticsearch
from kafka_kit import Reader
from waiting import wait_until

from epochsink.errors import ServiceError
from epochsink_devkit.services import LocalElasticsearch, LocalKafka, LocalPostgres, free_port, spark_packages, versions
from epochsink_devkit.services.ports import LOOPBACK, answers, is_free

if TYPE_CHECKING:
    from collections.abc import Callable

    from fix_services import FreshName, PrivateElasticsearch, PrivateKafka, PrivatePostgres

    from epochsink_devkit.services import ElasticsearchService, KafkaService, PostgresService
    from epochsink_devkit.services.local import LocalService


def all_processes(service: Any) -> list[psutil.Process]:
    main = psutil.Process(service.pid)
    return [main, *main.children(recursive=True)]


def commit_transaction(kafka: KafkaService, topic: str, values: list[bytes]) -> None:
    with_id = {"bootstrap.servers": kafka.bootstrap_servers, "transactional.id": f"tx-{topic}"}
    producer = Producer(with_id)
    producer.init_transactions(30)
    producer.begin_transaction()
    for value in values:
        producer.produce(topic, value)
    producer.commit_transaction(30)


def committed_values(kafka: KafkaService, topic: str, count: int) -> list[bytes]:
    with Reader(kafka.bootstrap_servers, topic) as reader:
        return [message.value() for message in reader.until(count)]


def create_topic(kafka: KafkaService, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    admin.create_topics([NewTopic(topic, num_partitions=1)])[topic].result(30)


def test_kafka_runs_transactions(kafka: KafkaService, fresh_topic: FreshName) -> None:
    topic = fresh_topic()
    create_topic(kafka, topic)
    commit_transaction(kafka, topic, [b"one", b"two"])
    assert committed_values(kafka, topic, 2) == [b"one", b"two"]


def test_postgres_is_the_pinned_version_and_durable(postgres: PostgresService) -> None:
    with psycopg.connect(postgres.dsn) as connection:
        shown = {
            name: (connection.execute(f"SHOW {name}").fetchone() or [None])[0]
            for name in ("server_version", "fsync", "synchronous_commit", "max_prepared_transactions")
        }
    assert shown == {
        "server_version": versions.POSTGRES,
        "fsync": "on",
        "synchronous_commit": "on",
        "max_prepared_transactions": "64",
    }


def test_postgres_asks_for_its_password(postgres: PostgresService) -> None:
    """Any user of the machine reaches the port; only who was told the password is its superuser."""
    for stranger in ("postgres", "postgres:guessed"):
        with pytest.raises(psycopg.OperationalError, match="password"):
            psycopg.connect(postgres.dsn.replace(f"postgres:{postgres.password}", stranger))


@pytest.mark.parametrize("kind", [LocalKafka, LocalElasticsearch])
def test_a_short_lived_server_starts_from_an_archive_of_its_classes(
    kind: Callable[..., LocalService], tmp_path: Path
) -> None:
    """The archive is in use only if the JVM has mapped it: one that does not fit is refused without a word."""
    with kind(short_lived=True, home=tmp_path) as server:
        assert "classes.jsa" in Path(f"/proc/{server.pid}/maps").read_text()


def test_elasticsearch_answers_searches(elasticsearch: ElasticsearchService, fresh_index: FreshName) -> None:
    index = fresh_index()
    with Elasticsearch(elasticsearch.url) as client:
        client.index(index=index, id="1", document={"word": "epoch"}, refresh=True)
        assert client.search(index=index, query={"match": {"word": "epoch"}})["hits"]["total"]["value"] == 1
        assert client.nodes.info()["nodes"].popitem()[1]["version"] == elasticsearch.version


def test_kafka_keeps_committed_records_over_a_kill(private_kafka: PrivateKafka, fresh_topic: FreshName) -> None:
    kafka, topic = private_kafka(), fresh_topic()
    create_topic(kafka, topic)
    commit_transaction(kafka, topic, [b"kept"])
    # the coordinator answers before it has written the end, and after a kill it may leave it out (KAFKA-20734)
    assert committed_values(kafka, topic, 1) == [b"kept"]
    before, pid = kafka.bootstrap_servers, kafka.pid
    kafka.kill()
    assert not psutil.pid_exists(pid)
    kafka.start()
    assert kafka.bootstrap_servers == before
    assert committed_values(kafka, topic, 1) == [b"kept"]


def test_postgres_keeps_prepared_transactions_over_a_kill(private_postgres: PrivatePostgres) -> None:
    postgres = private_postgres(max_connections=20)
    with psycopg.connect(postgres.dsn) as connection:
        connection.execute("CREATE TABLE t (a int)")
        connection.commit()
        connection.execute("INSERT INTO t VALUES (1)")
        connection.execute("PREPARE TRANSACTION 'epoch 1'")
        processes = all_processes(postgres)
        assert len(processes) > 3
        postgres.kill()
    assert not any(process.is_running() for process in processes), "the backends went with the postmaster"
    postgres.start()
    with psycopg.connect(postgres.dsn, autocommit=True) as connection:
        connection.execute("COMMIT PREPARED 'epoch 1'")
        assert connection.execute("SELECT a FROM t").fetchall() == [(1,)]
        assert connection.execute("SHOW max_connections").fetchone() == ("20",)


def test_elasticsearch_keeps_documents_over_a_kill(private_elasticsearch: PrivateElasticsearch) -> None:
    elasticsearch = private_elasticsearch()
    with Elasticsearch(elasticsearch.url) as client:
        client.index(index="kept", id="1", document={"n": 1})
        elasticsearch.kill()
        assert not answers(elasticsearch.port)
        elasticsearch.start()
        assert client.get(index="kept", id="1")["_source"] == {"n": 1}


def test_a_graceful_stop_leaves_nothing_to_recover(private_postgres: PrivatePostgres) -> None:
    postgres = private_postgres()
    port = postgres.port
    postgres.restart()
    assert postgres.port == port
    assert "database system was shut down at" in postgres.logs()
    assert "automatic recovery in progress" not in postgres.logs()
    postgres.stop()
    assert not postgres.running
    assert is_free(port)


def test_a_paused_server_answers_nobody_until_it_goes_on(private_postgres: PrivatePostgres) -> None:
    postgres = private_postgres()
    with psycopg.connect(postgres.dsn, autocommit=True) as connection:
        postgres.pause()
        assert postgres.running
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(postgres.dsn, connect_timeout=2)
        postgres.resume()
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_a_failed_start_shows_the_end_of_the_log() -> None:
    postgres = LocalPostgres({"max_connections": "many"})
    with pytest.raises(ServiceError, match=r'(?s)ended with status 1.*invalid value for parameter "max_connections"'):
        postgres.start()
    assert not postgres.running
    postgres.close()


def test_a_taken_port_is_named() -> None:
    with socket.create_server((LOOPBACK, free_port())) as server:
        port = server.getsockname()[1]
        postgres = LocalPostgres(port=port)
        with pytest.raises(ServiceError, match=f"port {port} is taken"):
            postgres.start()
        postgres.close()


def test_a_named_home_keeps_the_data_for_the_next_object() -> None:
    """In a folder of its own, since the server's account cannot enter pytest's."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o711)
        home = Path(folder, "home")
        with LocalPostgres(home=home) as first, psycopg.connect(first.dsn) as connection:
            connection.execute("CREATE TABLE kept ()")
            connection.commit()
        with LocalPostgres(home=home) as second, psycopg.connect(second.dsn) as connection:
            assert connection.execute("SELECT to_regclass('kept') IS NOT NULL").fetchone() == (True,)


OWNER = """
import time
from epochsink_devkit.services import LocalPostgres
postgres = LocalPostgres().start()
print(postgres.pid, postgres.home, flush=True)
time.sleep(1000)
"""


def test_a_killed_owner_takes_the_server_and_its_data_along() -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout
        pid, home = owner.stdout.readline().split()
        server = psutil.Process(int(pid))
        processes = [server, *server.children(recursive=True)]
        owner.kill()
    wait_until(lambda: not any(process.is_running() for process in processes))
    wait_until(lambda: not Path(home).exists())


class Shell:
    """`epochsink services`, typed in a folder; all folders share one user's state."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "epochsink.cli.app", "services", *arguments],
            env={**os.environ, "XDG_STATE_HOME": str(self.folder.parent), "COLUMNS": "200"},
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )


def shown(text: str) -> list[tuple[str, str, str, str]]:
    return re.findall(r"│ (\w+) +│ ([\d.]+) +│ (\d+) +│ (\w+) +│", text)


def test_up_status_down(tmp_path: Path) -> None:
    """Left running in the background, shown, and stopped by another process. What runs stays when more is added."""
    run = Shell(tmp_path / "project")
    first = run("up", "postgres", "--detach")
    assert first.returncode == 0, first.stderr
    up = run("up", "kafka", "postgres", "--detach")
    assert up.returncode == 0, up.stderr
    assert up.stdout.startswith("Up already: postgres.\n")
    rows = shown(up.stdout)
    assert [(name, version, ready) for name, version, _, ready in rows] == [
        ("postgres", versions.POSTGRES, "yes"),
        ("kafka", versions.KAFKA, "yes"),
    ]
    assert shown(first.stdout) == rows[:1]
    addresses = r"\npostgresql://postgres:[0-9a-f]{32}@127\.0\.0\.1:\d+/postgres\n127\.0\.0\.1:\d+\n"
    assert re.search(addresses, up.stdout), up.stdout
    processes = [psutil.Process(int(pid)) for _, _, pid, _ in rows]
    assert run("status").stdout.splitlines() == up.stdout.splitlines()[1:-1]
    down = run("down")
    assert "Stopped postgres, kafka." in down.stdout
    assert not any(process.is_running() for process in processes)
    assert "No services are up" in run("status").stdout
    assert "No services were up" in run("down").stdout


def test_what_is_done_in_another_folder_leaves_services_alone(tmp_path: Path) -> None:
    """Each folder has services of its own, and says where others run; ``--name`` leads to them."""
    mine, other = Shell(tmp_path / "mine"), Shell(tmp_path / "other")
    up = mine("up", "s3", "--detach")
    assert up.returncode == 0, up.stderr
    try:
        for verb in ("status", "down"):
            answer = other(verb).stdout
            assert f"No services {'are' if verb == 'status' else 'were'} up for {other.folder}" in answer
            assert f"Up for {mine.folder}: s3; to name them from here: --name {mine.folder}" in answer
        assert shown(mine("status").stdout) == shown(up.stdout)
    finally:
        down = other("down", "--name", str(mine.folder))
    assert down.stdout == "Stopped s3.\n"


READ = """
import sys
from pyspark.sql import SparkSession
spark = (SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
         .config("spark.jars", sys.argv[1]).getOrCreate())
rows = (spark.read.format("kafka").option("kafka.bootstrap.servers", sys.argv[2])
        .option("subscribe", sys.argv[3]).load().selectExpr("CAST(value AS string)").collect())
jdbc = spark.read.format("jdbc").option("url", sys.argv[4]).option("driver", sys.argv[5])
table = jdbc.option("query", "SELECT 7 AS n").load().collect()
print([row[0] for row in rows], table[0].n)
"""


def test_spark_reads_kafka_and_postgres_with_the_fetched_jars(
    kafka: KafkaService, postgres: PostgresService, fresh_topic: FreshName
) -> None:
    """In a process of its own: the jars of a session are fixed when its JVM starts."""
    topic = fresh_topic()
    create_topic(kafka, topic)
    commit_transaction(kafka, topic, [b"read by Spark"])
    jars = ",".join(str(path) for path in spark_packages())
    command = [
        sys.executable,
        "-c",
        READ,
        jars,
        kafka.bootstrap_servers,
        topic,
        postgres.jdbc_url,
        postgres.jdbc_driver,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "['read by Spark'] 7", done.stderr
