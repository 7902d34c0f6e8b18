"""What tasks of all epochs share."""

from __future__ import annotations

import threading
import traceback
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pytest
from pyspark import TaskContext

from epochsink.errors import EpochsinkError, RowsRejected
from epochsink.protocol.spool import NO_SPOOL
from epochsink.sink import Epoch, Identity, Keeping, SpoolFile, WriterContext
from epochsink.spark.write_task import ORDER, Answer, TaskFailed, WriteJob, WriteOrder

if TYPE_CHECKING:
    from collections.abc import Callable


def test_a_task_that_is_not_told_its_epoch_writes_nothing() -> None:
    jobs = WriteJob({}, {}, NO_SPOOL)
    with pytest.raises(RuntimeError, match=r"no local property 'epochsink\.order'"):
        list(jobs.write_partition([]))


def test_rows_outside_a_task_of_spark_are_of_no_partition() -> None:
    with pytest.raises(RuntimeError, match="which partition its rows are"):
        list(WriteJob({}, {}, NO_SPOOL).write_in_order((WriteOrder(Epoch(0, "a" * 32), {}).to_json(), [])))


def test_a_task_is_told_its_epoch_and_which_targets_keep_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[WriteOrder, int]] = []

    def note(_: WriteJob, order: WriteOrder, batches: list[pa.RecordBatch], partition: int) -> list[pa.RecordBatch]:
        seen.append((order, partition))
        return batches

    # PySpark keeps the one that is made as the process's own
    monkeypatch.setattr(TaskContext, "_taskContext", None)
    context = TaskContext()
    contexts = {"topic": WriterContext(Keeping.IN_TARGET, {"a": 1}), "table": WriterContext(Keeping.IN_SPOOL_ALONE)}
    order = WriteOrder(Epoch(7, "a" * 32), contexts, 99)
    context._localProperties = {ORDER: order.to_json()}
    context._partitionId = 3
    monkeypatch.setattr(TaskContext, "get", lambda: context)
    monkeypatch.setattr(WriteJob, "write", note)
    monkeypatch.setattr("epochsink.spark.write_task.spare_collector", lambda: None)
    acknowledged: list[int] = []
    monkeypatch.setattr("epochsink.spark.write_task.acknowledge_at_once", lambda: acknowledged.append(len(seen)))
    assert list(WriteJob({}, {}, NO_SPOOL).write_partition([])) == []
    assert seen == [(order, 3)]
    assert acknowledged == [0]  # before its rows are waited for


class Target:
    """A sink, its writer, the spool and its writer."""

    spool = True
    where = "true"

    def __init__(self, prepare: Callable[[], object], close: Callable[[], object]) -> None:
        self._prepare, self._close = prepare, close
        self.aborted = 0
        self.written = 0

    def writer(self, *_: object) -> Target:
        return self

    def write(self, batch: pa.RecordBatch) -> None:
        assert batch.num_rows == 1
        self.written += 1

    def prepare(self) -> dict[str, Any]:
        self._prepare()
        return {}

    def close(self) -> SpoolFile:
        self._close()
        return SpoolFile(1, 1, 1)

    def abort(self) -> None:
        self.aborted += 1

    def count_deletes(self, _rows: pa.RecordBatch) -> int:
        return 0

    def run(self, *, show_values: bool = False, keeping: Keeping = Keeping.IN_SPOOL) -> list[pa.RecordBatch]:
        given = cast("Any", self)
        job = WriteJob({"x": given}, {"x": Identity("query", "x", 1)}, given, show_values)
        rows = pa.record_batch({"x": pa.array([{"id": 1}, None])})
        return list(job.write(WriteOrder(Epoch(0, "a" * 32), {"x": WriterContext(keeping)}), [rows], 0))


@pytest.fixture
def no_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no other test's context be found: there is one in a process."""
    monkeypatch.setattr(TaskContext, "get", lambda: None)


@pytest.mark.usefixtures("no_context")
def test_the_disk_and_the_target_take_the_last_rows_side_by_side() -> None:
    together = threading.Barrier(2)
    (answers,) = Target(lambda: together.wait(60), lambda: together.wait(60)).run()
    assert answers.num_rows == 1


@pytest.mark.usefixtures("no_context")
def test_a_task_whose_spool_is_not_durable_answers_nothing_though_its_target_has_prepared() -> None:
    def fail() -> None:
        raise OSError("no space left on device")

    target = Target(lambda: None, fail)
    with pytest.raises(OSError, match="no space left"):
        target.run()
    assert target.aborted == 1


@pytest.mark.usefixtures("no_context")
@pytest.mark.parametrize("show_values", [False, True])
def test_what_a_task_sends_of_an_error_has_values_of_rows_only_if_they_may_be_shown(show_values: bool) -> None:  # noqa: FBT001
    """Executors log it, and so does Spark's driver, before the package sees it. The causes quote rows too."""

    def refuse() -> None:
        try:
            raise ValueError("Ada Lovelace")
        except ValueError as quoted:
            raise RowsRejected("a value is too long", values="name: Ada Lovelace") from quoted

    with pytest.raises(TaskFailed) as failed:
        Target(refuse, lambda: None).run(show_values=show_values)
    sent = "".join(traceback.format_exception(failed.value))
    assert ("Ada Lovelace" in sent) is show_values
    told = EpochsinkError.from_text(str(failed.value))
    assert isinstance(told, RowsRejected)
    assert told.message == "sink 'x': a value is too long"


@pytest.mark.usefixtures("no_context")
@pytest.mark.parametrize(
    ("keeping", "written"),
    [(Keeping.NOT, 1), (Keeping.IN_TARGET, 1), (Keeping.IN_SPOOL, 2), (Keeping.IN_SPOOL_ALONE, 2)],
)
def test_the_rows_that_where_leaves_over_go_to_the_sink_and_to_the_spool_if_they_are_kept_there(
    keeping: Keeping, written: int
) -> None:
    target = Target(lambda: None, lambda: None)
    (answers,) = target.run(keeping=keeping)
    assert target.written == written
    answer = Answer.from_json(answers.column("answer")[0].as_py())
    assert answer.spooled == (SpoolFile(1, 1, 1) if keeping.is_spooled else None)


@pytest.mark.usefixtures("no_context")
def test_no_two_invocations_of_a_task_share_a_name() -> None:
    """Spark may run the same task twice: only what the accepted one has prepared is recorded."""
    runs = [Target(lambda: None, lambda: None).run() for _ in range(2)]
    assert len({Answer.from_json(answers.column("answer")[0].as_py()).task for (answers,) in runs}) == 2
