"""What a query tells of its epochs: in the ledger's receipts, to the program, in the log."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

import pytest
from query_by_hand import Query

from epochsink.errors import Fenced, RowsRejected
from epochsink.protocol.json_value import from_json
from epochsink.protocol.ledger_entries import Prepared
from epochsink.protocol.progress import EpochProgress, SinkProgress
from epochsink.protocol.progress_tracker import LOG_SECONDS, ProgressTracker

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def query(tmp_path: Path) -> Query:
    return Query(tmp_path)


def receipt_of(query: Query, epoch: int) -> EpochProgress:
    return query.history().receipts[epoch]


def test_the_receipt_of_a_done_epoch_says_what_each_sink_got(query: Query) -> None:
    driver = query.driver()
    query.prepare(driver, 0, 1, 2, 3)
    assert driver.progress.snapshot().pending == (0,)
    query.decide(0)
    driver.commit_decided()
    sink = receipt_of(query, 0).sinks["out"]
    assert (sink.rows, sink.bytes, sink.deleted, sink.set_aside, sink.replays) == (3, 24, 0, 0, 0)
    now = driver.progress.snapshot()
    assert (now.pending, now.late_seconds, now.epochs) == ((), 0.0, 1)
    assert now.recent == (receipt_of(query, 0),)
    assert now.totals["out"].rows == 3
    assert json.loads(now.json)["recent"][0]["sinks"]["out"]["rows"] == 3
    assert receipt_of(query, 0).done_at == pytest.approx(query.history().owner.stamp.at, abs=60)  # type: ignore[union-attr]


def test_a_driver_that_finishes_the_epoch_of_another_one_knows_its_rows(query: Query) -> None:
    query.prepare(query.driver(), 0, 1, 2)
    query.decide(0)
    told = query.driver().progress.snapshot()
    assert [one.rows for one in told.recent] == [2]
    assert receipt_of(query, 0).sinks["out"].rows == 2
    # the steps that the first driver took are not guessed
    assert receipt_of(query, 0).write_seconds == receipt_of(query, 0).decision_seconds == 0.0


def test_an_epoch_is_late_from_its_decision_until_readers_see_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("epochsink.protocol.progress_tracker.time.monotonic", lambda: clock[0])
    told = ProgressTracker()
    told.begin(7)
    told.recorded(_prepared(7))
    clock[0] += 50
    assert told.snapshot().late_seconds == 0.0
    told.decided(7)
    clock[0] += 9
    assert (told.snapshot().pending, told.snapshot().late_seconds) == ((7,), 9.0)
    told.visible(7)
    told.done(7)
    assert (told.snapshot().pending, told.snapshot().late_seconds) == ((), 0.0)
    (epoch,) = told.snapshot().recent
    assert (epoch.decision_seconds, epoch.commit_seconds) == (50.0, 9.0)


def test_an_epoch_is_under_way_from_its_call_on_however_often_it_is_attempted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A target that does not answer stops an epoch before anything is prepared: nothing is late then."""
    caplog.set_level(logging.INFO, "epochsink")
    clock = [100.0]
    monkeypatch.setattr("epochsink.protocol.progress_tracker.time.monotonic", lambda: clock[0])
    told = ProgressTracker()
    told.opened(7)
    clock[0] += 40
    told.opened(7)
    told.begin(7)
    clock[0] += 25
    assert (told.snapshot().open_seconds, told.snapshot().late_seconds) == (65.0, 0.0)
    told.log_now_and_then()
    assert "no epoch became visible in the last minute; one has been under way for 65 s" in caplog.text
    told.written(7)
    told.recorded(_prepared(7))
    told.decided(7)
    told.visible(7)
    told.done(7)
    assert told.snapshot().open_seconds == 0.0
    # what the epoch waited for, and its failed attempts, are in its receipt
    (seen,) = told.snapshot().recent
    assert seen.write_seconds == 65.0
    # an earlier run has done this one
    told.opened(6)
    told.closed(6)
    assert told.snapshot().open_seconds == 0.0


