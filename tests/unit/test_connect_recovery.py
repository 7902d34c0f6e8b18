"""What a query on Spark Connect has left when it ends, and who commits it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, cast

import pytest
from query_by_hand import Query

from epochsink.errors import Fenced
from epochsink.spark.connect import execution
from epochsink.spark.connect.checkpoint_files import CheckpointLocation
from epochsink.spark.connect.engine import CONNECT
from epochsink.spark.connect.execution import Started
from epochsink.spark.connect.recovery import RecoveryContext, Standing
from epochsink.spark.query_run import RunSettings, new_driver

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame

START = "3f" * 16


@pytest.fixture
def query(tmp_path: Path) -> Query:
    """Return a query with an id, of which no run has begun."""
    made = Query(tmp_path)
    made.files.create("metadata", json.dumps({"id": "query-1"}).encode())
    return made


def recovery(query: Query) -> RecoveryContext:
    """Return what the tasks of one start of the query know."""
    place = CheckpointLocation(str(query.folder), "", query.spool)
    settings = RunSettings({"out": query.sink}, application="app-1", reference="pipeline:sink")
    return RecoveryContext(settings, place, START)


def settled(recovery: RecoveryContext) -> Standing:
    """Return how the commits stand after the end of the query."""
    return Standing.from_json(recovery.settle("query-1", Standing(), 0.05, ended=True))


def test_what_the_killed_process_of_the_run_has_left_is_committed_at_once(query: Query) -> None:
    """However long after the first take of the start, which recovers, the run takes the checkpoint."""
    again = recovery(query)
    again.recover()
    query.prepare(query.driver(name=new_driver(START)), 0, 1, 2)
    query.decide(0)
    assert settled(again) == Standing()
    assert query.visible() == [1, 2]


def test_what_another_driver_will_commit_is_left_to_it(query: Query) -> None:
    again = recovery(query)
    again.recover()
    query.prepare(query.driver(name=new_driver(START)), 0, 1)
    other = query.driver()
    query.decide(0)
    assert settled(again) == Standing(pending=(0,))
    assert other.commit_decided()  # it was not fenced
    assert query.visible() == [1]


def test_the_failure_of_an_older_driver_is_not_one_of_this_query(query: Query) -> None:
    """The server of a client that was killed runs on; it finds out that it is superseded while the next query runs."""
    older, again = query.driver(), recovery(query)
    before = Standing.from_json(again.recover())
    with pytest.raises(Fenced):
        older.settle(0)
    older.note_failure(Fenced("another driver has taken over this checkpoint"))
    assert Standing.from_json(again.settle("query-1", before, 0.05, ended=False)) == before


def test_a_recovery_that_failed_is_repeated_by_the_same_start(query: Query) -> None:
    again = recovery(query)
    query.prepare(query.driver(name=new_driver(START)), 0, 1)
    query.decide(0)
    query.sink.forget_outcome()
    with pytest.raises(Exception, match="outcome"):
        settled(again)
    assert settled(again) == Standing()
    assert query.visible() == [1]


def test_the_process_of_the_run_knows_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "_client_session", [])
    monkeypatch.setattr(execution, "_start", [])
    assert CONNECT.start_id() == ""
    seen: list[str] = []
    Started(lambda _, __: seen.append(CONNECT.start_id()), "session", START)(cast("DataFrame", None), 0)
    assert seen == [START]
    one, other = new_driver(START), new_driver(START)
    assert one.startswith(START)
    assert one != other
