"""What every look at a checkpoint says after its PostgreSQL was set back: before the next start, and after that."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from checkpoint_kit import CheckpointKit
from typer.testing import CliRunner

from epochsink.cli.app import app
from epochsink.errors import WentBack
from epochsink.postgres import Postgres
from epochsink.testing.sink_rig import OneSink

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from fix_postgres import Truth
    from typer.testing import Result

    from epochsink_devkit.services import PostgresService

MODULE = "looked_at_sinks"


def ids(*values: int) -> pa.RecordBatch:
    return pa.record_batch({"id": pa.array(values, pa.int64())})


class Pipeline:
    """A checkpoint whose one table has four epochs; the two newest are gone from it once it is `set_back`."""

    def __init__(self, folder: Path, dsn: str, schema: str, truth: Truth, retain_seconds: float) -> None:
        self._schema, self._truth = schema, truth
        self.table = f"{schema}.orders"
        truth.execute(f"CREATE TABLE {self.table} (id bigint)")
        given: dict[str, Any] = {"table": self.table, "marker_schema": schema}
        (folder / f"{MODULE}.py").write_text(
            "from epochsink import ExactlyOnce, Postgres\n"
            f"SINKS = {{'sink': Postgres({dsn!r}, **{given!r})}}\n"
            f"pipeline = ExactlyOnce(checkpoint={str(folder / 'checkpoint')!r}, sinks=SINKS)\n"
        )
        sink = Postgres(dsn, **given)
        with closing(OneSink.of(sink)) as committer:
            assert committer.check(ids(1).schema) == []
        self.kit = CheckpointKit(folder / "checkpoint", {"sink": sink}, retain_seconds=retain_seconds)
        for number in range(4):
            self.kit.run(number, {"sink": ids(number)})

    def set_back(self) -> None:
        """Take the two newest epochs from the table, as a restore does."""
        execute = self._truth.execute
        execute(f"DELETE FROM {self._schema}.marker WHERE key NOT LIKE '%%.table' AND epoch > 1")  # noqa: S608
        execute(f"DELETE FROM {self.table} WHERE id > 1")  # noqa: S608

    def start(self) -> str:
        """Start the query, which stops; return its error as Spark shows it."""
        stopped = self.kit.stopped_start(f"{MODULE}:pipeline")
        assert isinstance(stopped, WentBack)
        return str(stopped)


@pytest.fixture
def pipeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, postgres: PostgresService, pg_schema: str, pg_truth: Truth
) -> Iterator[Callable[..., Pipeline]]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    made: list[Pipeline] = []

    def make(retain_seconds: float = 3600.0) -> Pipeline:
        made.append(Pipeline(tmp_path, postgres.dsn, pg_schema, pg_truth, retain_seconds))
        return made[-1]

    yield make
    for each in made:
        each.kit.close()
    sys.modules.pop(MODULE, None)


def typed(command: str) -> Result:
    """Type a command as it stands."""
    return CliRunner().invoke(app, shlex.split(command)[1:])


def test_a_start_that_failed_is_what_every_look_says(
    pipeline: Callable[..., Pipeline], pg_truth: Truth, tmp_path: Path
) -> None:
    """The first line, the status, and the one command that mends it, which can be copied from the error and from
    status.
    """
    query = pipeline()
    query.set_back()
    root, sinks = query.kit.root, f"--sinks {MODULE}:pipeline"
    error = query.start()
    repair = f"epochsink repair {root} {sinks}"
    assert f"\n  Type: {repair}" in error
    assert "the rows of epochs 2 to 3 are missing" in error
    assert "MODULE:ATTRIBUTE" not in error
    for command in (f"epochsink status {root}", f"epochsink status {root} --max-age 9999"):
        status = typed(command)
        assert status.exit_code == 3
        assert status.output.startswith("STOPPED ")
        assert " with WentBack, and no query has started since" in status.output
        assert f"    {repair}\n" in status.output
    asked = typed(f"epochsink status {root} {sinks} --json")
    told = json.loads(asked.output)
    assert (asked.exit_code, told["needs_person"]) == (3, True)
    assert told["headline"].startswith("ATTENTION: a target and the ledger disagree")
    assert told["targets"][0]["disagreements"][0]["command"] == repair
    audit = typed(f"epochsink audit {root} {sinks}")
    assert (audit.exit_code, repair in audit.output) == (3, True)
    page = tmp_path / "report.html"
    assert typed(f"epochsink report {root} --output {page}").exit_code == 0
    assert "STOPPED " in page.read_text()
    assert "the rows of epochs 2 to 3 are missing" in page.read_text()
    assert typed(f"{repair} --yes").exit_code == 0
    assert sorted(pg_truth.rows(query.table)) == [(0,), (1,), (2,), (3,)]
    well = typed(f"epochsink status {root} {sinks}")
    assert (well.exit_code, well.output.partition(":")[0]) == (0, "up to date")


def test_targets_are_compared_before_a_start_fails(pipeline: Callable[..., Pipeline], tmp_path: Path) -> None:
    """By status, doctor and report, if they know the sinks; without rows that are retained, they say to accept."""
    query = pipeline(retain_seconds=0.0)
    query.set_back()
    root, sinks = query.kit.root, f"--sinks {MODULE}:pipeline"
    # it cannot know: nobody has asked the target
    assert typed(f"epochsink status {root}").exit_code == 0
    status = typed(f"epochsink status {root} {sinks}")
    assert (status.exit_code, status.output.partition(":")[0]) == (3, "ATTENTION")
    assert f"\n    epochsink accept {root} 3 --sink sink\n" in status.output
    doctor = typed(f"epochsink doctor {MODULE}:pipeline")
    [line] = [each for each in doctor.output.splitlines() if "sink 'sink', marker: " in each]
    assert (doctor.exit_code, line[:5]) == (1, "wrong")
    assert f"epochsink accept {root} 3 --sink sink" in line
    page = tmp_path / "report.html"
    assert typed(f"epochsink report {root} {sinks} --output {page}").exit_code == 0
    assert "a target and the ledger disagree" in page.read_text()


def test_a_command_that_fails_after_its_take_is_shown_as_a_start_that_failed(pipeline: Callable[..., Pipeline]) -> None:
    query = pipeline()
    query.set_back()
    recover = typed(f"epochsink recover {query.kit.root} --sinks {MODULE}:pipeline --yes")
    assert recover.exit_code == 1
    status = typed(f"epochsink status {query.kit.root}")
    assert (status.exit_code, status.output.partition(" ")[0]) == (3, "STOPPED")


def test_a_driver_that_has_died_on_this_host_is_not_said_to_be_connected(
    pipeline: Callable[..., Pipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL may hold its sessions for a while; the ledger has its process, which has ended."""
    query = pipeline()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(30)
    with monkeypatch.context() as while_it_starts:
        while_it_starts.setattr(os, "getpid", lambda: ended.pid)
        query.kit.coordinator = query.kit.start()
    query.kit.record(4, {"sink": ids(4)})
    command = f"epochsink status {query.kit.root} --sinks {MODULE}:pipeline"
    assert "its driver is not connected" in typed(command).output
    # its session is there
    monkeypatch.setattr("epochsink.cli.targets.has_ended", lambda _: False)
    assert "its driver is connected now" in typed(command).output
