"""Whoever lacks PySpark or a sink's client is told so when the sink is made, in one error that says what to type."""

from __future__ import annotations

import subprocess
import sys

import pytest

from epochsink.cli.devkit import EXTRAS


@pytest.mark.parametrize(
    ("call", "extra", "client"),
    [
        ("Kafka(bootstrap_servers='127.0.0.1:9092', topic='orders')", "kafka", "confluent_kafka"),
        ("Postgres('postgresql://127.0.0.1/shop', table='orders')", "postgres", "psycopg"),
        ("Postgres('postgresql://127.0.0.1/shop', table='orders')", "postgres", "pgpq"),
        ("Elasticsearch('http://127.0.0.1:9200', index='orders')", "elasticsearch", "elasticsearch"),
        ("OpenSearch('http://127.0.0.1:9200', index='orders')", "opensearch", "opensearchpy"),
        ("ExactlyOnce(checkpoint='/checkpoint', sinks={})", "spark", "pyspark"),
    ],
)
def test_a_sink_without_its_client_names_the_extra(call: str, extra: str, client: str) -> None:
    script = f"import sys; sys.modules['{client}'] = None; from epochsink import *; {call}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert f"ConfigurationError: {call.partition('(')[0]} needs the package(s) {client}" in done.stderr
    assert f'pip install "epochsink[{extra}]"' in done.stderr
    assert "ModuleNotFoundError" not in done.stderr


@pytest.mark.parametrize(
    ("verb", "missing", "extra"),
    [
        ("services", "psutil", "services"),
        ("demo", "psycopg", "demo"),
        *((verb, "epochsink_devkit", extra) for verb, extra in EXTRAS.items()),
    ],
)
def test_a_verb_of_the_devkit_says_what_to_install(verb: str, missing: str, extra: str) -> None:
    script = f"import sys; sys.modules['{missing}'] = None; from epochsink.cli.app import main; main()"
    command = [sys.executable, "-c", script, verb, *(["/checkpoint"] if verb == "report" else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    first, hint = done.stderr.splitlines()
    assert first.startswith("error: ")
    assert missing in first
    assert hint == f'  Hint: pip install "epochsink[{extra}]"'
    assert done.returncode == 1


def test_the_help_lists_the_verbs_of_a_devkit_that_is_absent() -> None:
    script = "import sys; sys.modules['epochsink_devkit'] = None; from epochsink.cli.app import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", script, "--help"], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0
    assert all(verb in done.stdout for verb in (*EXTRAS, "status"))


def test_a_driver_with_a_jvm_needs_nothing_of_spark_connect() -> None:
    script = "import sys; sys.modules['grpc'] = None; from epochsink import ExactlyOnce; ExactlyOnce"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
