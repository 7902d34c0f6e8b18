"""The world goes back, or Spark decides without us: the coordinator stops before a row is lost, and says what to do."""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path

import pyarrow as pa
import pytest
from checkpoint_kit import CheckpointKit
from typer.testing import CliRunner

from epochsink.cli.app import app
from epochsink.errors import ConfigurationError, EpochsinkError, OutcomeUnknown, PrepareFailed, WentBack
from epochsink.protocol import consistency
from epochsink.protocol.checkpoint import Checkpoint
from epochsink.protocol.coordinator import Coordinator, Plan
from epochsink.protocol.ledger import Ledger
from epochsink.protocol.storage import LocalStorage
from epochsink.sink import LastDone, Mark, Marks, Remnant, participants_of
from epochsink.testing import LocalSink
from epochsink.testing.local_sink import LocalParticipant


@pytest.fixture
def sink(tmp_path: Path) -> LocalSink:
    return LocalSink(tmp_path / "target")


@pytest.fixture
def kit(tmp_path: Path, sink: LocalSink) -> CheckpointKit:
    return CheckpointKit(tmp_path / "checkpoint", {"out": sink})


def rows(number: int) -> dict[str, pa.RecordBatch]:
    return {"out": pa.RecordBatch.from_pydict({"id": [number]})}


def plan_offsets(kit: CheckpointKit, number: int) -> None:
    (kit.root / "offsets" / str(number)).write_text(f'v1\n{{"batchWatermarkMs":0}}\n{{"orders":{{"0":{number}}}}}')


def run(kit: CheckpointKit, *numbers: int) -> None:
    for number in numbers:
        plan_offsets(kit, number)
        assert kit.coordinator.settle(number) is Plan.WRITE
        kit.run(number, rows(number))


def ids(sink: LocalSink) -> list[int]:
    return sorted(row["id"] for row in sink.rows())


def accept(kit: CheckpointKit, *arguments: str) -> None:
    result = CliRunner().invoke(app, ["accept", str(kit.root), *arguments, "--yes"])
    assert result.exit_code == 0, result.output


def test_a_target_restored_from_a_backup_stops_the_next_start_until_that_is_accepted(
    kit: CheckpointKit, sink: LocalSink
) -> None:
    run(kit, 0, 1, 2)
    sink.set_back(0)
    with pytest.raises(WentBack, match="epoch 2 is done: the target is the older copy") as stopped:
        kit.start()
    assert "epochsink accept CHECKPOINT 2 --sink out" in str(stopped.value)
    accept(kit, "2", "--sink", "out")
    kit.coordinator = kit.start()
    run(kit, 3)
    assert ids(sink) == [0, 3]


def test_a_target_set_back_while_the_query_runs_stops_it_before_the_next_epoch_is_written(
    kit: CheckpointKit, sink: LocalSink
) -> None:
    run(kit, 0, 1)
    sink.set_back(0)
    plan_offsets(kit, 2)
    with pytest.raises(WentBack, match="older copy"):
        kit.coordinator.settle(2)


