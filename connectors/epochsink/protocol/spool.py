"""A durable copy of an epoch's rows (Arrow IPC), for replay and for redo.

One file for each sink and task attempt, in a folder for each attempt at an epoch:

    <root>/<query id>/<epoch>-<attempt>/<sink key>-<task>.arrow

The driver makes that folder before the write job and removes it when the epoch is done; tasks never make one, so
a late task of a finished epoch fails instead of leaving rows behind. Executors write through ``pyarrow.fs``: a
local path, ``s3://``, ``gs://``, ``abfs://`` or ``hdfs://``; it has to be a place that driver and executors share.
"""

from __future__ import annotations

import io
import os
import re
import weakref
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlparse

import pyarrow as pa
from pyarrow import fs

from epochsink.errors import ConfigurationError, SpoolDamaged, SpoolMissing
from epochsink.identity import identity_key
from epochsink.protocol.storage import sync_folder
from epochsink.sink import Epoch, SpoolFile

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from concurrent.futures import Future

    from epochsink.sink import Identity, Task


@dataclass(frozen=True, slots=True)
class Spool:
    """Where spooled rows live. Picklable: it crosses to the executors. Every method may raise OSError."""

    root: str

    @classmethod
    def beside(cls, checkpoint: str) -> Spool:
        """Return the spool inside a checkpoint folder, given as a path or URI of any Hadoop file system."""
        return cls(f"{checkpoint.rstrip('/')}/epochsink/spool")

    def check(self) -> None:
        """Raise `ConfigurationError` if pyarrow has no file system for this place."""
        self._open()

    def writer(self, task: Task, schema: pa.Schema) -> SpoolWriter:
        """Open the file of one sink and task attempt."""
        filesystem, root = self._open()
        folder = f"{root}/{_folder(task.identity.query_id, task.epoch)}"
        path = f"{folder}/{_file(task.identity, task.uuid)}"
        return SpoolWriter(filesystem, path, schema)

    def rows(
        self,
        identity: Identity,
        epoch: Epoch,
        tasks: Sequence[str],
        files: Mapping[str, SpoolFile] = MappingProxyType({}),
    ) -> SpooledRows:
        """Return the rows that accepted tasks have spooled for a sink; ``files`` is what is recorded of them."""
        return SpooledRows(self, identity, epoch, tuple(tasks), files)

    def make(self, query_id: str, epoch: Epoch) -> None:
        """Make the folder for an attempt at an epoch."""
        filesystem, root = self._open()
        filesystem.create_dir(f"{root}/{_folder(query_id, epoch)}", recursive=True)
        if isinstance(filesystem, fs.LocalFileSystem):
            # rows are the user's data: nobody else on this machine may read them
            Path(root).chmod(0o700)

    def drop(self, query_id: str, epoch: Epoch) -> None:
        """Remove all that an attempt at an epoch has spooled."""
        self._remove(_folder(query_id, epoch))

    def attempts(self, query_id: str) -> list[Epoch]:
        """Return the attempts at epochs of a query that have a folder, in any order."""
        filesystem, root = self._open()
        selector = fs.FileSelector(f"{root}/{query_id}", allow_not_found=True)
        found = (re.fullmatch(_ATTEMPT, info.base_name) for info in filesystem.get_file_info(selector))
        return [Epoch(int(name[1]), name[2]) for name in found if name]

    def size(self, query_id: str, epoch: Epoch) -> int:
        """Return how many bytes an attempt at an epoch has spooled; 0 if it has no folder."""
        filesystem, root = self._open()
        selector = fs.FileSelector(f"{root}/{_folder(query_id, epoch)}", allow_not_found=True)
        return sum(info.size or 0 for info in filesystem.get_file_info(selector))

    def _remove(self, folder: str) -> None:
        filesystem, root = self._open()
        try:
            filesystem.delete_dir(f"{root}/{folder}")
        except FileNotFoundError:
            return

    def _open(self) -> tuple[fs.FileSystem, str]:
        return _filesystem(self.root)


