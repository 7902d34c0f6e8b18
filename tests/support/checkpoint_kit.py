"""A checkpoint made by hand, as Spark and the machine would leave it: for tests of what operators do to one."""

from __future__ import annotations

import json
import uuid
from typing import TYPE_CHECKING, TypeAlias

import pytest

from epochsink.errors import EpochsinkError
from epochsink.protocol.checkpoint import Checkpoint, OpenCheckpoint
from epochsink.protocol.coordinator import Coordinator
from epochsink.protocol.ledger import Ledger
from epochsink.protocol.spool import Spool
from epochsink.protocol.storage import LocalStorage
from epochsink.sink import Keeping, RowCount, Task, participants_of
from epochsink.spark.query_run import Run, RunSettings

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import pyarrow as pa

    from epochsink.protocol.ledger_history import LedgerHistory
    from epochsink.sink import Epoch, Sink, SpoolFile

    Batches: TypeAlias = pa.RecordBatch | list[pa.RecordBatch]


class CheckpointKit:
    """One query's checkpoint in ``root``, and its driver, which has recovered."""

    def __init__(self, root: Path, sinks: Mapping[str, Sink], *, retain_seconds: float = 0.0) -> None:
        self.root = root
        self._retain_seconds = retain_seconds
        self.sinks = dict(sinks)
        self.query_id = str(uuid.uuid4())
        self.spool = Spool.beside(str(root))
        for folder in ("offsets", "commits"):
            (root / folder).mkdir(parents=True)
        (root / "metadata").write_text(json.dumps({"id": self.query_id}))
        self._spooled: dict[str, dict[str, SpoolFile]] = {}
        self.participants = participants_of(self.sinks)
        self.coordinator = self.start()
        self._first = self.history().owner.generation  # type: ignore[union-attr] # it has just been taken

    def start(self) -> Coordinator:
        """Return a driver of this checkpoint that has recovered."""
        files = LocalStorage(self.root)
        coordinator = Coordinator(
            query_id=self.query_id,
            ledger=Ledger(files, uuid.uuid4().hex),
            checkpoint=Checkpoint(files),
            spool=self.spool,
            participants=self.participants,
            location=str(self.root),
            retain_seconds=self._retain_seconds,
        )
        coordinator.recover()
        return coordinator

    def stopped_start(self, reference: str, sinks: Mapping[str, Sink] | None = None) -> EpochsinkError:
        """Start the query as Spark does, and return the error that stops it; ``reference`` is for its commands."""
        with pytest.raises(EpochsinkError) as stopped:
            Run(
                RunSettings(self.sinks if sinks is None else sinks, reference=reference),
                OpenCheckpoint(LocalStorage(self.root), str(self.root), self.spool),
                self.query_id,
                driver=uuid.uuid4().hex,
            )
        return stopped.value

    def write(
        self, number: int, rows: Mapping[str, Batches]
    ) -> tuple[Epoch, dict[str, list[tuple[str, dict[str, object]]]]]:
        """Write an epoch by a task for each batch; an attempt that nobody records."""
        self.plan(number)
        epoch = self.coordinator.begin(number)
        self._spooled = {}
        tasks = {name: enumerate(_listed(batches)) for name, batches in rows.items()}
        return epoch, {name: [self._run_task(name, epoch, *task) for task in each] for name, each in tasks.items()}

    def plan(self, number: int) -> None:
        """Write offsets/N, as Spark does first."""
        (self.root / "offsets" / str(number)).write_text(f'v1\n{{"batchWatermarkMs":0}}\n{{"orders":{{"0":{number}}}}}')

    def record(self, number: int, rows: Mapping[str, Batches]) -> None:
        """Write and record an epoch."""
        epoch, written = self.write(number, rows)
        counts = {}
        for name, batches in rows.items():
            listed = _listed(batches)
            counts[name] = RowCount(sum(map(len, listed)), sum(map(self.sinks[name].count_deletes, listed)))
        self.coordinator.record(epoch, written, self._spooled, counts)

    def decide(self, number: int) -> None:
        """Let Spark's checkpoint decide an epoch."""
        (self.root / "commits" / str(number)).write_text('v1\n{"nextBatchWatermarkMs":0}')

    def run(self, number: int, rows: Mapping[str, Batches]) -> None:
        """Take an epoch through all its steps."""
        self.record(number, rows)
        self.decide(number)
        assert self.coordinator.commit_decided()

    def history(self) -> LedgerHistory:
        """Return what the ledger says now."""
        return Ledger(LocalStorage(self.root), "nobody").read()

    def generation(self) -> int:
        """Return how often the ledger has been taken."""
        owner = self.history().owner
        return owner.generation - self._first + 1 if owner else 0

    def close(self) -> None:
        for participant in self.participants:
            participant.close()

    def _run_task(
        self, name: str, epoch: Epoch, partition: int, batch: pa.RecordBatch
    ) -> tuple[str, dict[str, object]]:
        (participant,) = (each for each in self.participants if name in each.members)
        schemas = dict.fromkeys(participant.members, batch.schema)
        told = participant.begin(epoch, schemas, retained=self._retain_seconds > 0)[name]
        # what a participant keeps nowhere is spooled here all the same: for tests of what becomes of spools
        keeping = Keeping.IN_SPOOL if told.keeping is Keeping.NOT else told.keeping
        identity = self.coordinator.identity(name)
        task = Task(identity, epoch, partition, uuid.uuid4().hex, keeping, settings=told.settings)
        if keeping.is_spooled:
            spool = self.spool.writer(task, batch.schema)
            spool.write(batch)
            self._spooled.setdefault(name, {})[task.uuid] = spool.close()
        writer = self.sinks[name].writer(task)
        writer.write(batch)
        return task.uuid, writer.prepare()


def _listed(batches: Batches) -> list[pa.RecordBatch]:
    return batches if isinstance(batches, list) else [batches]
