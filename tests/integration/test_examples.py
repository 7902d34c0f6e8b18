"""The examples and the README's pipeline run as they stand."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import closing, contextmanager
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING

import psycopg
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext

from epochsink_devkit.demo.connect_server import start_server
from epochsink_devkit.demo.session import jvm_options
from epochsink_devkit.history.readers.kafka import KafkaReader
from epochsink_devkit.services.artifacts import spark_avro, spark_packages

if TYPE_CHECKING:
    from collections.abc import Iterator

    from epochsink_devkit.services import KafkaService, LocalRegistry, PostgresService

pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).parents[2]
WATCH_TWO_EPOCHS = """
import time
deadline = time.monotonic() + 120
while query.isActive and sum(p["numInputRows"] > 0 for p in query.recentProgress) < 2 and time.monotonic() < deadline:
    time.sleep(0.1)
query.stop()
"""


def with_spark(changed: dict[str, str]) -> dict[str, str]:
    """Return the environment of a script that finds Spark's jars, and few partitions."""
    classes = ":".join(map(str, (*spark_packages(), *spark_avro())))
    jars = f"--driver-class-path {classes} --driver-java-options '{jvm_options()}'"
    settings = "--master local[2] --conf spark.ui.enabled=false --conf spark.sql.shuffle.partitions=2"
    submit = f"{settings} {jars} pyspark-shell"
    return {**os.environ, "PYSPARK_PYTHON": sys.executable, "PYSPARK_SUBMIT_ARGS": submit, **changed}


def run(*typed: str | Path, **environment: str) -> None:
    """Run a script, or ``-m`` and a module, as a user would."""
    done = subprocess.run(
        [sys.executable, *typed],
        env=with_spark(environment),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]


def rows(server: PostgresService, query: str) -> list[tuple[object, ...]]:
    with psycopg.connect(server.dsn) as connection:
        return connection.execute(query.encode()).fetchall()


def execute(server: PostgresService, *statements: str) -> None:
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())


def test_kafka_to_postgres_keeps_a_table_of_the_newest_rows(
    kafka: KafkaService, postgres: PostgresService, tmp_path: Path
) -> None:
    """Upserts take the newest row of a key, deletes remove it, and a second run adds only what came since.

    The second run is on Spark Connect, with the same checkpoint.
    """
    execute(
        postgres,
        "DROP TABLE IF EXISTS orders",
        "CREATE TABLE orders (order_id bigint PRIMARY KEY, amount double precision, updated_at timestamptz)",
    )
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    admin.create_topics([NewTopic("orders", 2)])["orders"].result(30)
    script = ROOT / "examples" / "kafka_to_postgres.py"
    settings = {"KAFKA": kafka.bootstrap_servers, "DSN": postgres.dsn, "CHECKPOINT": str(tmp_path / "checkpoint")}

    produce(kafka, [(1, "U", 1.0, 1), (2, "U", 2.0, 1), (2, "U", 2.5, 2), (3, "U", 3.0, 1), (3, "D", 0.0, 2)])
    run(script, **settings)
    assert rows(postgres, "SELECT order_id, amount FROM orders ORDER BY 1") == [(1, 1.0), (2, 2.5)]

    produce(kafka, [(1, "D", 0.0, 3), (4, "U", 4.0, 3)])
    with spark_connect() as url:
        run(script, **settings, SPARK_REMOTE=url)
    assert rows(postgres, "SELECT order_id, amount FROM orders ORDER BY 1") == [(2, 2.5), (4, 4.0)]


@contextmanager
def spark_connect() -> Iterator[str]:
    """Start a server of Spark Connect that can read Kafka; yield its URL."""
    classes = ":".join(map(str, spark_packages()))
    process, url = start_server({"spark.driver.extraClassPath": classes}, jvm_options())
    try:
        yield url
    finally:
        process.kill()
        process.wait()


def produce(kafka: KafkaService, changes: list[tuple[int, str, float, int]]) -> None:
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers})
    for order_id, op, amount, second in changes:
        at = f"2026-01-01T00:00:{second:02d}Z"
        row = {"order_id": order_id, "op": op, "amount": amount, "updated_at": at}
        producer.produce("orders", key=str(order_id), value=json.dumps(row))
    assert producer.flush(30) == 0