@dataclass(frozen=True, slots=True)
class NoSpool:
    """Stands for the spool where no sink wants one, at a place that pyarrow could not open."""

    def writer(self, task: Task, schema: pa.Schema) -> SpoolWriter:
        """Raise AssertionError: no sink asks."""
        raise AssertionError((task, schema))

    def rows(
        self, identity: Identity, epoch: Epoch, tasks: Sequence[str], files: Mapping[str, SpoolFile]
    ) -> UnspooledRows:
        """Return rows that cannot be read."""
        del files
        return UnspooledRows(identity, epoch, tuple(tasks))

    def make(self, query_id: str, epoch: Epoch) -> None:
        """Do nothing."""

    def drop(self, query_id: str, epoch: Epoch) -> None:
        """Do nothing."""

    def attempts(self, query_id: str) -> list[Epoch]:
        """Return none."""
        del query_id
        return []


@dataclass(frozen=True, slots=True)
class UnspooledRows:
    """The rows of one sink in one recorded epoch, of which no copy was kept."""

    identity: Identity
    epoch: Epoch
    accepted: tuple[str, ...]

    def tasks(self) -> Sequence[str]:
        """Return the uuids of the accepted tasks that had rows."""
        return self.accepted

    def read(self, task: str) -> Iterator[pa.RecordBatch]:
        """Raise `SpoolMissing`."""
        raise _missing(self.identity, self.epoch, task, "spool=False")

    def verify(self) -> None:
        """Raise `SpoolMissing` if there is any row."""
        for task in self.accepted:
            self.read(task)


class SpoolWriter:
    """Writes one task's rows of one sink; durable when `close` returns."""

    def __init__(self, filesystem: fs.FileSystem, path: str, schema: pa.Schema) -> None:
        self._path = path
        self._sink = _Checksummed(filesystem.open_output_stream(path))
        self._stream = pa.ipc.new_stream(self._sink, schema)
        self._rows = 0
        self._disk = _Disk(path) if isinstance(filesystem, fs.LocalFileSystem) else None

    def write(self, batch: pa.RecordBatch) -> None:
        """Append a record batch."""
        self._stream.write_batch(batch)
        self._rows += batch.num_rows
        if self._disk is not None:
            self._disk.added(batch.nbytes)

    def close(self) -> SpoolFile:
        """Finish the file and make it durable; return what it holds."""
        self._stream.close()
        self._sink.close()
        if self._disk is not None:
            self._disk.sync()
            sync_folder(Path(self._path).parent)
        return SpoolFile(self._rows, self._sink.size, self._sink.crc32)


class _Checksummed(io.RawIOBase):
    """Passes on what is written, and sums it up: what the file has to hold, whatever the disk makes of it."""

    def __init__(self, sink: pa.NativeFile) -> None:
        self._sink = sink
        self.size = 0
        self.crc32 = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        written = len(data)
        self.crc32 = zlib.crc32(data, self.crc32)
        self.size += written
        self._sink.write(data)
        return written

    def close(self) -> None:
        self._sink.close()
        super().close()


class _Disk:
    """Brings a local file to the disk beside the writing of it, so that the last fsync finds little left to do."""

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_RDONLY)
        # a task that fails closes nothing
        self._release = weakref.finalize(self, os.close, self._descriptor)
        self._thread = ThreadPoolExecutor(1)
        self._syncing: Future[None] | None = None
        self._waiting = 0

    def added(self, size: int) -> None:
        """Take in how many bytes were written. Raises OSError if the disk did not take those before."""
        self._waiting += size
        if self._waiting < _SYNC_BYTES or (self._syncing is not None and not self._syncing.done()):
            return
        self._check()
        self._waiting = 0
        self._syncing = self._thread.submit(os.fdatasync, self._descriptor)

    def sync(self) -> None:
        """Make all of the file durable. Raises OSError."""
        try:
            self._check()
            os.fsync(self._descriptor)
        finally:
            self._thread.shutdown()
            self._release()

    def _check(self) -> None:
        # the system tells a descriptor of an error once: what the thread was told counts for the file
        if self._syncing is not None:
            self._syncing.result()


