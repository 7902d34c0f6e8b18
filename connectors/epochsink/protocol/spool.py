"""A durable copy of an epoch's rows (Arrow IPC), for replay and for redo.

One file for each sink and task attempt, in a folder for each attempt at an epoch:

    <root>/<query id>/<epoch>-<attempt>/<sink key>-<task>.arrow

The driver makes that folder before the write job and removes it when the epoch is done. Tasks never make one, so a
late task of a finished epoch fails and leaves no rows behind (an object store has no folders: there the next sweep
removes them). `epochsink.protocol.storage` has the places where the spool can be.

The ledger's entry carries what would be a small file, so that the epoch waits for one file of the store, not for two,
and on HDFS not for the 400 ms that a DataNode may sleep before a file is complete.

The schema's metadata names the version of the format and the version of epochsink that wrote it.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import unquote, urlparse

import pyarrow as pa

from epochsink import __version__
from epochsink.errors import ConfigurationError, SpoolDamaged, SpoolMissing, sink_option
from epochsink.protocol.storage import LocalStorage, Output, SpoolStorage, is_object_store
from epochsink.sink import Epoch, Identity, Rows, SpoolFile, Task, identity_key


def open_spool(root: str, options: str) -> SpoolStorage:
    """Return the files below a path or URI, for driver or executor. Raises `ConfigurationError`.

    ``options`` is the JSON of what the place needs to be reached (see `epochsink.spark.store_options`).
    """
    if not root:
        return _Nowhere()
    place = urlparse(root)
    if place.scheme in ("", "file"):
        return LocalStorage(Path(unquote(place.path) if place.scheme else root))
    # imported here: executors load only what they use
    if is_object_store(root):
        from epochsink.protocol.object_storage import ObjectStorage, open_store  # noqa: PLC0415 - see above

        return ObjectStorage(open_store(root, options))
    if place.scheme == "hdfs":
        from epochsink.protocol.webhdfs import WebHdfs  # noqa: PLC0415 - likewise

        return WebHdfs(root=unquote(place.path), **json.loads(options))
    raise ConfigurationError(
        f"the spool cannot be kept at {root!r}: there is no client for {place.scheme}:// in executors",
        hint="give spool= a place that driver and executors share: a mounted folder, s3a://, gs://, abfss:// or hdfs://",
    )


@dataclass(frozen=True, slots=True)
class Spool:
    """A place for spooled rows. Picklable: it is sent to the executors. Every method may raise OSError."""

    root: str
    options: str = field(default="{}", repr=False)
    """The settings of the place's client as JSON, secrets included."""
    beside_ledger: bool = False
    """Whether the ledger is in the same folder, and so may carry small files: rows stay where the user wants them."""

    @classmethod
    def beside(cls, checkpoint: str, options: str = "{}") -> Spool:
        """Return the spool inside a checkpoint folder, given as a path or URI."""
        return cls(f"{checkpoint.rstrip('/')}/epochsink/spool", options, beside_ledger=True)

    def check(self) -> None:
        """Raise `ConfigurationError` if executors have no client for this place, or it does not answer."""
        files = self._open()
        try:
            files.names("")
        except OSError as failure:
            raise ConfigurationError(
                f"the spool at {self.root} cannot be reached: {failure}",
                hint="on HDFS executors use WebHDFS, at the address of the Hadoop setting dfs.namenode.http-address "
                "(default: port 9870), without Kerberos; or give spool= another place that driver and executors share",
            ) from failure

    def writer(self, task: Task, schema: pa.Schema) -> SpoolWriter:
        """Return a writer of one sink's rows in one task attempt; up to ``task.carried`` bytes need no file."""

        def create() -> Output:
            return self._open().write(_name(task.identity, task.epoch, task.uuid))

        return SpoolWriter(create, schema, task.carried)

    def rows(
        self,
        identity: Identity,
        epoch: Epoch,
        tasks: Sequence[str],
        files: Mapping[str, SpoolFile] = MappingProxyType({}),
    ) -> SpooledRows:
        """Return the rows that accepted tasks have spooled for a sink; ``files`` is what is recorded of them."""
        return SpooledRows(self, identity, epoch, tuple(tasks), files)

    def open(self, identity: Identity, epoch: Epoch, task: str) -> pa.NativeFile:
        """Open a task's file of a sink. Raises FileNotFoundError."""
        return self._open().open(_name(identity, epoch, task))

    def make(self, query_id: str, epoch: Epoch) -> None:
        """Make the folder for an attempt at an epoch."""
        self._open().make_folder(_folder(query_id, epoch))

    def drop(self, query_id: str, epoch: Epoch, known: Sequence[tuple[Identity, str]] | None = None) -> None:
        """Remove all that an attempt at an epoch has spooled.

        ``known`` are the files of accepted tasks. An object store, which has no folders, deletes them without a
        listing, and what losing tasks have left there stays for a sweep.
        """
        names = None if known is None else [_file(identity, task) for identity, task in known]
        self._open().remove_folder(_folder(query_id, epoch), names)

    def note_retained(self, query_id: str, name: str, record: bytes) -> None:
        """Write a record of a retained epoch beside earlier ones; see `epochsink.protocol.retained`."""
        files, folder = self._open(), f"{query_id}/{_RETAINED}/{name}"
        files.make_folder(folder)
        # none is written over: HDFS refuses that, and a driver that dies in the middle would leave none
        output = files.write(f"{folder}/{max(_numbers(files, folder), default=0) + 1}.json")
        output.write(record)
        output.close()

    def retained(self, query_id: str) -> list[str]:
        """Return the names of the records of retained epochs."""
        return self._open().names(f"{query_id}/{_RETAINED}")

    def read_retained(self, query_id: str, name: str) -> Iterator[bytes]:
        """Yield the records of a retained epoch, the newest first; a driver may have died while it wrote one."""
        files, folder = self._open(), f"{query_id}/{_RETAINED}/{name}"
        for number in sorted(_numbers(files, folder), reverse=True):
            with files.open(f"{folder}/{number}.json") as file:
                # not read(): that asks for the place in the file, which a stream from a DataNode has not
                yield b"".join(iter(lambda: file.read(_READ_BYTES), b""))

    def forget_retained(self, query_id: str, name: str = "") -> None:
        """Remove the records of a retained epoch, or (no name) all of them."""
        self._open().remove_folder(f"{query_id}/{_RETAINED}/{name}".rstrip("/"))

    def attempts(self, query_id: str) -> list[Epoch]:
        """Return the attempts at epochs of a query that have a folder, in any order."""
        names = (re.fullmatch(_ATTEMPT, name) for name in self._open().names(query_id))
        return [Epoch(int(name[1]), name[2]) for name in names if name]

    def size(self, query_id: str, epoch: Epoch) -> int:
        """Return how many bytes an attempt at an epoch has spooled; 0 if it has no folder."""
        return self._open().size(_folder(query_id, epoch))

    def _open(self) -> SpoolStorage:
        return open_spool(self.root, self.options)


