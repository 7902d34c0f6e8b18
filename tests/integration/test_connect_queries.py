"""Queries on a server of Spark Connect: what is different there, by cases of `connect_cases.py`, on one server.

What is the same on a classic session is shown by the tests that are marked `connect`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

SUPPORT: Final = Path(__file__).parents[1] / "support"
SECONDS: Final = 400
CASES: Final = (
    "dies_in_its_last_commit",
    "swallows",
    "calls_twice",
    "mistakes_checkpoint",
    "mistakes_an_epoch_under_way",
    "fails_idle",
    "refuses",
    "tells_expressions",
)

# the first of them starts the server and runs the cases, whichever it is
pytestmark = [pytest.mark.thorough, pytest.mark.timeout(SECONDS + 60)]


@pytest.fixture(scope="module")
def came(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what came of each case. A process of its own: a session of Spark Connect changes all of PySpark in it."""
    path = os.pathsep.join([str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "connect_cases.py"), str(tmp_path_factory.mktemp("connect")), *CASES],
        env={**os.environ, "PYTHONPATH": path, "PYSPARK_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return {name: result for name, result, _ in map(json.loads, done.stdout.splitlines())}


def test_the_last_epoch_of_a_process_that_was_killed_is_visible_when_the_query_ends(came: dict[str, Any]) -> None:
    assert came["dies_in_its_last_commit"] == {"rows": [1, 2], "done": [0, 1]}


def test_an_epoch_whose_error_the_function_catches_is_not_decided(came: dict[str, Any]) -> None:
    found = came["swallows"]
    assert found["failed"]
    assert (found["committed"], found["rows"]) == ([], [1, 2])


def test_a_second_object_in_one_function_is_refused(came: dict[str, Any]) -> None:
    found = came["calls_twice"]
    assert "two ExactlyOnce objects are called for one query" in found["failed"]
    assert found["rows"] == [1]


def test_another_checkpoint_than_the_querys_is_refused_before_a_row_moves(came: dict[str, Any]) -> None:
    found = came["mistakes_checkpoint"]
    assert "no query has begun on the checkpoint" in found["failed"]
    assert "the checkpoint that it was given says that" in found["also"]
    assert found["rows"] == [1, 2]


def test_another_checkpoint_on_which_the_same_epoch_is_under_way_is_refused(came: dict[str, Any]) -> None:
    """By the queries that the session lists; from PySpark 4.3 on it lists none."""
    found = came["mistakes_an_epoch_under_way"]
    assert "which does not run" in found["failed"]
    assert found["prepared"] == []


def test_a_commit_that_fails_in_an_idle_query_ends_it(came: dict[str, Any]) -> None:
    found = came["fails_idle"]
    assert "OutcomeUnknown" in found["failed"]
    assert (found["ended"], found["rows"]) == (True, [1])


def test_mistakes_are_told_before_the_query_starts(came: dict[str, Any]) -> None:
    found = came["refuses"]
    assert found["finding"].startswith("CheckFailed: ")
    assert "sink 'folder': the disk is full" in found["finding"]
    assert found["format"].startswith("ConfigurationError: the stream writer already has .format('console')")
    assert found["complete"].startswith("ConfigurationError: sink 'folder' appends rows")
    assert found["async"].startswith("UnsupportedQuery: with async progress tracking")
    assert found["waits"].startswith("UnsupportedQuery: the commits of a query on Spark Connect run in its server")
    assert found["rows"] == [1]


def test_what_expressions_depend_on_is_told_by_spark(came: dict[str, Any]) -> None:
    found = came["tells_expressions"]
    assert found["changeable"] == ["rand()", "concat(word, uuid())"]
    assert found["loose"] == [[], ["id"], []]
    assert found["times"] == [[], ["word"], ["'to' || 'day'"]]
    assert found["parallelism"] == 2
    *refused, started = found["refused"]
    assert all("it is not known whether that has the same value each time" in each for each in refused), refused
    assert started == ""
