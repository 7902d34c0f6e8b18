"""What a start makes of what the last run left, with ledger and spool on real HDFS and on an S3 API.

Spark's part is played by hand, so that each crash point, and each step of a store, has a run of its own.
"""

from __future__ import annotations

import json
import signal
import uuid
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import pytest
from stored_query import StoredQuery

from epochsink import failpoints
from epochsink.errors import Fenced, WentBack
from epochsink.failpoints import POINTS
from epochsink.protocol.object_storage import ObjectStorage, open_store
from epochsink.protocol.spool import Spool
from epochsink.spark import write_task
from epochsink.spark.classic.hadoop_storage import HadoopStorage

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

    from epochsink_devkit.services import LocalHdfs, LocalS3

EPOCHS: Final = 3
STEPS: Final = sorted(point for point in POINTS if point.startswith(("coordinator.", "task.")))


class Crash(BaseException):
    """The end of a driver, or of a task and its driver with it."""


@pytest.fixture(params=["hdfs", "s3"])
def query(request: pytest.FixtureRequest, tmp_path: Path) -> StoredQuery:
    """Return a fresh query on each of the stores, in a folder whose name has what URLs quote."""
    folder = f"orders é {uuid.uuid4().hex}"
    if request.param == "s3":
        s3: LocalS3 = request.getfixturevalue("s3")
        settings = {"endpoint": s3.endpoint, "region": "us-east-1", "access_key_id": "a", "secret_access_key": "b"}
        url, options = f"s3a://lake/{folder}", json.dumps(settings)
        return StoredQuery(ObjectStorage(open_store(url, options)), Spool.beside(url, options), tmp_path)
    hdfs: LocalHdfs = request.getfixturevalue("hdfs")
    spark: SparkSession = request.getfixturevalue("spark")
    url = f"{hdfs.url}/{folder}"
    options = json.dumps({"addresses": [f"http://127.0.0.1:{hdfs.web_port}"], "user": "root"})
    return StoredQuery(HadoopStorage(spark.newSession(), url), Spool.beside(url, options), tmp_path)


@pytest.fixture
def crashes(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Let a driver end, as if it was killed, where a failpoint is armed: nothing of ours handles such an end."""

    def end(_signal: int, _frame: object) -> None:
        raise Crash

    before = signal.signal(signal.SIGUSR1, end)
    # a killed task undoes nothing
    monkeypatch.setattr(write_task._Attempt, "abort", lambda _: None)
    monkeypatch.setenv("EPOCHSINK_FAILPOINT_SIGNAL", "USR1")
    monkeypatch.setattr(failpoints, "_reached", Counter())
    yield monkeypatch
    signal.signal(signal.SIGUSR1, before)


def test_drivers_that_end_at_one_step_after_another_are_made_good(
    query: StoredQuery, crashes: pytest.MonkeyPatch
) -> None:
    """Each finds what the end of the one before has left, and both targets lose each epoch that it decides."""
    for epoch, point in enumerate(STEPS):
        crashes.setattr(failpoints, "_reached", Counter())
        crashes.setenv("EPOCHSINK_FAILPOINT", point)
        with pytest.raises(Crash):
            query.run(epoch + 1, lose=epoch)
    crashes.delenv("EPOCHSINK_FAILPOINT")
    query.run(len(STEPS))
    assert query.values() == list(range(10 * len(STEPS)))
    assert query.remains() == []


class Breaking:
    """A store of whose changes one is the driver's last: it ends just before that, or just after."""

    def __init__(self, files: Any, last: int, *, carried_out: bool) -> None:
        self._files = files
        self._left = last
        self._carried_out = carried_out
        self.broke = False

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._files, name)
        if name not in ("create", "remove_many"):
            return call

        def breaking(*given: Any) -> Any:
            self._left -= 1
            if self._left != 0:
                return call(*given)
            self.broke = True
            if self._carried_out:
                call(*given)
            raise Crash

        return breaking


