"""The durable copy of an epoch's rows."""

from __future__ import annotations

import errno
import gc
import os
import pickle
import stat
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epochsink.errors import ConfigurationError, SpoolDamaged, SpoolMissing
from epochsink.protocol import spool as spool_module
from epochsink.protocol.spool import NO_SPOOL, Spool
from epochsink.sink import Epoch, Identity, SpoolFile, Task

if TYPE_CHECKING:
    from collections.abc import Callable

QUERY = "5f0c4a50-2f54-4d0e-9a40-6e33d6a1f001"
EPOCH = Epoch(3, "a" * 32)
SINK = Identity(QUERY, 'x"; drop table y;--/../é', 1)


def batch(*numbers: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"id": list(numbers)})


def spooled(
    spool: Spool, task: str, *batches: pa.RecordBatch, epoch: Epoch = EPOCH, sink: Identity = SINK, carried: int = 0
) -> SpoolFile:
    writer = spool.writer(Task(sink, epoch, 0, task, carried=carried), batches[0].schema)
    for one in batches:
        writer.write(one)
    return writer.close()


def random_numbers(count: int) -> list[int]:
    """Return numbers that take as many bytes on the disk as in memory."""
    numbers: list[int] = np.random.default_rng(7).integers(0, 1 << 62, count).tolist()
    return numbers


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool.beside(str(tmp_path / "checkpoint"))


def test_rows_come_back_as_written(spool: Spool) -> None:
    spool.make(QUERY, EPOCH)
    spooled(spool, "1" * 32, batch(1, 2), batch(3))
    spooled(spool, "2" * 32, batch(4))
    rows = spool.rows(SINK, EPOCH, ["1" * 32, "2" * 32])
    assert rows.tasks() == ("1" * 32, "2" * 32)
    assert [one.column("id").to_pylist() for task in rows.tasks() for one in rows.read(task)] == [[1, 2], [3], [4]]
    assert spool.size(QUERY, EPOCH) > 0


def test_few_rows_are_carried_by_the_record_and_make_no_file(spool: Spool) -> None:
    one, two = "1" * 32, "2" * 32
    spool.make(QUERY, EPOCH)
    small = spooled(spool, one, batch(1, 2), carried=1_000)
    large = spooled(spool, two, *[batch(*range(50))] * 4, carried=1_000)
    assert (small.rows, large.carried) == (2, "")
    assert small.size <= 1_000 < large.size == spool.size(QUERY, EPOCH)
    rows = spool.rows(SINK, EPOCH, [one, two], {one: small, two: large})
    rows.verify()
    numbers = [each.column("id").to_pylist() for task in rows.tasks() for each in rows.read(task)]
    assert numbers == [[1, 2], *[list(range(50))] * 4]
    assert small.carried not in repr(small)  # rows are in no log
    with pytest.raises(SpoolDamaged, match=r"the ledger's record \(epochsink/ledger/.*\) with rows of epoch 3"):
        list(spool.rows(SINK, EPOCH, [one], {one: replace(small, crc32=7)}).read(one))


def test_rows_that_the_record_carries_are_read_also_when_no_sink_wants_a_spool_any_more(spool: Spool) -> None:
    one, two = "1" * 32, "2" * 32
    spool.make(QUERY, EPOCH)
    files = {one: spooled(spool, one, batch(1, 2), carried=1_000), two: spooled(spool, two, batch(3))}
    rows = NO_SPOOL.rows(SINK, EPOCH, [one, two], files)
    assert [each.column("id").to_pylist() for each in rows.read(one)] == [[1, 2]]
    with pytest.raises(SpoolMissing, match="spool=False"):
        list(rows.read(two))
    with pytest.raises(SpoolMissing, match="spool=False"):
        rows.verify()


def test_texts_of_few_different_characters_take_little_more_than_half_of_their_bytes_on_the_disk(spool: Spool) -> None:
    spool.make(QUERY, EPOCH)
    hexadecimal = pa.record_batch({"value": [f"{number:015x}" for number in random_numbers(10_000)]})
    assert spooled(spool, "1" * 32, hexadecimal).size < 0.65 * hexadecimal.nbytes


