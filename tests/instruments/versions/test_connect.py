"""Queries on a server of Spark Connect: what differs between the versions of PySpark, and what every query does."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING, Any, Final

import pytest

from versions.environments import ROOT, client_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from versions.environments import Environment

SUPPORT: Final = ROOT / "tests" / "support"
CASES: Final = ("adopts", "fails_idle", "refuses")
EXACT: Final = {"seen": [1, 2, 3, 4], "rows": [1, 2, 3, 4, 5], "done": [0, 1, 2, 3], "active": False}
SERVER: Final = """
import sys
from epochsink_devkit.demo.connect_server import start_server
process, url = start_server({})
print(url, flush=True)
sys.stdin.read()
process.kill()
process.wait()
"""
PIPELINE: Final = """
from importlib.util import find_spec
from epochsink import ExactlyOnce, UnsupportedQuery
from epochsink.testing import LocalSink

once = ExactlyOnce(checkpoint="/nowhere", sinks={"local": LocalSink("/nowhere")})
if find_spec("pyspark.pipelines") is None:
    print("no pipelines")
else:
    from pyspark.pipelines.graph_element_registry import graph_element_registration_context
    with graph_element_registration_context(object()):
        try:
            once.start(None)
        except UnsupportedQuery as refused:
            print(refused)
"""


@pytest.fixture(scope="module")
def server(with_postgres_only: Environment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start a server of the environment's PySpark; return its URL."""
    with_postgres_only.install("connect,postgres")
    process = subprocess.Popen(
        [with_postgres_only.folder / "bin" / "python", "-c", SERVER],
        cwd=tmp_path_factory.mktemp("server"),
        env=with_postgres_only.variables(PYTHONPATH=str(SUPPORT)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    yield process.stdout.readline().strip()
    process.communicate()


def outcomes(client: Environment, url: str, folder: Path, *cases: str) -> dict[str, Any]:
    """Return what comes of cases of `connect_cases.py`, run by a client."""
    asked: list[str | Path] = [SUPPORT / "connect_cases.py", folder, *cases]
    done = client.run("python", *asked, folder=folder, PYTHONPATH=str(SUPPORT), SPARK_REMOTE=url)
    assert done.returncode == 0, done.stderr[-6000:]
    return {name: result for name, result, _ in map(json.loads, done.stdout.splitlines())}


def test_queries_of_spark_connect(with_postgres_only: Environment, server: str, tmp_path: Path) -> None:
    """An adopted epoch, a commit that fails while the query is idle, and refusals."""
    came = outcomes(with_postgres_only, server, tmp_path, *CASES)
    assert (came["adopts"]["before"], came["adopts"]["rows"]) == ([1], [1, 2])
    assert "OutcomeUnknown" in came["fails_idle"]["failed"], came["fails_idle"]
    assert came["fails_idle"]["ended"]
    assert came["refuses"]["complete"].startswith("ConfigurationError: sink 'folder' appends rows"), came["refuses"]


def test_a_client_without_a_jvm_is_exact(with_postgres_only: Environment, server: str, tmp_path: Path) -> None:
    """In three runs on a checkpoint. Beside pyspark-client, pip has installed neither the full PySpark nor py4j."""
    client = client_of(with_postgres_only)
    listed = client.run("pip", "list", "--format=freeze", "--disable-pip-version-check", folder=tmp_path).stdout
    installed = {line.partition("==")[0].lower() for line in listed.splitlines()}
    assert installed & {"pyspark", "pyspark-client", "py4j", "epochsink"} == {"pyspark-client", "epochsink"}
    assert outcomes(client, server, tmp_path, "restarts")["restarts"] == EXACT


def test_no_query_starts_in_the_definitions_of_a_pipeline(with_postgres_only: Environment, tmp_path: Path) -> None:
    """PySpark has pipelines from 4.1 on."""
    done = with_postgres_only.run("python", "-c", PIPELINE, folder=tmp_path)
    told = "no pipelines" if with_postgres_only.name == "oldest" else "the definitions of a declarative pipeline"
    assert told in done.stdout, done.stderr[-6000:]
