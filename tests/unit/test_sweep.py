"""What no recorded epoch names is ended; what the ledger names never is."""

from __future__ import annotations

import shutil
import threading
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from folder_sink import FolderParticipant, FolderSink
from query_by_hand import Query

from epochsink.errors import Fenced, OutcomeUnknown, PrepareFailed, WentBack
from epochsink.sink import RowCount, Task
from epochsink.testing.local_sink import LocalParticipant

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

SECONDS = 10


@pytest.fixture
def query(tmp_path: Path) -> Query:
    return Query(tmp_path)


def test_what_nobody_recorded_is_aborted_at_the_next_start(query: Query) -> None:
    driver = query.driver()
    query.attempt(driver, 0, 1)
    query.driver()
    assert query.sink.prepared() == []
    assert not list((query.folder.parent / "sink").glob("*/written/*"))


def test_tidying_ends_nothing_while_an_epoch_is_pending(query: Query) -> None:
    driver = query.driver()
    query.prepare(driver, 0, 1)
    prepared = query.sink.prepared()
    driver.tidy()
    assert query.sink.prepared() == prepared


def test_tidying_ends_nothing_while_an_attempt_is_under_way(query: Query) -> None:
    driver = query.driver()
    epoch, accepted = query.attempt(driver, 0, 1)
    driver.tidy()
    driver.record(epoch, {"out": [accepted]}, {})
    query.decide(0)
    assert driver.commit_decided()
    assert query.visible() == [1]


@pytest.mark.parametrize(
    ("failure", "stops"),
    [
        (ConnectionError("the server is down"), False),
        (PrepareFailed("the server starts up"), False),
        (PrepareFailed("a right is missing", may_pass=False), True),
    ],
)
def test_a_failure_that_passes_while_the_stream_idles_does_not_end_the_query(
    query: Query, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failure: Exception, *, stops: bool
) -> None:
    driver = query.driver()

    def fail(*_: object) -> list[str]:
        raise failure

    monkeypatch.setattr(LocalParticipant, "remnants", fail)
    with pytest.raises(type(failure)) if stops else nullcontext():
        driver.tidy()
    assert ("leftovers of losing tasks stay for the next sweep" in caplog.text) != stops


@pytest.mark.parametrize("sweeping", ["an idle stream", "an attempt that fails"])
def test_what_a_target_that_was_set_back_holds_prepared_of_an_old_epoch_is_left(query: Query, sweeping: str) -> None:
    """After two restarts no driver knows any more what the epoch had prepared, and its rows may be nowhere else."""
    driver = query.driver()
    query.prepare(driver, 0, 1)
    kept, prepared = query.folder.parent / "kept", query.sink.prepared()
    shutil.copytree(query.sink.folder, kept)
    query.decide(0)
    assert driver.commit_decided()
    query.driver()
    driver = query.driver()
    query.prepare(driver, 1, 2)
    query.decide(1)
    assert driver.commit_decided()
    epoch = None
    if sweeping == "an attempt that fails":
        query.plan(2)
        driver.settle(2)
        epoch = driver.begin(2)
    shutil.rmtree(query.sink.folder)
    kept.rename(query.sink.folder)
    if epoch is None:
        with pytest.raises(WentBack, match="no marker of this query"):
            driver.tidy()
    else:
        # the query shows why it failed; its next start shows this
        driver.abandon(epoch)
    assert query.sink.prepared() == prepared


def test_a_target_that_holds_nothing_to_end_is_not_asked_for_its_marker(
    query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the query outlives it if that target is down while the stream idles."""
    driver = query.driver()

    def fail(*_: object) -> None:
        raise OutcomeUnknown("the marker cannot be read")

    monkeypatch.setattr(LocalParticipant, "marks", fail)
    driver.tidy()


def test_the_spooled_rows_of_a_recorded_epoch_stay_until_it_is_done(query: Query) -> None:
    query.prepare(query.driver(), 0, 1)
    kept = query.spool.attempts("query-1")
    assert len(kept) == 1
    later = query.driver()
    assert query.spool.attempts("query-1") == kept
    query.decide(0)
    assert later.commit_decided()
    assert query.spool.attempts("query-1") == []


def test_a_sweep_that_waits_for_a_replay_ends_nothing_if_its_record_may_be_written(
    query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replay is recorded, and only its reply is lost: a sweep with the ledger as it was before would end it."""
    driver = query.driver()
    epoch, (task, part) = query.attempt(driver, 0, 1)
    batch = pa.RecordBatch.from_pydict({"id": [1]})
    rows = query.spool.writer(Task(driver.identity("out"), epoch, 0, task), batch.schema)
    rows.write(batch)
    driver.record(epoch, {"out": [(task, part)]}, {"out": {task: rows.close()}}, {"out": RowCount(1, 0, 8)})
    query.decide(0)
    query.sink.abort_prepared()
    query.plan(1)
    create, alone, waits, raised = query.files.create, driver.queue.alone, threading.Event(), []

    def settle() -> None:
        with pytest.raises(OSError, match="the reply is lost") as failure:
            driver.settle(1)
        raised.append(failure.value)

    def noted() -> AbstractContextManager[None]:
        waits.set()
        return alone()

    def lose_reply(name: str, data: bytes) -> bool:
        next_epoch.start()
        assert waits.wait(SECONDS)
        create(name, data)
        raise OSError("the reply is lost")

    next_epoch = threading.Thread(target=settle, daemon=True)
    with monkeypatch.context() as patched:
        patched.setattr(driver.queue, "alone", noted)
        patched.setattr(query.files, "create", lose_reply)
        with pytest.raises(OSError, match="the reply is lost") as lost:
            driver.commit_decided()
        driver.fail(lost.value)
        next_epoch.join(SECONDS)
    assert query.sink.prepared() == [part["name"] for part in query.history().epochs[0].parts_of("out")]
    assert raised == [lost.value]
    query.driver()
    assert query.visible() == [1]


def test_a_superseded_driver_ends_nothing_of_its_successors(query: Query, tmp_path: Path) -> None:
    """In a target that does not know generations, too."""
    folder: Any = FolderSink(str(tmp_path / "folder"))
    older = query.driver(participant=FolderParticipant({"out": folder}))
    newer = query.driver(participant=FolderParticipant({"out": folder}))
    query.sink = folder
    query.prepare(newer, 0, 1)
    prepared, spooled = folder.prepared(), query.spool.attempts("query-1")
    assert (len(prepared), len(spooled)) == (1, 1)
    # first, while it knows nothing of the other's record
    with pytest.raises(Fenced):
        older._sweep.all()
    with pytest.raises(Fenced):
        older._sweep._end_in_spool()
    with pytest.raises(Fenced):
        older.tidy()
    assert (folder.prepared(), query.spool.attempts("query-1")) == (prepared, spooled)
