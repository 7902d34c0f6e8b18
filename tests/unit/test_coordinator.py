"""The coordinator's steps, one after another, on a plain folder; what strikes between them: tests/simulation."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from epochsink.errors import Fenced, WentBack
from epochsink.protocol.coordinator import Coordinator, Plan
from epochsink.protocol.ledger import Ledger
from epochsink.protocol.spool import Spool
from epochsink.protocol.storage import LocalStorage
from epochsink.sink import Task
from epochsink.spark.checkpoint import Checkpoint
from epochsink.testing import LocalSink

if TYPE_CHECKING:
    from pathlib import Path

    from epochsink.sink import Epoch


class Query:
    """One query's checkpoint and sink; Spark's part is played by hand."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "checkpoint"
        self.sink = LocalSink(folder / "sink")
        self.files = LocalStorage(self.folder)
        self.spool = Spool.beside(str(self.folder))

    def driver(self) -> Coordinator:
        """Return a driver's coordinator, recovered."""
        made = Coordinator(
            query_id="query-1",
            ledger=Ledger(self.files, uuid.uuid4().hex),
            checkpoint=Checkpoint(self.files),
            spool=self.spool,
            sinks={"out": self.sink.committer()},
        )
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
        self.plan(number)
        assert driver.settle(number) is Plan.WRITE
        epoch = driver.begin(number)
        driver.record(epoch, {"out": [self._task(driver, epoch, ids)]}, {})

    def _task(self, driver: Coordinator, epoch: Epoch, ids: tuple[int, ...]) -> tuple[str, dict[str, object]]:
        task = Task(driver.identity("out"), epoch, 0, uuid.uuid4().hex)
        writer = self.sink.writer(task)
        writer.write(pa.RecordBatch.from_pydict({"id": list(ids)}))
        return task.uuid, writer.prepare()

    def visible(self) -> list[int]:
        return sorted(row["id"] for row in self.sink.rows())


@pytest.fixture
def query(tmp_path: Path) -> Query:
    return Query(tmp_path)


def test_an_epoch_is_visible_after_its_decision_and_not_before(query: Query) -> None:
    driver = query.driver()
    query.prepare(driver, 0, 1, 2)
    assert not driver.commit_decided()
    assert query.visible() == []
    query.decide(0)
    assert driver.commit_decided()
    assert query.visible() == [1, 2]


def test_a_recorded_epoch_is_adopted_by_the_next_driver(query: Query) -> None:
    query.prepare(query.driver(), 0, 1)
    later = query.driver()
    assert later.settle(0) is Plan.RUN_FOR_STATE
    query.decide(0)
    assert later.commit_decided()
    assert query.visible() == [1]


def test_a_decided_epoch_is_committed_at_the_next_start(query: Query) -> None:
    query.prepare(query.driver(), 0, 1)
    query.decide(0)
    query.driver()
    assert query.visible() == [1]


def test_what_nobody_recorded_is_aborted_at_the_next_start(query: Query) -> None:
    driver = query.driver()
    query.plan(0)
    driver.settle(0)
    query._task(driver, driver.begin(0), (1,))
    query.driver()
    assert query.sink.prepared() == []
    assert not list((query.folder.parent / "sink").glob("*/written/*"))


def test_a_superseded_driver_records_nothing(query: Query) -> None:
    older = query.driver()
    query.plan(0)
    older.settle(0)
    epoch = older.begin(0)
    accepted = query._task(older, epoch, (1,))
    query.driver()
    with pytest.raises(Fenced):
        older.record(epoch, {"out": [accepted]}, {})
    assert query.visible() == []


def test_decided_epochs_without_a_ledger_are_refused(query: Query) -> None:
    query.plan(0)
    query.decide(0)
    with pytest.raises(WentBack, match="holds no record of them"):
        query.driver()


def test_an_epoch_that_was_decided_without_a_call_is_named(query: Query) -> None:
    driver = query.driver()
    query.prepare(driver, 0, 1)
    for epoch in (0, 1):
        query.plan(epoch)
        query.decide(epoch)
    driver.commit_decided()
    query.plan(2)
    with pytest.raises(WentBack, match="epoch 1 was decided without ExactlyOnce"):
        driver.settle(2)


def test_draining_commits_what_is_decided_and_leaves_the_rest(query: Query) -> None:
    driver = query.driver()
    query.prepare(driver, 0, 1)
    driver.drain()
    assert query.visible() == []
    query.decide(0)
    driver.drain()
    assert query.visible() == [1]
