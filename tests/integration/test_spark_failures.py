"""A failing task, vote or commit: the query stops loudly with the sink's own error, and nothing is lost."""

from __future__ import annotations

import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from folder_sink import FolderSink
from pyspark.errors import StreamingQueryException

from epochsink.errors import CheckFailed, OutcomeUnknown, PrepareFailed, RowsRejected
from epochsink.protocol import failed_start
from epochsink.protocol.storage import LocalStorage
from epochsink.spark import epoch_attempts
from epochsink.spark.query_handle import ExactlyOnceQuery

if TYPE_CHECKING:
    from streams import Stream

pytestmark = pytest.mark.connect

TRIES = 9
"""More than a run and the recovery at its end take, which on Spark Connect is a try of its own."""


def test_a_task_brings_the_sinks_own_error_to_the_driver(stream: Stream) -> None:
    """Raised as it is, with the sink, the epoch, its source offsets and a command, and nothing of Spark's around it."""
    stream.sink.faults.arm("write-rejects")
    stream.put(range(10))
    with pytest.raises(RowsRejected) as failed:
        stream.run()
    assert str(failed.value).splitlines() == [
        "sink 'folder': value 7 of column id breaks the rule id < 7",
        "  Hint: filter it with where=",
        f"  Type: epochsink status {stream.checkpoint}",
        "  Epoch: 0; nothing of it is visible, and the next start writes it again",
        '  Source: the beginning to {"logOffset":0}',
    ]
    assert len(traceback.format_exception(failed.value)) < 15
    assert failed.value.__cause__ is failed.value.__context__ is None


def test_a_start_that_fails_before_it_takes_the_ledger_is_noted_until_one_succeeds(stream: Stream) -> None:
    """For who looks later: `epochsink status` reads it. The first start of all has nobody but its own user."""
    files = LocalStorage(stream.checkpoint)
    unfit = FolderSink(stream.sink.folder, findings=["the disk is full"])
    stream.put(range(3))
    with pytest.raises(CheckFailed):
        stream.run(stream.exactly_once({"folder": unfit}))
    assert not stream.checkpoint.exists()
    stream.run()
    takes = len(stream.ledger())
    with pytest.raises(CheckFailed):
        stream.run(stream.exactly_once({"folder": unfit}))
    noted = failed_start.newest(files)
    assert noted is not None
    assert noted.failure.startswith("CheckFailed: 1 check(s) failed before any row moved:")
    assert "sink 'folder': the disk is full" in noted.failure
    assert len(stream.ledger()) == takes
    stream.put(range(3, 6))
    stream.run()
    assert failed_start.newest(files) is None
    assert stream.sink.values() == list(range(6))
    # what the ledger has is not noted beside it
    stream.sink.faults.arm("unreachable", TRIES)
    with pytest.raises(OutcomeUnknown):
        stream.run()
    stream.sink.faults.disarm("unreachable")
    assert stream.ledger()[-1]["entry"] == "stopped"
    assert failed_start.newest(files) is None


@pytest.mark.classic("of what a first batch by hand finds")
def test_a_start_by_hand_that_fails_before_it_takes_the_ledger_is_noted_too(stream: Stream) -> None:
    stream.put(range(3))
    stream.run()
    stream.put(range(3, 6))
    once = stream.exactly_once({"folder": FolderSink(stream.sink.folder, findings=["the disk is full"])})
    with pytest.raises(StreamingQueryException, match="the disk is full"):
        stream.by_hand(once).awaitTermination()
    noted = failed_start.newest(LocalStorage(stream.checkpoint))
    assert noted is not None
    assert noted.kind == "CheckFailed"


@pytest.mark.classic("looks at the object, of which the server has a copy")
def test_the_error_of_an_earlier_query_is_not_that_of_the_next_one(stream: Stream) -> None:
    """An object may be started again; without a batch, nothing of the new query has failed."""
    stream.sink.faults.arm("write-rejects")
    stream.put(range(10))
    once = stream.exactly_once()
    with pytest.raises(RowsRejected):
        once.start(stream.frame().writeStream.trigger(availableNow=True)).awaitTermination(60)
    once.recover(stream.spark)
    once.await_commits()
    assert once._failed.failure is None