NO_SPOOL: Final = Spool("")
"""Stands for the spool if no sink wants one, and its place cannot be reached."""


class _Nowhere:
    """The files of `NO_SPOOL`: none. Rows that the record carries can be read: an earlier run had a spool."""

    def write(self, name: str) -> Output:
        raise AssertionError(name)

    def open(self, name: str) -> pa.NativeFile:
        del name
        raise FileNotFoundError("spool=False")

    def names(self, folder: str) -> list[str]:
        del folder
        return []

    def make_folder(self, name: str) -> None:
        pass

    def remove_folder(self, name: str, files: Sequence[str] | None = None) -> None:
        pass

    def size(self, folder: str) -> int:
        del folder
        return 0


class SpoolWriter:
    """Writes one task's rows of one sink; durable when `close` returns, or when what it returns is recorded."""

    def __init__(self, create: Callable[[], Output], schema: pa.Schema, carried: int) -> None:
        self._output = _Checksummed(create, carried)
        metadata = {**(schema.metadata or {}), _FORMAT: FORMAT, _WRITTEN_BY: __version__}
        file = pa.PythonFile(self._output, mode="w")
        self._stream = pa.ipc.new_stream(file, schema.with_metadata(metadata), options=_PACKED)
        self._rows = 0

    def write(self, batch: pa.RecordBatch) -> None:
        """Append a record batch."""
        self._stream.write_batch(batch)
        self._rows += batch.num_rows

    def close(self) -> SpoolFile:
        """Finish the file and make it durable; return what it holds."""
        self._stream.close()
        carried = base64.b64encode(self._output.finish()).decode()
        return SpoolFile(self._rows, self._output.size, self._output.crc32, carried)


