"""``epochsink abandon`` while a query still runs on the checkpoint: that one stops, says why, and leaves nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from checkpoint_kit import CheckpointKit

from epochsink.cli.abandon import Abandonment
from epochsink.cli.accept import Acceptance
from epochsink.cli.checkpoint_folder import open_place
from epochsink.errors import ConfigurationError, Fenced
from epochsink.testing import LocalSink
from epochsink.testing.sink_rig import OneSink

if TYPE_CHECKING:
    from pathlib import Path

ABANDONED = "an operator has abandoned this checkpoint with 'epochsink abandon'"


@pytest.fixture
def kit(tmp_path: Path) -> CheckpointKit:
    made = CheckpointKit(tmp_path / "checkpoint", {"out": LocalSink(tmp_path / "target")})
    made.run(0, rows(0))
    return made


def rows(number: int) -> dict[str, pa.RecordBatch]:
    return {"out": pa.RecordBatch.from_pydict({"id": [number]})}


def abandon(kit: CheckpointKit) -> None:
    with open_place(str(kit.root)) as place:
        Abandonment(place, sinks=kit.sinks, gone=[]).carry_out()


def left(kit: CheckpointKit) -> list[str]:
    committer = OneSink.of(kit.sinks["out"], "out")
    committer.open(kit.coordinator.identity("out"))
    return [*committer.leftovers(), *map(str, kit.spool.attempts(kit.query_id))]


def test_an_epoch_that_is_written_meanwhile_is_not_recorded_and_leaves_nothing(kit: CheckpointKit) -> None:
    epoch, written = kit.write(1, rows(1))
    abandon(kit)
    assert left(kit) == []
    # what its tasks write after the end of everything
    again, late = kit.write(1, rows(1))
    assert len(left(kit)) == 2
    for attempt, answers in ((epoch, written), (again, late)):
        with pytest.raises(Fenced, match=ABANDONED) as told:
            kit.coordinator.record(attempt, answers, {})
        assert "start with a new checkpoint folder" in told.value.hint
    assert left(kit) == []
    with pytest.raises(Fenced, match=ABANDONED):
        kit.coordinator.settle(2)


def test_a_target_that_is_down_keeps_nothing_in_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sinks = {name: LocalSink(tmp_path / name) for name in ("down", "out")}
    kit = CheckpointKit(tmp_path / "two", sinks)
    with open_place(str(kit.root)) as place:
        Abandonment(place, sinks=sinks, gone=[]).carry_out()
    attempt, _ = kit.write(0, {name: rows(0)["out"] for name in sinks})
    assert len(left(kit)) == 2
    down, _ = kit.participants
    monkeypatch.setattr(down, "end", refuse)
    kit.coordinator.abandon(attempt)
    assert left(kit) == []


def refuse(*_: object) -> None:
    raise ConnectionError("broker down")


def test_an_epoch_that_was_recorded_is_ended_and_its_commit_is_refused(kit: CheckpointKit) -> None:
    """Spark decides it all the same: the live query says why it stops, and a successor reads its input again."""
    kit.record(1, rows(1))
    abandon(kit)
    kit.decide(1)
    with pytest.raises(Fenced, match=ABANDONED):
        kit.coordinator.commit_decided()
    assert left(kit) == []
    sink = kit.sinks["out"]
    assert isinstance(sink, LocalSink)
    assert [row["id"] for row in sink.rows()] == [0]


def test_an_epoch_that_spark_decides_after_the_plan_was_shown_is_not_given_up(tmp_path: Path) -> None:
    """Its sink's target is said to be gone: the epoch's rows are kept in a file first, or nothing is closed."""
    sinks = {name: LocalSink(tmp_path / name) for name in ("gone", "out")}
    kit = CheckpointKit(tmp_path / "two", sinks)
    kit.record(0, {name: rows(0)["out"] for name in sinks})
    with open_place(str(kit.root)) as place:
        abandonment = Abandonment(place, sinks=sinks, gone=["gone"])
        kit.decide(0)
        with pytest.raises(ConfigurationError, match="not yet committed in sink 'gone'"):
            abandonment.carry_out()
    assert kit.history().abandoned is None
    assert list(kit.history().epochs[0].shares) == ["gone", "out"]


def test_who_is_stopped_by_another_command_is_told_which(kit: CheckpointKit) -> None:
    with open_place(str(kit.root)) as place:
        Acceptance(place, 0, "out", {}).carry_out()
    with pytest.raises(Fenced, match="taken this checkpoint with 'epochsink accept'") as told:
        kit.coordinator.settle(1)
    assert "start the query again" in told.value.hint