@pytest.mark.parametrize("carried_out", [False, True], ids=["before", "after"])
def test_a_driver_that_ends_at_any_change_of_the_store_is_made_good_by_the_next(
    query: StoredQuery, *, carried_out: bool
) -> None:
    """Each run ends at the next change; so each finds a checkpoint that another end has left."""
    files = query.files
    for last in range(1, 6):
        query.files = Breaking(files, last, carried_out=carried_out)
        with pytest.raises(Crash):
            query.run(100)
    query.files = files
    epochs = len(query.files.names("offsets")) + 1
    query.run(epochs)
    assert query.values() == list(range(10 * epochs))
    assert query.remains() == []


def test_a_recorded_undecided_epoch_is_adopted(query: StoredQuery) -> None:
    query.prepare(query.driver(), 0, 1, 2)
    next_driver = query.driver()
    query.prepare(next_driver, 0, 3)
    query.decide(0)
    assert next_driver.commit_decided()
    assert query.values() == [1, 2]


def test_the_next_driver_commits_what_was_decided(query: StoredQuery) -> None:
    query.prepare(query.driver(), 0, 1, 2)
    query.decide(0)
    assert query.values() == []
    query.driver()
    assert query.values() == [1, 2]
    assert query.remains() == []


def test_what_the_targets_lost_is_replayed_from_the_spool(query: StoredQuery) -> None:
    query.prepare(query.driver(), 0, 1, 2)
    query.decide(0)
    for sink in query.sinks.values():
        sink.abort_prepared()
    query.driver()
    assert query.values() == [1, 2]


def test_of_two_drivers_the_older_one_records_nothing(query: StoredQuery) -> None:
    older = query.driver()
    query.prepare(older, 0, 1)
    newer = query.driver()
    query.decide(0)
    with pytest.raises(Fenced):
        query.prepare(older, 1, 2)
    assert newer.commit_decided()
    query.prepare(newer, 1, 3)
    query.decide(1)
    assert newer.commit_decided()
    assert query.values() == [1, 3]
    assert query.remains() == []


def test_a_checkpoint_restored_from_an_older_copy_writes_nothing_twice(query: StoredQuery) -> None:
    query.run(EPOCHS)
    for number in (1, 2):
        query.forget("commits", number)
        query.forget("offsets", number)
    query.run(EPOCHS + 1)
    assert query.values() == list(range(10 * (EPOCHS + 1)))


def test_other_input_under_a_recorded_epoch_is_refused(query: StoredQuery) -> None:
    query.run(EPOCHS)
    query.forget("commits", 2)
    query.forget("offsets", 2)
    query.files.create("offsets/2", b'v1\n{"batchWatermarkMs":0}\n{"t":77}')
    with pytest.raises(WentBack, match="epoch 2 is recorded with other offsets"):
        query.run(EPOCHS)
    assert query.values() == list(range(10 * EPOCHS))


def test_commits_newer_than_the_ledger_are_refused(query: StoredQuery) -> None:
    query.run(EPOCHS)
    entries = sorted(query.files.names("epochsink/ledger"))
    query.files.remove_many([f"epochsink/ledger/{name}" for name in entries[-2:]])
    with pytest.raises(WentBack, match="the ledger is the older copy"):
        query.driver()


def test_an_empty_commit_decides_nothing(query: StoredQuery) -> None:
    """A store that lost power may show the name of a file without its content."""
    driver = query.driver()
    query.prepare(driver, 0, 1)
    query.files.create("commits/0", b"")
    assert not driver.commit_decided()
    query.forget("commits", 0)
    query.decide(0)
    assert driver.commit_decided()
    assert query.values() == [1]


def test_a_long_run_leaves_few_entries_of_the_ledger_and_a_start_reads_on(query: StoredQuery) -> None:
    query.run(9, summarised_after=4)
    assert len(query.files.names("epochsink/ledger")) < 2 * 9
    query.run(10)
    assert query.values() == list(range(100))
    assert query.remains() == []
