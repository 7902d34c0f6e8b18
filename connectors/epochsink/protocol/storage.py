"""A folder of small files in which a name is given once: what ledger and checkpoint stand on.

`LocalStorage` serves ``file:`` checkpoints with POSIX calls; `epochsink.spark.hadoop_storage.HadoopStorage` serves
every other place where Spark can keep a checkpoint.
"""

from __future__ import annotations

import os
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from epochsink.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


_RACES: Final = 3
_AT_ONCE: Final = 16
_Answer = TypeVar("_Answer")


class Storage(Protocol):
    """Small files below one root, named by relative paths with ``/``. Raises OSError on I/O failure.

    A call that raises may or may not have been carried out.
    """

    def create(self, name: str, data: bytes) -> bool:
        """Make a file, whole and durable, unless the name exists; return whether it was made."""

    def read(self, name: str) -> bytes | None:
        """Return a file's bytes, or None if it does not exist."""

    def read_many(self, names: Sequence[str]) -> list[bytes | None]:
        """Return what `read` would for each name, in their order, some at a time where the store is far away."""

    def exists(self, name: str) -> bool:
        """Return whether a file exists."""

    def names(self, folder: str) -> list[str]:
        """Return the plain names of the files in a folder, in any order; none if it does not exist."""

    def remove(self, name: str) -> None:
        """Delete a file; no error if it does not exist."""

    def remove_many(self, names: Sequence[str]) -> None:
        """Delete several files, by one request where the store has one for that."""

    def make_durable(self, name: str) -> None:
        """Make a file that somebody else wrote outlive a power cut, as far as the store does not do so by itself."""


def refuse_unconditional_create(files: Storage, location: str) -> None:
    """Let two creates of one name race, and believe only what is seen.

    Raises `ConfigurationError` unless one of them is told that it made the file, the other that it did not, and the
    file holds what the first one wrote: without that two drivers can both append the same entry to the ledger.
    """
    with ThreadPoolExecutor(2) as pool:
        for _ in range(_RACES):
            name = f"epochsink/check-{uuid.uuid4().hex}"
            contents = [b"one", b"two"]
            try:
                made = list(pool.map(files.create, [name, name], contents))
                made.append(files.create(name, b"late"))
                kept = files.read(name)
            except OSError as unusable:
                raise ConfigurationError(
                    f"checkpoint={location!r} cannot be written: {unusable}",
                    hint="give a folder that Spark can make and write",
                ) from unusable
            finally:
                files.remove(name)
            if made.count(True) != 1 or made[2] or kept != contents[made.index(True)]:
                raise ConfigurationError(
                    f"the store at {location} does not create conditionally: of three creates of one file "
                    f"{made.count(True)} succeeded, so two drivers could both record an epoch and rows would be lost",
                    hint="put the checkpoint on a store that does: a POSIX file system, HDFS, Amazon S3, MinIO, Google "
                    "Cloud Storage or Azure; a server in between may drop the header If-None-Match",
                )


def beside(call: Callable[[str], _Answer], names: Sequence[str]) -> list[_Answer]:
    """Call for several files of a store that is far away, so that their round trips are waited for together."""
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="epochsink-store") as pool:
        return list(pool.map(call, names))


class LocalStorage:
    """Files on a local or network-mounted POSIX file system. Folders 0700, files 0600."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def create(self, name: str, data: bytes) -> bool:
        """Write a temporary file, make it durable, and link it to its name: whole or not at all."""
        target = self.root / name
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = target.parent / f".{target.name}.{uuid.uuid4().hex}.tmp"
        descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as stream:
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
        sync_folder(target.parent)
        return True

    def read(self, name: str) -> bytes | None:
        """Return a file's bytes, or None."""
        try:
            return (self.root / name).read_bytes()
        except FileNotFoundError:
            return None

    def read_many(self, names: Sequence[str]) -> list[bytes | None]:
        """Return the bytes of several files."""
        return [self.read(name) for name in names]

    def exists(self, name: str) -> bool:
        """Return whether a file exists."""
        return (self.root / name).exists()

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder."""
        try:
            return [entry.name for entry in (self.root / folder).iterdir()]
        except FileNotFoundError:
            return []

    def remove(self, name: str) -> None:
        """Delete a file."""
        (self.root / name).unlink(missing_ok=True)

    def remove_many(self, names: Sequence[str]) -> None:
        """Delete several files."""
        for name in names:
            self.remove(name)

    def make_durable(self, name: str) -> None:
        """Sync a file, the checksum that Hadoop's local file system keeps beside it, and their folder."""
        target = self.root / name
        for path in (target, target.with_name(f".{target.name}.crc"), target.parent):
            # Spark purges old files meanwhile
            with suppress(FileNotFoundError):
                sync_folder(path)


def sync_folder(folder: Path) -> None:
    """Make a folder's entries, or a file's content, durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
