"""The scoreboard's judge names what became of rows, and is not blind to any of it."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from epochsink_devkit.history.history import CheckedTarget, EpochFacts, History, Read
from epochsink_devkit.history.rows import Workload, stamp
from scoreboard.flink_checkpoints import ENDLESS, newest
from scoreboard.game import Plan
from scoreboard.judge import Verdict, judge
from scoreboard.page import Result, page
from scoreboard.systems import SYSTEMS

if TYPE_CHECKING:
    from pathlib import Path

ROWS = 4
SOURCE = Workload(keys=ROWS, deletes=1 << 40).source({0: 2 * ROWS})
SHOWN = stamp(SOURCE, run="r", epoch=0, attempt="")


def judged(final: pa.Table, *, early: pa.Table | None = None, keyed: bool = False, undecided: bool = False) -> Verdict:
    """Judge two epochs, decided at 10 and 20 s, of which a reader saw ``early`` at 5 s and ``final`` at 30 s."""
    times = (10.0, None if undecided else 20.0)
    epochs = {
        ("r", number): EpochFacts("r", number, {0: ROWS * (number + 1)}, committed_at=at, absent_until=(at or 1e9) - 1)
        for number, at in enumerate(times)
    }
    reads = [Read("t", 30.0, 30.0, final, final=True)]
    if early is not None:
        reads.insert(0, Read("t", 5.0, 5.0, early))
    history = History(targets={"t": CheckedTarget("t", keyed=keyed)}, inputs={"r": SOURCE}, epochs=epochs, reads=reads)
    return judge(history, "t")


def found(verdict: Verdict) -> dict[str, Any]:
    return {name: getattr(verdict, name) for name in ("lost", "doubled", "early", "stuck") if getattr(verdict, name)}


def test_all_rows_once_are_no_finding() -> None:
    verdict = judged(SHOWN)
    assert found(verdict) == {}
    assert verdict.rows == 2 * ROWS


def test_rows_that_are_missing_twice_or_early_are_counted() -> None:
    assert found(judged(SHOWN.slice(3))) == {"lost": 3}
    assert found(judged(pa.concat_tables([SHOWN, SHOWN.slice(0, 2)]))) == {"doubled": 2}
    assert found(judged(SHOWN, early=SHOWN.slice(0, 1))) == {"early": 1}


def test_rows_of_an_epoch_that_was_never_decided_are_stuck() -> None:
    assert found(judged(SHOWN.slice(0, ROWS), undecided=True)) == {"stuck": ROWS}


def test_a_key_without_its_newest_row_is_lost() -> None:
    newest, oldest = SHOWN.slice(ROWS), SHOWN.slice(0, 1)
    assert found(judged(newest, keyed=True)) == {}
    assert found(judged(pa.concat_tables([newest.slice(1), oldest]), keyed=True)) == {"lost": 1}


def test_a_key_that_is_there_twice_is_doubled() -> None:
    assert found(judged(SHOWN.slice(ROWS - 1), keyed=True)) == {"doubled": 1}


def test_a_kill_that_no_read_followed_before_the_next_epoch_is_unwatched() -> None:
    epochs = {("r", 0): EpochFacts("r", 0, {0: 2 * ROWS}, committed_at=20.0, absent_until=19.0)}
    reads = [Read("t", 12.0, 12.0, SHOWN.slice(0, 0)), Read("t", 30.0, 30.0, SHOWN, final=True)]
    made = History(targets={"t": CheckedTarget("t")}, inputs={"r": SOURCE}, epochs=epochs, reads=reads)
    made.kills, made.counts = [(11.0, "driver"), (13.0, "driver")], {"killed": 2}
    verdict = judge(made, "t")
    assert (verdict.kills, verdict.unwatched) == (2, 1)


def test_rows_that_nobody_sent_prove_nothing() -> None:
    kver = SHOWN.schema.get_field_index("kver")
    spoilt = SHOWN.set_column(kver, "kver", pc.add(SHOWN["kver"], 1))
    with pytest.raises(ValueError, match="nobody sent"):
        judged(spoilt)


def test_the_page_tells_a_missing_verdict_from_a_perfect_one() -> None:
    results = [Result(SYSTEMS[0], None, "no verdict, the broker is gone"), Result(SYSTEMS[1], judged(SHOWN))]
    lines = page(results, Plan.of(1, 2), "2026-01-01").splitlines()
    without, perfect = (next(line for line in lines if one.system.title in line) for one in results)
    assert without.count("| no verdict ") == 4
    assert perfect.endswith("| 0 | 0 | 0 | 0 | 0 | 1 |")


def test_a_target_that_nobody_read_at_the_end_proves_nothing() -> None:
    with pytest.raises(ValueError, match="no final read"):
        judge(History(targets={"t": CheckedTarget("t")}, inputs={"r": SOURCE}), "t")


def test_a_checkpoint_of_flink_tells_where_each_partition_ends(tmp_path: Path) -> None:
    def split(partition: int, offset: int) -> bytes:
        topic = b"source-flink-kafka"
        return struct.pack(f">H{len(topic)}siqq", len(topic), topic, partition, offset, ENDLESS)

    for number, splits in ((1, [split(0, -2), split(1, 7)]), (2, [split(0, 11), split(1, 12)]), (3, [split(1, 13)])):
        folder = tmp_path / "job" / f"chk-{number}"
        folder.mkdir(parents=True)
        (folder / "_metadata").write_bytes(b"state".join([b"", *splits, b""]))
    (tmp_path / "job" / "chk-4").mkdir()
    found = newest(tmp_path)
    assert found is not None
    assert (found.number, found.ends) == (2, {0: 11, 1: 12})
