"""The checker can fail: each anomaly is named in a history made to show it, and good histories show none."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epochsink_devkit.history import ANOMALIES, CheckedTarget, History, HistoryLog, Workload, check
from epochsink_devkit.history.history import AttemptFacts, EpochFacts, Read, TakeFacts
from epochsink_devkit.history.rows import SCHEMA, checksums, stamp

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

STEP = 10.0
"""Seconds between two epochs of a made-up history: epoch e of it is decided at e * STEP, and done a second later."""


@dataclass
class Story:
    """A good history of ``epochs`` epochs of one source, and the rows that its readers saw; to be spoilt by a test."""

    ends: list[dict[int, int]]
    run: str = "r1"
    workload: Workload = field(default_factory=lambda: Workload(keys=5, deletes=3))
    history: History = field(default_factory=History)
    start: float = 0.0

    def __post_init__(self) -> None:
        self.source = self.workload.source(self.ends[-1])
        self.history.inputs[self.run] = self.source
        self.history.drivers[f"driver of {self.run}"] = self.start
        for number, ends in enumerate(self.ends):
            decided = self.decided(number)
            self.history.epochs[self.run, number] = EpochFacts(
                self.run,
                number,
                ends,
                committed_at=decided,
                absent_until=decided - 0.01,
                done_at=decided + 1,
                recorded_at=decided - 0.2,
                unrecorded_until=decided - 0.3,
            )
            self.tries(self.attempt(number), number, decided - 0.5).returned_at = decided - 0.1
        self.history.drained_at = self.history.ended_at = self.decided(len(self.ends) - 1) + 2

    def tries(self, attempt: str, number: int, at: float, driver: str = "") -> AttemptFacts:
        """Add an attempt at an epoch; returns it."""
        by = driver or f"driver of {self.run}"
        self.history.attempts[attempt] = made = AttemptFacts(attempt, self.run, by, number, invoked_at=at)
        return made

    def decided(self, number: int) -> float:
        """When an epoch was decided."""
        return self.start + STEP * (number + 1)

    def attempt(self, number: int) -> str:
        """Return the attempt that became visible."""
        return f"{self.run}{number:031x}"

    def epoch_rows(self, number: int, attempt: str | None = None) -> pa.Table:
        """Return the stamped rows of one epoch."""
        before = self.ends[number - 1] if number else dict.fromkeys(self.ends[0], 0)
        part, off = self.source["src_part"].to_numpy(), self.source["src_off"].to_numpy()
        chosen = np.zeros(len(part), dtype=bool)
        for partition, end in self.ends[number].items():
            chosen |= (part == partition) & (off >= before.get(partition, 0)) & (off < end)
        rows = self.source.filter(pa.array(chosen))
        return stamp(rows, run=self.run, epoch=number, attempt=attempt or self.attempt(number))

    def rows(self, count: int, target: CheckedTarget) -> pa.Table:
        """Return what a target holds when the first ``count`` epochs are applied."""
        table = pa.concat_tables([SCHEMA.empty_table(), *(self.epoch_rows(number) for number in range(count))])
        return newest(table) if target.keyed else table

    def target(self, name: str = "table", **options: Any) -> CheckedTarget:
        """Add a target."""
        self.history.targets[name] = target = CheckedTarget(name, **options)
        return target

    def read(self, target: CheckedTarget, rows: pa.Table, at: float, *, final: bool = False) -> None:
        """Add a read that took a hundredth of a second."""
        self.history.reads.append(Read(target.name, at, at + 0.01, rows, final=final))

    def read_all(self, target: CheckedTarget) -> None:
        """Read after each epoch and in the end."""
        for count in range(len(self.ends) + 1):
            self.read(target, self.rows(count, target), self.start + STEP * count + 2)
        self.read(target, self.rows(len(self.ends), target), self.decided(len(self.ends)) + 2, final=True)

    def spoil(self, target: CheckedTarget, change: Callable[[pa.Table], pa.Table], *, only: int | None = None) -> None:
        """Change what the reads of a target saw: all of them, or one."""
        reads = [read for read in self.history.reads if read.target == target.name]
        for read in reads if only is None else [reads[only]]:
            read.source = change(read.rows())

    @property
    def found(self) -> frozenset[str]:
        """The names of the anomalies that the checker finds."""
        return check(self.history).names


def newest(rows: pa.Table) -> pa.Table:
    """Return what a keyed target makes of rows: the newest of each key, unless it is a delete."""
    order = np.lexsort((rows["kver"].to_numpy(), rows["key"].to_numpy()))
    keys = rows["key"].to_numpy()[order]
    last = order[np.concatenate((keys[1:] != keys[:-1], [True]))] if len(order) else order
    return rows.take(np.sort(last)).filter(pc.field("op") == "U")


def without(**values: Any) -> Callable[[pa.Table], pa.Table]:
    """Remove the rows that have all these values."""

    def change(rows: pa.Table) -> pa.Table:
        hit = np.ones(rows.num_rows, dtype=bool)
        for name, value in values.items():
            hit &= np.asarray(rows[name].to_pylist(), dtype=object) == value
        return rows.filter(pa.array(~hit))

    return change


def with_value(name: str, value: Any, **where: Any) -> Callable[[pa.Table], pa.Table]:
    """Change one column of the rows that have all these values; the checksum is made to fit unless it is the change."""

    def change(rows: pa.Table) -> pa.Table:
        made = [
            {**row, name: value} if all(row[key] == wanted for key, wanted in where.items()) else row
            for row in rows.to_pylist()
        ]
        table = pa.Table.from_pylist(made, schema=SCHEMA)
        return table if name == "crc" else table.set_column(8, "crc", pa.array(checksums(table), pa.int64()))

    return change


def plus(more: pa.Table) -> Callable[[pa.Table], pa.Table]:
    """Add rows."""
    return lambda rows: pa.concat_tables([rows, more])


def story(epochs: int = 4, rows: int = 6, **options: Any) -> Story:
    """Two source partitions, so many rows of each in every epoch."""
    return Story([{0: rows * (n + 1), 1: rows * (n + 1)} for n in range(epochs)], **options)


def told(*, keyed: bool = False, atomic: bool = True, **options: Any) -> tuple[Story, CheckedTarget]:
    """Return a good history with one target, read throughout."""
    one = story()
    target = one.target(keyed=keyed, atomic=atomic, **options)
    one.read_all(target)
    assert one.found == frozenset()
    return one, target


def test_lost_is_a_source_row_missing_in_the_end() -> None:
    one, target = told()
    one.spoil(target, without(src_part=1, src_off=7))
    assert "lost" in one.found


def test_lost_is_also_a_key_that_a_keyed_target_lacks() -> None:
    one, target = told(keyed=True)
    held = one.history.reads[-1].rows()
    one.spoil(target, without(key=held["key"][0].as_py()), only=-1)
    assert "lost" in one.found


def test_lost_is_also_a_delete_that_was_not_applied() -> None:
    one, target = told(keyed=True)
    rows = pa.concat_tables([one.epoch_rows(number) for number in range(4)]).to_pylist()
    last = {row["key"]: row for row in sorted(rows, key=lambda row: row["kver"])}
    key = next(key for key, row in last.items() if row["op"] == "D")
    back = [row for row in rows if row["key"] == key and row["kver"] == last[key]["kver"] - 1]
    one.spoil(target, plus(pa.Table.from_pylist(back, schema=SCHEMA)), only=-1)
    assert {"lost", "stale"} <= one.found


def test_duplicate_is_a_source_row_seen_twice() -> None:
    one, target = told()
    one.spoil(target, plus(one.epoch_rows(0).slice(2, 1)), only=3)
    assert one.found == {"duplicate"}


def test_duplicate_is_also_a_key_seen_twice_in_a_keyed_target() -> None:
    one, target = told(keyed=True)
    one.spoil(target, lambda rows: plus(rows.slice(0, 1))(rows), only=3)
    assert one.found == {"duplicate"}


def test_a_source_row_delivered_again_in_a_later_epoch_is_a_duplicate() -> None:
    one, target = told()
    again = one.epoch_rows(1).slice(0, 3)
    again = stamp(again, run="r1", epoch=2, attempt=one.attempt(2))
    one.spoil(target, plus(again), only=-1)
    assert "duplicate" in one.found


def test_aborted_read_is_a_visible_row_of_an_aborted_attempt() -> None:
    one, target = told()
    one.tries("canary", 1, one.decided(1) - 0.6).aborted = True
    one.spoil(target, plus(one.epoch_rows(1, "canary")), only=3)
    assert one.found == {"aborted read", "mixed attempts", "duplicate"}


def test_early_is_a_row_seen_before_its_commit_existed() -> None:
    one, target = told()
    one.read(target, one.rows(3, target), one.decided(2) - 1)
    assert one.found == {"early"}


@pytest.mark.parametrize("atomic", [False, True])
def test_a_delete_that_is_seen_before_its_commit_existed_is_a_row_that_is_gone(*, atomic: bool) -> None:
    """It leaves no row that could be early; by an aborted attempt it looks the same."""
    one, target = told(keyed=True, atomic=atomic)
    before, after = one.rows(1, target), one.rows(2, target)
    left = before.filter(pc.field("key").isin(after["key"]))
    assert 0 < left.num_rows < before.num_rows
    one.read(target, left, one.decided(1) - 1)
    assert one.found == {"false ack", "flicker"} | ({"torn"} if atomic else set())
    one.history.reads.pop()
    # Elasticsearch applies an epoch bit by bit
    one.read(target, left, one.decided(1) + 0.5)
    assert one.found == ({"false ack", "flicker", "torn"} if atomic else set())


def test_early_is_also_an_epoch_seen_that_was_never_decided() -> None:
    one, _target = told()
    facts = one.history.epochs["r1", 3]
    facts.committed_at, facts.absent_until, facts.done_at = None, float("inf"), None
    assert "early" in one.found


def test_torn_is_a_snapshot_with_some_rows_of_an_epoch() -> None:
    one, target = told()
    one.spoil(target, without(epoch=1, src_part=0), only=3)
    assert "torn" in one.found


def test_torn_is_also_an_epoch_upserted_in_part() -> None:
    one, target = told(keyed=True)
    key = one.rows(3, target)["key"][0].as_py()
    one.spoil(target, without(key=key), only=3)
    assert "torn" in one.found


def test_an_epoch_seen_in_part_is_torn_in_a_target_that_is_not_atomic_only_when_a_later_one_came() -> None:
    one, target = told(atomic=False)
    half = without(epoch=1, src_part=0)
    one.read(target, half(one.rows(2, target)), one.decided(1) + 0.2)
    assert one.found == frozenset()
    assert check(one.history).windows["table"] == pytest.approx(1.81)
    one.spoil(target, half, only=4)
    assert "torn" in one.found


def test_mixed_attempts_are_two_attempts_in_one_epoch() -> None:
    one, target = told()
    one.tries("f" * 32, 2, one.decided(2) - 0.25)
    one.spoil(target, with_value("attempt", "f" * 32, epoch=2, src_part=0))
    assert one.found == {"mixed attempts"}


def test_mixed_attempts_are_also_different_attempts_in_two_sinks() -> None:
    one, _table = told()
    other = one.target("search")
    one.read_all(other)
    one.tries("f" * 32, 2, one.decided(2) - 0.25)
    one.spoil(other, with_value("attempt", "f" * 32, epoch=2))
    assert one.found == {"mixed attempts"}


def test_divergence_is_an_epoch_that_one_sink_holds_and_another_does_not() -> None:
    one, _table = told()
    other = one.target("search")
    one.read_all(other)
    one.spoil(other, without(epoch=3))
    assert "divergence" in one.found


def test_stale_is_a_key_that_goes_back() -> None:
    one, target = told(keyed=True)
    one.read(target, one.rows(1, target), one.decided(3))
    assert "stale" in one.found


def test_stale_is_also_a_deleted_key_that_comes_back() -> None:
    one, target = told(keyed=True)
    rows = [row for number in range(4) for row in one.epoch_rows(number).to_pylist()]
    deleted = next(row for row in rows if row["op"] == "D" and row["kver"] > 0 and row["epoch"] < 3)
    before = [row for row in rows if row["key"] == deleted["key"] and row["kver"] == deleted["kver"] - 1]
    held = pa.Table.from_pylist(before, schema=SCHEMA)
    gone = without(key=deleted["key"])
    target_rows = one.rows(deleted["epoch"], target)
    one.history.reads.clear()
    one.read(target, plus(held)(gone(target_rows)), 1000)
    one.read(target, gone(target_rows), 1001)
    one.read(target, plus(held)(gone(target_rows)), 1002)
    one.read(target, one.rows(4, target), 1003, final=True)
    assert "stale" in one.found


def test_gap_is_an_epoch_missing_below_a_visible_one() -> None:
    one, target = told()
    one.spoil(target, without(epoch=1), only=3)
    assert "gap" in one.found


def test_gap_is_found_in_a_target_that_is_not_atomic_too() -> None:
    one, target = told(atomic=False)
    one.spoil(target, without(epoch=1), only=4)
    assert "gap" in one.found


def test_zombie_write_is_an_old_drivers_attempt_that_appears_after_a_new_driver_went_past_it() -> None:
    one, target = told()
    history = one.history
    history.drivers["second"] = one.decided(1) - 5
    for number in (2, 3):
        history.attempts[one.attempt(number)].driver = "second"
    one.spoil(target, without(epoch=1), only=2)
    one.spoil(target, without(epoch=1), only=3)
    assert "zombie write" in one.found


def test_an_adopted_attempt_that_appears_after_the_restart_is_no_zombie() -> None:
    one, _target = told()
    history = one.history
    history.drivers["second"] = one.decided(1) - 5
    for number in (2, 3):
        history.attempts[one.attempt(number)].driver = "second"
    # the second driver runs epoch 1 again for its state, while the first one's attempt stands
    one.tries("again", 1, one.decided(1) - 0.15, "second").returned_at = one.decided(1) - 0.05
    assert one.found == frozenset()


def test_swallowed_is_an_epoch_of_a_new_checkpoint_that_the_old_ones_marker_hides() -> None:
    one, target = told()
    two = story(run="r2", history=one.history, start=100.0)
    for count in range(1, 5):
        rows = pa.concat_tables([one.rows(4, target), two.rows(count, target)])
        two.read(target, rows, two.decided(count - 1) + 2, final=count == 4)
    assert one.found == frozenset()
    one.spoil(target, without(run="r2", epoch=0))
    assert "swallowed" in one.found


def test_silent_drop_is_a_row_neither_in_the_sink_nor_among_its_dead_letters() -> None:
    one, target = told(dead_letters="refused")
    letters = one.target("refused")
    drop = without(src_part=1, src_off=7)
    refused = one.epoch_rows(1).filter((pc.field("src_part") == 1) & (pc.field("src_off") == 7))
    one.spoil(target, drop)
    one.read(letters, refused, 200, final=True)
    assert one.found == frozenset()
    one.history.reads[-1].source = SCHEMA.empty_table()
    assert "silent drop" in one.found


def test_false_ack_is_an_epoch_done_in_the_ledger_that_a_later_read_lacks() -> None:
    one, target = told()
    one.spoil(target, without(epoch=3), only=4)
    assert one.found == {"false ack"}


def test_false_ack_is_found_in_a_keyed_target_too() -> None:
    one, target = told(keyed=True)
    one.read(target, one.rows(3, target), one.decided(3) + 1.5)
    one.history.reads.sort(key=lambda read: read.began)
    assert one.found == {"false ack"}


@pytest.mark.parametrize("kind", ["orphan", "pin"])
def test_orphan_and_pin_are_what_is_left_over_in_the_end(kind: str) -> None:
    one, target = told()
    one.history.leftovers.append((target.name, kind, "epochsink:1:2:3"))
    assert one.found == {kind}


def test_stuck_is_no_progress_after_healing() -> None:
    one, _target = told()
    one.history.healed_at = one.decided(1)
    assert check(one.history, progress_within=STEP / 2).names == {"stuck"}
    assert check(one.history, progress_within=STEP * 2).clean


def test_stuck_is_also_input_that_was_never_drained() -> None:
    one, _target = told()
    one.history.inputs["r1"] = one.workload.source({0: 30, 1: 24})
    assert one.found == {"stuck"}


def test_stuck_is_also_the_last_epoch_invisible_after_the_end() -> None:
    one, target = told()
    one.history.epochs["r1", 3].done_at = None
    one.spoil(target, without(epoch=3), only=4)
    assert one.found == frozenset()
    one.spoil(target, without(epoch=3), only=5)
    assert one.found == {"lost", "stuck"}


@pytest.mark.parametrize(
    "change",
    [
        with_value("crc", 7, epoch=1),
        with_value("key", 3, src_off=7),
        with_value("run", "another", epoch=1),
        with_value("src_off", 10**6, src_off=7),
        with_value("epoch", 2, epoch=1, src_part=0),
        with_value("epoch", None, src_off=7),
    ],
    ids=["checksum", "key", "run", "offset", "epoch", "null"],
)
def test_corrupt_is_a_row_that_nobody_sent_like_this(change: Callable[[pa.Table], pa.Table]) -> None:
    one, target = told()
    one.spoil(target, change, only=3)
    assert "corrupt" in one.found


def test_corrupt_is_also_a_row_in_the_wrong_target() -> None:
    one, target = told()
    for read in one.history.reads:
        rows = read.rows()
        read.source = rows.append_column("sink", pa.array([target.name] * rows.num_rows, pa.string()))
    assert one.found == frozenset()
    rows = one.history.reads[2].rows()
    one.history.reads[2].source = rows.set_column(9, "sink", pa.array(["topic"] * rows.num_rows, pa.string()))
    assert one.found == {"corrupt"}


def test_early_is_also_a_row_seen_only_50_ms_before_its_commit_existed() -> None:
    """A read is of a moment: all that it shows was visible when it ended."""
    one, target = told()
    one.read(target, one.rows(3, target), one.decided(2) - 0.05)
    assert one.found == {"early"}


def test_a_read_that_had_not_ended_when_its_commit_was_looked_for_last_shows_nothing_early() -> None:
    one, target = told()
    one.read(target, one.rows(3, target), one.decided(2) - 0.015)
    assert one.found == frozenset()


KINDS = [
    pytest.param({"keyed": keyed, "atomic": atomic}, id=f"{'keyed' if keyed else 'append'}, atomic={atomic}")
    for keyed in (False, True)
    for atomic in (False, True)
]


@pytest.mark.parametrize("kind", KINDS)
def test_flicker_is_an_epoch_that_is_visible_gone_and_visible_again(kind: dict[str, bool]) -> None:
    one, target = told(**kind)
    one.read(target, one.rows(4, target), one.decided(3) + 0.2)
    assert one.found == frozenset()
    one.read(target, one.rows(3, target), one.decided(3) + 0.5)
    assert "flicker" in one.found


@pytest.mark.parametrize("kind", KINDS)
def test_flicker_is_also_a_target_that_empties_for_a_while(kind: dict[str, bool]) -> None:
    one, target = told(**kind, lag=30.0)
    one.read(target, SCHEMA.empty_table(), one.decided(3) + 0.5)
    assert "flicker" in one.found


@pytest.mark.parametrize("kind", KINDS)
def test_flicker_is_also_a_part_of_an_epoch_that_is_gone_for_a_while(kind: dict[str, bool]) -> None:
    one, target = told(**kind, lag=30.0)
    one.read(target, one.rows(4, target), one.decided(3) + 0.2)
    row = one.rows(4, target).filter(pc.field("epoch") == 3).slice(0, 1).to_pylist()[0]
    one.read(target, without(src_part=row["src_part"], src_off=row["src_off"])(one.rows(4, target)), one.decided(3) + 1)
    assert "flicker" in one.found


def test_an_epoch_under_way_may_lose_what_nobody_has_acknowledged() -> None:
    """Elasticsearch shows documents before they are on disk, and a crash takes them away."""
    one, target = told(atomic=False)
    part = one.epoch_rows(3)
    for seconds, rows in ((0.2, part.slice(0, 8)), (0.4, part.slice(0, 3)), (0.6, part)):
        one.read(target, pa.concat_tables([one.rows(3, target), rows]), one.decided(3) + seconds)
    assert one.found == frozenset()


def test_a_read_that_began_before_another_had_ended_may_show_less() -> None:
    one, target = told()
    one.history.reads.append(Read(target.name, one.decided(3) + 0.1, one.decided(3) + 0.4, one.rows(4, target)))
    one.history.reads.append(Read(target.name, one.decided(3) + 0.2, one.decided(3) + 0.3, one.rows(3, target)))
    assert one.found == frozenset()


def test_a_key_that_an_epoch_under_way_writes_and_then_deletes_does_not_flicker() -> None:
    """The epoch after it is half applied: it has deleted the key, whose row before it is gone."""
    one = story(workload=Workload(keys=4, deletes=5))
    target = one.target(keyed=True, atomic=False)
    one.read_all(target)
    held = [row for row in one.rows(1, target).to_pylist() if row["key"] == 2]
    written = [row for row in one.epoch_rows(1).to_pylist() if row["key"] == 2]
    assert [row["op"] for row in (*held, *written)] == ["U", "U", "D"]
    one.read(target, without(key=2)(one.rows(1, target)), one.decided(1) + 0.2)
    assert one.found == frozenset()


def test_unknown_writer_is_an_attempt_that_nobody_began() -> None:
    one, target = told()
    one.spoil(target, with_value("attempt", "f" * 32, epoch=2))
    assert one.found == {"unknown writer"}


def test_unknown_writer_is_also_an_attempt_at_another_epoch() -> None:
    one, target = told()
    one.tries("f" * 32, 1, one.decided(2) - 0.25)
    one.spoil(target, with_value("attempt", "f" * 32, epoch=2))
    assert one.found == {"unknown writer"}


def test_unknown_writer_is_also_an_attempt_that_raised_before_another_driver_recorded_the_epoch() -> None:
    one, target = told()
    one.history.drivers["second"] = one.decided(2) - 3
    one.tries("f" * 32, 2, one.decided(2) - 4).raised = True
    one.history.attempts[one.attempt(2)].driver = one.history.attempts[one.attempt(3)].driver = "second"
    assert one.found == frozenset()
    one.spoil(target, with_value("attempt", "f" * 32, epoch=2))
    assert one.found == {"unknown writer"}


def test_an_attempt_that_raised_when_the_ledger_held_it_is_adopted_by_the_next_driver() -> None:
    """Whether its append happened, it could not know; the next driver ran the epoch again for its state."""
    one, _target = told()
    one.history.drivers["second"] = one.decided(2) - 0.18
    one.history.attempts[one.attempt(2)].raised = True
    one.history.attempts[one.attempt(2)].returned_at = None
    one.history.attempts[one.attempt(3)].driver = "second"
    one.tries("f" * 32, 2, one.decided(2) - 0.15, "second").returned_at = one.decided(2) - 0.1
    assert one.found == frozenset()


def test_unknown_writer_is_also_an_attempt_that_only_adopted_the_recorded_one() -> None:
    one, target = told()
    one.history.drivers["second"] = one.decided(2) - 0.18
    one.history.attempts[one.attempt(3)].driver = "second"
    one.tries("f" * 32, 2, one.decided(2) - 0.15, "second").returned_at = one.decided(2) - 0.1
    one.spoil(target, with_value("attempt", "f" * 32, epoch=2))
    assert one.found == {"unknown writer"}


def test_unknown_writer_is_also_an_attempt_at_an_epoch_that_nobody_recorded() -> None:
    one, _target = told()
    one.history.epochs["r1", 2].recorded_at = None
    assert one.found == {"unknown writer"}


def test_without_a_ledger_an_unknown_writer_is_an_attempt_that_raised_where_no_other_returned() -> None:
    one, _target = told()
    for epoch in one.history.epochs.values():
        epoch.recorded_at = None
    assert one.found == frozenset()
    facts = one.history.attempts[one.attempt(2)]
    facts.raised, facts.returned_at = True, None
    assert one.found == {"unknown writer"}
    one.tries("f" * 32, 2, one.decided(2) - 0.2).returned_at = one.decided(2) - 0.1
    assert one.found == frozenset()


def overtaken() -> tuple[Story, CheckedTarget]:
    """Return a history in which the driver that was started first, and paused, took the ledger after its successor."""
    one, target = told()
    history = one.history
    history.drivers = {"paused": 0.0, "prompt": 1.0}
    history.takes = {"prompt": TakeFacts("r1", 7, 2.0), "paused": TakeFacts("r1", 8, one.decided(1) + 3)}
    for number, driver in enumerate(("prompt", "prompt", "paused", "paused")):
        history.attempts[one.attempt(number)].driver = driver
    one.tries("f" * 32, 2, one.decided(1) + 2.5, "prompt").raised = True
    return one, target


def test_a_driver_that_took_the_ledger_after_its_successor_is_no_unknown_writer() -> None:
    one, _target = overtaken()
    assert one.found == frozenset()
    one.history.takes.clear()
    assert one.found == {"unknown writer"}, "by the order of the starts, which is all that is known then"


def test_unknown_writer_is_also_the_driver_started_last_once_an_earlier_one_has_taken_the_ledger() -> None:
    one, target = overtaken()
    one.spoil(target, with_value("attempt", "f" * 32, epoch=2))
    assert one.found == {"unknown writer"}


def test_zombie_write_is_also_that_of_the_driver_started_last_once_an_earlier_one_has_taken_the_ledger() -> None:
    one, target = overtaken()
    one.spoil(target, without(epoch=1), only=2)
    one.spoil(target, without(epoch=1), only=3)
    assert "zombie write" in one.found
    one.history.takes.clear()
    assert "zombie write" not in one.found


def test_unknown_writer_is_also_a_driver_that_never_took_the_ledger() -> None:
    one, target = overtaken()
    one.history.drivers["third"] = one.decided(2) - 1
    one.tries("e" * 32, 2, one.decided(2) - 0.4, "third").returned_at = one.decided(2) - 0.1
    assert one.found == frozenset()
    one.spoil(target, with_value("attempt", "e" * 32, epoch=2))
    assert one.found == {"unknown writer"}


def test_a_call_that_began_before_its_driver_had_the_ledger_passes_nobody_and_records_nothing_until_then() -> None:
    """The first call on a new checkpoint is where the ledger is taken."""
    one, target = overtaken()
    one.tries("e" * 32, 0, 1.5, "paused").raised = True
    assert one.found == frozenset()
    one.spoil(target, with_value("attempt", "e" * 32, epoch=0))
    assert one.found == {"unknown writer"}


def test_a_driver_takes_the_ledger_once() -> None:
    history = History()
    took = {"event": "took", "at": 1.0, "run": "r1", "driver": "d1", "generation": 7}
    history.add(took)
    with pytest.raises(ValueError, match="driver d1 took the ledger twice"):
        history.add(took)


def logged(rows: pa.Table, places: Sequence[int], parts: Sequence[int] | None = None) -> pa.Table:
    """Return rows as a log has them, each at its place."""
    table = rows.append_column("log_part", pa.array(parts or [0] * rows.num_rows, pa.int32()))
    return table.append_column("log_off", pa.array(places, pa.int64()))


def test_disorder_is_a_log_in_reverse_order() -> None:
    one, target = told()
    one.spoil(target, lambda rows: logged(rows, range(rows.num_rows)))
    assert one.found == frozenset()
    one.spoil(target, lambda rows: logged(rows.select(SCHEMA.names), range(rows.num_rows, 0, -1)), only=-1)
    assert one.found == {"disorder"}


def test_disorder_is_also_an_epoch_before_an_earlier_one_that_has_no_key_in_common_with_it() -> None:
    one = story(rows=2, workload=Workload(keys=97))
    target = one.target()
    one.read_all(target)
    one.spoil(target, lambda rows: logged(rows, [-row["epoch"] for row in rows.to_pylist()]))
    assert one.found == {"disorder"}


def test_disorder_is_found_in_a_log_with_a_damaged_row_too() -> None:
    one, target = told()
    one.spoil(target, with_value("crc", 7, src_part=0, src_off=0), only=-1)
    one.spoil(target, plus(one.epoch_rows(0).slice(0, 1)), only=-1)
    one.spoil(target, with_value("src_off", 10**6, src_part=0, src_off=0), only=-1)
    one.spoil(target, lambda rows: logged(rows, range(rows.num_rows, 0, -1)), only=-1)
    assert {"corrupt", "disorder"} <= one.found


def test_disorder_is_also_two_versions_of_a_key_the_wrong_way_round() -> None:
    one, target = told()

    def swapped(rows: pa.Table) -> pa.Table:
        places = list(range(rows.num_rows))
        of_key = [n for n, row in enumerate(rows.to_pylist()) if row["key"] == 0 and row["epoch"] == 0]
        if len(of_key) > 1:
            places[of_key[0]], places[of_key[1]] = of_key[1], of_key[0]
        return logged(rows, places)

    one.spoil(target, swapped)
    assert one.found == {"disorder"}


def test_a_log_of_several_partitions_in_which_tasks_take_turns_is_in_order() -> None:
    one, target = told()

    def turns(rows: pa.Table) -> pa.Table:
        """Let the tasks of the two source partitions write by turns, each key into a partition of its own."""
        place = [row["epoch"] * 1000 + row["src_off"] * 2 + row["src_part"] for row in rows.to_pylist()]
        parts = [row["key"] % 3 for row in rows.to_pylist()]
        return logged(rows, [at - 900 * part for at, part in zip(place, parts, strict=True)], parts)

    one.spoil(target, turns)
    assert one.found == frozenset()


def refused(*, more: Callable[[pa.Table], pa.Table] = lambda rows: rows) -> tuple[Story, CheckedTarget]:
    """Return a history in which one row of epoch 1 is a dead letter, and what else the letters hold."""
    one, target = told(dead_letters="refused")
    letters = one.target("refused")
    row = one.epoch_rows(1).filter((pc.field("src_part") == 1) & (pc.field("src_off") == 7))
    one.spoil(target, without(src_part=1, src_off=7))
    # a run that was broken off has left its letters for the next one to clear away
    one.read(letters, pa.concat_tables([row, row]), one.decided(1) + 0.5)
    one.read(letters, row, 200, final=True)
    assert one.found == frozenset()
    one.spoil(letters, more, only=-1)
    return one, target


@pytest.mark.parametrize(
    "more",
    [
        lambda rows: pa.concat_tables([rows, rows]),
        with_value("attempt", "f" * 32),
        with_value("attempt", "r1" + f"{2:031x}"),
        with_value("crc", 7),
    ],
    ids=["twice", "of an unknown attempt", "of an attempt at another epoch", "damaged"],
)
def test_letters_are_dead_letters_that_are_not_those_of_the_epoch(more: Callable[[pa.Table], pa.Table]) -> None:
    one, _target = refused(more=more)
    assert one.found == {"letters"}


def test_letters_are_also_dead_letters_that_the_target_holds_too() -> None:
    one, target = refused()
    one.spoil(target, lambda _: one.rows(4, target), only=-1)
    assert one.found == {"letters"}


def test_letters_are_also_dead_letters_of_an_aborted_attempt() -> None:
    one, target = refused(more=with_value("attempt", "f" * 32))
    one.tries("f" * 32, 1, one.decided(1) - 0.25).aborted = True
    one.spoil(target, without(epoch=1))
    assert "letters" in one.found


def test_letters_are_also_dead_letters_of_an_attempt_other_than_the_targets() -> None:
    one, _target = refused(more=with_value("attempt", "f" * 32))
    one.tries("f" * 32, 1, one.decided(1) - 0.25)
    assert one.found == {"letters"}


def test_letters_are_also_dead_letters_of_an_epoch_that_was_never_decided() -> None:
    one, target = refused()
    one.spoil(target, without(epoch=3))
    facts = one.history.epochs["r1", 3]
    facts.committed_at, facts.absent_until, facts.done_at = None, float("inf"), None
    one.history.inputs["r1"] = one.workload.source(one.ends[2])
    assert one.found == frozenset()
    one.history.inputs["r1"] = one.source
    assert one.found == {"stuck"}
    one.spoil(one.history.targets["refused"], plus(one.epoch_rows(3).slice(0, 1)), only=-1)
    assert one.found == {"stuck", "letters"}


def killed() -> tuple[Story, CheckedTarget]:
    """Return a history in which the driver was killed after epoch 1, and another one started; no read between."""
    one, target = told()
    one.history.kills.append((one.decided(1) + 3, "driver"))
    one.history.drivers["second"] = one.decided(1) + 4
    for number in (2, 3):
        one.history.attempts[one.attempt(number)].driver = "second"
    return one, target


def test_blind_is_no_read_between_a_kill_and_the_recovery() -> None:
    one, target = killed()
    assert one.found == {"blind"}
    one.read(target, one.rows(2, target), one.decided(1) + 5)
    assert one.found == frozenset()


def test_blind_is_also_a_read_that_was_over_when_the_kill_came_and_one_after_the_recovery() -> None:
    one, target = killed()
    one.read(target, one.rows(2, target), one.decided(1) + 2.9)
    one.read(target, one.rows(2, target), one.decided(2) - 0.4)
    assert one.found == {"blind"}


def test_a_final_read_is_not_one_between_a_kill_and_the_recovery() -> None:
    one, target = killed()
    one.read(target, one.rows(2, target), one.decided(1) + 5, final=True)
    assert "blind" in one.found


def test_reads_that_saw_the_same_and_were_not_kept_are_reads() -> None:
    one, _target = killed()
    one.history.reads[3].between = (one.decided(1) + 2.1, one.decided(1) + 5)
    assert one.found == frozenset()


def test_a_target_that_cannot_be_read_after_one_kill_has_to_be_read_after_another() -> None:
    one, target = killed()
    one.history.unreachable.append((target.name, one.decided(1) + 2.5, one.decided(1) + 9.5))
    assert one.found == {"blind"}
    one.history.kills.append((one.decided(2) + 1, "a worker, which the pipeline outlives"))
    assert one.found == frozenset()


def test_a_target_that_is_unreachable_for_a_moment_has_to_be_read_all_the_same() -> None:
    one, target = killed()
    one.history.kills.append((one.decided(2) + 1, "a worker, which the pipeline outlives"))
    one.history.unreachable.append((target.name, one.decided(1) + 4, one.decided(1) + 4.1))
    assert one.found == {"blind"}
    assert check(one.history).counts["unread kills"] == 1


def test_what_is_killed_when_all_is_drained_needs_no_recovery() -> None:
    one, _target = told()
    assert one.history.drained_at is not None
    one.history.kills.append((one.history.drained_at + 1, "a driver that woke up"))
    assert one.found == frozenset()


def test_nothing_is_concluded_without_a_final_read() -> None:
    one, target = told()
    one.history.reads = [replace(read, final=False) for read in one.history.reads]
    with pytest.raises(ValueError, match=f"no final read of target '{target.name}'"):
        check(one.history)


def test_nothing_is_concluded_from_a_source_with_holes() -> None:
    one, _target = told()
    one.history.inputs["r1"] = one.source.filter(pc.field("src_off") != 3)
    with pytest.raises(ValueError, match="dense"):
        check(one.history)


def test_every_anomaly_has_a_row_in_the_report() -> None:
    one, target = told()
    one.spoil(target, without(src_part=1, src_off=7))
    text = str(check(one.history))
    for name in ANOMALIES:
        assert name in text
    assert "lost: table: 1 row(s) of 1 epoch(s)" in text


def effects(rows: pa.Table) -> pa.Table:
    """Return what a keyed target applies of an epoch: the newest row of each key, deletes too."""
    order = np.lexsort((rows["kver"].to_numpy(), rows["key"].to_numpy()))
    keys = rows["key"].to_numpy()[order]
    return rows.take(order[np.concatenate((keys[1:] != keys[:-1], [True]))] if len(order) else order)


def test_every_anomaly_has_a_row_in_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "checker.md").read_text()
    assert re.findall(r"^\| ([a-z ]+) \|", page, re.MULTILINE) == ["anomaly", *ANOMALIES]


@st.composite
def good_stories(draw: st.DrawFn) -> Story:
    """Histories that a right sink may give: any epochs, empty ones too, any prefix at any read, one restart.

    Of the epoch after that prefix, a target that is not atomic may show a part.
    """
    partitions = draw(st.integers(1, 3))
    growth = draw(
        st.lists(
            st.lists(st.integers(0, 9), min_size=partitions, max_size=partitions), min_size=1, max_size=8
        )
    )  # fmt: skip
    totals = np.cumsum(np.array(growth), axis=0)
    ends = [{part: int(end) for part, end in enumerate(row)} for row in totals]
    workload = Workload(keys=draw(st.integers(1, 7)), deletes=draw(st.integers(2, 4)))
    made = Story(ends, workload=workload)
    for name, keyed in (("table", draw(st.booleans())), ("search", draw(st.booleans()))):
        target = made.target(name, keyed=keyed, atomic=draw(st.booleans()))
        at, count, part = 0.0, 0, 0
        while count < len(ends):
            # a read may see any prefix from the newest acknowledged epoch to the newest decided one
            at += draw(st.floats(0.5, STEP))
            decided = int(at // STEP)
            done = int((at - 1) // STEP)
            before = count
            count = draw(st.integers(max(count, min(done, len(ends))), max(count, min(decided, len(ends)))))
            rows, part = made.rows(count, target), part if count == before else 0
            if not target.atomic and count < min(decided, len(ends)):
                following = effects(made.epoch_rows(count)) if keyed else made.epoch_rows(count)
                part = draw(st.integers(part, following.num_rows))
                rows = pa.concat_tables([rows, following.slice(0, part)])
            made.read(target, newest(rows) if keyed else rows, at)
        made.read(target, made.rows(count, target), at + 100, final=True)
    return made


@given(good_stories())
@settings(max_examples=100, deadline=None)
def test_good_histories_show_no_anomaly(made: Story) -> None:
    report = check(made.history)
    assert report.clean, str(report)


@given(good_stories(), st.data())
@settings(max_examples=40, deadline=None)
def test_a_row_taken_from_the_end_of_a_good_history_is_missed(made: Story, data: st.DataObject) -> None:
    finals = [read for read in made.history.reads if read.final and read.rows().num_rows]
    for read in finals:
        rows = read.rows()
        process = data.draw(st.integers(0, rows.num_rows - 1))
        read.source = pa.concat_tables([rows.slice(0, process), rows.slice(process + 1)])
    if finals:
        assert "lost" in check(made.history).names


def test_a_history_written_line_by_line_is_judged_like_one_in_memory(tmp_path: Path) -> None:
    one, target = told()
    log = HistoryLog(tmp_path)
    log.write("target", name="table")
    log.write_input("r1", one.source)
    log.write("started", run="r1", driver="d1")
    log.write("took", run="r1", driver="d1", generation=7)
    for number, ends in enumerate(one.ends):
        log.write("invoked", run="r1", driver="d1", epoch=number, attempt=one.attempt(number))
        log.write("offsets", run="r1", epoch=number, ends=ends)
        log.write("recorded", run="r1", epoch=number, absent_until=time.monotonic())
        log.write("returned", attempt=one.attempt(number))
        log.write("committed", run="r1", epoch=number, absent_until=time.monotonic())
        log.write("done", run="r1", epoch=number)
        now = time.monotonic()
        log.write_read("table", now, now, log.keep(one.rows(number + 1, target)), final=number == 3)
    log.write("drained")
    report = check(tmp_path)
    assert report.clean, str(report)
    assert report.counts["rows read"] == 12 + 24 + 36 + 48
    lines = (tmp_path / "history.jsonl").read_text().splitlines()
    kept = [line for line in lines if json.loads(line)["event"] != "read" or json.loads(line)["final"]]
    assert len(kept) == len(lines) - 3


def test_an_event_of_unknown_kind_is_refused() -> None:
    event: Mapping[str, Any] = {"event": "rumour", "at": 1.0}
    with pytest.raises(ValueError, match="rumour"):
        History().add(event)


def test_many_rows_are_judged_in_linear_time() -> None:
    """Half a million rows, six reads: seconds, where anything quadratic would take hours."""
    one = story(epochs=5, rows=50_000, workload=Workload(keys=9973))
    for name, keyed in (("table", True), ("log", False)):
        target = one.target(name, keyed=keyed)
        for count in (3, 5):
            one.read(target, one.rows(count, target), one.decided(count - 1) + 2)
        one.read(target, one.rows(5, target), 500, final=True)
    began = time.monotonic()
    assert check(one.history).clean
    assert time.monotonic() - began < 60
