"""What an operator types, against a real PostgreSQL; each test asks the server what is true afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from checkpoint_kit import CheckpointKit
from typer.testing import CliRunner

from epochsink.cli.app import app
from epochsink.postgres import Postgres
from epochsink.sink import Identity, identity_key
from epochsink.testing.sink_rig import OneSink

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fix_postgres import Truth
    from typer.testing import Result

    from epochsink_devkit.services import PostgresService

MODULE = "operators_table"


class Desk:
    """A checkpoint with one PostgreSQL sink, the server's truth, and the command line."""

    def __init__(self, folder: Path, dsn: str, schema: str, truth: Truth, **way: Any) -> None:
        self.table = f"{schema}.orders"
        self.schema = schema
        self.truth = truth
        truth.execute(f"CREATE TABLE {self.table} (id bigint)")
        options = f"{dsn!r}, table={self.table!r}, marker_schema={schema!r}, **{way!r}"
        (folder / f"{MODULE}.py").write_text(
            f"from epochsink import Postgres\nSINKS = {{'table': Postgres({options})}}\n"
        )
        sink = Postgres(dsn, table=self.table, marker_schema=schema, **way)
        self._prepare_target(sink)
        self.kit = CheckpointKit(folder / "checkpoint", {"table": sink})
        self.key = identity_key(Identity(self.kit.query_id, "table"))

    def decided(self, number: int, *ids: int) -> None:
        """Leave an epoch prepared, recorded and decided: the driver died before its commit."""
        self.kit.record(number, {"table": rows(*ids)})
        self.kit.decide(number)

    def run(self, verb: str, *arguments: str) -> Result:
        place = str(self.kit.root)
        return CliRunner().invoke(app, [verb, place, *arguments, "--sinks", f"{MODULE}:SINKS", "--yes"])

    def visible(self) -> list[int]:
        return sorted(value for (value,) in self.truth.rows(self.table))

    def prepared(self) -> list[str]:
        """Return the gids of this sink's prepared transactions."""
        found = self.truth.execute("SELECT gid FROM pg_prepared_xacts WHERE strpos(gid, %s) > 0 ORDER BY 1", self.key)
        return [gid for (gid,) in found]

    def staging(self) -> list[str]:
        """Return the names of this sink's staging tables."""
        found = self.truth.execute(
            "SELECT tablename FROM pg_tables WHERE schemaname = %s AND strpos(tablename, %s) > 0", self.schema, self.key
        )
        return [name for (name,) in found]

    def roll_back_as_a_dba(self) -> None:
        for gid in self.prepared():
            self.truth.execute(f"ROLLBACK PREPARED '{gid}'")

    def mark_as_another(self, number: int) -> None:
        """Leave the marker of an attempt that the ledger does not know, as a restored target may hold."""
        insert = "INSERT INTO {}.marker (key, epoch, part, attempt, query_id, sink) VALUES (%s, %s, 'all', %s, %s, %s)"
        attempt = uuid.uuid4().hex
        self.truth.execute(insert.format(self.schema), self.key, number, attempt, self.kit.query_id, "table")

    @staticmethod
    def _prepare_target(sink: Postgres) -> None:
        committer = OneSink.of(sink)
        assert committer.check(rows(1).schema) == []
        committer.close()


def name_sinks(folder: Path, module: str, options: str) -> None:
    """Write the module that a user's pipeline would keep its sinks in."""
    (folder / f"{module}.py").write_text(f"from epochsink import Postgres\nSINKS = {{'table': Postgres({options})}}\n")


def rows(*ids: int) -> pa.RecordBatch:
    return pa.record_batch({"id": pa.array(ids, pa.int64())})


@pytest.fixture
def desk(
    request: pytest.FixtureRequest, tmp_path: Path, pg_schema: str, pg_truth: Truth, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Desk]:
    """Return a desk of the test's own; a test gives other options of its sink as the fixture's parameter."""
    monkeypatch.chdir(tmp_path)
    made = Desk(tmp_path, pg_truth.dsn, pg_schema, pg_truth, **getattr(request, "param", {}))
    yield made
    made.kit.close()
    sys.modules.pop(MODULE, None)


@pytest.mark.parametrize("desk", [{"atomic": False}], indirect=True)
def test_recover_commits_the_decided_and_rolls_back_the_leftover(desk: Desk) -> None:
    """The seal and the rows of one attempt, and the rows of a task of an earlier one."""
    desk.kit.write(0, {"table": rows(3)})
    desk.decided(0, 1, 2)
    assert (desk.visible(), len(desk.prepared()), len(desk.staging())) == ([], 3, 0)
    result = desk.run("recover")
    assert result.exit_code == 0, result.output
    assert "committed epoch 0" in result.output
    assert (desk.visible(), desk.prepared(), desk.staging()) == ([1, 2], [], [])


def test_recover_leaves_an_undecided_transaction_prepared(desk: Desk) -> None:
    desk.kit.record(0, {"table": rows(1)})
    before = desk.prepared()
    assert desk.run("recover").exit_code == 0
    assert (desk.visible(), desk.prepared()) == ([], before)


