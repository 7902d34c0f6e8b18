"""What a running query shows: when rows become visible, and what stop, drain and restart leave."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from folder_sink import FolderSink
from waiting import wait_until

from epochsink.errors import ConfigurationError
from epochsink.spark.classic.engine import ClassicEngine
from epochsink.spark.classic.hadoop_storage import open_checkpoint

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from streams import Stream

    from epochsink.protocol.progress import EpochProgress
    from epochsink.spark.query_handle import ExactlyOnceQuery

pytestmark = pytest.mark.connect


def test_all_rows_are_visible_when_await_termination_returns(stream: Stream) -> None:
    """availableNow: the last epoch too, whose commits/N Spark writes just before the query ends."""
    for first in (0, 10, 20):
        stream.put(range(first, first + 10))
    stream.run()
    assert stream.sink.values() == list(range(30))
    assert stream.committed() == stream.done() == [0, 1, 2]
    assert stream.sink.prepared() == []
    assert list((stream.checkpoint / "epochsink" / "spool").glob("*/*")) == []


def test_nothing_is_visible_before_the_checkpoint_has_decided(stream: Stream) -> None:
    """Every commit call of an epoch comes after the file commits/N."""
    for first in (0, 10):
        stream.put(range(first, first + 10))
    stream.run()
    for call in stream.sink.calls("commit"):
        epoch, _, at = call.split()
        assert (stream.checkpoint / "commits" / epoch).stat().st_mtime_ns <= int(at)


def test_process_all_available_waits_until_the_rows_are_visible(stream: Stream) -> None:
    once = stream.exactly_once()
    query = stream.start_endless(once)
    for first in (0, 10):
        stream.put(range(first, first + 10))
        query.processAllAvailable()
        assert stream.sink.values() == list(range(first + 10))
    query.stop()


def test_stop_waits_for_a_decided_epoch_whose_commit_is_slow(stream: Stream) -> None:
    """The stream thread has ended long before: stop() returns when the rows are there."""
    stream.sink.faults.arm("commit-waits")
    stream.put(range(10))
    query = stream.start_endless(stream.exactly_once())
    wait_until(stream.committed, "commits/0")
    query.stop()
    assert stream.sink.values() == list(range(10))


@pytest.mark.classic("the handle of a query is not in the process that calls on_progress=")
def test_a_query_that_its_progress_stops_ends_with_every_decided_epoch_visible(stream: Stream) -> None:
    """Also if the next epoch is decided by then, and the one after it waits for this thread to commit that."""
    for first in (0, 10, 20, 30):
        stream.put(range(first, first + 10))
    queries: list[ExactlyOnceQuery] = []
    called: list[int] = []

    def stop(epoch: EpochProgress) -> None:
        called.append(epoch.epoch)
        if epoch.epoch == 0:
            wait_until(lambda: 1 in stream.committed() and (stream.checkpoint / "offsets" / "2").exists(), "epoch 2")
            queries[0].stop()

    once = stream.exactly_once(on_progress=stop)
    queries.append(stream.start_endless(once))
    queries[0].awaitTermination()
    assert called == stream.done() == stream.committed()
    assert stream.sink.values() == list(range(10 * len(called)))


def test_stop_in_the_middle_of_a_batch_leaves_nothing_of_it(stream: Stream) -> None:
    """The query ends without an error, the epoch's rows come once, at the next start."""
    once = stream.exactly_once()
    stream.put(range(10))
    stream.run(once)
    stream.sink.faults.arm("write")
    stream.put(range(10, 20))
    query = stream.start_endless(once)
    wait_until(lambda: stream.sink.faults.reached("write"), "a task writes")
    query.stop()
    assert query.exception() is None
    assert stream.sink.values() == list(range(10))
    stream.sink.faults.disarm("write")
    stream.run(once)
    assert stream.sink.values() == list(range(20))
    assert stream.sink.prepared() == []


def test_one_object_serves_one_query_after_another(stream: Stream) -> None:
    """In one process, with a generation of its own for each run."""
    once = stream.exactly_once()
    for run in range(3):
        stream.put(range(run * 10, run * 10 + 10))
        stream.run(once)
    assert stream.sink.values() == list(range(30))
    takes = [entry["generation"] for entry in stream.ledger() if entry["entry"] == "take"]
    assert takes == sorted(set(takes))
    assert stream.committed() == stream.done() == [0, 1, 2]


def test_one_object_refuses_a_second_query_while_the_first_runs(stream: Stream) -> None:
    once = stream.exactly_once()
    query = stream.start_endless(once)
    with pytest.raises(ConfigurationError, match="already serves a running query"):
        stream.start(once)
    with pytest.raises(ConfigurationError, match="already serves a running query"):
        once.recover(stream.spark)
    stream.put(range(5))
    query.processAllAvailable()
    query.stop()
    assert stream.sink.values() == list(range(5))


def test_a_foreach_batch_made_by_hand_is_the_same(stream: Stream) -> None:
    """Started twice in a row: the second start waits for the first one's last commits."""
    once = stream.exactly_once()
    for run in range(3):
        stream.put(range(run * 10, run * 10 + 10))
        stream.by_hand(once).awaitTermination()
    stream.settle(once)
    assert stream.sink.values() == list(range(30))
    assert stream.committed() == stream.done() == [0, 1, 2]