def test_the_age_of_an_epoch_that_an_earlier_run_has_begun_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler that restarts a failing query every minute must not hide for how long readers have waited."""
    clock = [100.0]
    monkeypatch.setattr("epochsink.protocol.progress_tracker.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("epochsink.protocol.progress_tracker.time.time", lambda: 5_000.0)
    told = ProgressTracker(begun_at={7: 4_700.0, 8: 4_000.0}.get)
    told.opened(7)
    clock[0] += 5
    assert told.snapshot().open_seconds == 305.0
    told.begin(7)
    told.recorded(_prepared(7))
    told.decided(7)
    told.visible(7)
    told.done(7)
    assert told.snapshot().open_seconds == 0.0
    # its own steps are those of this run
    assert told.snapshot().recent[0].write_seconds == 0.0
    # a later epoch is this run's own, whatever another machine's clock said
    told.opened(8)
    assert told.snapshot().open_seconds == 0.0
    # a clock that is behind makes no age negative
    behind = ProgressTracker(begun_at=lambda _: 6_000.0)
    behind.opened(7)
    assert behind.snapshot().open_seconds == 0.0


def test_ages_are_those_of_the_oldest_epoch_and_no_second_look_makes_it_younger(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = [100.0]
    monkeypatch.setattr("epochsink.protocol.progress_tracker.time.monotonic", lambda: clock[0])
    told = ProgressTracker()
    told.opened(7)
    told.recorded(_prepared(7))
    clock[0] += 10
    told.decided(7)
    clock[0] += 20
    told.opened(8)
    told.recorded(_prepared(8))
    told.decided(8)
    told.decided(7)
    clock[0] += 40
    now = told.snapshot()
    assert (now.pending, now.late_seconds, now.open_seconds) == ((7, 8), 60.0, 70.0)
    # a line that a log at its default level shows, too
    told.log_now_and_then()
    assert "no epoch became visible in the last minute; the oldest decided one is late by 60 s" in caplog.text


def test_the_first_failure_is_the_one_that_is_shown() -> None:
    told = ProgressTracker()
    told.failed("RowsRejected: the cause")
    told.failed("Fenced: what followed")
    assert told.snapshot().failure == "RowsRejected: the cause"


def test_replays_and_dead_letters_are_counted() -> None:
    told = ProgressTracker()
    told.recorded(_prepared(0))
    told.replayed(0, ["out", "other"])
    told.replayed(0, ["out"])
    told.set_aside(0, "out", [2, 1])
    told.set_aside(0, "other", [2, None])
    sinks = told.of(0).sinks
    assert {name: (sink.replays, sink.set_aside) for name, sink in sinks.items()} == {"out": (2, 3), "other": (1, None)}


def test_receipts_outlive_the_entries_that_held_them(query: Query) -> None:
    driver = query.driver()
    for number in range(70):
        query.prepare(driver, number, number)
        query.decide(number)
        driver.commit_decided()
    # summed up by a take since: the newest receipts are in it
    assert [*query.history().receipts] == list(range(6, 70))


def test_a_listener_that_fails_stops_nothing(query: Query, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[int] = []

    def listen(epoch: EpochProgress) -> None:
        seen.append(epoch.epoch)
        raise RuntimeError("the monitoring is down")

    driver = query.driver(listener=listen)
    for number in range(2):
        query.prepare(driver, number, number)
        query.decide(number)
        driver.commit_decided()
    assert seen == [0, 1]
    assert query.visible() == [0, 1]
    assert "on_progress= failed for epoch 0" in caplog.text


def test_no_epoch_waits_for_a_listener(query: Query) -> None:
    """The next epoch's vote may go on: what the listener is told of is committed, and is not pending any more."""
    pending: list[tuple[int, ...]] = []
    driver = query.driver(listener=lambda _: pending.append(driver.queue.pending))
    query.prepare(driver, 0, 0)
    query.decide(0)
    driver.commit_decided()
    assert pending == [()]


def test_a_start_and_the_end_of_a_query_tell_the_listener_of_what_they_commit(query: Query) -> None:
    seen: list[int] = []
    query.prepare(query.driver(), 0, 0)
    query.decide(0)
    driver = query.driver(listener=lambda epoch: seen.append(epoch.epoch))
    assert seen == [0]
    query.prepare(driver, 1, 1)
    query.decide(1)
    driver.drain()
    assert seen == [0, 1]


def test_the_last_failure_is_in_the_ledger_and_outlives_the_next_start(query: Query) -> None:
    driver = query.driver()
    driver.note_failure(RowsRejected("sink 'out': the target refuses 3 rows", hint="filter them", command="this"))
    assert query.history().failing is not None
    query.driver()
    assert query.history().failing is None
    stopped = query.history().stopped
    assert stopped is not None
    assert (stopped.kind, stopped.hint, stopped.command) == ("RowsRejected", "filter them", "this")
    assert stopped.failure == "RowsRejected: sink 'out': the target refuses 3 rows"
    assert stopped.stamp is not None
    assert driver.progress.snapshot().failure == stopped.failure


def test_a_superseded_driver_leaves_no_failure_in_its_successors_ledger(query: Query) -> None:
    driver = query.driver()
    query.driver()
    driver.note_failure(Fenced("taken"))
    assert query.history().stopped is None


def test_a_driver_that_has_read_its_successors_take_leaves_no_failure_there(query: Query) -> None:
    driver = query.driver()
    query.driver()
    with pytest.raises(Fenced):
        driver.settle(0)
    driver.note_failure(Fenced("taken"))
    assert query.history().stopped is None


def test_a_line_a_minute_and_nothing_while_nothing_happens(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "epochsink")
    clock = [0.0]
    monkeypatch.setattr("epochsink.protocol.progress_tracker.time.monotonic", lambda: clock[0])
    told = ProgressTracker()
    for number in range(3):
        told.begin(number)
        told.recorded(_prepared(number))
        told.decided(number)
        told.visible(number)
        told.done(number)
        told.log_now_and_then()
    assert caplog.text == ""
    clock[0] += LOG_SECONDS
    told.log_now_and_then()
    clock[0] += LOG_SECONDS
    told.log_now_and_then()
    assert [record.message.split(";")[0] for record in caplog.records] == ["epochs 0 to 2: 0 rows are visible"]


def test_progress_is_json_and_back() -> None:
    told = EpochProgress(3, 1.5, sinks={"out": SinkProgress(rows=4, set_aside=None)})
    content = json.loads(
        json.dumps(told, default=lambda value: {name: getattr(value, name) for name in value.__slots__})
    )
    assert from_json(EpochProgress, content) == told
    # a newer version's facts are left out
    content["sinks"]["out"]["new"] = content["new"] = 1
    assert from_json(EpochProgress, content) == told


def _prepared(number: int) -> Prepared:
    return Prepared(number, "a" * 32, "", {})
