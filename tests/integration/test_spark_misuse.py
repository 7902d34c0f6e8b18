"""What user code in foreachBatch gets wrong: the query stops with the mistake's name, and no row is lost for it."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from folder_sink import FolderSink
from pyspark import inheritable_thread_target
from pyspark.errors import StreamingQueryException
from waiting import wait_until

from epochsink.errors import CheckFailed, ConfigurationError, RowsRejected, WentBack

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from streams import Stream

    from epochsink import ExactlyOnce


def twice(once: ExactlyOnce, frame: DataFrame, epoch: int) -> None:
    once(frame.where("id < 5"), epoch)
    once(frame.where("id >= 5"), epoch)


def twice_and_on(once: ExactlyOnce, frame: DataFrame, epoch: int) -> None:
    once(frame.where("id < 5"), epoch)
    with pytest.raises(ConfigurationError):
        once(frame.where("id >= 5"), epoch)


def in_two_threads(once: ExactlyOnce, frame: DataFrame, epoch: int) -> None:
    # threads that have the local properties of this one, by which Spark knows the query
    calls = [inheritable_thread_target(frame.sparkSession)(lambda: once(frame, epoch)) for _ in range(2)]
    with ThreadPoolExecutor() as threads:
        for called in [threads.submit(call) for call in calls]:
            called.result()


@pytest.mark.parametrize("mistake", [twice, twice_and_on, in_two_threads])
def test_two_calls_in_an_epoch_are_refused(stream: Stream, mistake: object) -> None:
    """The query ends, where it used to wait for ever; user code that goes on regardless is stopped next time."""
    for first in (0, 10):
        stream.put(range(first, first + 10))
    once = stream.exactly_once()
    query = stream.by_hand(lambda frame, epoch: mistake(once, frame, epoch))  # type: ignore[operator]
    with pytest.raises(StreamingQueryException, match="ExactlyOnce was called twice in epoch 0") as refused:
        query.awaitTermination(60)
    assert "where=" in str(refused.value)
    with pytest.raises(ConfigurationError, match="called twice"):
        once.await_committed()


def test_two_objects_in_one_query_are_refused(stream: Stream) -> None:
    """The second one would find the epoch recorded by the first, and write nothing."""
    stream.put(range(10))
    other = FolderSink(str(stream.folder / "other"))
    first, second = stream.exactly_once(), stream.exactly_once({"other": other})

    def batch(frame: DataFrame, epoch: int) -> None:
        first(frame, epoch)
        second(frame, epoch)

    with pytest.raises(StreamingQueryException, match="two ExactlyOnce objects are called for one query, in epoch 0"):
        stream.by_hand(batch).awaitTermination(60)
    assert other.calls("vote") == []


@pytest.mark.parametrize(
    ("objects", "number", "told"),
    [(1, 0, "next start runs epoch 0 again"), (2, 0, "next start runs epoch 0 again"), (1, 7, "number 7 in Spark's")],
)
def test_the_next_start_writes_the_epoch_of_a_mistake_whole(
    stream: Stream, objects: int, number: int, told: str
) -> None:
    """The record of the first call lacks the second one's rows: adopted, they would be in no sink."""
    stream.put(range(10))
    called = [stream.exactly_once(), stream.exactly_once()][-objects:]

    def batch(frame: DataFrame, epoch: int) -> None:
        called[0](frame.where("id < 5"), epoch)
        called[-1](frame.where("id >= 5"), epoch + number)

    with pytest.raises(StreamingQueryException, match=told):
        stream.by_hand(batch).awaitTermination(60)
    assert stream.sink.values() == []
    stream.put(range(10, 20))
    stream.run()
    assert stream.sink.values() == list(range(20))
    assert [entry["entry"] for entry in stream.ledger()].count("withdrawn") == 1


def test_after_a_mistake_that_the_function_caught_no_row_is_lost_or_comes_twice(stream: Stream) -> None:
    """Mostly Spark cannot decide the epoch, which is written whole then; if it could, what is decided stands."""
    for first in (0, 10):
        stream.put(range(first, first + 10))
    once = stream.exactly_once()
    with pytest.raises(StreamingQueryException, match="called twice"):
        stream.by_hand(lambda frame, epoch: twice_and_on(once, frame, epoch)).awaitTermination(60)
    whole = stream.committed() == []
    stream.run()
    assert stream.sink.values() == [*range(10 if whole else 5), *range(10, 20)]


