"""What the driver makes of the tasks' answers; the tasks themselves: test_write_task.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from epochsink.protocol.spool import NO_SPOOL
from epochsink.sink import Epoch, Identity, RowCount, SpoolFile
from epochsink.spark.epoch_writer import EpochWriter
from epochsink.spark.write_task import Answer

if TYPE_CHECKING:
    from collections.abc import Iterator

EPOCH = Epoch(7, "a" * 32)
PLAN: Any = "the plan of the write job"


@pytest.fixture
def writer() -> Iterator[EpochWriter]:
    made = EpochWriter({}, lambda *_: {}, lambda sink: Identity("query", sink), NO_SPOOL, show_values=False)
    yield made
    made.close()


def answer(partition: int, sink: str = "out") -> Answer:
    return Answer(
        sink, f"task-{partition}", partition, {"part": partition}, SpoolFile(1, partition, 1), RowCount(2, 1, 30), 10.0
    )


def test_parts_are_in_the_order_of_the_partitions_whichever_task_ends_first(
    writer: EpochWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [answer(2), answer(0, "other"), answer(0), answer(1)]
    monkeypatch.setattr(writer, "_run", lambda _plan, _epoch: answers)
    written, spooled, counts = writer.write(PLAN, EPOCH)
    assert counts == {"out": RowCount(6, 3, 90), "other": RowCount(2, 1, 30)}
    assert written == {
        "out": [(f"task-{partition}", {"part": partition}) for partition in range(3)],
        "other": [("task-0", {"part": 0})],
    }
    assert {task: file.size for task, file in spooled["out"].items()} == {"task-0": 0, "task-1": 1, "task-2": 2}


def test_after_a_failure_no_task_carries_rows(writer: EpochWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_run", lambda _plan, _epoch: [answer(0)])
    writer.write(PLAN, EPOCH)
    assert writer._carry_limit.bytes > 0

    def fail(_plan: object, _epoch: Epoch) -> list[Answer]:
        raise RuntimeError("the results are bigger than spark.driver.maxResultSize")

    monkeypatch.setattr(writer, "_run", fail)
    with pytest.raises(RuntimeError, match="maxResultSize"):
        writer.write(PLAN, EPOCH)
    assert writer._carry_limit.bytes == 0