@pytest.mark.classic("reads the log of the process of the run")
def test_an_error_that_no_sink_names_is_told_in_one_line(stream: Stream, caplog: pytest.LogCaptureFixture) -> None:
    """The whole trace, of the executor too, is logged where people see it."""
    stream.sink.faults.arm("write-breaks")
    stream.put(range(10))
    with pytest.raises(PrepareFailed) as failed:
        stream.run()
    assert "epoch 0 could not be prepared: RuntimeError: the disk is on fire" in str(failed.value)
    [logged] = [record for record in caplog.records if record.message.startswith("epoch 0 failed")]
    assert (logged.name, logged.levelname) == ("epochsink", "ERROR")
    assert logged.exc_info is not None
    assert "in write_partition" in str(logged.exc_info[1])
    stream.run()
    assert stream.sink.values() == list(range(10))


def test_an_error_in_the_streams_own_plan_is_told_in_one_line(stream: Stream) -> None:
    stream.put(range(10))
    with pytest.raises(PrepareFailed) as failed:
        stream.run(frame=stream.frame().selectExpr("id", "raise_error('row ' || id) AS broken"))
    assert "epoch 0 could not be prepared" in str(failed.value)
    assert "row 0" in str(failed.value)


@pytest.fixture
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let attempts follow one another at once."""
    monkeypatch.setattr(epoch_attempts, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(epoch_attempts, "LONGEST_PAUSE_SECONDS", 0.01)


@pytest.mark.classic("waits out the pauses between attempts, which are in the process of the run")
@pytest.mark.usefixtures("without_pauses")
@pytest.mark.parametrize("fault", ["prepare-breaks", "vote-breaks"])
def test_a_failure_that_passes_does_not_end_the_query(stream: Stream, fault: str) -> None:
    """A fresh attempt in the same batch; the failed one's leftovers are ended, and its rows come once."""
    stream.sink.faults.arm(fault, epoch_attempts.ATTEMPTS - 1)
    stream.put(range(10))
    stream.run()
    assert stream.sink.values() == list(range(10))
    assert stream.sink.prepared() == []
    assert [entry["entry"] for entry in stream.ledger()] == ["take", "prepared", "done"]


@pytest.mark.classic("waits out the pauses between attempts, which are in the process of the run")
@pytest.mark.usefixtures("without_pauses")
@pytest.mark.parametrize(
    ("fault", "message"),
    [("prepare-breaks", "the task failed after it had prepared"), ("vote-breaks", "the sink votes no")],
)
def test_a_failure_that_stays_ends_the_query_and_leaves_nothing(stream: Stream, fault: str, message: str) -> None:
    stream.sink.faults.arm(fault, epoch_attempts.ATTEMPTS)
    stream.put(range(10))
    with pytest.raises(PrepareFailed, match=message):
        stream.run()
    assert stream.sink.prepared() == []
    assert stream.committed() == []
    stream.run()
    assert stream.sink.values() == list(range(10))


def test_rows_that_are_refused_are_not_tried_again(stream: Stream) -> None:
    stream.sink.faults.arm("write-rejects", 2)
    stream.put(range(10))
    with pytest.raises(RowsRejected):
        stream.run()
    assert stream.sink.faults.strike("write-rejects")