def test_what_the_other_thread_finishes_during_a_comparison_is_no_disagreement(
    kit: CheckpointKit, sink: LocalSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target then holds an epoch that was pending as the comparison began."""
    kit.record(0, rows(0))
    kit.decide(0)
    read = LocalParticipant.marks
    compared: list[LastDone | None] = []

    def finish_meanwhile(
        participant: LocalParticipant, name: str, done: LastDone | None, pending: LastDone | None
    ) -> Marks:
        compared.append(done)
        if len(compared) == 1:
            assert kit.coordinator.commit_decided()
            return Marks("the target", {"": Mark(0)})
        return read(participant, name, done, pending)

    monkeypatch.setattr(LocalParticipant, "marks", finish_meanwhile)
    kit.coordinator._check.verify("out")
    assert ids(sink) == [0]
    assert compared[-1] is not None


def test_a_target_set_back_before_a_commit_stops_the_commit(kit: CheckpointKit, sink: LocalSink) -> None:
    run(kit, 0, 1)
    kit.record(2, rows(2))
    kit.decide(2)
    sink.set_back(0)
    with pytest.raises(WentBack, match="older copy"):
        kit.coordinator.commit_decided()
    assert ids(sink) == [0]


@pytest.mark.parametrize(("may_pass", "kind"), [(False, PrepareFailed), (True, OutcomeUnknown)])
def test_a_target_that_refuses_to_be_asked_before_a_commit_is_named_and_one_out_of_reach_leaves_it_unknown(
    kit: CheckpointKit, sink: LocalSink, monkeypatch: pytest.MonkeyPatch, *, may_pass: bool, kind: type[Exception]
) -> None:
    """A right that was taken away is for somebody to grant; the next start commits the epoch."""
    kit.record(0, rows(0))
    kit.decide(0)

    def refuse(*_: object) -> None:
        raise PrepareFailed("reading the marker: no", hint="grant it", may_pass=may_pass)

    with monkeypatch.context() as patched:
        patched.setattr(LocalParticipant, "marks", refuse)
        with pytest.raises(kind, match=r"epoch 0 is decided, and .*sink 'out'.*reading the marker: no"):
            kit.coordinator.commit_decided()
    kit.start()
    assert ids(sink) == [0]


def test_a_target_without_any_marker_stops_the_next_start(kit: CheckpointKit, sink: LocalSink) -> None:
    run(kit, 0)
    sink.set_back(-1)
    with pytest.raises(WentBack, match="no marker of this query"):
        kit.start()


def test_a_second_copy_of_the_checkpoint_is_noticed_by_whose_epoch_is_applied(
    kit: CheckpointKit, sink: LocalSink, tmp_path: Path
) -> None:
    run(kit, 0)
    shutil.copytree(kit.root, tmp_path / "copy")
    run(kit, 1)
    other = LocalStorage(tmp_path / "copy")
    plan = CheckpointKit.__new__(CheckpointKit)
    plan.__dict__ |= {**kit.__dict__, "root": tmp_path / "copy"}
    with pytest.raises(WentBack, match="already holds epoch 1"):
        plan.start()
    # as if the copy had written its own epoch 1: same number, another attempt
    ledger = Ledger(other, uuid.uuid4().hex)
    ledger.take(kit.query_id, {}, -1)
    for entry in (one for one in kit.history().epochs.values() if one.epoch == 1):
        ledger.append(type(entry)(1, "f" * 32, entry.offsets, entry.shares))
    with pytest.raises(WentBack, match="another copy of this checkpoint"):
        plan.start()
    assert ids(sink) == [0, 1]


def test_an_epoch_decided_without_us_is_named_and_can_be_accepted(kit: CheckpointKit, sink: LocalSink) -> None:
    run(kit, 0)
    plan_offsets(kit, 1)
    kit.decide(1)
    plan_offsets(kit, 2)
    with pytest.raises(WentBack, match="epoch 1 was decided without ExactlyOnce: the function"):
        kit.coordinator.settle(2)
    with pytest.raises(WentBack, match="epochsink accept CHECKPOINT 1"):
        kit.start()
    accept(kit, "1")
    kit.coordinator = kit.start()
    run(kit, 2)
    assert ids(sink) == [0, 2]


def give_other_input(kit: CheckpointKit) -> Path:
    """Run two epochs, put an older copy of commits/ back, and give epoch 1 more rows; return its offsets file."""
    for number in range(2):
        run(kit, number)
    (kit.root / "commits" / "1").unlink()
    kit.coordinator = kit.start()
    offsets = kit.root / "offsets" / "1"
    offsets.write_text(offsets.read_text().replace('{"0":1}', '{"0":7}'))
    return offsets


@pytest.mark.parametrize("noticed", ["in the same run", "at the next start"])
def test_an_epoch_decided_without_us_is_not_the_one_of_its_number_that_the_ledger_knows(
    kit: CheckpointKit, sink: LocalSink, noticed: str
) -> None:
    """An older copy of commits/ and offsets/ was put back, and epochsink/ stayed; now epoch 1 has more rows."""
    give_other_input(kit)
    # the user's function did not call us for it
    kit.decide(1)
    if noticed == "at the next start":
        kit.coordinator = kit.start()
    plan_offsets(kit, 2)
    with pytest.raises(WentBack, match="epoch 1 is recorded with other offsets"):
        kit.coordinator.settle(2)
    assert ids(sink) == [0, 1]


@pytest.mark.parametrize("noticed", ["in the same run", "as the stream ends", "at the next start"])
def test_epochs_decided_without_us_are_not_all_that_is_lacking_behind_one_with_other_input(
    kit: CheckpointKit, sink: LocalSink, noticed: str
) -> None:
    """Whoever accepts them would believe that only their own rows are in no sink."""
    offsets = give_other_input(kit)
    kit.decide(1)
    plan_offsets(kit, 2)
    other = pytest.raises(WentBack, match="epoch 1 is recorded with other offsets")
    if noticed == "in the same run":
        with other:
            kit.coordinator.settle(2)
        # the user's function has caught that
        kit.decide(2)
        with other:
            kit.coordinator.commit_decided()
    else:
        kit.decide(2)
        with other:
            if noticed == "as the stream ends":
                kit.coordinator.drain()
            else:
                kit.start()
    assert ids(sink) == [0, 1]
    typed = CliRunner().invoke(app, ["accept", str(kit.root), "2", "--yes"])
    assert typed.exit_code == 1
    assert "epoch 1 is recorded with other offsets" in typed.output
    assert kit.history().skipped == -1
    # of what Spark has purged, nobody can say that it was other input
    offsets.unlink()
    with pytest.raises(WentBack, match="epoch 2 was decided without ExactlyOnce"):
        kit.start()


def test_a_ledger_that_has_lost_a_decided_epoch_is_not_taken_for_a_function_that_left_it_out(
    kit: CheckpointKit, sink: LocalSink
) -> None:
    """What is prepared of that epoch would be swept by whoever believes that it had no rows."""
    run(kit, 0)
    kit.record(1, rows(1))
    kit.decide(1)
    lost = max((kit.root / "epochsink" / "ledger").iterdir())
    kept = lost.read_bytes()
    lost.unlink()
    with pytest.raises(WentBack, match="but the spool has rows of epoch 1: the ledger is the older copy"):
        kit.start()
    for take in sorted((kit.root / "epochsink" / "ledger").iterdir())[-1:]:
        take.unlink()
    lost.write_bytes(kept)
    kit.coordinator = kit.start()
    assert ids(sink) == [0, 1]


def test_epochs_that_spark_passes_over_because_commits_and_ledger_are_older_than_offsets_are_named(
    kit: CheckpointKit, sink: LocalSink
) -> None:
    """Of several epochs that are planned and not decided, Spark runs the newest one alone."""
    run(kit, 0)
    for number in (1, 2, 3):
        plan_offsets(kit, number)
    restarted = kit.start()
    with pytest.raises(WentBack, match="Spark runs epoch 3, and epochs 1 to 2 before it are in offsets/, and neither"):
        restarted.settle(3)
    for number in (2, 3):
        (kit.root / "offsets" / str(number)).unlink()
    assert kit.start().settle(1) is Plan.WRITE
    assert ids(sink) == [0]


@pytest.mark.parametrize("begun", [True, False])
def test_an_error_that_the_users_function_swallowed_is_named(kit: CheckpointKit, *, begun: bool) -> None:
    """By the commit thread, which ends the query: what the next epoch raises would be swallowed too."""
    run(kit, 0)
    plan_offsets(kit, 1)
    assert kit.coordinator.settle(1) is Plan.WRITE
    if begun:
        kit.coordinator.abandon(kit.coordinator.begin(1))
    assert kit.coordinator.commit_decided()
    kit.decide(1)
    with pytest.raises(WentBack, match="caught the error with which epoch 1 failed") as stopped:
        kit.coordinator.commit_decided()
    kit.coordinator.fail(stopped.value)
    with pytest.raises(WentBack, match="caught the error with which epoch 1 failed"):
        kit.coordinator.settle(2)


def test_an_epoch_under_way_is_not_taken_for_one_that_was_swallowed(kit: CheckpointKit, sink: LocalSink) -> None:
    """Nor is one that an attempt has failed at, and the next one has recorded."""
    plan_offsets(kit, 0)
    assert kit.coordinator.settle(0) is Plan.WRITE
    kit.coordinator.abandon(kit.coordinator.begin(0))
    assert kit.coordinator.settle(0) is Plan.WRITE
    assert kit.coordinator.commit_decided()
    kit.run(0, rows(0))
    assert kit.coordinator.commit_decided()
    assert ids(sink) == [0]


def test_joining_is_refused_where_the_target_knows_the_query(kit: CheckpointKit, sink: LocalSink) -> None:
    """``join_running=True`` left in the code, and the folder epochsink/ is lost."""
    run(kit, 0)
    joining = joining_anew(kit, sink, join_running=True)
    with pytest.raises(WentBack, match="holds epoch 0 of it: the folder epochsink/ of this checkpoint is lost"):
        joining.recover()
    assert LocalStorage(kit.root).names("epochsink/ledger") == []


def joining_anew(kit: CheckpointKit, sink: LocalSink, *, join_running: bool | str) -> Coordinator:
    """Return a driver on the checkpoint as it is, without a ledger."""
    shutil.rmtree(kit.root / "epochsink", ignore_errors=True)
    files = LocalStorage(kit.root)
    return Coordinator(
        query_id=kit.query_id,
        ledger=Ledger(files, uuid.uuid4().hex),
        checkpoint=Checkpoint(files),
        spool=kit.spool,
        participants=participants_of({"out": sink}),
        join_running=join_running,
    )


def test_joining_in_the_middle_of_an_epoch_is_refused(kit: CheckpointKit, sink: LocalSink) -> None:
    """Spark runs it again, and what the old code has written of it would be in a target without a key twice."""
    for number in (0, 1):
        kit.plan(number)
    kit.decide(0)
    with pytest.raises(ConfigurationError, match="epoch 1 was begun before epochsink joined this pipeline") as refused:
        joining_anew(kit, sink, join_running=True).recover()
    assert "trigger(availableNow=True)" in refused.value.hint
    assert "join_running='rewrite'" in refused.value.hint
    assert LocalStorage(kit.root).names("epochsink/ledger") == []
    kit.decide(1)
    (kit.root / "epochsink").mkdir(exist_ok=True)
    joining_anew(kit, sink, join_running=True).recover()
    assert kit.history().newest == 1


def test_joining_in_the_middle_of_an_epoch_can_be_allowed_and_names_what_to_look_at(
    kit: CheckpointKit, sink: LocalSink, caplog: pytest.LogCaptureFixture
) -> None:
    for number in (0, 1):
        kit.plan(number)
    kit.decide(0)
    kit.coordinator = joining_anew(kit, sink, join_running="rewrite")
    kit.coordinator.recover()
    assert "epochsink joins at epoch 1, which Spark has already begun" in caplog.text
    assert "between offsets/0 and offsets/1" in caplog.text
    run(kit, 1)
    assert ids(sink) == [1]


def test_an_epoch_decided_after_the_recovery_is_committed_while_the_stream_idles(
    kit: CheckpointKit, sink: LocalSink
) -> None:
    """The old run writes commits/0 after the new one has recovered, and no batch comes."""
    kit.record(0, rows(0))
    later = kit.start()
    assert not later.commit_decided()
    kit.decide(0)
    assert later.commit_decided()
    assert ids(sink) == [0]


def test_an_adopted_epoch_is_watched_once(kit: CheckpointKit, sink: LocalSink) -> None:
    kit.record(0, rows(0))
    kit.coordinator = kit.start()
    assert kit.coordinator.settle(0) is Plan.RUN_FOR_STATE
    assert list(kit.coordinator.queue.pending) == [0]
    kit.decide(0)
    assert kit.coordinator.commit_decided()
    assert ids(sink) == [0]


@pytest.mark.parametrize("restarted", [False, True])
def test_the_decision_is_durable_before_it_becomes_visible(
    kit: CheckpointKit, sink: LocalSink, monkeypatch: pytest.MonkeyPatch, *, restarted: bool
) -> None:
    """And so is its input: this run has synced it before it recorded the epoch, an earlier run may have read a copy."""
    synced: list[str] = []
    real = os.fsync

    def note(descriptor: int) -> None:
        if not ids(sink):
            synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().relative_to(kit.root).as_posix())
        real(descriptor)

    kit.record(0, rows(0))
    if restarted:
        kit.coordinator = kit.start()
    kit.decide(0)
    monkeypatch.setattr(os, "fsync", note)
    assert kit.coordinator.commit_decided()
    assert [name for name in synced if not name.startswith("epochsink")] == [
        *(["offsets/0", "offsets"] if restarted else []),
        "commits/0",
        "commits",
    ]


def test_the_input_of_an_epoch_is_durable_before_the_epoch_is_recorded(
    kit: CheckpointKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a power cut takes offsets/N and leaves its record, and Spark plans N anew with other offsets."""
    synced: list[str] = []
    real = os.fsync

    def note(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().relative_to(kit.root).parts[0])
        real(descriptor)

    epoch, written = kit.write(0, rows(0))
    (kit.root / "offsets" / ".0.crc").write_bytes(b"crc")
    monkeypatch.setattr(os, "fsync", note)
    kit.coordinator.record(epoch, written)
    assert synced == ["offsets", "offsets", "offsets", "epochsink", "epochsink"]


def test_accept_takes_the_epoch_after_the_newest_done_one_only_where_it_is_decided(kit: CheckpointKit) -> None:
    def said(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["accept", str(kit.root), *arguments, "--sink", "out", "--yes"])
        return result.exit_code, " ".join(result.output.split())

    kit.record(0, rows(0))
    code, text = said("0")
    assert (code, "no sink has committed it yet" in text, "name none" in text) == (1, True, True)
    kit.decide(0)
    assert said("7")[0] == 1
    assert "for this sink, name none or 0" in said("7")[1]
    assert said("-x")[0] == 2
    assert said("0")[0] == 0
    assert "out" not in kit.history().epochs[0].shares


CASES: list[tuple[EpochsinkError, type[EpochsinkError], list[str]]] = [
    (consistency.no_ledger(41), WentBack, ["41", "join_running=True"]),
    (consistency.ledger_is_older(41, 37), WentBack, ["41", "37", "restore", "epochsink abandon CHECKPOINT"]),
    (
        consistency.ledger_lost_prepared(41, 37, "sink 'table' has x"),
        WentBack,
        ["41", "37", "sink 'table' has x", "restore", "epochsink accept CHECKPOINT 41"],
    ),
    (
        consistency.decided_without_us(41, 41, attempted=40),
        WentBack,
        ["epoch 41 was", "accept CHECKPOINT 41"],
    ),
    (consistency.decided_without_us(41, 43, attempted=41), WentBack, ["epochs 41 to 43 were", "CHECKPOINT 43"]),
    (
        consistency.ledger_is_lost("table", 40, [Remnant("transaction", "gid-1"), Remnant("transaction", "gid-2")]),
        WentBack,
        ["'table'", "40", "gid-1 and 1 more"],
    ),
    (consistency.ledger_is_lost("table", None, [Remnant("transaction", "gid-1")]), WentBack, ["'table'", "gid-1"]),
    (consistency.sink_is_gone(41, "table"), ConfigurationError, ["41", "'table'", "epochsink resolve"]),
    (consistency.other_input(41), WentBack, ["41", "other offsets"]),
    (consistency.undecided_before(40, 41), WentBack, ["40", "41"]),
    (consistency.unknown_past(12, 41), WentBack, ["12", "41"]),
    (consistency.overtaken(41), PrepareFailed, ["41"]),
    (consistency.unknown_outcome(41, "table", "no marker"), OutcomeUnknown, ["41", "'table'", "no marker"]),
]


@pytest.mark.parametrize(("error", "kind", "said"), CASES, ids=lambda value: getattr(value, "message", "")[:30] or None)
def test_an_error_names_its_epochs_and_what_to_do(
    error: EpochsinkError, kind: type[EpochsinkError], said: list[str]
) -> None:
    assert type(error) is kind
    assert error.hint
    assert [each for each in said if each not in str(error)] == []


def test_an_epoch_of_a_sink_that_the_query_lacks_now_stops_the_start(tmp_path: Path, sink: LocalSink) -> None:
    kit = CheckpointKit(tmp_path / "checkpoint", {"out": sink, "other": LocalSink(tmp_path / "other")})
    kit.record(0, {**rows(0), "other": rows(0)["out"]})
    kit.decide(0)
    kit.participants = participants_of({"out": sink})
    with pytest.raises(ConfigurationError, match="not yet committed in sink 'other', which this query no longer has"):
        kit.start()
    assert ids(sink) == []