@pytest.mark.parametrize("first", [True, False])
def test_a_number_that_is_not_that_of_sparks_batch_is_refused(stream: Stream, first: bool) -> None:  # noqa: FBT001
    """Under a number of the past an epoch counts as done, under one of the future it is adopted: its rows are lost."""
    for start in (0, 10):
        stream.put(range(start, start + 10))
    once = stream.exactly_once()

    def batch(frame: DataFrame, epoch: int) -> None:
        once(frame, 7 if epoch == (0 if first else 1) else epoch)

    with pytest.raises(StreamingQueryException, match=rf"number 7 in Spark's batch {0 if first else 1}"):
        stream.by_hand(batch).awaitTermination(60)
    assert stream.ledger() == [] if first else all(entry.get("epoch") != 7 for entry in stream.ledger())
    stream.run()
    assert stream.sink.values() == list(range(20))


@pytest.mark.parametrize("right", [0, 1])
def test_a_number_that_is_not_sparks_ends_a_query_whose_function_goes_on(stream: Stream, right: int) -> None:
    stream.put(range(10))
    once = stream.exactly_once()

    def batch(frame: DataFrame, epoch: int) -> None:
        with contextlib.suppress(ConfigurationError):
            once(frame, epoch if epoch < right else 7)

    query = stream.by_hand(batch, endless=True)
    wait_until(lambda: stream.committed()[:right] == list(range(right)), "the right numbers are decided")
    stream.put(range(10, 20))
    with pytest.raises(StreamingQueryException, match=f"number 7 in Spark's batch {right}"):
        query.awaitTermination(60)
    assert stream.sink.values() == list(range(10 * right))


def test_an_object_made_anew_in_each_epoch_is_refused(stream: Stream) -> None:
    for start in (0, 10):
        stream.put(range(start, start + 10))

    def batch(frame: DataFrame, epoch: int) -> None:
        stream.exactly_once()(frame, epoch)

    with pytest.raises(StreamingQueryException, match=r"two ExactlyOnce objects .* in epoch 1"):
        stream.by_hand(batch).awaitTermination(60)
    stream.run()
    assert stream.sink.values() == list(range(20))


@pytest.mark.parametrize("turn", range(3))
def test_an_error_that_every_call_swallows_ends_the_query_before_the_next_epoch(stream: Stream, turn: int) -> None:
    """The query ends inside the call that fails. Whether Spark then writes the commit, its own race decides."""
    stream.sink.faults.arm("write-rejects")
    for first in range(0, 40, 10):
        stream.put(range(first + turn * 100, first + turn * 100 + 10))
    once = stream.exactly_once()
    calls = []

    def batch(frame: DataFrame, epoch: int) -> None:
        calls.append(epoch)
        with contextlib.suppress(Exception):
            once(frame, epoch)
        with contextlib.suppress(Exception):
            once(frame, epoch)

    query = stream.by_hand(batch, endless=True)
    with pytest.raises(StreamingQueryException, match="RowsRejected: sink 'folder': "):
        query.awaitTermination(60)
    with pytest.raises((RowsRejected, WentBack), match="Type: epochsink status") as stopped:
        once.await_committed()
    assert calls == [0]
    # Spark's own race: mostly it cannot write the commit any more; if it has, that is said, with the command
    assert stream.committed() == ([] if stopped.type is RowsRejected else [0])
    assert stream.sink.values() == []


def test_a_start_that_fails_in_the_first_batch_ends_the_query_whatever_catches_its_error(stream: Stream) -> None:
    """No run was made, so there is no commit thread that would notice."""
    stream.sink = FolderSink(stream.sink.folder, findings=("the disk is read-only",))
    for first in (0, 10):
        stream.put(range(first, first + 10))
    once = stream.exactly_once()
    calls = []

    def batch(frame: DataFrame, epoch: int) -> None:
        calls.append(epoch)
        with contextlib.suppress(CheckFailed):
            once(frame, epoch)

    query = stream.by_hand(batch, endless=True)
    with pytest.raises(StreamingQueryException, match="the disk is read-only"):
        query.awaitTermination(60)
    with pytest.raises(CheckFailed, match="the disk is read-only"):
        once.await_committed()
    assert calls == [0]
