"""One suite for every kind of place where a checkpoint can live: local folders and Hadoop's file systems."""

from __future__ import annotations

import threading
import uuid
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from streams import raising_after

from epochsink import ExactlyOnce
from epochsink.errors import ConfigurationError, Fenced
from epochsink.protocol import storage
from epochsink.protocol.ledger import Ledger
from epochsink.protocol.ledger_entries import Done, Prepared
from epochsink.protocol.storage import LocalStorage
from epochsink.spark.classic.hadoop_storage import HadoopStorage, open_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession
    from streams import Stream

    from epochsink.protocol.storage import Storage


@pytest.fixture(params=["posix", "hadoop-local", "hadoop-mounted", "hadoop-odd-name"])
def open_files(request: pytest.FixtureRequest, spark: SparkSession, tmp_path: Path) -> Callable[[], Storage]:
    """Return what opens one and the same empty folder, each time anew."""
    name = uuid.uuid4().hex
    if request.param == "posix":
        return lambda: LocalStorage(tmp_path)
    place = {
        "hadoop-local": tmp_path.as_uri(),
        "hadoop-mounted": f"viewfs://mounted/tree/{name}",
        "hadoop-odd-name": f"viewfs://mounted/tree/{name}/a b%20c,d=[1]",
    }[request.param]
    return lambda: HadoopStorage(spark, place)


def test_a_name_is_given_once(open_files: Callable[[], Storage]) -> None:
    files = open_files()
    assert files.create("ledger/0001", b"first")
    assert not files.create("ledger/0001", b"second")
    assert not open_files().create("ledger/0001", b"third")
    assert files.read("ledger/0001") == b"first"


def test_one_of_many_at_once_gets_the_name(open_files: Callable[[], Storage]) -> None:
    """The fence of the ledger: no two drivers ever both write an entry."""
    made: list[int] = []
    start = threading.Barrier(6)

    def create(number: int) -> None:
        files = open_files()
        start.wait(30)
        if files.create("ledger/0001", str(number).encode()):
            made.append(number)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(made) == 1
    assert open_files().read("ledger/0001") == str(made[0]).encode()


def test_what_is_absent_reads_as_nothing(open_files: Callable[[], Storage]) -> None:
    files = open_files()
    assert files.read("no/such/file") is None
    assert files.names("no/such") == []
    files.remove_many(["no/such/file"])


def test_bytes_come_back_as_they_were(open_files: Callable[[], Storage]) -> None:
    data = bytes(range(256)) * 300
    files = open_files()
    files.create("deep/er/file", data)
    files.create("deep/er/empty", b"")
    assert files.read("deep/er/file") == data
    assert files.read("deep/er/empty") == b""


def test_names_are_those_of_one_folder(open_files: Callable[[], Storage]) -> None:
    files = open_files()
    for name in ("x/1", "x/2", "x/y/3", "z/4"):
        files.create(name, b"-")
    files.remove_many(["x/2"])
    assert [name for name in sorted(files.names("x")) if not name.startswith(".")] == ["1", "y"]
    assert not any(name.endswith(".tmp") for name in files.names("x"))


def test_an_older_driver_is_fenced_and_writes_nothing(open_files: Callable[[], Storage]) -> None:
    older, newer = Ledger(open_files(), "older"), Ledger(open_files(), "newer")
    older.take("query", {}, -1)
    older.append(Prepared(0, "a" * 32, "digest", {}))
    newer.take("query", {}, -1)
    with pytest.raises(Fenced):
        older.append(Prepared(1, "b" * 32, "digest", {}))
    newer.append(Done(0))
    history = Ledger(open_files(), "reader").read()
    assert list(history.epochs) == [0]
    assert history.done == {0}


@pytest.fixture
def mounted(stream: Stream, spark_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], ExactlyOnce]:
    """Return what makes the object under test on a checkpoint that is not local; `stream` sees its files."""
    # Hadoop's local file system, which stands for a remote one here, lets both of two creates win now and then: it
    # looks first, and then renames a file and its checksum. Such a store is refused (test_object_storage.py).
    monkeypatch.setattr(storage, "_RACES", 0)
    name = f"check point {uuid.uuid4().hex[:8]}"
    stream.checkpoint = spark_folder / "tree" / name

    def make() -> ExactlyOnce:
        place = f"viewfs://mounted/tree/{name}"
        return ExactlyOnce(checkpoint=place, sinks={"folder": stream.sink}, spool=str(stream.folder / "spool"))

    return make


def test_a_query_lives_on_a_hadoop_file_system(stream: Stream, mounted: Callable[[], ExactlyOnce]) -> None:
    """From a first run over a restart and an adoption: with the ledger in the checkpoint, wherever that is."""
    for first in (0, 10):
        stream.put(range(first, first + 10))
    once = mounted()
    query = stream.frame().writeStream.foreachBatch(raising_after(once, 1)).trigger(availableNow=True)
    with pytest.raises(Exception, match="Boom"):
        query.option("checkpointLocation", once.checkpoint).start().awaitTermination()
    once.await_committed()
    assert stream.committed() == stream.done() == [0]
    assert stream.sink.values() == list(range(10))
    stream.put(range(20, 30))
    stream.run(mounted())
    assert stream.sink.values() == list(range(30))
    assert stream.committed() == stream.done() == [0, 1, 2]
    assert stream.sink.calls("vote") == ["0", "1", "2"]


def test_stop_in_the_middle_of_a_batch_there_is_no_error(stream: Stream, mounted: Callable[[], ExactlyOnce]) -> None:
    """stop() interrupts the thread that writes the ledger through Hadoop."""
    once = mounted()
    query = stream.start_endless(once)
    for first in range(0, 30, 10):
        stream.put(range(first, first + 10))
    query.stop()
    assert query.exception() is None
    stream.run(once)
    assert stream.sink.values() == list(range(30))


def test_a_spool_that_executors_cannot_open_is_refused_before_rows_move(
    stream: Stream, mounted: Callable[[], ExactlyOnce]
) -> None:
    """The spool is in the checkpoint where nothing else is said, and executors have no viewfs."""
    once = ExactlyOnce(checkpoint=mounted().checkpoint, sinks={"folder": stream.sink})
    stream.put(range(10))
    with pytest.raises(ConfigurationError, match="no client for viewfs://") as refused:
        stream.start(once)
    assert "give spool=" in refused.value.hint


def test_without_any_spool_nothing_has_to_open_it(stream: Stream, mounted: Callable[[], ExactlyOnce]) -> None:
    unspooled = replace(stream.sink, spool=False)
    stream.put(range(10))
    stream.run(ExactlyOnce(checkpoint=mounted().checkpoint, sinks={"folder": unspooled}))
    assert unspooled.values() == list(range(10))


@pytest.mark.parametrize("spelling", ["{}", "file://{}", "file:{}", "{}/", "{}/x/.."])
def test_a_local_folder_has_one_place_however_it_is_spelt(spark: SparkSession, tmp_path: Path, spelling: str) -> None:
    opened = open_checkpoint(spark, spelling.format(tmp_path / "a b#c"))
    assert isinstance(opened.files, LocalStorage)
    assert Path(opened.location).resolve() == opened.files.root.resolve() == tmp_path / "a b#c"
