"""What tasks of all epochs share."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from pyspark import TaskContext

from epochsink.protocol.spool import NoSpool
from epochsink.sink import Epoch
from epochsink.spark.write_task import EPOCH, WriteJob, WriteJobs, told

if TYPE_CHECKING:
    import pyarrow as pa

COLLECTED = """
import gc
from epochsink.spark.write_task import spare_collector

before = len(gc.get_objects())
spare_collector()
frozen = gc.get_freeze_count()
spare_collector()
assert gc.get_freeze_count() == frozen > before / 2
import wave  # another module
spare_collector()
assert gc.get_freeze_count() > frozen
"""


def test_the_collector_passes_over_what_a_worker_has_loaded() -> None:
    """In a process of its own: this one's garbage is to be collected."""
    subprocess.run([sys.executable, "-c", COLLECTED], check=True, timeout=60)


def test_a_task_that_is_not_told_its_epoch_writes_nothing() -> None:
    jobs = WriteJobs({}, {}, NoSpool())
    with pytest.raises(RuntimeError, match=r"no local property 'epochsink\.epoch'"):
        list(jobs.write_partition([]))


def test_a_task_is_told_its_epoch_and_which_targets_keep_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[WriteJob] = []

    def note(job: WriteJob, batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
        seen.append(job)
        return batches

    context, epoch = TaskContext(), Epoch(7, "a" * 32)
    context._localProperties = {EPOCH: told(epoch, {"topic"}, 99, ["table"])}
    monkeypatch.setattr(TaskContext, "get", lambda: context)
    monkeypatch.setattr(WriteJob, "write_partition", note)
    monkeypatch.setattr("epochsink.spark.write_task.spare_collector", lambda: None)
    assert list(WriteJobs({}, {}, NoSpool()).write_partition([])) == []
    assert seen == [WriteJob(epoch, {}, {}, NoSpool(), frozenset({"topic"}), 99, frozenset({"table"}))]
