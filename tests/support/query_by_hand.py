"""One query on plain folders whose steps, Spark's among them, a test takes by hand."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import pyarrow as pa

from epochsink.protocol.checkpoint import Checkpoint
from epochsink.protocol.coordinator import Coordinator, Plan
from epochsink.protocol.ledger import Ledger
from epochsink.protocol.spool import Spool
from epochsink.protocol.storage import LocalStorage
from epochsink.sink import RowCount, Task
from epochsink.testing import LocalSink

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from epochsink.protocol.ledger_history import LedgerHistory
    from epochsink.protocol.progress import EpochProgress
    from epochsink.sink import Epoch, Participant


class Query:
    """One query's checkpoint and sink; Spark's part is played by hand."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "checkpoint"
        self.sink = LocalSink(folder / "sink")
        self.files = LocalStorage(self.folder)
        self.spool = Spool.beside(str(self.folder))

    def driver(
        self,
        *,
        name: str = "",
        recovers: bool = True,
        participant: Participant | None = None,
        listener: Callable[[EpochProgress], None] | None = None,
    ) -> Coordinator:
        """Return the coordinator of a driver, whose name in the ledger is made up unless it is given."""
        made = Coordinator(
            query_id="query-1",
            ledger=Ledger(self.files, name or uuid.uuid4().hex),
            checkpoint=Checkpoint(self.files),
            spool=self.spool,
            participants=[participant or self.sink.participant({"out": self.sink})],
            listener=listener,
        )
        if recovers:
            made.recover()
        return made

    def plan(self, epoch: int) -> None:
        """Write offsets/N, as Spark does first."""
        self.files.create(f"offsets/{epoch}", f'v1\n{{"batchWatermarkMs":0}}\n{{"offset":{epoch}}}'.encode())

    def decide(self, epoch: int) -> None:
        """Write commits/N, as Spark does last."""
        self.files.create(f"commits/{epoch}", b'v1\n{"nextBatchWatermarkMs":0}')

    def prepare(self, driver: Coordinator, number: int, *ids: int) -> None:
        """Play foreachBatch for an epoch that has to be written."""
        epoch, accepted = self.attempt(driver, number, *ids)
        driver.record(epoch, {"out": [accepted]}, {}, {"out": RowCount(len(ids), 0, 8 * len(ids))})

    def attempt(self, driver: Coordinator, number: int, *ids: int) -> tuple[Epoch, tuple[str, dict[str, object]]]:
        """Write an epoch by one task; return the attempt, and what the task answers. Nothing is recorded."""
        self.plan(number)
        assert driver.settle(number) is Plan.WRITE
        epoch = driver.begin(number)
        return epoch, self.task(driver, epoch, ids)

    def task(self, driver: Coordinator, epoch: Epoch, ids: tuple[int, ...]) -> tuple[str, dict[str, object]]:
        task = Task(driver.identity("out"), epoch, 0, uuid.uuid4().hex)
        writer = self.sink.writer(task)
        writer.write(pa.RecordBatch.from_pydict({"id": list(ids)}))
        return task.uuid, writer.prepare()

    def history(self) -> LedgerHistory:
        """Return what the ledger holds."""
        return Ledger(self.files, "reader").read()

    def visible(self) -> list[int]:
        return sorted(row["id"] for row in self.sink.rows())
