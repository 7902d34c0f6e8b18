"""The watch says when an epoch was planned, decided and done, and never takes an epoch for decided too early."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from epochsink.protocol.ledger import Ledger
from epochsink.protocol.ledger_entries import Done, Prepared
from epochsink.protocol.storage import LocalStorage
from epochsink_devkit.history import History, HistoryLog
from epochsink_devkit.history.checkpoint_watch import CheckpointWatch, kafka_ends

if TYPE_CHECKING:
    from pathlib import Path


def write(folder: Path, name: str, text: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


def plan(folder: Path, epoch: int, end: int) -> None:
    write(folder, f"offsets/{epoch}", f'v1\n{{"batchWatermarkMs":0}}\n{{"orders":{{"0":{end},"1":{end + 1}}}}}')


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint"


def test_an_epoch_is_planned_then_decided_then_done(checkpoint: Path, tmp_path: Path) -> None:
    watch = CheckpointWatch(checkpoint, "r1", HistoryLog(tmp_path))
    ledger = Ledger(LocalStorage(checkpoint), "driver")
    ledger.take("query", {}, -1)
    plan(checkpoint, 0, 10)
    watch.look()
    before = time.monotonic()
    watch.look()
    write(checkpoint, "commits/0", "v1\n{}")
    after = time.monotonic()
    watch.look()
    unrecorded = time.monotonic()
    watch.look()
    ledger.append(Prepared(0, "a", "digest", {}))
    recorded = time.monotonic()
    watch.look()
    ledger.append(Done(0))
    watch.look()
    facts = History.load(tmp_path).epochs["r1", 0]
    assert unrecorded <= facts.unrecorded_until <= recorded <= (facts.recorded_at or 0) <= (facts.done_at or 0)
    assert facts.ends == {0: 10, 1: 11}
    assert before <= facts.absent_until <= after <= (facts.committed_at or 0) <= (facts.done_at or 0)
    assert watch.decided() == {0: 10, 1: 11}
    assert watch.epochs == 1


def test_an_epoch_that_is_planned_and_recorded_while_one_looks_is_told_at_once(
    checkpoint: Path, tmp_path: Path
) -> None:
    """Else the time until which it was not recorded would be too late by one look."""

    class PlannedMeanwhile(LocalStorage):
        def names(self, folder: str) -> list[str]:
            found = super().names(folder)
            if folder == "offsets":
                plan(checkpoint, 0, 10)
                ledger.append(Prepared(0, "a", "digest", {}))
            return found

    ledger = Ledger(LocalStorage(checkpoint), "driver")
    ledger.take("query", {}, -1)
    watch = CheckpointWatch(PlannedMeanwhile(checkpoint), "r1", HistoryLog(tmp_path))
    watch.look()
    facts = History.load(tmp_path).epochs["r1", 0]
    assert facts.recorded_at is not None
    assert facts.unrecorded_until < facts.recorded_at


def test_what_a_checkpoint_holds_that_is_copied_to_its_place_may_be_older_than_the_copy(
    checkpoint: Path, tmp_path: Path
) -> None:
    watch = CheckpointWatch(checkpoint, "r1", HistoryLog(tmp_path))
    watch.look()
    first = tmp_path / "first"
    ledger = Ledger(LocalStorage(first), "driver")
    ledger.take("query", {}, -1)
    plan(first, 0, 10)
    ledger.append(Prepared(0, "a", "digest", {}))
    began = time.monotonic()
    watch.look()
    first.rename(checkpoint)
    watch.look()
    facts = History.load(tmp_path).epochs["r1", 0]
    assert facts.unrecorded_until < began < (facts.recorded_at or 0)


def test_a_torn_commit_is_no_decision(checkpoint: Path, tmp_path: Path) -> None:
    watch = CheckpointWatch(checkpoint, "r1", HistoryLog(tmp_path))
    plan(checkpoint, 0, 10)
    write(checkpoint, "commits/0", "")
    write(checkpoint, "commits/.0.crc", "x")
    write(checkpoint, "commits/.1.4711.tmp", "v1\n{}")
    watch.look()
    assert History.load(tmp_path).epochs["r1", 0].committed_at is None
    assert watch.decided() == {}
    write(checkpoint, "commits/0", "v1\n{}")
    watch.look()
    assert History.load(tmp_path).epochs["r1", 0].committed_at is not None


def test_what_was_seen_once_is_not_told_again(checkpoint: Path, tmp_path: Path) -> None:
    watch = CheckpointWatch(checkpoint, "r1", HistoryLog(tmp_path))
    plan(checkpoint, 0, 10)
    write(checkpoint, "commits/0", "v1\n{}")
    for _ in range(3):
        watch.look()
    assert History.load(tmp_path).counts == {"offsets": 1, "committed": 1}


def test_offsets_of_one_kafka_topic_are_understood_and_others_refused() -> None:
    assert kafka_ends(b'v1\n{}\n{"t":{"0":5,"10":7}}') == {0: 5, 10: 7}
    assert kafka_ends(b'v2\n{}\norders:{"t":{"0":5,"10":7}}') == {0: 5, 10: 7}
    assert kafka_ends(b'v1\n{}\n{"t":{"0":5}}\n{"clock":3}') == {0: 5}
    assert kafka_ends(b"v1\n{}") is None
    assert kafka_ends(b'v1\n{}\n{"t":{"0":5') is None
    with pytest.raises(ValueError, match="logOffset"):
        kafka_ends(b'v1\n{}\n{"logOffset":3}')
