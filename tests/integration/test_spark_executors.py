"""Spark's executors, lent to a commit: in a job group and a pool of their own, and given up where they do not come."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark import TaskContext
from streams import wait_until

from epochsink.sink import NotCarriedOut
from epochsink.spark.classic import executors
from epochsink.spark.classic.executors import SparkExecutors

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_each_part_is_done_by_a_process_of_an_executor_and_answered_in_order(spark: SparkSession) -> None:
    answers = SparkExecutors(spark.sparkContext).map(lambda part: (part, os.getpid()), list(range(20)), 60.0)
    assert [part for part, _ in answers] == list(range(20))
    assert os.getpid() not in {pid for _, pid in answers}


def test_a_job_has_a_group_and_a_pool_of_its_own_and_leaves_the_callers_alone(spark: SparkSession) -> None:
    """The caller may be a stream's thread, whose group is how the run that it serves is found."""
    context = spark.sparkContext

    def told(name: str) -> str | None:
        task = TaskContext.get()
        return task.getLocalProperty(name) if task is not None else None

    names = ["spark.scheduler.pool", "spark.jobGroup.id"]
    context.setJobGroup("the caller's", "a stream")
    try:
        pool, group = SparkExecutors(context).map(told, names, 60.0)
        assert pool == executors.POOL
        assert group is not None
        assert group.startswith("epochsink-")
        assert [context.getLocalProperty(name) for name in names] == [None, "the caller's"]
    finally:
        for name in ("spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel"):
            context.setLocalProperty(name, None)  # type: ignore[arg-type]


def test_a_job_that_fails_is_not_carried_out(spark: SparkSession) -> None:
    def fail(part: int) -> int:
        raise ValueError(f"part {part} is on fire")

    with pytest.raises(NotCarriedOut, match="is on fire"):
        SparkExecutors(spark.sparkContext).map(fail, [1], 60.0)


def test_a_job_for_which_no_executor_is_free_is_given_up(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executors, "LOOK_SECONDS", 0.1)
    context = spark.sparkContext
    released, begun = tmp_path / "released", tmp_path / "begun"
    begun.mkdir()

    def occupy(core: int) -> None:
        (Path(begun) / str(core)).touch()
        deadline = time.monotonic() + 60
        while not released.exists() and time.monotonic() < deadline:
            time.sleep(0.02)

    thread = threading.Thread(target=lambda: context.parallelize([0, 1], 2).foreach(occupy))
    thread.start()
    try:
        wait_until(lambda: len(list(begun.iterdir())) == 2, "both cores are taken")
        with pytest.raises(NotCarriedOut):
            SparkExecutors(context).map(str, [1], 0.5)
    finally:
        released.touch()
        thread.join()