@pytest.mark.classic("makes reads fail in the process of the run")
def test_a_store_that_does_not_answer_for_a_moment_ends_no_query(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decision is asked for again: a failed look at commits/N says nothing about it."""
    answer = LocalStorage.read
    failures = iter(range(3))

    def read(files: LocalStorage, name: str) -> bytes | None:
        if name.startswith("commits/") and next(failures, None) is not None:
            raise OSError("503 Slow Down")
        return answer(files, name)

    monkeypatch.setattr(LocalStorage, "read", read)
    stream.put(range(10))
    stream.run()
    assert next(failures, None) is None
    assert stream.sink.values() == list(range(10))


def test_a_lost_reply_stops_the_query_and_nothing_comes_twice(stream: Stream) -> None:
    """The target has committed, and nobody knows: the next start finds out."""
    stream.sink.faults.arm("commit-reply-lost", TRIES)
    stream.put(range(10))
    with pytest.raises(
        OutcomeUnknown, match=r"epoch 0 is decided, .* the connection broke after the request"
    ) as stopped:
        stream.run()
    assert "the next start asks again" in stopped.value.hint
    assert stream.done() == []
    stream.sink.faults.disarm("commit-reply-lost")
    stream.run()
    assert stream.sink.values() == list(range(10))
    assert stream.done() == [0]


def test_an_unknown_outcome_stops_a_busy_query(stream: Stream) -> None:
    """The next epochs are not recorded: at most one is pending."""
    stream.sink.faults.arm("commit-unknown", TRIES)
    for first in range(0, 50, 10):
        stream.put(range(first, first + 10))
    query = stream.start_endless(stream.exactly_once())
    with pytest.raises(OutcomeUnknown):
        query.awaitTermination()
    assert isinstance(query.exception(), StreamingQueryException)
    assert "OutcomeUnknown" in str(query.exception())
    assert [entry["epoch"] for entry in stream.ledger() if entry["entry"] == "prepared"] == [0]
    stream.sink.faults.disarm("commit-unknown")
    stream.run()
    assert stream.sink.values() == list(range(50))


@pytest.mark.classic("on Spark Connect such a query is stopped, not failed: test_connect_queries.py")
def test_an_unknown_outcome_stops_an_idle_query(stream: Stream) -> None:
    """No batch comes that could raise the error: the query is made to fail, and whoever waits for it is told why."""
    stream.spark.streams.resetTerminated()
    stream.sink.faults.arm("commit-unknown")
    stream.put(range(10))
    once = stream.exactly_once()
    # its next batch is an hour away
    writer = stream.frame().writeStream.trigger(processingTime="1 hour")
    query = once.start(writer)
    with ThreadPoolExecutor() as others:
        waiting = others.submit(stream.spark.streams.awaitAnyTermination)
        with pytest.raises(OutcomeUnknown):
            query.awaitTermination()
        with pytest.raises(StreamingQueryException, match="OutcomeUnknown: epoch 0 is decided, and whether"):
            waiting.result()
    assert not query.isActive
    assert "OutcomeUnknown: epoch 0 is decided" in str(query.exception())
    with pytest.raises(StreamingQueryException, match="OutcomeUnknown: epoch 0 is decided, and whether"):
        super(ExactlyOnceQuery, query).awaitTermination()
    with pytest.raises(StreamingQueryException, match="OutcomeUnknown: epoch 0 is decided, and whether"):
        stream.spark.streams.awaitAnyTermination()
    stream.spark.streams.resetTerminated()


@pytest.mark.classic("on Spark Connect a query by hand is stopped, and recover() tells why")
@pytest.mark.parametrize("files", [1, 5], ids=["idle", "busy"])
def test_a_query_by_hand_fails_too(stream: Stream, files: int) -> None:
    """Its own awaitTermination must not return as if all were well; await_committed names the reason."""
    stream.sink.faults.arm("commit-unknown")
    for first in range(files):
        stream.put(range(first * 10, first * 10 + 10))
    once = stream.exactly_once()
    query = stream.by_hand(once, endless=True)
    with pytest.raises(StreamingQueryException, match="OutcomeUnknown: epoch 0 is decided"):
        query.awaitTermination()
    with pytest.raises(OutcomeUnknown):
        once.await_committed()
    once.recover(stream.spark)
    stream.by_hand(once).awaitTermination()
    once.await_committed()
    assert stream.sink.values() == list(range(files * 10))


def test_process_all_available_raises_what_made_a_commit_fail(stream: Stream) -> None:
    query = stream.start_endless(stream.exactly_once())
    stream.sink.faults.arm("commit-unknown", TRIES)
    stream.put(range(10))
    with pytest.raises((OutcomeUnknown, StreamingQueryException), match="epoch 0 is decided, and whether"):
        query.processAllAvailable()
    with pytest.raises(OutcomeUnknown):
        query.awaitTermination()


def test_stop_raises_what_made_the_last_commit_fail(stream: Stream) -> None:
    stream.sink.faults.arm("commit")
    stream.sink.faults.arm("commit-unknown", TRIES)
    stream.put(range(10))
    query = stream.start_endless(stream.exactly_once())
    while not stream.sink.faults.reached("commit"):
        assert not query.awaitTermination(1)
    stream.sink.faults.disarm("commit")
    with pytest.raises(OutcomeUnknown):
        query.stop()


@pytest.mark.classic("on Spark Connect the process of a run may be killed before it closes anything")
def test_committers_are_closed_after_a_failure_too(stream: Stream) -> None:
    stream.sink.faults.arm("commit-unknown")
    stream.put(range(10))
    with pytest.raises(OutcomeUnknown):
        stream.run()
    # one for the check, one for the run
    assert len(stream.sink.calls("close")) == 2
