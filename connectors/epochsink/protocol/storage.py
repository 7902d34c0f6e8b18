"""The stores of the ledger's and the spool's files: a mounted folder, an object store, or HDFS.

Both keep files below one root, named by relative paths with ``/``. `LocalStorage` and
`epochsink.protocol.object_storage.ObjectStorage` serve both. On HDFS the ledger is written by Hadoop's own client in
the driver's JVM (`epochsink.spark.classic.hadoop_storage.HadoopStorage`), and the spool over WebHDFS
(`epochsink.protocol.webhdfs.WebHdfs`), since executors cannot call a JVM.
"""

from __future__ import annotations

import os
import shlex
import shutil
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar
from urllib.parse import urlparse

import pyarrow as pa

from epochsink.errors import ConfigurationError
from epochsink.protocol.store_failure import remedy

_RACES: Final = 3
_AT_ONCE: Final = 16
_SYNC_BYTES: Final = 16 << 20
_OBJECT_SCHEMES: Final = ("s3", "s3a", "s3n", "gs", "abfs", "abfss", "az")
_Answer = TypeVar("_Answer")


class Storage(Protocol):
    """Small files, each name given once: the ledger's, and Spark's own in the checkpoint. Raises OSError.

    A call that raises may or may not have been carried out.
    """

    def create(self, name: str, data: bytes) -> bool:
        """Make a file, whole and durable, unless the name exists; return whether it was made."""

    def read(self, name: str) -> bytes | None:
        """Return a file's bytes, or None if it does not exist."""

    def read_many(self, names: Sequence[str]) -> list[bytes | None]:
        """Return what `read` returns for each name, in their order; some at a time if the store is remote."""

    def names(self, folder: str) -> list[str]:
        """Return the plain names of what is in a folder, in any order; none if it does not exist."""

    def remove_many(self, names: Sequence[str]) -> None:
        """Delete files, by one request if the store has one for that; no error if one does not exist."""

    def make_durable(self, name: str) -> None:
        """Make a file that Spark wrote survive a power cut, if the store does not do so by itself."""


class Output(Protocol):
    """A file that is being written."""

    def write(self, data: Any) -> object:
        """Append the bytes of a buffer. Raises OSError."""

    def close(self) -> None:
        """Finish the file and make it durable. Raises OSError."""


class SpoolStorage(Protocol):
    """Large files in folders: the spool's. Raises OSError."""

    def write(self, name: str) -> Output:
        """Begin a file. Unless a folder is only part of a name, it must exist."""

    def open(self, name: str) -> pa.NativeFile:
        """Open a file for reading; FileNotFoundError if it is not there."""

    def names(self, folder: str) -> list[str]:
        """Return the plain names of what is in a folder; none if it does not exist."""

    def make_folder(self, name: str) -> None:
        """Make a folder and those above it; only this user may enter the first one below the root."""

    def remove_folder(self, name: str, files: Sequence[str] | None = None) -> None:
        """Remove a folder with all that is in it; no error if it does not exist.

        If a folder is only part of names, and ``files`` in it are known: those.
        """

    def size(self, folder: str) -> int:
        """Return how many bytes the files of a folder hold together; 0 if it does not exist."""


def is_object_store(place: str) -> bool:
    """Whether a path or URI is one of an object store that this package has a client for."""
    return urlparse(place).scheme in _OBJECT_SCHEMES


def refuse_credentials(argument: str, place: str) -> None:
    """Raise `ConfigurationError`, which shows no part of it, if the URI of a store seems to hold credentials.

    Its first part is a bucket, and on Azure container@account: errors and logs may show it.
    """
    parsed = urlparse(place)
    azure = parsed.scheme.startswith(("abfs", "az"))
    if parsed.scheme in _OBJECT_SCHEMES and (":" in parsed.netloc or parsed.netloc.count("@") > azure):
        raise ConfigurationError(
            f"invalid {argument} (not shown, it may hold a password): the URI of an object store holds no credentials",
            hint="give them in the Spark session (fs.s3a.*, fs.azure.*, fs.gs.*), or as storage_options=",
        )


