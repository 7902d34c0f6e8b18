"""Stateful queries: state and rows stay right when an epoch is adopted, restored or retried."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pandas as pd  # type: ignore[import-untyped]
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from streams import raising_after

from epochsink.errors import PrepareFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.state import GroupState
    from streams import Stream

pytestmark = pytest.mark.connect

STATE = "org.apache.spark.sql.execution.streaming.state"
PROVIDERS = {"hdfs": f"{STATE}.HDFSBackedStateStoreProvider", "rocksdb": f"{STATE}.RocksDBStateStoreProvider"}


# on Spark Connect one of the two is enough: the state is the same engine's
@pytest.fixture(params=[pytest.param("hdfs", marks=pytest.mark.classic("one state store is enough")), "rocksdb"])
def state_store(request: pytest.FixtureRequest, spark: SparkSession) -> Iterator[None]:
    """Run the test's queries on each of Spark's state stores."""
    spark.conf.set("spark.sql.streaming.stateStore.providerClass", PROVIDERS[request.param])
    yield
    spark.conf.unset("spark.sql.streaming.stateStore.providerClass")


def interrupted_after(stream: Stream, epoch: int, make: Callable[[], DataFrame]) -> None:
    """Run until an epoch is recorded; let Spark never decide it, and lose the state that the attempt wrote."""
    once = stream.exactly_once()
    writer = make().writeStream.foreachBatch(raising_after(once, epoch)).trigger(availableNow=True)
    with pytest.raises(StreamingQueryException, match="Boom"):
        writer.option("checkpointLocation", str(stream.checkpoint)).start().awaitTermination()
    stream.settle(once)
    stream.forget_state(epoch)


def put_four(stream: Stream) -> None:
    # windows of 10 s: each file closes those before its last row
    for first in (0, 15, 30, 45):
        stream.put(range(first, first + 15))


def windows(stream: Stream) -> DataFrame:
    counted = stream.frame().withWatermark("at", "0 seconds").groupBy(F.window("at", "10 seconds")).count()
    return counted.selectExpr("unix_timestamp(window.start) AS id", "count AS rows")


@pytest.mark.usefixtures("state_store")
def test_windows_are_right_when_an_epoch_with_state_is_adopted(stream: Stream) -> None:
    """The adopted epoch's plan runs for its state: without that, later windows would miss its rows."""
    put_four(stream)
    interrupted_after(stream, 2, lambda: windows(stream))
    stream.put(range(60, 75))
    stream.run(frame=windows(stream))
    assert [(row["id"], row["rows"]) for row in sorted(stream.sink.rows(), key=lambda row: row["id"])] == [
        (start, 10) for start in range(0, 70, 10)
    ]
    assert stream.committed() == stream.done()


@pytest.mark.usefixtures("state_store")
def test_duplicates_stay_dropped_when_a_checkpoint_is_restored(stream: Stream) -> None:
    """commits/2 is gone and epoch 2 done: it runs for its state, and its rows are known to later epochs."""
    for first in (0, 5, 10):
        stream.put(range(first, first + 10))
    stream.run(frame=stream.frame().dropDuplicates(["id"]))
    stream.forget_commit(2)
    stream.forget_state(2)
    stream.put(range(15, 25))
    stream.run(frame=stream.frame().dropDuplicates(["id"]))
    assert stream.sink.values() == list(range(25))


def joined(stream: Stream) -> DataFrame:
    left = stream.frame().withWatermark("at", "30 seconds")
    right = stream.frame().withWatermark("at", "30 seconds").selectExpr("id + 15 AS id", "at AS seen", "id AS other")
    return left.join(right, "id").select("id", "other")


def test_a_join_of_two_streams_is_right_when_an_epoch_is_adopted(stream: Stream) -> None:
    """Each row meets one of the file before, kept in state."""
    put_four(stream)
    interrupted_after(stream, 1, lambda: joined(stream))
    stream.run(frame=joined(stream))
    assert [(row["id"], row["other"]) for row in sorted(stream.sink.rows(), key=lambda row: row["id"])] == [
        (number, number - 15) for number in range(15, 60)
    ]


def test_updated_counts_are_right_after_a_failed_write(stream: Stream) -> None:
    """Output mode update: an epoch whose task failed runs again from the state before it."""
    put_four(stream)
    stream.sink.faults.arm("write-breaks")
    frame = stream.frame().groupBy(F.expr("id % 2 AS id")).count()
    with pytest.raises(PrepareFailed, match="the disk is on fire"):
        stream.run(frame=frame, mode="update")
    stream.run(frame=stream.frame().groupBy(F.expr("id % 2 AS id")).count(), mode="update")
    newest = {row["id"]: row["count"] for row in stream.sink.rows() if row["epoch"] == 3}
    assert newest == {0: 30, 1: 30}
    assert len(stream.sink.rows()) == 8