class _Checksummed:
    """Writes a file, and computes size and checksum of what it has to hold, whatever the disk stores.

    The file is made only when the bytes exceed what may be carried. Arrow closes this stream when it is dropped; that
    does not finish the file, so a failed task leaves none that looks complete.
    """

    closed = False

    def __init__(self, create: Callable[[], Output], carried: int) -> None:
        self._create = create
        self._carried = carried
        self._kept = bytearray()
        self._output: Output | None = None
        self.size = 0
        self.crc32 = 0

    def write(self, data: Any) -> None:
        self.crc32 = zlib.crc32(data, self.crc32)
        self.size += len(data)
        if self.size <= self._carried:
            self._kept += data
            return
        # only now: on a remote store each file costs requests, and the driver has to remove it
        if self._output is None:
            self._output = self._create()
            if self._kept:
                self._output.write(bytes(self._kept))
                self._kept.clear()
        self._output.write(data)

    def flush(self) -> None:
        """Do nothing: no bytes are held back."""

    def close(self) -> None:
        """Leave the file as it is."""

    def finish(self) -> bytes:
        """Make the file durable; return the bytes if there is no file."""
        if self._output is not None:
            self._output.close()
        return bytes(self._kept)


@dataclass(frozen=True, slots=True)
class SpooledRows(Rows):
    """The rows of one sink in one recorded epoch (see `epochsink.sink.Rows`)."""

    spool: Spool
    identity: Identity
    epoch: Epoch
    accepted: tuple[str, ...]
    files: Mapping[str, SpoolFile]

    def tasks(self) -> Sequence[str]:
        return self.accepted

    def read(self, task: str) -> Iterator[pa.RecordBatch]:
        rows = 0
        try:
            with self._verified(task) as source, pa.ipc.open_stream(source) as stream:
                self._refuse_other_format(task, stream.schema)
                for batch in stream:
                    rows += batch.num_rows
                    yield batch
        except pa.ArrowInvalid as broken:
            raise self._damaged(task, "rows as Arrow writes them", str(broken)) from broken
        recorded = self.files.get(task)
        if recorded is not None and recorded.rows != rows:
            raise self._damaged(task, f"{recorded.rows} rows", f"{rows} rows")

    def verify(self) -> None:
        for task in self.accepted:
            self._verified(task).close()

    def _verified(self, task: str) -> pa.NativeFile:
        """Open a task's file after comparing its bytes with what its writer wrote: damaged rows are never read.

        A small file is read once, into memory; a large one is read to its end, and then again.
        """
        recorded = self.files.get(task)
        # nothing is recorded of rows that were not spooled: their file cannot be opened, which the error names
        if recorded is None:
            return self._open(task)
        # before Arrow decodes it: Arrow trusts the offsets in its input, and damaged ones could crash the driver
        size, crc32, small = 0, 0, b""
        with self._open(task) as source:
            while data := source.read(_READ_BYTES):
                size, crc32, small = size + len(data), zlib.crc32(data, crc32), data
        if (size, crc32) != (recorded.size, recorded.crc32):
            expected = f"{recorded.size} bytes with the checksum {recorded.crc32:08x}"
            raise self._damaged(task, expected, f"{size} bytes with {crc32:08x}")
        return pa.BufferReader(small) if size == len(small) else self._open(task)

    def _open(self, task: str) -> pa.NativeFile:
        recorded = self.files.get(task)
        try:
            if recorded is not None and recorded.carried:
                return pa.BufferReader(base64.b64decode(recorded.carried))
            return self.spool.open(self.identity, self.epoch, task)
        except binascii.Error as broken:
            raise self._damaged(task, "base64", str(broken)) from broken
        except FileNotFoundError as gone:
            raise SpoolMissing(
                f"the spool of epoch {self.epoch.number}, sink '{self.identity.sink}', task {task} cannot be read: "
                f"{gone}",
                hint=self._way_on("the spool folder"),
            ) from gone

    def _damaged(self, task: str, expected: str, content: str) -> SpoolDamaged:
        recorded = self.files.get(task)
        if recorded is not None and recorded.carried:
            # few rows are in the ledger itself
            place, copy = "the ledger's record (epochsink/ledger/ in the checkpoint)", "the ledger folder"
        else:
            place, copy = self._place(task), "the spool folder"
        return SpoolDamaged(
            f"{place} with rows of epoch {self.epoch.number}, sink '{self.identity.sink}', was cut or changed: "
            f"it was written with {expected}, and holds {content}; none of its rows is applied",
            hint=self._way_on(copy),
        )

    def _refuse_other_format(self, task: str, schema: pa.Schema) -> None:
        """Refuse rows that were spooled in a format that this version does not know."""
        metadata = schema.metadata or {}
        version, writer = (metadata.get(key, b"unknown").decode() for key in (_FORMAT, _WRITTEN_BY))
        if version != FORMAT:
            raise SpoolDamaged(
                f"{self._place(task)} with rows of epoch {self.epoch.number}, sink '{self.identity.sink}', has format "
                f"version {version}; epochsink {writer} wrote it, and epochsink {__version__} reads version {FORMAT} "
                "only; none of its rows is applied",
                hint=f"start the query with epochsink {writer} or a later version",
            )

    def _place(self, task: str) -> str:
        return f"the spool file {self.spool.root}/{_name(self.identity, self.epoch, task)}"

    def _way_on(self, place: str) -> str:
        number = self.epoch.number
        return (
            f"put {place} back as it was, and start again. If there is no copy (or spool=False was set), these rows "
            "are only in the source. To close the epoch without them: "
            f"epochsink resolve CHECKPOINT {number} {sink_option(self.identity.sink)} --as discard --without-rows; its "
            f"input (offsets/{number} in the checkpoint) can then be loaded by a separate query"
        )


FORMAT: Final = "1"
"""The version of the spool files' format: the one that is written, and the only one that is read."""
_FORMAT, _WRITTEN_BY = b"epochsink.format", b"epochsink.version"
_READ_BYTES: Final = 32 << 20
_PACKED: Final = pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", compression_level=1))
"""With zstd at its lowest level, which halves even hex and costs little."""
_RETAINED: Final = "retained"
_ATTEMPT: Final = r"(\d+)-([0-9a-f]{32})"


def _numbers(files: SpoolStorage, folder: str) -> list[int]:
    return [int(name.removesuffix(".json")) for name in files.names(folder)]


def _folder(query_id: str, epoch: Epoch) -> str:
    return f"{query_id}/{epoch.number}-{epoch.attempt}"


def _name(identity: Identity, epoch: Epoch, task: str) -> str:
    return f"{_folder(identity.query_id, epoch)}/{_file(identity, task)}"


def _file(identity: Identity, task: str) -> str:
    return f"{identity_key(identity)}-{task}.arrow"