def test_a_large_file_goes_to_the_disk_while_it_is_written(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    spool.make(QUERY, EPOCH)
    numbers = random_numbers(1 << 20)
    spooled(spool, "1" * 32, *[batch(*numbers)] * 5)
    assert len(synced) >= 1
    rows = spool.rows(SINK, EPOCH, ["1" * 32]).read("1" * 32)
    assert [one.column("id").to_pylist() == numbers for one in rows] == [True] * 5


def test_what_the_disk_does_not_take_fails_the_task(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system tells of such an error once: an fsync afterwards would not know of it."""

    def broken(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", broken)
    spool.make(QUERY, EPOCH)
    with pytest.raises(OSError, match="Input/output error"):
        spooled(spool, "1" * 32, *[batch(*random_numbers(1 << 20))] * 5)


@pytest.mark.parametrize(("batches", "failing"), [(3, 1), (6, 1)], ids=["the last piece", "a piece before others"])
def test_no_piece_that_the_disk_did_not_take_is_passed_over(
    spool: Spool, monkeypatch: pytest.MonkeyPatch, batches: int, failing: int
) -> None:
    """Of 16 MB each, beside the writing: an error is known after the last batch, or before pieces that succeed."""
    calls: list[int] = []

    def broken_once(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == failing:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", broken_once)
    spool.make(QUERY, EPOCH)
    writer = spool.writer(Task(SINK, EPOCH, 0, "1" * 32), batch(1).schema)
    numbers = batch(*random_numbers(1 << 20))

    def write_all() -> None:
        for _ in range(batches):
            writer.write(numbers)
        writer.close()

    with pytest.raises(OSError, match="Input/output error"):
        write_all()
    assert len(calls) == failing


def test_a_writer_that_is_never_closed_keeps_no_file_open(spool: Spool) -> None:
    spool.make(QUERY, EPOCH)
    writer = spool.writer(Task(SINK, EPOCH, 0, "1" * 32), batch(1).schema)
    writer.write(batch(1))
    (path,) = map(str, Path(spool.root).rglob("*.arrow"))
    assert path in open_files()
    del writer
    gc.collect()
    assert path not in open_files()


def open_files() -> set[str]:
    """Return the paths of this process's open files."""
    return {str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.exists()}


def test_it_crosses_to_executors(spool: Spool) -> None:
    spool.make(QUERY, EPOCH)
    spooled(pickle.loads(pickle.dumps(spool)), "1" * 32, batch(1))  # noqa: S301 - our own bytes
    assert len(list(spool.rows(SINK, EPOCH, []).read("1" * 32))) == 1


def test_sinks_of_one_task_are_apart(spool: Spool) -> None:
    other = Identity(QUERY, "other", 1)
    spool.make(QUERY, EPOCH)
    spooled(spool, "1" * 32, batch(1))
    spooled(spool, "1" * 32, batch(2), sink=other)
    assert next(iter(spool.rows(other, EPOCH, []).read("1" * 32))).column("id").to_pylist() == [2]


def test_a_late_task_of_a_finished_epoch_fails(spool: Spool) -> None:
    spool.make(QUERY, EPOCH)
    spool.drop(QUERY, EPOCH)
    with pytest.raises(OSError, match="No such file"):
        spooled(spool, "1" * 32, batch(1))
    assert spool.attempts(QUERY) == []


def test_what_is_gone_is_named(spool: Spool) -> None:
    spool.make(QUERY, EPOCH)
    with pytest.raises(SpoolMissing, match="epoch 3"):
        list(spool.rows(SINK, EPOCH, []).read("1" * 32))
    spool.drop(QUERY, EPOCH)
    spool.drop(QUERY, EPOCH)
    with pytest.raises(SpoolMissing, match="epoch 3"):
        list(spool.rows(SINK, EPOCH, []).read("1" * 32))


def changed(data: bytes) -> bytes:
    return data[:-20] + bytes([data[-20] ^ 1]) + data[-19:]


def cut_between_batches(data: bytes) -> bytes:
    """Cut off the last batch, and end the stream: Arrow finds nothing amiss."""
    with pa.ipc.open_stream(data) as stream:
        batches = list(stream)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema) as shorter:
        for one in batches[:-1]:
            shorter.write_batch(one)
    return bytes(sink.getvalue())


def cut_in_a_batch(data: bytes) -> bytes:
    return data[:-100]


def cut_in_the_schema(data: bytes) -> bytes:
    return data[:100]


@pytest.mark.parametrize("alter", [changed, cut_between_batches, cut_in_a_batch, cut_in_the_schema])
@pytest.mark.parametrize("read_bytes", [1 << 20, 1000])
def test_a_damaged_file_yields_no_row_and_is_named(
    spool: Spool, monkeypatch: pytest.MonkeyPatch, alter: Callable[[bytes], bytes], read_bytes: int
) -> None:
    """Whether it is read into memory at once, or is too large for that."""
    monkeypatch.setattr(spool_module, "_READ_BYTES", read_bytes)
    spool.make(QUERY, EPOCH)
    task = "1" * 32
    files = {task: spooled(spool, task, batch(*range(500)), batch(*range(500, 1000)))}
    rows = spool.rows(SINK, EPOCH, [task], files)
    rows.verify()
    assert [len(one) for one in rows.read(task)] == [500, 500]
    path = next(p for p in Path(spool.root).rglob("*.arrow"))
    path.write_bytes(alter(path.read_bytes()))
    for look in (rows.verify, lambda: next(rows.read(task))):
        with pytest.raises(SpoolDamaged, match=f"{path}.*{files[task].size} bytes with the checksum"):
            look()


def test_the_rows_read_are_as_many_as_recorded(spool: Spool) -> None:
    spool.make(QUERY, EPOCH)
    task = "1" * 32
    files = {task: replace(spooled(spool, task, batch(1, 2)), rows=3)}
    with pytest.raises(SpoolDamaged, match="3 rows, and holds 2 rows"):
        list(spool.rows(SINK, EPOCH, [task], files).read(task))


@pytest.mark.parametrize("carried", [0, 1 << 20])
def test_rows_of_another_format_are_refused_by_the_name_of_who_wrote_them(
    spool: Spool, monkeypatch: pytest.MonkeyPatch, carried: int
) -> None:
    spool.make(QUERY, EPOCH)
    task = "1" * 32
    with monkeypatch.context() as newer:
        newer.setattr(spool_module, "FORMAT", "2")
        newer.setattr(spool_module, "__version__", "2.3.0")
        files = {task: spooled(spool, task, batch(1, 2), carried=carried)}
    with pytest.raises(SpoolDamaged, match=r"epoch 3.* format version 2; epochsink 2\.3\.0 wrote it"):
        list(spool.rows(SINK, EPOCH, [task], files).read(task))


def test_rows_that_say_no_format_are_refused(spool: Spool) -> None:
    spool.make(QUERY, EPOCH)
    spooled(spool, "1" * 32, batch(1))
    path = next(Path(spool.root).rglob("*.arrow"))
    with pa.ipc.new_stream(str(path), batch(1).schema) as stream:
        stream.write_batch(batch(1))
    with pytest.raises(SpoolDamaged, match="format version unknown"):
        list(spool.rows(SINK, EPOCH, ["1" * 32]).read("1" * 32))


def test_attempts_are_those_of_the_query(spool: Spool) -> None:
    again = Epoch(3, "b" * 32)
    for query, epoch in ((QUERY, EPOCH), (QUERY, again), ("other", EPOCH)):
        spool.make(query, epoch)
    assert sorted(spool.attempts(QUERY), key=lambda epoch: epoch.attempt) == [EPOCH, again]
    assert spool.attempts("nobody") == []
    spool.drop(QUERY, EPOCH)
    assert spool.attempts(QUERY) == [again]
    assert spool.attempts("other") == [EPOCH]


def test_nobody_else_may_read(spool: Spool) -> None:
    spool.make(QUERY, EPOCH)
    mode = (Path(spool.root) / QUERY).stat().st_mode
    assert stat.S_IMODE(mode) == 0o700


def test_the_rights_of_a_folder_that_the_user_gives_for_the_spool_stay_as_they_are(tmp_path: Path) -> None:
    """Others may have files there; a query's own folder is closed, also one that an earlier version left open."""
    shared = tmp_path / "shared"
    (shared / QUERY).mkdir(parents=True)
    for folder in (shared, shared / QUERY):
        folder.chmod(0o755)
    Spool(str(shared)).make(QUERY, EPOCH)
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in (shared, shared / QUERY)] == [0o755, 0o700]


def test_file_uris_are_local(tmp_path: Path) -> None:
    spool = Spool.beside(f"file://{tmp_path}/with%20space/")
    spool.make(QUERY, EPOCH)
    spooled(spool, "1" * 32, batch(1))
    assert (tmp_path / "with space" / "epochsink" / "spool" / QUERY).is_dir()


def test_an_unknown_place_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="ftp://"):
        Spool("ftp://host/spool").check()


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.binary(max_size=9), st.text(max_size=9), st.none() | st.integers(-9, 9)), min_size=1),
        min_size=1,
        max_size=4,
    )
)
def test_any_rows_survive(tmp_path_factory: pytest.TempPathFactory, batches: list[list[tuple[object, ...]]]) -> None:
    spool = Spool(str(tmp_path_factory.mktemp("spool")))
    schema = pa.schema([("b", pa.binary()), ("t", pa.string()), ("n", pa.int64())])
    written = [
        pa.RecordBatch.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], schema=schema)
        for rows in batches
    ]
    spool.make(QUERY, EPOCH)
    spooled(spool, "1" * 32, *written)
    assert list(spool.rows(SINK, EPOCH, []).read("1" * 32)) == written
