"""What a newcomer meets: one extra installed, the README's first example, the command's help, what is missing."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import psycopg
import pytest

from epochsink import __version__
from versions.environments import ROOT

if TYPE_CHECKING:
    from pathlib import Path

    from epochsink_devkit.services import PostgresService
    from versions.environments import Environment

WATCH_TWO_EPOCHS = """
import time
deadline = time.monotonic() + 120
while query.isActive and sum(p["numInputRows"] > 0 for p in query.recentProgress) < 2 and time.monotonic() < deadline:
    time.sleep(0.1)
query.stop()
"""


def test_the_readmes_first_example_fills_its_table(
    with_postgres_only: Environment, postgres: PostgresService, tmp_path: Path
) -> None:
    """As it stands, in an empty folder; only the folder and the minute of waiting are replaced."""
    with psycopg.connect(postgres.dsn, autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS orders")
    found = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found is not None
    block = found[1].replace("/tmp/checkpoints/orders", str(tmp_path / "checkpoint"))  # noqa: S108 - only replaced
    assert str(tmp_path) in block
    script = tmp_path / "pipeline.py"
    script.write_text(block.replace("query.awaitTermination(60)", WATCH_TWO_EPOCHS))
    done = with_postgres_only.run("python", script, folder=tmp_path, DSN=postgres.dsn)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    with psycopg.connect(postgres.dsn) as connection:
        count, highest, latest = connection.execute(
            "SELECT count(*), max(order_id), max(abs(extract(epoch FROM now() - placed_at))) FROM orders"
        ).fetchall()[0]
    assert count > 0
    assert highest == count - 1
    assert latest < 600, "the timestamps are hours away"
    status = with_postgres_only.run("epochsink", "status", tmp_path / "checkpoint", folder=tmp_path)
    assert (status.returncode, "orders" in status.stdout) == (0, True), status.stdout + status.stderr


def test_the_command_says_its_version_and_helps(with_postgres_only: Environment, tmp_path: Path) -> None:
    said = with_postgres_only.run("epochsink", "--version", folder=tmp_path)
    assert said.stdout.split()[:2] == ["epochsink", __version__], said.stderr
    helped = with_postgres_only.run("epochsink", "resolve", "--help", folder=tmp_path)
    assert (helped.returncode, "--sinks" in helped.stdout) == (0, True), helped.stderr


@pytest.mark.parametrize(
    ("call", "extra"),
    [
        ("Kafka(bootstrap_servers='127.0.0.1:9092', topic='orders')", "kafka"),
        ("Elasticsearch('http://127.0.0.1:9200', index='orders')", "elasticsearch"),
    ],
)
def test_a_sink_without_its_client_names_the_extra(
    call: str, extra: str, with_postgres_only: Environment, tmp_path: Path
) -> None:
    """In one error of ours, when it is made: not as a ModuleNotFoundError in a task."""
    done = with_postgres_only.run("python", "-c", f"import epochsink; epochsink.{call}", folder=tmp_path)
    lines = done.stderr.strip().splitlines()
    assert f'pip install "epochsink[{extra}]"' in lines[-1], done.stderr
    assert "epochsink.errors.ConfigurationError: " in done.stderr
    assert "ModuleNotFoundError" not in done.stderr


@pytest.mark.parametrize("verb", ["services", "demo"])
def test_a_tool_without_its_modules_names_the_extra(verb: str, with_postgres_only: Environment, tmp_path: Path) -> None:
    done = with_postgres_only.run("epochsink", verb, folder=tmp_path)
    assert done.returncode != 0
    assert 'pip install "epochsink[' in done.stderr
    assert "Traceback" not in done.stderr
