"""How often an epoch asks the store, on each of its two threads: where that is far away, each call is a round trip."""

from __future__ import annotations

import statistics
import threading
import uuid
from collections import Counter
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from epochsink.protocol.checkpoint import Checkpoint
from epochsink.protocol.coordinator import Coordinator, Plan
from epochsink.protocol.ledger import Ledger
from epochsink.protocol.spool import Spool
from epochsink.protocol.storage import LocalStorage
from epochsink.sink import Task, participants_of
from epochsink.testing import LocalSink

if TYPE_CHECKING:
    from pathlib import Path

    from epochsink.sink import Epoch, SpoolFile

STORAGE = ("create", "read", "read_many", "names", "remove_many")
SPOOL = ("make", "drop", "attempts")
AT_MOST = 4
EPOCHS = 24


class Counted:
    """Passes calls on, and counts them by thread; those of executors are not among them."""

    def __init__(self, inner: Any, names: tuple[str, ...], calls: Counter[str]) -> None:
        self._inner, self._names, self._calls = inner, names, calls

    def __getattr__(self, name: str) -> Any:
        if name in self._names:
            self._calls[threading.current_thread().name] += 1
        return getattr(self._inner, name)


class Query:
    """A query with so many sinks on a local folder, whose epochs a test takes by hand, in two threads."""

    def __init__(self, folder: Path, sinks: int) -> None:
        self.calls: Counter[str] = Counter()
        self.spark = LocalStorage(folder / "checkpoint")
        files: Any = Counted(self.spark, STORAGE, self.calls)
        self.spool = Spool.beside(str(folder / "checkpoint"))
        self.sinks = {f"sink{number}": LocalSink(folder / f"sink{number}") for number in range(sinks)}
        kept: Any = Counted(self.spool, SPOOL, self.calls)
        self.coordinator = Coordinator(
            query_id="query-1",
            ledger=Ledger(files, uuid.uuid4().hex),
            checkpoint=Checkpoint(files),
            spool=kept,
            participants=participants_of(self.sinks),
        )
        self.coordinator.recover()

    def run(self, number: int, *, early: bool) -> Counter[str]:
        """Take an epoch through its steps; return the calls of each thread.

        Spark goes on with the next epoch before the commit of this one begins (``early``), or after it.
        """
        self.calls.clear()
        self.spark.create(f"offsets/{number}", f'v1\n{{"batchWatermarkMs":0}}\n{{"offset":{number}}}'.encode())
        self._in("stream", lambda: self._begin(number))
        if number and early:
            self._in("commit", self.coordinator.commit_decided)
        self._in("stream", lambda: self._record(number))
        self.spark.create(f"commits/{number}", b'v1\n{"nextBatchWatermarkMs":0}')
        if not early:
            self._in("commit", self.coordinator.commit_decided)
        return self.calls.copy()

    def _begin(self, number: int) -> None:
        assert self.coordinator.settle(number) is Plan.WRITE
        self.epoch = self.coordinator.begin(number)

    def _record(self, number: int) -> None:
        files: dict[str, dict[str, SpoolFile]] = {}
        written = {name: [self._task(name, self.epoch, number, files)] for name in self.sinks}
        self.coordinator.record(self.epoch, written, files)

    def _task(
        self, name: str, epoch: Epoch, row: int, files: dict[str, dict[str, SpoolFile]]
    ) -> tuple[str, dict[str, object]]:
        task = Task(self.coordinator.identity(name), epoch, 0, uuid.uuid4().hex)
        batch = pa.RecordBatch.from_pydict({"id": [row]})
        spool = self.spool.writer(task, batch.schema)
        spool.write(batch)
        files[name] = {task.uuid: spool.close()}
        writer = self.sinks[name].writer(task)
        writer.write(batch)
        return task.uuid, writer.prepare()

    @staticmethod
    def _in(name: str, call: Any) -> None:
        failures: list[BaseException] = []

        def guarded() -> None:
            try:
                call()
            except BaseException as failure:  # noqa: BLE001 - raised below
                failures.append(failure)

        thread = threading.Thread(target=guarded, name=name)
        thread.start()
        thread.join()
        for failure in failures:
            raise failure


@pytest.mark.parametrize(("sinks", "early"), [(1, False), (3, True)], ids=["idle", "busy"])
def test_a_steady_epoch_costs_four_calls_a_thread_however_many_sinks(
    tmp_path: Path, sinks: int, *, early: bool
) -> None:
    query = Query(tmp_path, sinks)
    for number in range(3):
        query.run(number, early=early)
    epochs = [query.run(number, early=early) for number in range(3, EPOCHS)]
    for thread in ("stream", "commit"):
        calls = [epoch[thread] for epoch in epochs]
        assert statistics.median(calls) <= AT_MOST, (thread, calls)
        # the ledger is summed up now and then: one entry more, and one call that removes what it replaces
        assert sum(number > AT_MOST for number in calls) <= 2, (thread, calls)
        assert max(calls) <= AT_MOST + 2, (thread, calls)
    query.coordinator.commit_decided()
    for sink in query.sinks.values():
        assert sorted(row["id"] for row in sink.rows()) == list(range(EPOCHS))
