"""What the doctor says of a checkpoint and of sinks that find something, and with which status it ends."""

from __future__ import annotations

import json
import shlex
import sys
import time
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from checkpoint_kit import CheckpointKit
from folder_sink import FolderSink
from hints import type_words
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from epochsink.cli.app import app
from epochsink.protocol.storage import LocalStorage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from typer.testing import Result

MODULE = "examined_sinks"
SINKS = """
import psycopg
from folder_sink import FolderParticipant, FolderSink
from epochsink import ExactlyOnce
from epochsink.sink import Finding, Operator

class Examined(FolderSink):
    def participant(self, members):
        return Examining(members)

class Examining(FolderParticipant):
    def operator(self):
        return Examiner()

class Examiner(Operator):
    def examine(self, sink):
        yield Finding("server", "a folder")
        yield from FOUND
        if FAILURE is not None:
            raise FAILURE

FOUND = []
FAILURE = None
SINKS = {"table": Examined("FOLDER/table")}
sink = ExactlyOnce(checkpoint="FOLDER/checkpoint", sinks=SINKS)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the module that names the sinks, in the current folder."""
    (tmp_path / f"{MODULE}.py").write_text(SINKS.replace("FOLDER", str(tmp_path)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAVA_HOME", "/nonexistent")
    # tests of other files may have left a session in this process
    monkeypatch.setattr(SparkSession, "getActiveSession", classmethod(lambda _: None))
    yield tmp_path / f"{MODULE}.py"
    sys.modules.pop(MODULE, None)


@pytest.fixture
def doctor(module: Path) -> Callable[..., Result]:
    """Run the verb on sinks that find ``found`` and then fail with ``failure``, both Python expressions."""

    def run(*arguments: str, of: str = "sink", found: str = "[]", failure: str = "None") -> Result:
        text = (
            module.read_text()
            .replace("FOUND = []", f"FOUND = {found}")
            .replace("FAILURE = None", f"FAILURE = {failure}")
        )
        module.write_text(text)
        sys.modules.pop(MODULE, None)
        return CliRunner().invoke(app, ["doctor", f"{MODULE}:{of}", *arguments])

    return run


def line(result: Result, of: str, what: str) -> str:
    """Return the one line about something."""
    (found,) = (each for each in result.output.splitlines() if f"{of}, {what}: " in each)
    return found


def test_the_command_in_a_line_can_be_typed_as_it_stands(doctor: Callable[..., Result], tmp_path: Path) -> None:
    CheckpointKit(tmp_path / "checkpoint", {"table": FolderSink(str(tmp_path / "table"))}).close()
    command = "epochsink recover CHECKPOINT --sinks MODULE:ATTRIBUTE"
    result = doctor(found=f"[Finding('table', 'a lock; {command}', '{command}')]")
    hint = line(result, "sink 'table'", "table").rpartition("; ")[2]
    assert f"a lock; {hint}; {hint}" in result.output
    type_words(shlex.split(hint))


def test_a_line_for_each_thing_and_status_0_if_all_is_well(doctor: Callable[..., Result], tmp_path: Path) -> None:
    result = doctor()
    assert result.exit_code == 0
    assert "epochsink 0" in line(result, "this machine", "versions")
    assert line(result, "checkpoint", "store").startswith("well ")
    assert line(result, "checkpoint", "query").endswith("none has run here")
    assert line(result, "sink 'table'", "server").startswith("well ")
    # what nobody looked at is said, and is no alarm
    assert line(result, "stream", "columns").startswith("not examined ")
    assert line(result, "executors", "Python").startswith("not examined ")
    assert list((tmp_path / "checkpoint").rglob("check-*")) == []


def test_what_a_person_should_look_at_ends_with_status_3(doctor: Callable[..., Result]) -> None:
    result = doctor(found='[Finding("clock", "9 s ahead", "set it")]')
    assert (result.exit_code, line(result, "sink 'table'", "clock")) == (
        3,
        "attention    sink 'table', clock: 9 s ahead; set it",
    )


def test_what_stops_an_epoch_ends_with_status_1_and_the_rest_is_still_examined(doctor: Callable[..., Result]) -> None:
    found = '[Finding("table", "is a view", is_fatal=True), Finding("clock", "right")]'
    result = doctor(found=found)
    assert (result.exit_code, line(result, "sink 'table'", "table")[:5]) == (1, "wrong")
    assert line(result, "sink 'table'", "clock").startswith("well ")


def test_a_target_that_is_down_is_a_line(doctor: Callable[..., Result]) -> None:
    result = doctor("--json", failure='psycopg.OperationalError("no route")')
    lines = {(each["of"], each["what"]): each for each in json.loads(result.stdout)["lines"]}
    down = lines["sink 'table'", "target"]
    assert (result.exit_code, down["state"]) == (1, "wrong")
    assert "PostgreSQL says OperationalError: no route" in down["found"]
    assert down["hint"].startswith("check that PostgreSQL runs")
    assert ("stream", "columns") in lines


def test_a_defect_keeps_its_traceback(doctor: Callable[..., Result]) -> None:
    assert isinstance(doctor(failure='ZeroDivisionError("ours")').exception, ZeroDivisionError)


def test_a_store_that_does_not_create_conditionally_is_wrong(
    doctor: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    def overwrite(self: LocalStorage, name: str, data: bytes) -> bool:
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_bytes(data)
        return True

    monkeypatch.setattr(LocalStorage, "create", overwrite)
    result = doctor()
    assert result.exit_code == 1
    assert "does not create conditionally" in line(result, "checkpoint", "store")


def test_a_query_that_is_late_is_for_a_person(
    doctor: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = CheckpointKit(tmp_path / "checkpoint", {"table": FolderSink(str(tmp_path / "table"))})
    kit.record(0, {"table": pa.record_batch({"id": pa.array([1])})})
    kit.decide(0)
    kit.close()
    now = time.time()
    monkeypatch.setattr("epochsink.cli.status.time.time", lambda: now + 300)
    result = doctor()
    assert result.exit_code == 3
    assert "LATE by 5 min" in line(result, "checkpoint", "query")


def test_a_dict_of_sinks_has_no_checkpoint(doctor: Callable[..., Result]) -> None:
    result = doctor(of="SINKS")
    assert result.exit_code == 0
    assert line(result, "checkpoint", "store").startswith("not examined ")


def test_without_pyspark_the_targets_are_examined_all_the_same(
    doctor: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator's host may lack PySpark, which a cluster brings along."""
    doctor(of="SINKS")
    monkeypatch.setitem(sys.modules, "pyspark.sql", None)
    result = doctor(of="SINKS")
    assert result.exit_code == 0
    assert line(result, "executors", "Python").endswith("PySpark is not installed here")
    assert line(result, "sink 'table'", "server").startswith("well ")
    refused = doctor("--frame", f"{MODULE}:SINKS", of="SINKS")
    assert refused.exit_code == 1
    assert "this needs a Spark session, and the module pyspark.sql is not installed" in refused.output
