"""Whoever lacks PySpark or a sink's client is told so when the sink is made, in one error that says what to type."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("call", "extra", "client"),
    [
        ("Kafka(bootstrap_servers='127.0.0.1:9092', topic='orders')", "kafka", "confluent_kafka"),
        ("Postgres('postgresql://127.0.0.1/shop', table='orders')", "postgres", "psycopg"),
        ("Postgres('postgresql://127.0.0.1/shop', table='orders')", "postgres", "pgpq"),
        ("Elasticsearch('http://127.0.0.1:9200', index='orders')", "elasticsearch", "elasticsearch"),
        ("ExactlyOnce(checkpoint='/checkpoint', sinks={})", "spark", "pyspark"),
    ],
)
def test_a_sink_without_its_client_names_the_extra(call: str, extra: str, client: str) -> None:
    script = f"import sys; sys.modules['{client}'] = None; from epochsink import *; {call}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert f"ConfigurationError: {call.partition('(')[0]} needs the package(s) {client}" in done.stderr
    assert f'pip install "epochsink[{extra}]"' in done.stderr
    assert "ModuleNotFoundError" not in done.stderr
