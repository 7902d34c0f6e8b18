"""The limit on the bytes of a record batch: lifted while rows are narrow, and always there again afterwards."""

from __future__ import annotations

import sys
import zipfile
import zipimport
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pytest

from epochsink.protocol.spool import NO_SPOOL
from epochsink.sink import Epoch, Identity, Keeping, WriterContext, identity_key
from epochsink.spark.classic.compat import byte_limit_of_batches
from epochsink.spark.epoch_writer import ByteLimit
from epochsink.spark.write_task import Answer, WriteJob, WriteOrder
from epochsink.testing import LocalSink

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

BYTES: Final = "spark.sql.execution.arrow.maxBytesPerBatch"
ROWS: Final = "spark.sql.execution.arrow.maxRecordsPerBatch"
NARROW: Final = 100.0
WIDE: Final = 1e6
UNLIMITED: Final = 2**31 - 1


@pytest.fixture
def session(spark: SparkSession) -> Iterator[SparkSession]:
    """Return a session with settings of its own."""
    fresh = spark.newSession()
    yield fresh
    for name in (BYTES, ROWS):
        fresh.conf.unset(name)


def limit_within(limit: ByteLimit, session: SparkSession) -> int:
    with limit.lifted(session):
        return byte_limit_of_batches(session)


def test_the_limit_stays_until_an_epoch_has_told_how_wide_rows_are(session: SparkSession) -> None:
    limit, before = ByteLimit(), byte_limit_of_batches(session)
    assert limit_within(limit, session) == before < UNLIMITED
    limit.learn(NARROW)
    assert limit_within(limit, session) == UNLIMITED
    assert session.conf.get(BYTES, None) is None


def test_the_limit_stays_for_wide_rows_also_if_later_ones_are_narrow(session: SparkSession) -> None:
    limit, before = ByteLimit(), byte_limit_of_batches(session)
    limit.learn(WIDE)
    limit.learn(NARROW)
    assert limit_within(limit, session) == before


def test_a_limit_of_the_users_own_is_kept_where_rows_could_reach_it_and_set_again(session: SparkSession) -> None:
    limit = ByteLimit()
    limit.learn(NARROW)
    session.conf.set(BYTES, "1m")
    assert limit_within(limit, session) == 1 << 20
    session.conf.set(BYTES, "64m")
    assert limit_within(limit, session) == UNLIMITED
    assert session.conf.get(BYTES) == "64m"


def test_without_a_limit_on_rows_the_one_on_bytes_stays(session: SparkSession) -> None:
    limit, before = ByteLimit(), byte_limit_of_batches(session)
    limit.learn(NARROW)
    session.conf.set(ROWS, "0")
    assert limit_within(limit, session) == before


def test_the_limit_is_set_again_after_a_failure(session: SparkSession) -> None:
    limit, before = ByteLimit(), byte_limit_of_batches(session)
    limit.learn(NARROW)
    with pytest.raises(ZeroDivisionError), limit.lifted(session):
        assert 1 / 0
    assert byte_limit_of_batches(session) == before


def test_a_task_forgets_finders_of_archives_and_can_still_import_from_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "library.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("epochsink_test_first.py", "")
        file.writestr("epochsink_test_second.py", "VALUE = 2")
    monkeypatch.syspath_prepend(str(archive))
    import epochsink_test_first  # type: ignore[import-not-found] # noqa: F401, PLC0415 - makes the finder

    assert isinstance(sys.path_importer_cache[str(archive)], zipimport.zipimporter)
    sink = LocalSink(tmp_path / "sink", spool=False)
    identity = Identity("q" * 32, "out", 1)
    job = WriteJob({"out": sink}, {"out": identity}, NO_SPOOL)
    rows = pa.record_batch({"id": pa.array([1, 2])})
    [answers] = job.write(WriteOrder(Epoch(0, "a" * 32), {"out": WriterContext(Keeping.NOT)}), [rows], 0)
    [answer] = map(Answer.from_json, answers["answer"].to_pylist())
    assert answer.row_bytes == pytest.approx(rows.nbytes / 2)
    assert identity_key(identity) in {path.name for path in (tmp_path / "sink").iterdir()}
    assert not any(isinstance(finder, zipimport.zipimporter) for finder in sys.path_importer_cache.values())

    import epochsink_test_second  # type: ignore[import-not-found] # noqa: PLC0415 - after the finder is gone

    assert epochsink_test_second.VALUE == 2
