"""What an operator types, on checkpoints made by hand and sinks on plain folders."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import obstore.store
import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
from checkpoint_kit import CheckpointKit
from confluent_kafka.admin import AdminClient
from elasticsearch import Elasticsearch
from folder_sink import FolderParticipant, FolderSink
from typer.testing import CliRunner

from epochsink.cli.app import app
from epochsink.cli.driver_process import has_ended
from epochsink.errors import CheckFailed, ConfigurationError, Fenced, RowsRejected, WentBack
from epochsink.protocol import failed_start
from epochsink.protocol.ledger import Ledger
from epochsink.protocol.ledger_entries import Abandoned, Stamp
from epochsink.protocol.storage import LocalStorage
from epochsink.sink import participants_of
from epochsink.spark.import_guard import refuse_query

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from typer.testing import Result

MODULE = "operators_sinks"


@pytest.fixture
def sinks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, FolderSink]]:
    """Two sinks, which a module in the current folder names."""
    made = {name: FolderSink(str(tmp_path / name)) for name in ("table", "search")}
    (tmp_path / f"{MODULE}.py").write_text(
        "from folder_sink import FolderSink\n"
        "from epochsink import ExactlyOnce\n"
        f"SINKS = {{name: FolderSink(f'{tmp_path}/{{name}}') for name in ('table', 'search')}}\n"
        "TABLE = {'table': SINKS['table']}\n"
        f"sink = ExactlyOnce(checkpoint='{tmp_path}/checkpoint', sinks=SINKS)\n"
        f"elsewhere = ExactlyOnce(checkpoint='{tmp_path}/elsewhere', sinks=SINKS)\n"
        "number = 7\n"
        "empty = {}\n"
        "wrong = {'table': 7}\n"
    )
    monkeypatch.chdir(tmp_path)
    yield made
    sys.modules.pop(MODULE, None)


@pytest.fixture
def kit(tmp_path: Path, sinks: dict[str, FolderSink]) -> CheckpointKit:
    """Return a checkpoint with both sinks."""
    return CheckpointKit(tmp_path / "checkpoint", sinks)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Result]:
    """Run the command line where no JVM can start; the first answer that is not given is a refusal."""
    monkeypatch.setenv("JAVA_HOME", "/nonexistent")
    monkeypatch.setenv("COLUMNS", "200")

    def invoke(verb: str, *arguments: str, answer: str = "") -> Result:
        return CliRunner().invoke(app, [verb, str(tmp_path / "checkpoint"), *arguments], input=answer)

    return invoke


def rows(*ids: int) -> pa.RecordBatch:
    return pa.record_batch({"id": pa.array(ids, pa.int64())})


def both(*ids: int) -> dict[str, pa.RecordBatch]:
    return {"table": rows(*ids), "search": rows(*ids)}


def said(result: Result) -> str:
    """Return what was printed in one line, so that a terminal's width does not matter."""
    return " ".join(result.output.split())


# ---- status


def test_status_tells_how_far_each_epoch_has_come(kit: CheckpointKit, run: Callable[..., Result]) -> None:
    kit.run(0, both(1, 2))
    kit.record(1, {"table": rows(3)})
    kit.decide(1)
    result = run("status", "--json")
    found = json.loads(result.output)
    assert (result.exit_code, found["query_id"], found["generation"]) == (0, kit.query_id, kit._first)
    assert found["sinks"] == ["search", "table"]
    assert (found["newest_recorded"], found["newest_decided"]) == (1, 1)
    assert [(epoch["epoch"], epoch["state"], epoch["parts"]) for epoch in found["epochs"]] == [
        (0, "done", {"table": 1, "search": 1}),
        (1, "decided", {"table": 1}),
    ]
    assert found["epochs"][0]["spooled_bytes"] == 0 < found["epochs"][1]["spooled_bytes"]
    assert "epoch 1 is decided and not yet committed" in found["advice"][0]


