"""Queries on a server of Spark Connect: each case of `connect_cases.py` in turn, on one server."""

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

# the first of them starts the server and runs the cases, whichever it is
pytestmark = [pytest.mark.thorough, pytest.mark.timeout(SECONDS + 60)]


@pytest.fixture(scope="module")
def came(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what came of each case. A process of its own: a session of Spark Connect changes all of PySpark in it."""
    path = os.pathsep.join([str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "connect_cases.py"), str(tmp_path_factory.mktemp("connect"))],
        env={**os.environ, "PYTHONPATH": path, "PYSPARK_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return {name: result for name, result, _ in map(json.loads, done.stdout.splitlines())}


def test_every_epoch_is_visible_once_its_query_has_settled(came: dict[str, Any]) -> None:
    """At the end of the input, after processAllAvailable, and after stop; over three runs."""
    found = came["restarts"]
    assert found == {"seen": [1, 2, 3, 4], "rows": [1, 2, 3, 4, 5], "done": [0, 1, 2, 3], "active": False}


def test_a_recorded_epoch_is_adopted_by_the_next_run(came: dict[str, Any]) -> None:
    found = came["adopts"]
    assert "after epoch 1" in found["failed"]
    assert (found["before"], found["rows"], found["votes"]) == ([1], [1, 2], ["0", "1"])


def test_a_query_with_state_closes_its_groups_in_batches_without_data(came: dict[str, Any]) -> None:
    found = came["keeps_state"]
    assert found["rows"] == [2, 2]
    assert found["epochs"] > found["inputs"]


def test_the_client_gets_the_error_of_the_sink(came: dict[str, Any]) -> None:
    found = came["rejects"]
    assert found["failed"].startswith("RowsRejected: sink 'folder': value 7 of column id breaks the rule id < 7")
    assert "epochsink-error" not in found["failed"]
    assert found["rows"] == [1]


def test_an_epoch_whose_error_the_function_catches_is_not_decided(came: dict[str, Any]) -> None:
    found = came["swallows"]
    assert found["failed"]
    assert (found["committed"], found["rows"]) == ([], [1, 2])


def test_a_second_object_in_one_function_is_refused(came: dict[str, Any]) -> None:
    found = came["calls_twice"]
    assert "two ExactlyOnce objects are called for one query" in found["failed"]
    assert found["rows"] == [1]


def test_a_run_whose_checkpoint_another_driver_takes_writes_nothing_more(came: dict[str, Any]) -> None:
    found = came["takes_over"]
    assert found["failed"].startswith("Fenced: ")
    assert (found["before"], found["rows"]) == ([1], [1, 2])


def test_another_checkpoint_than_the_querys_is_refused_before_a_row_moves(came: dict[str, Any]) -> None:
    found = came["mistakes_checkpoint"]
    assert "no query has begun on the checkpoint" in found["failed"]
    assert "the checkpoint that it was given says that" in found["also"]
    assert found["rows"] == [1, 2]


def test_a_commit_that_fails_between_two_batches_stops_the_query_and_is_told(came: dict[str, Any]) -> None:
    found = came["fails_between"]
    assert "OutcomeUnknown" in found["failed"]
    assert found["rows"] == [1]


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
    assert found["loose"] == [[], ["id"], ["current_date"], ["uuid()"]]
    assert (found["plain"], found["parallelism"]) == ([], 2)