def test_the_commands_of_the_tutorial(postgres: PostgresService, tmp_path: Path) -> None:
    """A stateful query is killed between record and decision, and the table is what the page says at each step."""
    execute(postgres, "DROP TABLE IF EXISTS clicks_per_minute")
    page = (ROOT / "docs" / "tutorial" / "first-pipeline.md").read_text()
    commands = re.findall(r"^    (\S.*)", re.sub(r"```.*?```", "", page, flags=re.DOTALL), re.MULTILINE)
    kept = [line for line in commands if not re.match(r"python3 -m venv|pip |epochsink services|export DSN", line)]
    assert len(commands) - len(kept) == 5, commands
    (tmp_path / "windowed_counts.py").write_text((ROOT / "examples" / "windowed_counts.py").read_text())
    done = subprocess.run(
        ["/bin/bash", "-c", "\n".join(kept)],
        cwd=tmp_path,
        env=with_spark({"DSN": postgres.dsn, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}),
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    shown = re.findall(r"^\[\('/home', \d\)\]$", done.stdout, re.MULTILINE)
    assert shown == ["[('/home', 2)]", "[('/home', 2)]", "[('/home', 3)]"], done.stdout + done.stderr[-6000:]
    assert re.findall(r"```text\n(.*?)\n```", page) == [shown[0], shown[2]]
    assert "everything decided is committed" in done.stdout


def test_orders_are_written_as_avro(kafka: KafkaService, registry: LocalRegistry, tmp_path: Path) -> None:
    (tmp_path / "input").mkdir()
    (tmp_path / "input" / "0.json").write_text('{"order_id": 1, "amount": 1.5}\n{"order_id": 2, "amount": 2.5}')
    servers = {"KAFKA": kafka.bootstrap_servers, "REGISTRY": registry.url}
    folders = {"INPUT": str(tmp_path / "input"), "CHECKPOINT": str(tmp_path / "checkpoint")}
    run(ROOT / "examples" / "orders_as_avro.py", **servers, **folders)
    with closing(KafkaReader(kafka.bootstrap_servers, "orders.avro")) as reader:
        seen = reader.values()
    read = AvroDeserializer(SchemaRegistryClient({"url": registry.url}))
    field = SerializationContext("orders.avro", MessageField.VALUE)
    assert sorted(read(value, field)["order_id"] for value in seen) == [1, 2]


def test_a_pipelines_own_tests_pass() -> None:
    """Those of its tests that need no container: the others run with the tests on containers."""
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", os.curdir, "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, str(ROOT / "examples" / "test_pipeline.py"), "-k", "not postgresql"],
        env={**os.environ, "PYSPARK_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "2 passed" in done.stdout


def test_the_how_to_shows_the_example_as_it_is() -> None:
    page = (ROOT / "docs" / "how-to" / "test-a-pipeline.md").read_text()
    example = (ROOT / "examples" / "test_pipeline.py").read_text()
    shown = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert shown
    assert [block for block in shown if block not in example] == []


def test_the_pipeline_of_the_readme(postgres: PostgresService, tmp_path: Path) -> None:
    """The first block of Python in the README runs, with its folder replaced, and is the first page of the site."""
    execute(postgres, "DROP TABLE IF EXISTS orders")
    found = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found is not None
    assert found[0] in (ROOT / "docs" / "index.md").read_text()
    block = found[1].replace("/tmp/checkpoints/orders", str(tmp_path / "checkpoint"))  # noqa: S108 - only replaced
    assert str(tmp_path) in block
    script = tmp_path / "readme.py"
    script.write_text(block.replace("    query.awaitTermination(60)", indent(WATCH_TWO_EPOCHS, "    ")))
    run(script, DSN=postgres.dsn)
    count, highest = rows(postgres, "SELECT count(*), max(order_id) FROM orders")[0]
    assert isinstance(count, int)
    assert count > 0
    assert highest == count - 1
    # the last epoch may be prepared and not decided, and others share the server; the module names the sinks
    typed = ("abandon", str(tmp_path / "checkpoint"), "--sinks", "readme:sink", "--yes")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    run("-m", "epochsink.cli.app", *typed, PYTHONPATH=path, DSN=postgres.dsn)