def test_the_first_line_of_status_says_whether_data_is_late(
    kit: CheckpointKit, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    kit.run(0, both(1, 2))
    assert re.match(
        r"up to date: everything decided is visible; epoch 0 is the newest, \d+ s ago", run("status").output
    )
    kit.record(1, {"table": rows(3)})
    kit.decide(1)
    assert run("status").output.startswith("epoch 1 was decided just now")
    assert run("status", "--max-age", "60").exit_code == 0
    now = time.time()
    monkeypatch.setattr("epochsink.cli.status.time.time", lambda: now + 300)
    late = run("status", "--max-age", "60")
    assert late.output.startswith("LATE by 5 min: epoch 1 is decided and not visible in every sink")
    assert late.exit_code == 3
    assert run("status", "--max-age", "600").exit_code == 0


def test_status_tells_how_long_an_epoch_has_been_under_way(kit: CheckpointKit, run: Callable[..., Result]) -> None:
    kit.run(0, both(1, 2))
    assert json.loads(run("status", "--json").output)["open_seconds"] == 0.0

    def begun(number: int, ago: float) -> None:
        header = json.dumps({"batchWatermarkMs": 0, "batchTimestampMs": int(1000 * (time.time() - ago))})
        (kit.root / "offsets" / str(number)).write_text(f'v1\n{header}\n{{"orders":{{"0":{number}}}}}')

    # Spark has begun it, and a target does not answer: nothing is recorded, and nothing is late
    begun(1, 300)
    stuck = run("status", "--max-age", "60")
    assert re.match(r"SLOW: epoch 1 has been under way for 5 min: .*; up to date: ", stuck.output)
    assert "with --sinks MODULE:ATTRIBUTE, this command says whether its targets answer" in said(stuck)
    assert stuck.exit_code == 3
    assert run("status", "--max-age", "600").exit_code == 0
    begun(1, 20)
    assert re.match(r"up to date: .* ago; epoch 1 has been under way for 2\d s\n", run("status").output)
    kit.record(1, both(3))
    begun(1, 300)
    kit.decide(1)
    # Spark has begun the next one meanwhile
    begun(2, 5)
    assert 300 <= json.loads(run("status", "--json").output)["open_seconds"] < 400
    (kit.root / "offsets" / "2").unlink()
    assert kit.coordinator.commit_decided()
    assert run("status", "--max-age", "60").exit_code == 0
    # a header that tells no time
    (kit.root / "offsets" / "2").write_text("v1")
    assert json.loads(run("status", "--json").output)["open_seconds"] == 0.0


def test_status_tells_rows_times_and_the_last_failure(kit: CheckpointKit, run: Callable[..., Result]) -> None:
    kit.run(0, both(1, 2))
    kit.coordinator.note_failure(RowsRejected("the target refuses [3] rows"))
    result = run("status")
    assert "commit 0." in said(result)
    assert "RowsRejected: the target refuses [3] rows (20" in said(result)
    (epoch,) = json.loads(run("status", "--json").output)["epochs"]
    assert set(epoch["rows"]) == {"search", "table"}


def test_a_report_draws_the_newest_epochs(kit: CheckpointKit, run: Callable[..., Result], tmp_path: Path) -> None:
    kit.run(0, both(1, 2))
    kit.run(1, both(3))
    kit.record(2, {"table": rows(3)})
    output = tmp_path / "page.html"
    assert said(run("report", "--output", str(output))) == f"wrote {output}"
    page = output.read_text()
    assert "epochs 0 to 1 in time" in page
    assert "epoch 2 is recorded and not decided" in page


def test_a_start_that_failed_before_it_took_the_ledger_is_shown_until_one_succeeds(
    kit: CheckpointKit, run: Callable[..., Result], tmp_path: Path
) -> None:
    """A query may run meanwhile: it is not said to have stopped, and once it has done an epoch, nobody need look."""
    kit.run(0, both(1, 2))
    files = LocalStorage(kit.root)
    for text in ("older", "the table lacks a column"):
        failed_start.note(files, CheckFailed(f"sink 'table': {text}", hint="add the column"), "app-7")
    (noted,) = (kit.root / failed_start.FOLDER).iterdir()
    result = run("status")
    assert result.exit_code == 3
    assert re.match(r"a START FAILED \d+ s ago with CheckFailed; see below; up to date: ", result.output)
    assert "failed start CheckFailed: sink 'table': the table lacks a column (" in said(result)
    assert "add the column a query that another process has started is not affected" in said(result)
    found = json.loads(run("status", "--json").output)
    assert found["failed_start"]["failure"] == "CheckFailed: sink 'table': the table lacks a column"
    assert (found["failed_start"]["hint"], found["failed_start"]["stamp"]["application"]) == ("add the column", "app-7")
    assert (found["stopped"], found["needs_person"]) == (None, True)
    assert run("report", "--output", str(tmp_path / "page.html")).exit_code == 0
    assert "the table lacks a column" in (tmp_path / "page.html").read_text()
    examined = json.loads(CliRunner().invoke(app, ["doctor", f"{MODULE}:sink", "--json"]).output)
    (query,) = (line for line in examined["lines"] if line["what"] == "query")
    assert (query["state"], query["found"].partition(" ago")[0][:14]) == ("attention", "a START FAILED")
    kit.run(1, both(3))
    result = run("status")
    assert (result.exit_code, result.output.partition(":")[0]) == (0, "up to date")
    assert "the table lacks a column" in said(result)
    noted.unlink()
    assert "the table lacks a column" not in said(run("status"))


def test_a_failed_start_that_needs_no_note_leaves_none(tmp_path: Path) -> None:
    """Of a folder in which no query has run, and of a start that another one has overtaken."""
    files = LocalStorage(tmp_path)
    failed_start.note(files, CheckFailed("no table", hint="make it"), "")
    (tmp_path / "metadata").write_text('{"id": "7"}')
    failed_start.note(files, Fenced("another driver has taken over", hint="run one"), "")
    assert [each.name for each in tmp_path.iterdir()] == ["metadata"]
    (tmp_path / failed_start.FOLDER).mkdir(parents=True)
    (tmp_path / failed_start.FOLDER / "7-torn").touch()
    assert failed_start.newest(files) is None


def test_status_prints_a_table(kit: CheckpointKit, run: Callable[..., Result]) -> None:
    kit.run(0, both(1))
    kit.record(1, {"table": rows(3)})
    kit.write(2, {"table": rows(4)})
    result = run("status")
    assert result.exit_code == 0
    for text in (
        "recorded, not decided",
        "done",
        "1 row(s)",
        "no rows",
        kit.query_id,
        "an attempt at epoch 2 is not recorded",
    ):
        assert text in said(result)


def test_the_width_of_a_terminal_breaks_no_path_in_status(
    kit: CheckpointKit, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    kit.run(0, both(1))
    monkeypatch.setenv("COLUMNS", "40")
    assert f"bytes in {kit.spool.root}" in run("status").output


def test_status_says_that_an_epoch_has_begun_and_is_not_recorded(
    kit: CheckpointKit, run: Callable[..., Result]
) -> None:
    """A failed epoch leaves its offsets alone; that all is well is not the whole truth then."""
    kit.run(0, both(1))
    assert "has begun" not in said(run("status"))
    kit.write(1, both(2))
    assert "epoch 1 has begun and is not recorded: a query is writing it now, or it failed" in said(run("status"))
    assert json.loads(run("status", "--json").output)["newest_begun"] == 1


def commands(result: Result) -> list[str]:
    """Return the commands that are on a line of their own, whole: as one copies them."""
    return [line.strip() for line in result.output.splitlines() if line.startswith("    epochsink ")]


def test_the_command_that_status_names_can_be_pasted(
    kit: CheckpointKit, sinks: dict[str, FolderSink], run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the options that status was called with, and no terminal breaks its line."""
    kit.record(0, both(1))
    kit.decide(0)
    monkeypatch.setenv("COLUMNS", "80")
    [command] = commands(run("status", "--sinks", f"{MODULE}:sink", "--spool", kit.spool.root))
    assert command == f"epochsink recover {kit.root} --sinks {MODULE}:sink --spool {kit.spool.root}"
    pasted = CliRunner().invoke(app, [*shlex.split(command)[1:], "--yes"])
    assert pasted.exit_code == 0, pasted.output
    assert (sinks["table"].values(), kit.history().done) == ([1], {0})


def test_a_command_whose_sinks_status_does_not_know_says_what_to_add(
    kit: CheckpointKit, run: Callable[..., Result]
) -> None:
    kit.record(0, both(1))
    kit.decide(0)
    result = run("status")
    assert commands(result) == [f"epochsink recover {kit.root} --sinks my_pipeline:sink"]
    assert "instead of my_pipeline:sink, name the object that your pipeline starts" in said(result)


def typed(command: str, *more: str) -> Result:
    """Type a command as it stands."""
    return CliRunner().invoke(app, [*shlex.split(command)[1:], *more])


def test_the_command_for_a_ledger_that_lacks_epochs_can_be_pasted(
    kit: CheckpointKit, run: Callable[..., Result]
) -> None:
    """Whether these epochs may be accepted, the targets say: so the first command asks them."""
    kit.run(0, both(1))
    kit.decide(1)
    [command] = commands(run("status"))
    asked = typed(command.replace("my_pipeline:sink", f"{MODULE}:sink"))
    assert "epoch 1 was decided without ExactlyOnce" in said(asked)
    [command] = commands(asked)
    accepted = typed(command, "--yes")
    assert (accepted.exit_code, "accepted epochs up to 1" in accepted.output) == (0, True)
    kit.start()


def test_status_does_not_say_that_an_epoch_had_no_rows_once_its_parts_are_forgotten(
    kit: CheckpointKit, run: Callable[..., Result]
) -> None:
    for number in range(12):
        kit.run(number, both(number))
    assert "no rows" not in said(run("status", "--epochs", "12"))


def test_status_lists_every_pending_epoch_and_as_many_done_ones_as_asked_for(
    kit: CheckpointKit, run: Callable[..., Result]
) -> None:
    for number in range(4):
        kit.run(number, both(number))
    kit.record(4, both(4))
    assert said(run("status", "--epochs", "3")).count("done") == 2
    assert "recorded, not decided" in said(run("status", "--epochs", "0"))


def test_a_ledger_that_is_an_older_copy_is_not_accepted(
    kit: CheckpointKit, run: Callable[..., Result], tmp_path: Path
) -> None:
    """The first line says so, a scheduler's check fails, and what the targets know decides what to type."""
    ledger = kit.root / "epochsink" / "ledger"
    kit.run(0, both(1))
    shutil.copytree(ledger, tmp_path / "copy")
    for number in (1, 2):
        kit.run(number, both(number))
    shutil.rmtree(ledger)
    shutil.copytree(tmp_path / "copy", ledger)
    (kit.root / "offsets" / "1").write_text('v1\n{"batchTimestampMs":1000}\n{"orders":{"0":1}}')
    status = run("status", "--max-age", "60")
    assert status.output.startswith("ATTENTION: Spark has decided epochs 1 to 2, and the ledger ends at 0: ")
    assert status.exit_code == 3
    assert run("status").exit_code == 3
    assert commands(status) == [f"epochsink status {kit.root} --sinks my_pipeline:sink"]
    assert json.loads(run("status", "--json").output)["late_seconds"] > 60
    asked = run("status", "--sinks", f"{MODULE}:sink")
    assert "the ledger is the older copy" in said(asked)
    assert commands(asked) == [f"epochsink abandon {kit.root} --sinks {MODULE}:sink"]
    refused = run("accept", "2", "--sinks", f"{MODULE}:sink", "--yes")
    assert (refused.exit_code, "the ledger is the older copy" in said(refused)) == (1, True)
    assert "no target is asked whether it knows these epochs" in said(run("accept", "2"))
    assert typed(commands(asked)[0], "--yes").exit_code == 0
    assert kit.history().abandoned is not None


@pytest.mark.usefixtures("kit")
def test_status_says_that_the_driver_has_ended(run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a process on this host: a server may hold its session for longer than it lived."""
    assert "which has ended" not in said(run("status"))
    with monkeypatch.context() as patched:
        patched.setattr("epochsink.cli.status.has_ended", lambda _: True)
        assert f"process {os.getpid()} on host {socket.gethostname()}, which has ended" in said(run("status"))
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        dead.wait()
    stamp = Stamp(time.time(), socket.gethostname(), dead.pid)
    assert has_ended(stamp)
    # its number was given to another process, which began later
    reused = Stamp(0.0, stamp.host, os.getpid())
    assert has_ended(reused)
    assert not has_ended(Stamp(time.time(), stamp.host, os.getpid()))
    assert not has_ended(Stamp(0.0, "another-host", dead.pid))
    with subprocess.Popen([sys.executable, "-c", ""]) as zombie:
        while Path(f"/proc/{zombie.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)
        assert has_ended(Stamp(time.time(), stamp.host, zombie.pid))


def test_a_narrow_terminal_cuts_no_state(
    tmp_path: Path, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("table", "search", "topic", "archive")
    kit = CheckpointKit(tmp_path / "checkpoint", {name: FolderSink(str(tmp_path / name)) for name in names})
    kit.run(0, dict.fromkeys(names, rows(1)))
    kit.record(1, dict.fromkeys(names, rows(2)))
    kit.decide(1)
    monkeypatch.setenv("COLUMNS", "80")
    lines = run("status").output.splitlines()
    assert any("decided, not committed" in line for line in lines)
    assert max(len(line) for line in lines if line.startswith("│")) <= 80


def test_status_of_a_query_without_ledger(kit: CheckpointKit, run: Callable[..., Result]) -> None:
    shutil.rmtree(kit.root / "epochsink")
    result = run("status")
    assert result.exit_code == 0
    assert "no ledger" in said(result)


def test_status_says_since_when_the_driver_has_had_the_ledger(kit: CheckpointKit, run: Callable[..., Result]) -> None:
    """A driver that sums up the ledger repeats its take, which is no new one."""
    began = json.loads(run("status", "--json").output)["taken"]
    for number in range(40):
        kit.run(number, both(number))
    assert kit.generation() == 1
    assert json.loads(run("status", "--json").output)["taken"] == began


def test_a_sink_that_was_renamed_is_said_to_join_and_to_be_gone(
    kit: CheckpointKit, sinks: dict[str, FolderSink], caplog: pytest.LogCaptureFixture
) -> None:
    kit.run(0, both(1))
    renamed = {"table": sinks["table"], "find": sinks["search"]}
    kit.participants = participants_of(renamed)
    kit.start()
    assert [record.message.partition(":")[0] for record in caplog.records if record.name == "epochsink"] == [
        "sink 'search' is no longer part of this query",
        "sink 'find' joins this query after epoch 0",
    ]


def test_a_sink_that_returns_is_said_to_lack_the_epochs_between(
    kit: CheckpointKit, sinks: dict[str, FolderSink], run: Callable[..., Result], caplog: pytest.LogCaptureFixture
) -> None:
    """However often the query starts without it, and whatever a command does between."""
    kit.run(0, both(1))
    for number in (1, 2):
        kit.participants = participants_of({"table": sinks["table"]})
        kit.coordinator = kit.start()
        kit.run(number, {"table": rows(number)})
    assert run("recover", "--sinks", f"{MODULE}:SINKS", "--yes").exit_code == 0
    caplog.clear()
    kit.participants = participants_of(sinks)
    kit.coordinator = kit.start()
    assert "sink 'search' returns to this query, which ran without it after epoch 0: the rows of epochs 1 to 2 are" in (
        caplog.text
    )
    kit.run(3, both(4))
    caplog.clear()
    kit.start()
    assert "returns" not in caplog.text


def test_a_sink_that_was_left_out_of_a_start_without_epochs_lacks_none(
    kit: CheckpointKit, sinks: dict[str, FolderSink], caplog: pytest.LogCaptureFixture
) -> None:
    kit.run(0, both(1))
    for present in ({"table": sinks["table"]}, sinks):
        kit.participants = participants_of(present)
        kit.start()
    assert "returns" not in caplog.text


def test_status_does_not_take_the_ledger(kit: CheckpointKit, run: Callable[..., Result]) -> None:
    run("status")
    kit.run(0, both(1))


# ---- errors


def test_errors_are_one_block_without_traceback(tmp_path: Path, run: Callable[..., Result]) -> None:
    result = run("status")
    assert result.exit_code == 1
    assert said(result).startswith(f"error: {tmp_path}/checkpoint is not the checkpoint of a streaming query")
    assert "Hint: " in result.output
    assert "Traceback" not in result.output


def test_a_torn_entry_is_shown_with_the_epoch_that_is_at_stake(kit: CheckpointKit, run: Callable[..., Result]) -> None:
    kit.run(0, both(1))
    kit.record(1, both(2))
    kit.decide(1)
    entry = newest_entry(kit)
    entry.write_bytes(entry.read_bytes()[:60])
    result = run("status")
    assert result.exit_code == 1
    assert f"{entry.name} cannot be read" in said(result)
    assert "an entry 'prepared' of epoch 1; epoch 1 is at stake: Spark has decided 1, so check" in said(result)
    assert f"generation {kit._first}" in said(result)
    assert "recorded up to epoch 0" in said(result)
    found = json.loads(run("status", "--json").output)
    assert [(epoch["epoch"], epoch["state"]) for epoch in found["epochs"]] == [(0, "done"), (1, "unrecorded")]
    assert len(found["damage"]) == 1
    assert "ledger entry" in said(run("recover", "--sinks", f"{MODULE}:SINKS", "--yes"))


def test_an_entry_without_a_byte_names_the_epochs_around_it(kit: CheckpointKit, run: Callable[..., Result]) -> None:
    kit.run(0, both(1))
    newest_entry(kit).write_bytes(b"")
    result = run("status")
    assert "an entry of unknown kind, written after one of epoch 0; epoch 0 or 1 is at stake" in said(result)
    assert "Spark has decided 0" in said(result)


def test_a_torn_entry_of_an_undecided_epoch(kit: CheckpointKit, run: Callable[..., Result]) -> None:
    kit.record(0, both(1))
    entry = newest_entry(kit)
    entry.write_bytes(entry.read_bytes()[:60])
    assert "Spark has not decided it, so nothing of it may be visible" in said(run("status"))


def test_a_ledger_whose_only_take_is_gone(kit: CheckpointKit, run: Callable[..., Result]) -> None:
    kit.record(0, both(1))
    (kit.root / "epochsink" / "ledger" / f"{0:020d}").unlink()
    result = run("status")
    assert (result.exit_code, "no driver's take comes before it" in said(result)) == (1, True)


def newest_entry(kit: CheckpointKit) -> Path:
    return max((kit.root / "epochsink" / "ledger").glob("[0-9]*"))


@pytest.mark.parametrize(
    ("reference", "complaint"),
    [
        ("operators_sinks", "is not of the form module:attribute"),
        ("no_such_module:sink", "importing no_such_module failed: ModuleNotFoundError"),
        (f"{MODULE}:absent", "has no attribute 'absent'"),
        (f"{MODULE}:number", "is of type int"),
        (f"{MODULE}:empty", "is empty"),
        (f"{MODULE}:wrong", "'table' is not the name of a sink"),
        (f"{MODULE}:elsewhere", "the sinks belong to checkpoint"),
    ],
)
def test_a_wrong_reference_to_sinks_is_refused(
    kit: CheckpointKit, sinks: dict[str, FolderSink], run: Callable[..., Result], reference: str, complaint: str
) -> None:
    if reference.endswith(":elsewhere"):
        CheckpointKit(kit.root.parent / "elsewhere", sinks)
    result = run("recover", "--sinks", reference, "--yes")
    assert result.exit_code == 1
    assert complaint in said(result)
    kit.run(0, both(1))  # its driver still owns the ledger


def unreachable(port: int, folder: Path) -> dict[str, Callable[[], object]]:
    """Return a call of each client, to a port where nobody listens, and one for a file that does not exist."""
    store = obstore.store.S3Store(
        "lake",
        endpoint=f"http://127.0.0.1:{port}",
        region="us-east-1",
        skip_signature=True,
        client_options={"allow_http": True},
        retry_config={"max_retries": 0},
    )
    return {
        "PostgreSQL": lambda: psycopg.connect(f"host=127.0.0.1 port={port}"),
        "Kafka": lambda: AdminClient({"bootstrap.servers": f"127.0.0.1:{port}", "log_level": 0}).list_topics(
            timeout=0.2
        ),
        "Elasticsearch": lambda: Elasticsearch(f"http://127.0.0.1:{port}", max_retries=0).info(),
        "the object store": lambda: store.head("metadata"),
        "the operating system": (folder / "absent").read_bytes,
    }


@pytest.mark.parametrize("system", ["PostgreSQL", "Kafka", "Elasticsearch", "the object store", "the operating system"])
def test_an_error_of_a_client_is_told_in_plain_lines(
    kit: CheckpointKit, tmp_path: Path, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, system: str
) -> None:
    """One that no sink has translated: the sink, the system and what to check; the running driver goes on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        call = unreachable(free.getsockname()[1], tmp_path)[system]
    with monkeypatch.context() as patched:
        patched.setattr(FolderParticipant, "marks", lambda *_: call())
        result = run("recover", "--sinks", f"{MODULE}:SINKS", "--yes")
    assert result.exit_code == 1
    error, hint = result.stderr.splitlines()
    assert re.match(rf"error: sink '(table|search)': {system} says \w+: \S", error)
    assert hint.startswith("  Hint: check that ")
    kit.run(0, both(1))


def test_a_defect_keeps_its_traceback(
    kit: CheckpointKit, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FolderParticipant, "marks", lambda *_: dict[str, int]()["defect"])
    assert isinstance(run("recover", "--sinks", f"{MODULE}:SINKS", "--yes").exception, KeyError)
    kit.close()


def test_a_checkpoint_that_needs_spark_where_there_is_no_java() -> None:
    command = [sys.executable, "-m", "epochsink.cli.app", "status", "hdfs://127.0.0.1:1/checkpoint"]
    environment = {**os.environ, "JAVA_HOME": "/nonexistent"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 1
    assert "error: Spark says PySparkRuntimeError" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("absent", "verb", "complaint"),
    [
        ("psutil", ["services", "up", "postgres", "--detach"], "epochsink services needs the module psutil"),
        ("confluent_kafka", ["demo"], "the demo needs the module confluent_kafka"),
        ("psutil", ["status", "/nonexistent"], "/nonexistent is not the checkpoint of a streaming query"),
    ],
)
def test_a_verb_needs_only_its_own_extra(absent: str, verb: list[str], complaint: str) -> None:
    program = f"import sys; sys.modules[{absent!r}] = None; from epochsink.cli.app import main; main()"
    done = subprocess.run([sys.executable, "-c", program, *verb], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {complaint}")
    assert "Traceback" not in done.stderr


# ---- JSON


def test_an_operation_says_as_json_what_it_planned_and_did(kit: CheckpointKit, run: Callable[..., Result]) -> None:
    kit.record(0, both(1))
    kit.decide(0)
    result = run("recover", "--sinks", f"{MODULE}:SINKS", "--yes", "--json")
    told = json.loads(result.stdout)
    assert (result.exit_code, sorted(told)) == (0, ["done", "plan"])
    assert "commit epoch 0" in told["plan"]
    assert "committed epoch 0" in told["done"]


def test_json_asks_no_question(kit: CheckpointKit, run: Callable[..., Result]) -> None:
    """What would be done is in the answer; nothing is done."""
    kit.record(0, both(1))
    kit.decide(0)
    result = run("recover", "--sinks", f"{MODULE}:SINKS", "--json", answer="y\n")
    told = json.loads(result.stdout)
    assert result.exit_code == 1
    assert "commit epoch 0" in told["plan"]
    assert told["error"]["type"] == "ConfigurationError"
    assert "--yes" in told["error"]["hint"]
    assert kit.generation() == 1


def test_an_error_is_one_json_object(
    kit: CheckpointKit, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours, a client's, a defect (which keeps its traceback), and one in what was typed."""
    ours = run("status", "--sinks", "nothing:here", "--json")
    assert (ours.exit_code, ours.stderr) == (1, "")
    assert json.loads(ours.stdout)["error"]["type"] == "ConfigurationError"
    typed = run("status", "--json", "--colour")
    assert (typed.exit_code, json.loads(typed.stdout)["error"]["type"]) == (2, "NoSuchOption")
    recover = ["recover", "--sinks", f"{MODULE}:SINKS", "--yes", "--json"]
    for failure, system in ((OSError("gone"), True), (KeyError("defect"), False)):
        with monkeypatch.context() as patched:
            patched.setattr(FolderParticipant, "marks", raising(failure))
            result = run(*recover)
        told = json.loads(result.stdout)["error"]
        assert (result.exit_code, told["type"]) == (1, type(failure).__name__)
        assert ("the operating system says OSError: gone" in told["message"]) is system
        assert isinstance(result.exception, SystemExit) is system
    kit.run(0, both(1))


def raising(failure: Exception) -> Callable[..., None]:
    def call(*_: object) -> None:
        raise failure

    return call


def test_what_the_users_module_prints_is_no_part_of_the_json(
    kit: CheckpointKit, run: Callable[..., Result], tmp_path: Path
) -> None:
    kit.close()
    module = tmp_path / f"{MODULE}.py"
    module.write_text("print('loading sinks')\n" + module.read_text())
    result = run("status", "--sinks", f"{MODULE}:SINKS", "--json")
    assert json.loads(result.stdout)["query_id"] == kit.query_id
    assert "loading sinks" in result.stderr


def test_every_verb_answers_in_json() -> None:
    def verbs(group: Any, name: str = "") -> dict[str, Any]:
        below = getattr(group, "commands", None)
        if below is None:
            return {name: group}
        return {
            typed: each for key, one in below.items() for typed, each in verbs(one, f"{name} {key}".strip()).items()
        }

    without = [
        name
        for name, verb in verbs(typer.main.get_command(app)).items()
        if not any("--json" in one.opts for one in verb.params)
    ]
    assert without == []


def test_the_shell_completes_verbs() -> None:
    """As the library does it: the script that --show-completion prints asks the command itself."""
    asked = {"_EPOCHSINK_COMPLETE": "complete_bash", "COMP_WORDS": "epochsink re", "COMP_CWORD": "1"}
    result = CliRunner().invoke(app, [], env=asked, prog_name="epochsink")
    assert result.stdout.split() == ["recover", "repair", "resolve", "report"]


# ---- recover and abort


@pytest.mark.parametrize("attribute", ["SINKS", "sink"])
def test_recover_commits_what_is_decided_and_nothing_else(
    kit: CheckpointKit, sinks: dict[str, FolderSink], run: Callable[..., Result], attribute: str
) -> None:
    kit.record(0, both(1, 2))
    kit.decide(0)
    kit.write(1, both(3))
    result = run("recover", "--sinks", f"{MODULE}:{attribute}", "--yes")
    assert result.exit_code == 0, result.output
    assert "committed epoch 0" in result.output
    assert result.output.count("aborted what no recorded epoch names: 1-") == 2
    for sink in sinks.values():
        assert sink.values() == [1, 2]
        assert sink.prepared() == []


def test_an_undecided_epoch_stays_as_it_is_recorded(
    kit: CheckpointKit, sinks: dict[str, FolderSink], run: Callable[..., Result]
) -> None:
    kit.record(0, both(1))
    result = run("recover", "--sinks", f"{MODULE}:SINKS", "--yes")
    assert result.exit_code == 0, result.output
    assert "left epoch 0 recorded" in result.output
    for sink in sinks.values():
        assert sink.values() == []
        assert len(sink.prepared()) == 1


def test_recover_fences_the_driver(kit: CheckpointKit, run: Callable[..., Result]) -> None:
    assert run("recover", "--sinks", f"{MODULE}:SINKS", "--yes").exit_code == 0
    with pytest.raises(Fenced):
        kit.record(0, both(1))


@pytest.mark.parametrize("answer", ["n\n", ""], ids=["no", "no answer"])
def test_nothing_is_done_without_a_yes(
    kit: CheckpointKit, sinks: dict[str, FolderSink], run: Callable[..., Result], answer: str
) -> None:
    kit.record(0, both(1))
    kit.decide(0)
    for verb in (["recover"], ["resolve", "0", "--sink", "table", "--as", "committed"]):
        result = run(*verb, "--sinks", f"{MODULE}:SINKS", answer=answer)
        assert result.exit_code == 1
        assert "Go on?" in result.output
        assert "nothing was changed" in result.output
        assert "Aborted" not in result.output
    assert kit.generation() == 1
    assert sinks["table"].values() == []


def test_recover_without_a_ledger_begins_none(kit: CheckpointKit, run: Callable[..., Result]) -> None:
    shutil.rmtree(kit.root / "epochsink")
    result = run("recover", "--sinks", f"{MODULE}:SINKS", "--yes")
    assert result.exit_code == 1
    assert "has no ledger" in said(result)
    assert not (kit.root / "epochsink").exists()


def test_recover_needs_the_sink_of_every_pending_epoch(kit: CheckpointKit, run: Callable[..., Result]) -> None:
    kit.record(0, both(1))
    kit.decide(0)
    result = run("recover", "--sinks", f"{MODULE}:TABLE", "--yes")
    assert result.exit_code == 1
    assert "not yet committed in sink 'search'" in said(result)


def test_recover_does_not_let_a_sink_join(
    tmp_path: Path, sinks: dict[str, FolderSink], run: Callable[..., Result]
) -> None:
    kit = CheckpointKit(tmp_path / "checkpoint", {"table": sinks["table"]})
    result = run("recover", "--sinks", f"{MODULE}:SINKS", "--yes")
    assert "sink 'search' has never been part of this query" in said(result)
    owner = kit.history().owner
    assert owner is not None
    assert list(owner.origins) == ["table"]


def test_a_command_refuses_a_sink_of_another_kind_under_an_old_name(
    kit: CheckpointKit, run: Callable[..., Result], tmp_path: Path
) -> None:
    kit.record(0, both(1))
    kit.decide(0)
    module = tmp_path / f"{MODULE}.py"
    module.write_text(
        f"{module.read_text()}\nfrom epochsink.testing import LocalSink\nSINKS['table'] = LocalSink('local')\n"
    )
    result = run("resolve", "0", "--sink", "table", "--as", "committed", "--sinks", f"{MODULE}:SINKS", "--yes")
    assert result.exit_code == 1
    assert "sink 'table' was of the kind 'of your own' when it joined this query, and is of the kind" in said(result)
    assert kit.generation() == 1


def test_a_target_that_is_down_keeps_the_driver_its_ledger(
    kit: CheckpointKit, sinks: dict[str, FolderSink], run: Callable[..., Result]
) -> None:
    """The targets are asked before the take: a recover that cannot do anything does not end the query either."""
    sinks["search"].faults.arm("unreachable")
    result = run("recover", "--sinks", f"{MODULE}:SINKS", "--yes")
    assert result.exit_code == 1
    assert "the folder's server is down" in said(result)
    assert kit.generation() == 1
    kit.run(0, both(1))


@pytest.mark.parametrize("down", ["table", "search"])
@pytest.mark.parametrize("word", ["committed", "replay", "discard"])
def test_resolve_asks_every_target_before_it_takes_the_ledger(
    kit: CheckpointKit, sinks: dict[str, FolderSink], run: Callable[..., Result], word: str, down: str
) -> None:
    """The other sinks' targets too: the rest of the epoch is committed there."""
    kit.record(0, both(1))
    kit.decide(0)
    sinks[down].faults.arm("unreachable")
    result = run("resolve", "0", "--sink", "table", "--as", word, "--sinks", f"{MODULE}:SINKS", "--yes")
    assert result.exit_code == 1
    assert f"sink '{down}': the operating system says ConnectionError: the folder's server is down" in said(result)
    assert kit.generation() == 1
    assert not list(kit.root.parent.glob("*.parquet"))
    assert kit.coordinator.commit_decided()


# ---- the user's own module


PIPELINE = """
from pathlib import Path
from folder_sink import FolderSink
from epochsink import ExactlyOnce

class Writer:
    def __getattr__(self, name):
        Path("started").touch()
        raise AssertionError(name)

sink = ExactlyOnce(checkpoint="checkpoint", sinks={name: FolderSink(name) for name in ("table", "search")})
"""
STARTS = {
    "start": "sink.start(Writer())\n",
    "foreachBatch": "sink(Writer(), 0)\n",
    "exit": "raise SystemExit(0)\n",
}


@pytest.mark.parametrize("how", sorted(STARTS))
def test_a_module_that_runs_its_pipeline_when_imported_is_refused_before_any_row_moves(
    kit: CheckpointKit, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    (kit.root.parent / "pipeline_unguarded.py").write_text(PIPELINE + STARTS[how])
    monkeypatch.delitem(sys.modules, "pipeline_unguarded", raising=False)
    result = run("recover", "--sinks", "pipeline_unguarded:sink", "--yes")
    assert result.exit_code == 1
    assert ("importing pipeline_unguarded failed" if how == "exit" else 'if __name__ == "__main__"') in said(result)
    assert not (kit.root.parent / "started").exists()
    assert kit.generation() == 1


def test_a_guarded_module_is_imported_for_its_sinks(
    kit: CheckpointKit, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    guarded = 'if __name__ == "__main__":\n    sink.start(Writer())\n'
    (kit.root.parent / "pipeline_guarded.py").write_text(PIPELINE + guarded)
    monkeypatch.delitem(sys.modules, "pipeline_guarded", raising=False)
    assert run("recover", "--sinks", "pipeline_guarded:sink", "--yes").exit_code == 0
    kit.close()


def test_the_readmes_own_code_can_be_named_for_its_sinks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[..., Result]
) -> None:
    """It is imported where no JVM can start, and only its checkpoint is elsewhere."""
    found = re.search(r"```python\n(.*?)```", (Path(__file__).parents[2] / "README.md").read_text(), re.DOTALL)
    assert found is not None
    (tmp_path / "readme_pipeline.py").write_text(found[1])
    monkeypatch.setenv("DSN", "postgresql://app@127.0.0.1/shop")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "readme_pipeline", raising=False)
    result = run("recover", "--sinks", "readme_pipeline:sink", "--yes")
    assert f"the sinks belong to checkpoint /tmp/checkpoints/orders, and this is {tmp_path}/checkpoint" in said(result)


def test_queries_may_start_again_after_the_command(run: Callable[..., Result], kit: CheckpointKit) -> None:
    run("recover", "--sinks", f"{MODULE}:SINKS", "--yes")
    refuse_query()
    kit.close()


# ---- resolve


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["0", "--sink", "table", "--as", "committed"], "epoch 0 is done: every sink has committed it"),
        (
            ["1", "--sink", "mail", "--as", "committed"],
            "has nothing pending in sink 'mail' Hint: its rows are pending in: 'table', 'search'",
        ),
        (["1", "--sink", "table", "--as", "replay"], "--as replay needs --sinks"),
        (["1", "--sink", "search", "--as", "replay", "--sinks", f"{MODULE}:TABLE"], "--sinks has no sink 'search'"),
        (["2", "--sink", "table", "--as", "discard"], "epoch 2 is not in the ledger"),
    ],
)
def test_resolve_refuses_what_is_not_an_open_question(
    kit: CheckpointKit, run: Callable[..., Result], arguments: list[str], complaint: str
) -> None:
    kit.run(0, both(1))
    kit.record(1, both(2))
    kit.decide(1)
    result = run("resolve", *arguments, "--yes")
    assert result.exit_code == 1
    assert complaint in said(result)
    assert kit.generation() == 1


@pytest.mark.parametrize("word", ["committed", "replay"])
def test_resolve_refuses_an_undecided_epoch(kit: CheckpointKit, run: Callable[..., Result], word: str) -> None:
    kit.record(0, both(1))
    result = run("resolve", "0", "--sink", "table", "--as", word, "--sinks", f"{MODULE}:SINKS", "--yes")
    assert result.exit_code == 1
    assert "epoch 0 is recorded and not decided" in said(result)
    assert kit.generation() == 1


def test_the_share_of_a_sink_that_is_gone_is_discarded_before_the_decision(
    kit: CheckpointKit, sinks: dict[str, FolderSink], run: Callable[..., Result]
) -> None:
    """Without it the query starts neither with the sink, whose target is gone, nor without it."""
    kit.record(0, both(1))
    refused = run("recover", "--sinks", f"{MODULE}:TABLE", "--yes")
    assert "not yet committed in sink 'search'" in said(refused)
    result = run("resolve", "0", "--sink", "search", "--as", "discard", "--yes")
    assert result.exit_code == 0, result.output
    assert pq.read_table(kit.root.parent / "epoch-0-search.parquet").to_pydict() == {"id": [1]}
    assert kit.history().done == set()
    kit.decide(0)
    assert run("recover", "--sinks", f"{MODULE}:TABLE", "--yes").exit_code == 0
    assert (sinks["table"].values(), kit.history().done) == ([1], {0})


def test_an_epoch_whose_only_share_is_discarded_is_done_when_spark_decides_it(
    kit: CheckpointKit, run: Callable[..., Result]
) -> None:
    kit.record(0, {"search": rows(1)})
    run("resolve", "0", "--sink", "search", "--as", "discard", "--yes")
    assert [prepared.epoch for prepared in kit.history().pending] == [0]
    kit.decide(0)
    assert "committed epoch 0" in run("recover", "--sinks", f"{MODULE}:TABLE", "--yes").output


def test_resolve_as_committed_closes_one_sinks_share(kit: CheckpointKit, run: Callable[..., Result]) -> None:
    kit.record(0, both(1))
    kit.decide(0)
    first = run("resolve", "0", "--sink", "search", "--as", "committed", "--yes")
    assert first.exit_code == 0, first.output
    assert "the epoch is still pending in 'table'" in first.output
    assert [list(prepared.shares) for prepared in kit.history().pending] == [["table"]]
    second = run("resolve", "0", "--sink", "table", "--as", "committed", "--yes")
    assert "epoch 0 is done" in second.output
    assert kit.history().pending == []
    assert kit.spool.attempts(kit.query_id) == []


def test_the_rest_of_a_resolved_epoch_is_committed_at_the_next_start(
    kit: CheckpointKit, sinks: dict[str, FolderSink], run: Callable[..., Result]
) -> None:
    """A sink that the query no longer has is resolved; then the others go on without it."""
    kit.record(0, both(1))
    kit.decide(0)
    run("resolve", "0", "--sink", "search", "--as", "committed", "--yes")
    result = run("recover", "--sinks", f"{MODULE}:TABLE", "--yes")
    assert "committed epoch 0" in result.output
    assert sinks["table"].values() == [1]
    assert kit.history().done == {0}


def test_what_the_target_holds_outweighs_the_word(
    kit: CheckpointKit, sinks: dict[str, FolderSink], run: Callable[..., Result]
) -> None:
    kit.record(0, both(1))
    kit.decide(0)
    result = run("resolve", "0", "--sink", "table", "--as", "replay", "--sinks", f"{MODULE}:SINKS", "--yes")
    assert result.exit_code == 0, result.output
    assert "the target says committed" in result.output
    assert sinks["table"].calls("replay") == []
    assert sinks["table"].values() == sinks["search"].values() == [1]


def test_committed_is_refused_where_the_target_says_that_it_is_gone(
    kit: CheckpointKit, sinks: dict[str, FolderSink], run: Callable[..., Result]
) -> None:
    kit.record(0, both(1))
    kit.decide(0)
    for path in (kit.root.parent / "table" / "prepared").glob("*/*"):
        path.unlink()
    result = run("resolve", "0", "--sink", "table", "--as", "committed", "--sinks", f"{MODULE}:SINKS", "--yes")
    assert result.exit_code == 1
    assert "so it is not committed" in said(result)
    assert run("recover", "--sinks", f"{MODULE}:SINKS", "--yes").exit_code == 0
    assert sinks["table"].values() == [1]


def test_parts_behind_one_of_which_nothing_is_known_are_asked_for_too(
    kit: CheckpointKit, sinks: dict[str, FolderSink], run: Callable[..., Result]
) -> None:
    """A sink does not try them; and what is not tried would be lost by the word."""
    kit.record(0, {"table": [rows(1), rows(2), rows(3)], "search": rows(1)})
    kit.decide(0)
    sinks["table"].faults.arm("commit-unknown")
    result = run("resolve", "0", "--sink", "table", "--as", "committed", "--sinks", f"{MODULE}:SINKS", "--yes")
    assert result.exit_code == 0, result.output
    assert len(sinks["table"].values()) == 2


def test_an_unknown_part_is_prepared_again_by_word(
    kit: CheckpointKit, sinks: dict[str, FolderSink], run: Callable[..., Result]
) -> None:
    kit.record(0, both(1, 2))
    kit.decide(0)
    sinks["table"].faults.arm("commit-unknown")
    result = run("resolve", "0", "--sink", "table", "--as", "replay", "--sinks", f"{MODULE}:SINKS", "--yes")
    assert result.exit_code == 0, result.output
    assert "prepared again from the spool, and recorded" in result.output
    assert "committed epoch 0" in result.output
    assert sinks["table"].values() == [1, 2]
    assert sinks["table"].prepared() == []


def test_the_word_says_nothing_of_what_was_prepared_again_since(
    kit: CheckpointKit, sinks: dict[str, FolderSink], run: Callable[..., Result]
) -> None:
    """Its commit may have been carried out: prepared once more, the rows would come twice."""
    kit.record(0, both(1, 2))
    kit.decide(0)
    sinks["table"].faults.arm("commit-unknown", 2)
    result = run("resolve", "0", "--sink", "table", "--as", "replay", "--sinks", f"{MODULE}:SINKS", "--yes")
    assert (result.exit_code, "whether sink 'table' committed it is unknown" in said(result)) == (1, True)
    assert len(sinks["table"].calls("replay")) == 1
    assert run("recover", "--sinks", f"{MODULE}:SINKS", "--yes").exit_code == 0
    assert sinks["table"].values() == [1, 2]


def test_an_unknown_part_is_closed_by_word(
    kit: CheckpointKit, sinks: dict[str, FolderSink], run: Callable[..., Result]
) -> None:
    kit.record(0, both(1))
    kit.decide(0)
    sinks["table"].faults.arm("commit-unknown")
    result = run("resolve", "0", "--sink", "table", "--as", "committed", "--sinks", f"{MODULE}:SINKS", "--yes")
    assert result.exit_code == 0, result.output
    assert "recorded epoch 0, sink 'table' as committed, as you declared" in result.output
    assert sinks["search"].values() == [1]
    assert kit.history().done == {0}


@pytest.mark.parametrize("word", ["committed", "replay"])
@pytest.mark.parametrize("left", [1, 0])
def test_a_target_that_was_set_back_gets_no_newer_epoch_by_word(
    kit: CheckpointKit, sinks: dict[str, FolderSink], run: Callable[..., Result], word: str, left: int
) -> None:
    """With the marker of epoch 2 it would look as if it had epoch 1, too."""
    for number in (0, 1):
        kit.run(number, both(number))
    kit.record(2, both(2))
    kit.decide(2)
    for path in (kit.root.parent / "table" / "visible").glob("*/*"):
        if int(path.name.partition("-")[0]) >= left:
            path.unlink()
    sinks["table"].faults.arm("commit-unknown")
    result = run("resolve", "2", "--sink", "table", "--as", word, "--sinks", f"{MODULE}:SINKS", "--yes")
    assert result.exit_code == 1
    assert "epoch 1 is done" in said(result)
    assert sinks["table"].values() == [0][:left]
    assert [one.epoch for one in kit.history().pending] == [2]


@pytest.mark.parametrize("word", ["committed", "replay", "discard"])
def test_resolve_opens_each_target_once(
    kit: CheckpointKit, sinks: dict[str, FolderSink], run: Callable[..., Result], word: str
) -> None:
    kit.record(0, both(1))
    kit.decide(0)
    result = run("resolve", "0", "--sink", "table", "--as", word, "--sinks", f"{MODULE}:SINKS", "--yes")
    assert result.exit_code == 0, result.output
    assert [len(sink.calls("close")) for sink in sinks.values()] == [1, 1]


def test_discarded_rows_are_kept_in_a_file(
    kit: CheckpointKit, sinks: dict[str, FolderSink], run: Callable[..., Result]
) -> None:
    kit.record(0, both(1, 2))
    kit.decide(0)
    result = run("resolve", "0", "--sink", "table", "--as", "discard", "--sinks", f"{MODULE}:SINKS", "--yes")
    assert result.exit_code == 0, result.output
    file = kit.root.parent / "epoch-0-table.parquet"
    assert f"write its 2 spooled rows to {file}" in said(result)
    assert pq.read_table(file).to_pydict() == {"id": [1, 2]}
    assert (sinks["table"].values(), sinks["search"].values()) == ([], [1, 2])
    assert sinks["table"].prepared() == []


def test_discarding_never_overwrites_a_file(kit: CheckpointKit, run: Callable[..., Result]) -> None:
    kit.record(0, both(1))
    kit.decide(0)
    (kit.root.parent / "epoch-0-table.parquet").write_text("precious")
    result = run("resolve", "0", "--sink", "table", "--as", "discard", "--yes")
    assert result.exit_code == 1
    assert "exists already" in said(result)
    assert kit.history().pending


def test_rows_in_a_spool_that_is_not_found_are_not_discarded(
    kit: CheckpointKit, run: Callable[..., Result], tmp_path: Path
) -> None:
    """The command from a hint, without the place that ExactlyOnce(spool=...) names."""
    kit.record(0, {"table": rows(1)})
    kit.decide(0)
    elsewhere = tmp_path / "elsewhere"
    (kit.root / "epochsink" / "spool").rename(elsewhere)
    discard = ("resolve", "0", "--sink", "table", "--as", "discard", "--yes")
    refused = run(*discard)
    assert refused.exit_code == 1
    assert f"the spool that was read is {kit.root}/epochsink/spool" in said(refused)
    assert "name that place by --spool" in said(refused)
    assert kit.generation() == 1
    assert run(*discard, "--spool", str(elsewhere)).exit_code == 0
    assert pq.read_table(tmp_path / "epoch-0-table.parquet").to_pydict() == {"id": [1]}


def test_discarded_rows_are_on_the_disk_before_they_are_recorded_as_discarded(
    kit: CheckpointKit, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    kit.record(0, {"table": rows(1)})
    kit.decide(0)
    synced: list[Path] = []
    real = os.fsync

    def note(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        real(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    assert run("resolve", "0", "--sink", "table", "--as", "discard", "--yes").exit_code == 0
    assert synced[:2] == [kit.root.parent / "epoch-0-table.parquet", kit.root.parent]
    assert all("ledger" in path.parts for path in synced[2:])


def test_discarding_says_that_rows_cannot_be_kept(kit: CheckpointKit, run: Callable[..., Result]) -> None:
    kit.record(0, {"table": rows(1)})
    kit.decide(0)
    shutil.rmtree(kit.root / "epochsink" / "spool")
    result = run("resolve", "0", "--sink", "table", "--as", "discard", "--without-rows", answer="y\n")
    assert result.exit_code == 0, result.output
    assert "THE ROWS CANNOT BE KEPT" in result.output
    assert kit.history().done == {0}


def test_resolve_fences_the_driver(kit: CheckpointKit, run: Callable[..., Result]) -> None:
    kit.record(0, {"table": rows(1)})
    kit.decide(0)
    assert run("resolve", "0", "--sink", "table", "--as", "committed", "--yes").exit_code == 0
    with pytest.raises(Fenced):
        kit.coordinator.commit_decided()


def test_resolve_lets_a_sink_ask_whether_the_ledger_is_still_ours(
    kit: CheckpointKit, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elasticsearch asks before it writes over a document."""
    kit.record(0, {"table": rows(1)})
    kit.decide(0)

    def overtaken(self: FolderParticipant, *_arguments: object) -> NoReturn:
        Ledger(LocalStorage(kit.root), "another").take(kit.query_id, {}, -1)
        self.require_ours()
        pytest.fail("another driver has the ledger")

    monkeypatch.setattr(FolderParticipant, "commit_part", overtaken)
    result = run("resolve", "0", "--sink", "table", "--as", "committed", "--sinks", f"{MODULE}:SINKS", "--yes")
    assert result.exit_code == 1
    assert "another driver has taken over this checkpoint" in said(result)


# ---- abandon


def test_abandon_shows_and_ends_what_is_recorded_and_not_decided(
    kit: CheckpointKit, sinks: dict[str, FolderSink], run: Callable[..., Result]
) -> None:
    kit.run(0, both(1))
    kit.record(1, both(2))
    result = run("abandon", "--sinks", f"{MODULE}:SINKS", "--yes")
    assert result.exit_code == 0, result.output
    assert "END epoch 1, recorded and not decided, since 2" in said(result)
    assert 'in sink \'search\': {"file": "1-' in said(result)
    assert "closed: the targets hold all epochs up to 0; a successor starts at the offsets in offsets/0" in said(result)
    for sink in sinks.values():
        assert (sink.values(), sink.prepared()) == ([1], [])
    assert kit.spool.attempts(kit.query_id) == []


def test_abandon_commits_what_is_decided_and_ends_what_nobody_recorded(
    kit: CheckpointKit, sinks: dict[str, FolderSink], run: Callable[..., Result]
) -> None:
    kit.record(0, both(1))
    kit.decide(0)
    kit.write(1, both(2))
    result = run("abandon", "--sinks", f"{MODULE}:SINKS", "--yes")
    assert result.exit_code == 0, result.output
    assert "commit epoch 0, which Spark has decided" in said(result)
    for sink in sinks.values():
        assert (sink.values(), sink.prepared()) == ([1], [])
    assert kit.spool.attempts(kit.query_id) == []


def test_an_abandoned_checkpoint_refuses_every_later_start(kit: CheckpointKit, run: Callable[..., Result]) -> None:
    kit.record(0, both(1))
    assert run("abandon", "--sinks", f"{MODULE}:SINKS", "--yes").exit_code == 0
    with pytest.raises(Fenced):
        kit.coordinator.commit_decided() or kit.coordinator.settle(1)
    with pytest.raises(ConfigurationError, match=r"this checkpoint was abandoned .*: its ledger is closed for good"):
        kit.start()
    assert "this checkpoint was abandoned" in said(run("recover", "--sinks", f"{MODULE}:SINKS", "--yes"))


def test_status_says_that_a_checkpoint_was_abandoned(kit: CheckpointKit, run: Callable[..., Result]) -> None:
    kit.run(0, both(1))
    kit.record(1, both(2))
    run("abandon", "--sinks", f"{MODULE}:SINKS", "--yes")
    found = json.loads(run("status", "--json").output)
    assert [epoch["state"] for epoch in found["epochs"]] == ["done", "ended"]
    assert found["abandoned"]["pid"] == found["taken"]["pid"] == os.getpid()
    assert "no query starts here; the targets hold all epochs up to 0" in said(run("status"))


def test_an_abandonment_that_was_interrupted_goes_on(
    kit: CheckpointKit, sinks: dict[str, FolderSink], run: Callable[..., Result]
) -> None:
    """Killed after the ledger was closed and before everything was ended."""
    kit.record(0, both(1))
    ledger = Ledger(LocalStorage(kit.root), "killed")
    ledger.take(kit.query_id, {}, -1)
    ledger.append(Abandoned((0,)))
    result = run("abandon", "--sinks", f"{MODULE}:SINKS", "--yes")
    assert result.exit_code == 0, result.output
    assert all(sink.prepared() == [] for sink in sinks.values())
    assert kit.spool.attempts(kit.query_id) == []


def test_abandon_ends_a_checkpoint_whose_ledger_is_an_older_copy(
    kit: CheckpointKit, sinks: dict[str, FolderSink], run: Callable[..., Result]
) -> None:
    """No start can go on with it, so nobody but this command can end what it has prepared."""
    kit.run(0, both(1))
    kit.record(1, both(2))
    kit.decide(1)
    max((kit.root / "epochsink" / "ledger").iterdir()).unlink()
    with pytest.raises(WentBack, match="but the spool has rows of epoch 1: the ledger is the older copy"):
        kit.start()
    result = run("abandon", "--sinks", f"{MODULE}:SINKS", "--yes")
    assert result.exit_code == 0, result.output
    assert "the ledger is closed although the checkpoint has decided epochs up to 1" in said(result)
    assert "check what the targets hold before a successor starts" in said(run("status"))
    for sink in sinks.values():
        assert (sink.values(), sink.prepared()) == ([1], [])


def test_abandon_gives_up_no_decided_epoch_of_a_checkpoint_that_disagrees(
    kit: CheckpointKit, sinks: dict[str, FolderSink], run: Callable[..., Result]
) -> None:
    kit.record(0, both(1))
    for number in (0, 1):
        kit.decide(number)
    result = run("abandon", "--sinks", f"{MODULE}:SINKS", "--yes")
    assert result.exit_code == 1
    assert "the ledger knows only those up to 0" in said(result)
    assert all(sink.prepared() for sink in sinks.values())


def test_abandon_asks_first_and_needs_every_target(
    kit: CheckpointKit, sinks: dict[str, FolderSink], run: Callable[..., Result]
) -> None:
    kit.record(0, both(1))
    assert "Go on?" in run("abandon", "--sinks", f"{MODULE}:SINKS", answer="n\n").output
    assert "--sinks does not name sink 'search', so what this checkpoint holds there cannot be ended" in said(
        run("abandon", "--sinks", f"{MODULE}:TABLE", "--yes")
    )
    unknown = run("abandon", "--sinks", f"{MODULE}:SINKS", "--gone", "mail", "--yes")
    assert "--gone names 'mail', which has never been part" in said(unknown)
    sinks["search"].faults.arm("unreachable")
    assert run("abandon", "--sinks", f"{MODULE}:SINKS", "--yes").exit_code == 1
    assert kit.generation() == 1
    assert all(len(sink.prepared()) == 1 for sink in sinks.values())


def test_abandon_without_a_target_that_is_gone(
    kit: CheckpointKit, sinks: dict[str, FolderSink], run: Callable[..., Result]
) -> None:
    kit.record(0, both(1))
    result = run("abandon", "--sinks", f"{MODULE}:TABLE", "--gone", "search", "--yes")
    assert result.exit_code == 0, result.output
    assert "in sink 'search', whose target is gone: left as it is" in said(result)
    assert (sinks["table"].prepared(), len(sinks["search"].prepared())) == ([], 1)
    assert kit.history().abandoned is not None


def test_a_decided_epoch_of_a_target_that_is_gone_is_resolved_first(
    kit: CheckpointKit, run: Callable[..., Result]
) -> None:
    kit.record(0, both(1))
    kit.decide(0)
    arguments = ["--sinks", f"{MODULE}:TABLE", "--gone", "search", "--yes"]
    assert "epoch 0 is decided and has rows for sink 'search'" in said(run("abandon", *arguments))
    assert run("resolve", "0", "--sink", "search", "--as", "discard", "--yes").exit_code == 0
    assert run("abandon", *arguments).exit_code == 0


def test_the_version_comes_with_those_that_matter_beside_it() -> None:
    said = CliRunner().invoke(app, ["--version"])
    assert re.fullmatch(r"epochsink \d\S* \(PySpark 4\.\S+, Python 3\.\S+\)\n", said.stdout), said.output