@pytest.mark.classic("counts calls in the process of the run")
@pytest.mark.parametrize("by_hand", [False, True])
def test_a_start_opens_the_checkpoint_once(stream: Stream, monkeypatch: pytest.MonkeyPatch, by_hand: bool) -> None:  # noqa: FBT001
    """To open one in a store takes requests, and settings that are read twice may differ."""
    opened: list[str] = []

    def count(session: SparkSession, checkpoint: str, *options: Any) -> Any:
        opened.append(checkpoint)
        return open_checkpoint(session, checkpoint, *options)

    monkeypatch.setattr(ClassicEngine, "open_checkpoint", staticmethod(count))
    once = stream.exactly_once()
    for run in range(2):
        stream.put(range(run * 10, run * 10 + 10))
        if by_hand:
            stream.by_hand(once).awaitTermination()
            stream.settle(once)
        else:
            stream.run(once)
    assert opened == [stream.url] * 2
    assert stream.sink.values() == list(range(20))


@pytest.mark.classic("on Spark Connect each run has a process and an object of its own")
def test_a_query_by_hand_waits_for_the_last_commits_of_the_one_before(stream: Stream) -> None:
    """Else its take of the ledger would fence a run of the same object, in the middle of a commit."""
    once = stream.exactly_once()
    stream.sink.faults.arm("commit")
    stream.put(range(10))
    stream.by_hand(once).awaitTermination()
    stream.put(range(10, 20))
    query = stream.by_hand(once)
    assert not query.awaitTermination(3)
    assert [entry["entry"] for entry in stream.ledger()].count("take") == 1
    stream.sink.faults.disarm("commit")
    query.awaitTermination()
    stream.settle(once)
    assert stream.sink.values() == list(range(20))


def test_an_endless_query_by_hand_is_committed_after_its_stop(stream: Stream) -> None:
    once = stream.exactly_once()
    stream.put(range(10))
    query = stream.by_hand(once, endless=True)
    wait_until(stream.committed, "commits/0")
    query.stop()
    stream.settle(once)
    assert stream.sink.values() == list(range(10))


def test_each_sink_gets_its_own_rows_and_columns_in_one_pass(stream: Stream) -> None:
    """Rows that nobody wants go nowhere; comments in SQL end where they end."""
    low = FolderSink(str(stream.folder / "low"), select=["id", "id * 2 AS twice -- doubled"], where="id < 5 -- small")
    high = FolderSink(str(stream.folder / "high"), select=["*"], where="id >= 8", delete_when="id % 2 = 0")
    stream.put(range(12))
    stream.run(stream.exactly_once({"low": low, "high": high}))
    assert [(row["id"], row["twice"]) for row in low.rows()] == [(i, 2 * i) for i in range(5)]
    assert sorted((row["id"], row["word"], row["deleted"]) for row in high.rows()) == [
        (i, f"word {i}", i % 2 == 0) for i in range(8, 12)
    ]


def test_an_epoch_without_rows_is_recorded_and_nothing_is_written(stream: Stream) -> None:
    """For one sink or for all: else the commit log would run ahead of the ledger."""
    some = FolderSink(str(stream.folder / "some"), where="id < 5")
    none = FolderSink(str(stream.folder / "none"), where="id < 0")
    stream.put(range(10))
    stream.put(range(10, 20))
    stream.run(stream.exactly_once({"some": some, "none": none}))
    assert some.values() == list(range(5))
    assert none.rows() == []
    assert stream.committed() == stream.done() == [0, 1]
    assert len(some.calls("vote")) == 1
    assert none.calls("vote") == []


def test_rows_of_one_key_meet_in_one_task_where_a_sink_asks_for_it(stream: Stream) -> None:
    sink = replace(stream.sink, distribute_by=("id % 3",))
    for first in (0, 30):
        stream.put(range(first, first + 30))
    frame = stream.frame().repartition(4)
    stream.run(stream.exactly_once({"folder": sink}), frame)
    assert sink.values() == list(range(60))
    seen: dict[tuple[str, int], set[str]] = {}
    for path in Path(sink.folder).glob("visible/*/*.arrow"):
        with pa.OSFile(str(path), "rb") as source, pa.ipc.open_stream(source) as rows:
            for row in rows.read_all().to_pylist():
                seen.setdefault((path.name.partition("-")[0], row["id"] % 3), set()).add(path.name)
    assert len(seen) == 6
    assert all(len(files) == 1 for files in seen.values())


def test_a_sink_without_spool_leaves_no_copy(stream: Stream) -> None:
    sink = replace(stream.sink, spool=False)
    sink.faults.arm("commit")
    stream.put(range(10))
    query = stream.start_endless(stream.exactly_once({"folder": sink}))
    wait_until(lambda: sink.faults.reached("commit"), "the commit begins")
    assert list((stream.checkpoint / "epochsink" / "spool").rglob("*.arrow")) == []
    sink.faults.disarm("commit")
    query.processAllAvailable()
    query.stop()
    assert sink.values() == list(range(10))
