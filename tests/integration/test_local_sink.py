"""The in-memory sink in a pipeline on real Spark, as a user's own test would have it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from epochsink.testing import LocalSink

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame
    from streams import Stream


@pytest.fixture
def sink(tmp_path: Path) -> LocalSink:
    return LocalSink(tmp_path / "memory", select=("id", "upper(word) AS word"), where="id % 2 = 0")


def ids(sink: LocalSink) -> list[int]:
    return sorted(row["id"] for row in sink.rows())


def test_rows_cross_from_the_executors(stream: Stream, sink: LocalSink) -> None:
    stream.put(range(4))
    stream.put(range(4, 8))
    stream.run(stream.exactly_once({"out": sink}))
    assert ids(sink) == [0, 2, 4, 6]
    assert {row["word"] for row in sink.epochs()[1]} == {"WORD 4", "WORD 6"}
    assert sink.prepared() == []


def test_sparks_ui_says_which_epoch_a_job_writes_and_leaves_the_users_jobs_their_name(
    stream: Stream, sink: LocalSink
) -> None:
    stream.put(range(4))
    exactly_once = stream.exactly_once({"out": sink})

    def batch(frame: DataFrame, epoch: int) -> None:
        exactly_once(frame, epoch)
        frame.count()

    writer = stream.frame().writeStream.foreachBatch(batch).option("checkpointLocation", exactly_once.checkpoint)
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    found = stream.spark.sparkContext._jsc.sc().statusStore().jobsList(None)
    jobs = [found.apply(number) for number in range(found.size())]
    # the job group of a stream is its run; another test's job may have none
    ours = [job for job in jobs if job.jobGroup().isDefined() and job.jobGroup().get() == str(query.runId)]
    own = [job.description().get() for job in ours]
    assert "epochsink epoch 0: write to out" in own
    assert any(f"runId = {query.runId}" in description for description in own)


def test_a_passing_failure_does_not_end_the_run(stream: Stream, sink: LocalSink) -> None:
    stream.put(range(4))
    sink.fail_prepare()
    sink.fail_vote()
    stream.run(stream.exactly_once({"out": sink}))
    assert ids(sink) == [0, 2]
    assert sink.prepared() == []


@pytest.mark.parametrize("knob", ["reject", "lose_reply", "forget_outcome"])
def test_a_failed_run_is_made_good_by_the_next(stream: Stream, sink: LocalSink, knob: str) -> None:
    """Whatever failed, the run ends with an error, and after the next one each row is there once."""
    stream.put(range(4))
    if knob == "reject":
        sink.reject("id", 2)
    else:
        getattr(sink, knob)()
    with pytest.raises(Exception, match=r"LocalSink|unknown"):
        stream.run(stream.exactly_once({"out": sink}))
    sink.accept_all()
    stream.put(range(4, 8))
    stream.run(stream.exactly_once({"out": sink}))
    assert ids(sink) == [0, 2, 4, 6]
    assert sink.prepared() == []


def test_what_is_aborted_behind_the_back_is_prepared_again(stream: Stream, sink: LocalSink) -> None:
    """From the spool, after the decision: the query does not even fail."""
    stream.put(range(4))
    sink.forget_outcome()
    with pytest.raises(Exception, match="unknown"):
        stream.run(stream.exactly_once({"out": sink}))
    assert len(sink.abort_prepared()) == 1
    stream.run(stream.exactly_once({"out": sink}))
    assert ids(sink) == [0, 2]
