"""One local Spark session for all tests, and what small streams on it are made of.

With ``--connect`` it is a session of Spark Connect, and of the tests marked `connect` those run that are not marked
`classic`: the two kinds of session cannot share a process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from streams import Stream

from epochsink.spark.classic.compat import gateway_of
from epochsink_devkit.demo.connect_server import connect, start_server
from epochsink_devkit.demo.session import jvm_options, session
from epochsink_devkit.services import spark_packages

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pyspark.sql import SparkSession

TESTS = Path(__file__).parent
JVM_SECONDS = 30


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--connect", action="store_true", help="run the tests marked `connect` on Spark Connect")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With ``--connect``, leave out what does not run there."""
    if config.getoption("connect"):
        chosen = [item for item in items if _runs_on_connect(item)]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen


def _runs_on_connect(item: pytest.Item) -> bool:
    uses_spark = isinstance(item, pytest.Function) and "spark" in item.fixturenames
    return uses_spark and item.get_closest_marker("connect") is not None and item.get_closest_marker("classic") is None


def spark_settings(folder: Path) -> dict[str, str]:
    """Return the settings of a session for tests, with all its files below `folder`.

    `viewfs://mounted/tree` is `folder/tree` seen through a file system that is not `file:`.
    """
    (folder / "tree").mkdir(exist_ok=True)
    return {
        "spark.local.dir": str(folder / "local"),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.hadoop.fs.viewfs.mounttable.mounted.link./tree": (folder / "tree").as_uri(),
    }


def start_session(master: str, settings: Mapping[str, str]) -> SparkSession:
    """Start the process's Spark session."""
    started = session(jvm_options(), **{"spark.master": master, **settings})
    started.sparkContext.setLogLevel("OFF")
    return started


def end_session(started: SparkSession) -> None:
    """Stop the session and its JVM, a child of this process."""
    gateway = gateway_of(started)
    process = gateway.proc
    started.stop()
    gateway.shutdown()
    process.stdin.close()
    try:
        process.wait(JVM_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(JVM_SECONDS)


@pytest.fixture(scope="session")
def spark_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the session's files; `tree` in it is mounted as viewfs://mounted/tree."""
    return tmp_path_factory.mktemp("spark")


@pytest.fixture(scope="session")
def spark(spark_folder: Path, pytestconfig: pytest.Config) -> Iterator[SparkSession]:
    """Return the session of all tests: local[2], with Kafka's source and PostgreSQL's JDBC driver. Do not stop it."""
    # workers of Python import the sinks of the tests from here
    os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ["PYSPARK_PYTHON"] = sys.executable
    if pytestconfig.getoption("connect"):
        yield from connected_session(spark_settings(spark_folder))
        return
    started = start_session("local[2]", spark_settings(spark_folder))
    yield started
    end_session(started)


def connected_session(settings: Mapping[str, str]) -> Iterator[SparkSession]:
    """Start a server of Spark Connect, and a session on it."""
    classes = ":".join(str(jar) for jar in spark_packages())
    quiet = {"spark.log.level": "OFF", "spark.driver.extraClassPath": classes}
    process, url = start_server({**settings, **quiet}, jvm_options())
    try:
        started = connect(url)
        yield started
        started.stop()
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def stream(spark: SparkSession, tmp_path: Path) -> Iterator[Stream]:
    """Return a stream of small files with a checkpoint of its own; its queries are stopped at the end."""
    made = Stream(spark, tmp_path)
    yield made
    for query in spark.streams.active:
        query.stop()
    made.end()