def refuse_unconditional_create(files: Storage, location: str) -> None:
    """Raise `ConfigurationError` unless the store creates conditionally, which is tried.

    Two creates of one name race. Exactly one of them must succeed, and the file must hold what that one wrote.
    Otherwise two drivers could both append the same entry to the ledger.
    """
    with ThreadPoolExecutor(2) as pool:
        for _ in range(_RACES):
            name = f"epochsink/check-{uuid.uuid4().hex}"
            contents = [b"one", b"two"]
            try:
                answers = list(pool.map(files.create, [name, name], contents))
                answers.append(files.create(name, b"late"))
                kept = files.read(name)
            except OSError as unusable:
                raise ConfigurationError(
                    f"checkpoint={location!r} cannot be written: {unusable}",
                    hint=remedy(unusable, "give a folder that Spark can make and write"),
                ) from unusable
            finally:
                files.remove_many([name])
            if answers.count(True) != 1 or answers[2] or kept != contents[answers.index(True)]:
                raise ConfigurationError(
                    f"the store at {location} does not create conditionally: of three creates of one file "
                    f"{answers.count(True)} succeeded, so two drivers could both record an epoch, and rows would be "
                    "lost",
                    hint="put the checkpoint on a store that does: a POSIX file system, HDFS, Amazon S3, MinIO, Google "
                    "Cloud Storage or Azure; a proxy may drop the header If-None-Match",
                )


def beside(call: Callable[[str], _Answer], names: Sequence[str]) -> list[_Answer]:
    """Call for several files of a remote store, so that their round trips overlap."""
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="epochsink-store") as pool:
        return list(pool.map(call, names))


class LocalStorage(Storage, SpoolStorage):
    """Files on a local or network-mounted POSIX file system. The ledger's folders are 0700, its files 0600."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def create(self, name: str, data: bytes) -> bool:
        """Write a temporary file, make it durable, and link it to its name: whole or not at all."""
        target = self.root / name
        _make_folder(target.parent, 0o700)
        temporary = target.parent / f".{target.name}.{uuid.uuid4().hex}.tmp"
        with _explained(target.parent, target.parent):
            descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as stream:
                _give_to_owner_of(target.parent, descriptor)
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            try:
                # link(2), unlike rename(2), refuses an existing name
                os.link(temporary, target)
            except FileExistsError:
                return False
            except PermissionError as refused:
                raise ConfigurationError(
                    f"the file system of {self.root} has no hard links ({refused})",
                    hint="put the checkpoint on a POSIX file system, HDFS or an object store",
                ) from refused
        finally:
            with suppress(FileNotFoundError):
                temporary.unlink()
        sync_path(target.parent)
        return True

    def read(self, name: str) -> bytes | None:
        path = self.root / name
        try:
            with _explained(path, path.parent):
                return path.read_bytes()
        except FileNotFoundError:
            return None

    def read_many(self, names: Sequence[str]) -> list[bytes | None]:
        return [self.read(name) for name in names]

    def names(self, folder: str) -> list[str]:
        return [entry.name for entry in self._entries(folder)]

    def _entries(self, folder: str) -> list[Path]:
        path = self.root / folder
        try:
            with _explained(path, path):
                return list(path.iterdir())
        except FileNotFoundError:
            return []

    def remove_many(self, names: Sequence[str]) -> None:
        for name in names:
            (self.root / name).unlink(missing_ok=True)

    def make_durable(self, name: str) -> None:
        """Sync a file, the checksum that Hadoop's local file system keeps beside it, and their folder."""
        target = self.root / name
        for path in (target, target.with_name(f".{target.name}.crc"), target.parent):
            # Spark purges old files meanwhile
            with suppress(FileNotFoundError):
                sync_path(path)

    def write(self, name: str) -> LocalOutput:
        """Begin a file, which is on the disk when it is closed."""
        return LocalOutput(self.root / name)

    def open(self, name: str) -> pa.NativeFile:
        return pa.OSFile(str(self.root / name), "rb")

    def make_folder(self, name: str) -> None:
        """Make a folder that only this user may read: rows are the user's data."""
        folder = self.root / name
        # the root may be the user's own, and have other files in it: its rights are not changed
        first = self.root / Path(name).parts[0]
        _make_folder(first, 0o700)
        _make_folder(folder.parent)
        # not durable by itself: the first file in it makes it so
        folder.mkdir(exist_ok=True)
        _give_to_owner_of(folder.parent, folder)
        # one that an earlier version made relied on the root's rights
        first.chmod(0o700)

    def remove_folder(self, name: str, files: Sequence[str] | None = None) -> None:
        del files
        with suppress(FileNotFoundError):
            shutil.rmtree(self.root / name)

    def size(self, folder: str) -> int:
        return sum(entry.stat().st_size for entry in self._entries(folder))