@pytest.mark.usefixtures("state_store")
def test_windows_are_right_when_an_epoch_is_attempted_again_in_its_batch(stream: Stream) -> None:
    """The plan runs twice in one batch, from the same state."""
    put_four(stream)
    stream.sink.faults.arm("vote-breaks")
    stream.put(range(60, 75))
    stream.run(frame=windows(stream))
    assert [(row["id"], row["rows"]) for row in sorted(stream.sink.rows(), key=lambda row: row["id"])] == [
        (start, 10) for start in range(0, 70, 10)
    ]
    assert stream.committed() == stream.done()


@pytest.fixture
def second_format(spark: SparkSession) -> Iterator[None]:
    """Run the test's queries with a state store in which each run of a plan leaves a state of its own."""
    settings = {"providerClass": PROVIDERS["rocksdb"], "checkpointFormatVersion": "2"}
    for name, value in settings.items():
        spark.conf.set(f"spark.sql.streaming.stateStore.{name}", value)
    yield
    for name in settings:
        spark.conf.unset(f"spark.sql.streaming.stateStore.{name}")


def first_seen(stream: Stream) -> DataFrame:
    """Return the moment at which each key was first seen, which state keeps for all later epochs."""

    def seen(key: tuple[int], _rows: object, state: GroupState) -> Iterator[Any]:
        if not state.exists:
            state.update((time.time_ns(),))
        yield pd.DataFrame({"id": [key[0]], "word": [state.get[0]]})

    keyed = stream.frame().groupBy("id")
    return keyed.applyInPandasWithState(seen, "id long, word long", "seen long", "update", "NoTimeout")


def moments(stream: Stream) -> dict[int, set[int]]:
    """Return the moments that the sink has by key; one each, where rows and state agree."""
    found: dict[int, set[int]] = {}
    for row in stream.sink.rows():
        found.setdefault(row["id"], set()).add(row["word"])
    return found


@pytest.mark.usefixtures("second_format")
def test_rows_and_state_agree_where_spark_keeps_the_state_of_the_first_attempt(stream: Stream) -> None:
    """An attempt in the same batch would record its own rows beside the state of the first; so the query ends."""
    for _ in range(3):
        stream.put(range(5))
    stream.sink.faults.arm("vote-breaks")
    with pytest.raises(PrepareFailed, match="the sink votes no"):
        stream.run(frame=first_seen(stream), mode="update")
    assert stream.ledger()[-1]["entry"] != "prepared"
    stream.run(frame=first_seen(stream), mode="update")
    assert [row["epoch"] for row in stream.sink.rows()] == [0] * 5 + [1] * 5 + [2] * 5
    assert {key: len(seen) for key, seen in moments(stream).items()} == dict.fromkeys(range(5), 1)


@pytest.mark.usefixtures("second_format")
def test_a_function_that_calls_again_where_spark_keeps_the_first_state_records_nothing(stream: Stream) -> None:
    for _ in range(2):
        stream.put(range(5))
    stream.sink.faults.arm("vote-breaks")
    once = stream.exactly_once()

    def batch(frame: DataFrame, epoch: int) -> None:
        try:
            once(frame, epoch)
        except PrepareFailed:
            once(frame, epoch)

    writer = first_seen(stream).writeStream.foreachBatch(batch).outputMode("update").trigger(availableNow=True)
    with pytest.raises(StreamingQueryException, match="the sink votes no"):
        writer.option("checkpointLocation", stream.url).start().awaitTermination()
    stream.run(frame=first_seen(stream), mode="update")
    assert {key: len(seen) for key, seen in moments(stream).items()} == dict.fromkeys(range(5), 1)


@pytest.mark.classic("on Spark Connect whether a plan has state is not known: one attempt")
@pytest.mark.usefixtures("second_format")
def test_a_query_without_state_is_attempted_again_in_any_format(stream: Stream) -> None:
    stream.put(range(10))
    stream.sink.faults.arm("vote-breaks")
    stream.run()
    assert stream.sink.values() == list(range(10))


@pytest.mark.classic("on Spark Connect the warning is not given")
def test_state_that_does_not_repeat_is_named_at_the_start(stream: Stream, caplog: pytest.LogCaptureFixture) -> None:
    stream.put(range(5))
    stream.run(frame=windows(stream))
    stream.checkpoint = stream.folder / "another"
    stream.run(frame=windows(stream).selectExpr("id", "rand() AS word"))
    assert "another result" not in caplog.text
    stream.checkpoint = stream.folder / "a third"
    stream.run(frame=stream.frame().selectExpr("CAST(rand() * 5 AS INT) AS id").dropDuplicates(["id"]))
    assert "may give another result when an epoch runs again: rand()" in caplog.text