def test_recover_prepares_again_what_a_dba_rolled_back(desk: Desk) -> None:
    desk.decided(0, 1, 2)
    desk.roll_back_as_a_dba()
    assert desk.run("recover").exit_code == 0
    assert (desk.visible(), desk.prepared()) == ([1, 2], [])


def test_recover_twice_is_recover_once(desk: Desk) -> None:
    desk.decided(0, 1)
    desk.run("recover")
    result = desk.run("recover")
    assert "no recorded epoch is pending" in result.output
    assert desk.visible() == [1]


def test_an_unknown_outcome_stops_recover_and_leaves_everything(desk: Desk) -> None:
    desk.decided(0, 1)
    desk.roll_back_as_a_dba()
    desk.mark_as_another(0)
    result = desk.run("recover")
    assert result.exit_code == 1
    assert "epoch 0 was applied to table" in result.output
    assert "Traceback" not in result.output
    assert [prepared.epoch for prepared in desk.kit.history().pending] == [0]


def test_an_unknown_epoch_is_closed_as_committed(desk: Desk) -> None:
    desk.decided(0, 1)
    desk.roll_back_as_a_dba()
    desk.mark_as_another(0)
    result = desk.run("resolve", "0", "--sink", "table", "--as", "committed")
    assert result.exit_code == 0, result.output
    assert desk.kit.history().done == {0}
    assert desk.visible() == []


@pytest.mark.parametrize("desk", [{"atomic": False}], ids=["by-task"], indirect=True)
@pytest.mark.parametrize("word", ["committed", "replay"])
def test_no_task_is_committed_by_word_if_another_attempt_has_the_epoch(desk: Desk, word: str) -> None:
    """Its rows would be there twice: parts of tasks have no marker in common, only the seal has."""
    desk.kit.record(0, {"table": [rows(1), rows(2)]})
    desk.kit.decide(0)
    (seal,) = [gid for gid in desk.prepared() if ":all" in gid]
    desk.truth.execute(f"ROLLBACK PREPARED '{seal}'")
    desk.mark_as_another(0)
    result = desk.run("resolve", "0", "--sink", "table", "--as", word)
    assert result.exit_code == (0 if word == "committed" else 1), result.output
    assert desk.visible() == []
    assert desk.kit.history().done == ({0} if word == "committed" else set())


def test_a_replay_by_word_cannot_apply_an_epoch_that_has_a_marker(desk: Desk) -> None:
    """The operator is wrong; the marker's primary key keeps the rows from coming twice."""
    desk.decided(0, 1)
    desk.roll_back_as_a_dba()
    desk.mark_as_another(0)
    result = desk.run("resolve", "0", "--sink", "table", "--as", "replay")
    assert result.exit_code == 1
    assert "epoch 0 is already applied" in result.output
    assert (desk.visible(), desk.prepared()) == ([], [])


def test_discarding_rolls_back_what_was_prepared_and_keeps_the_rows(desk: Desk) -> None:
    desk.decided(0, 1, 2)
    result = desk.run("resolve", "0", "--sink", "table", "--as", "discard")
    assert result.exit_code == 0, result.output
    assert (desk.visible(), desk.prepared(), desk.staging()) == ([], [], [])
    assert pq.read_table(desk.kit.root.parent / "epoch-0-table.parquet").to_pydict() == {"id": [1, 2]}


def test_a_database_that_is_gone_leaves_everything_as_it_was(
    desk: Desk, tmp_path: Path, postgres: PostgresService
) -> None:
    desk.decided(0, 1)
    gone = postgres.dsn.removesuffix("postgres") + "gone"
    name_sinks(tmp_path, "operators_gone", f"{gone!r}, table={desk.table!r}, marker_schema={desk.schema!r}")
    arguments = ["recover", str(desk.kit.root), "--sinks", "operators_gone:SINKS", "--yes"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "Traceback" not in result.output
    assert 'database "gone" does not exist' in result.output
    assert desk.run("recover").exit_code == 0
    assert desk.visible() == [1]


def test_a_checkpoint_on_another_file_system_is_reached_through_spark(desk: Desk, tmp_path: Path) -> None:
    desk.decided(0, 1)
    link = f"spark.hadoop.fs.viewfs.mounttable.mounted.link./tree={tmp_path.as_uri()}"
    place = ["viewfs://mounted/tree/checkpoint", "--spool", desk.kit.spool.root]
    environment = {**os.environ, "PYSPARK_SUBMIT_ARGS": f"--conf {link} --conf spark.ui.enabled=false pyspark-shell"}

    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "epochsink.cli.app", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=240).stdout

    found = json.loads(run("status", *place, "--json"))
    assert [(epoch["epoch"], epoch["state"]) for epoch in found["epochs"]] == [(0, "decided")]
    assert "committed epoch 0" in run("recover", *place, "--sinks", f"{MODULE}:SINKS", "--yes")
    assert desk.visible() == [1]