@dataclass(frozen=True, slots=True)
class SpooledRows:
    """The rows of one sink in one recorded epoch (see `epochsink.sink.Rows`)."""

    spool: Spool
    identity: Identity
    epoch: Epoch
    accepted: tuple[str, ...]
    files: Mapping[str, SpoolFile]

    def tasks(self) -> Sequence[str]:
        """Return the uuids of the accepted tasks that had rows."""
        return self.accepted

    def read(self, task: str) -> Iterator[pa.RecordBatch]:
        """Yield the record batches of one task. Raises `SpoolMissing`, `SpoolDamaged`."""
        found = 0
        try:
            with self._verified(task) as source, pa.ipc.open_stream(source) as stream:
                for batch in stream:
                    found += batch.num_rows
                    yield batch
        except pa.ArrowInvalid as broken:
            raise self._damaged(task, "rows as Arrow writes them", str(broken)) from broken
        recorded = self.files.get(task)
        if recorded is not None and recorded.rows != found:
            raise self._damaged(task, f"{recorded.rows} rows", f"{found} rows")

    def verify(self) -> None:
        """Compare every task's file with what is recorded of it. Raises `SpoolMissing`, `SpoolDamaged`."""
        for task in self.accepted:
            self._verified(task).close()

    def _verified(self, task: str) -> pa.NativeFile:
        """Open a task's file, whose bytes are those that its writer wrote: nothing reads rows out of others.

        A small file is read once, into memory; a large one is read to its end, and then again.
        """
        recorded = self.files.get(task)
        if recorded is None:
            return self._open(task)
        size, crc32, small = 0, 0, b""
        with self._open(task) as source:
            while data := source.read(_READ_BYTES):
                size, crc32, small = size + len(data), zlib.crc32(data, crc32), data
        if (size, crc32) != (recorded.size, recorded.crc32):
            expected = f"{recorded.size} bytes with the checksum {recorded.crc32:08x}"
            raise self._damaged(task, expected, f"{size} bytes with {crc32:08x}")
        return pa.BufferReader(small) if size == len(small) else self._open(task)

    def _open(self, task: str) -> pa.NativeFile:
        filesystem, path = self._path(task)
        try:
            return filesystem.open_input_stream(path)
        except FileNotFoundError as gone:
            raise _missing(self.identity, self.epoch, task, gone) from gone

    def _path(self, task: str) -> tuple[fs.FileSystem, str]:
        filesystem, root = _filesystem(self.spool.root)
        return filesystem, f"{root}/{_folder(self.identity.query_id, self.epoch)}/{_file(self.identity, task)}"

    def _damaged(self, task: str, expected: str, found: str) -> SpoolDamaged:
        return SpoolDamaged(
            f"the spool file {self._path(task)[1]} of epoch {self.epoch.number}, sink '{self.identity.sink}', was cut "
            f"or changed: it was written with {expected}, and holds {found}; none of its rows is applied",
            hint="restore the file from a copy and start again; without one see 'epochsink status', then "
            "'epochsink resolve'",
        )


def _missing(identity: Identity, epoch: Epoch, task: str, why: object) -> SpoolMissing:
    return SpoolMissing(
        f"the spool of epoch {epoch.number}, sink '{identity.sink}', task {task} cannot be read: {why}",
        hint="if spool=False was set, or the folder was cleaned, this copy is gone: see "
        "'epochsink status', then 'epochsink resolve'",
    )


_SYNC_BYTES: Final = 16 << 20
_READ_BYTES: Final = 32 << 20
_ATTEMPT: Final = r"(\d+)-([0-9a-f]{32})"


def _folder(query_id: str, epoch: Epoch) -> str:
    return f"{query_id}/{epoch.number}-{epoch.attempt}"


def _file(identity: Identity, task: str) -> str:
    return f"{identity_key(identity)}-{task}.arrow"


def _filesystem(root: str) -> tuple[fs.FileSystem, str]:
    scheme = urlparse(root).scheme
    if not scheme:
        return fs.LocalFileSystem(), root
    if scheme == "file":
        return fs.LocalFileSystem(), unquote(urlparse(root).path)
    # Hadoop's names of the S3 connectors mean the same store
    uri = re.sub(r"^s3[an]://", "s3://", root)
    try:
        opened: tuple[Any, str] = fs.FileSystem.from_uri(uri)
    except (ValueError, OSError, NotImplementedError) as unusable:
        raise ConfigurationError(
            f"spool={root!r}: pyarrow cannot open this place ({unusable})",
            hint="give spool= a path or URI that driver and executors share and pyarrow.fs can open: "
            "a mounted folder, s3://, gs://, abfs:// or hdfs://",
        ) from unusable
    return opened