class LocalOutput(Output):
    """A file that is synced to the disk while it is written, so that the last fsync has little left to do."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = pa.OSFile(str(path), "wb")
        # Arrow does not give its own descriptor away; a sync through this one is of the same file
        self._descriptor = os.open(path, os.O_RDONLY)
        # a task that fails does not call close()
        self._release = weakref.finalize(self, os.close, self._descriptor)
        self._thread = ThreadPoolExecutor(1)
        self._syncing: Future[None] | None = None
        self._waiting = 0

    def write(self, data: Any) -> None:
        self._file.write(data)
        self._waiting += len(data)
        if self._waiting < _SYNC_BYTES or (self._syncing is not None and not self._syncing.done()):
            return
        self._check()
        self._waiting = 0
        self._syncing = self._thread.submit(os.fdatasync, self._descriptor)

    def close(self) -> None:
        """Make all of the file durable, and its name. Raises OSError."""
        self._file.close()
        try:
            self._check()
            os.fsync(self._descriptor)
        finally:
            self._thread.shutdown()
            self._release()
        # the folder's own name, too: the driver has made it for this attempt
        for folder in (self._path.parent, self._path.parent.parent):
            sync_path(folder)

    def _check(self) -> None:
        # the system reports an error once for each descriptor: what the thread got is the file's error
        if self._syncing is not None:
            self._syncing.result()


def _make_folder(folder: Path, mode: int = 0o777) -> None:
    """Make a folder and those above it, durably."""
    if not folder.is_dir():
        _make_folder(folder.parent)
        folder.mkdir(mode, exist_ok=True)
        _give_to_owner_of(folder.parent, folder)
        # a folder that may be written and not read cannot be synced: the user keeps it so
        with suppress(PermissionError):
            sync_path(folder.parent)


def _give_to_owner_of(folder: Path, target: Path | int) -> None:
    """Give what root makes to the owner of the folder: root may type a command for the query of another user."""
    if os.geteuid() == 0:
        owner = folder.stat()
        # a mounted folder may give root no rights
        with suppress(PermissionError):
            if isinstance(target, int):
                os.fchown(target, owner.st_uid, owner.st_gid)
            else:
                # never what a link leads to: the owner of the folder may have put one there
                os.lchown(target, owner.st_uid, owner.st_gid)


@contextmanager
def _explained(path: Path, folder: Path) -> Iterator[None]:
    """Say whose a file is that this user may not use; ``folder`` is what has to change its owner."""
    try:
        yield
    except PermissionError as refused:
        owner = "another user"
        with suppress(OSError):
            owner = f"user id {path.stat().st_uid}"
        raise ConfigurationError(
            f"{path} may not be used by user id {os.geteuid()} ({refused.strerror}): it belongs to {owner}",
            hint="a command or a query of another user may have made it. Give it to the user of the query: "
            f"chown -R {os.geteuid()} {shlex.quote(str(folder))}",
        ) from refused


def sync_path(path: Path) -> None:
    """Make a folder's entries, or a file's content, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
