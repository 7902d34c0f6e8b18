"""Where the spool's files lie: a mounted folder, an object store, or HDFS. Used by the driver and by executors."""

from __future__ import annotations

import json
import os
import shutil
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import unquote, urlparse

import pyarrow as pa

from epochsink.errors import ConfigurationError
from epochsink.protocol.storage import sync_folder

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

_SYNC_BYTES: Final = 16 << 20

_OBJECT_SCHEMES: Final = ("s3", "s3a", "s3n", "gs", "abfs", "abfss", "az")


class Output(Protocol):
    """A file that is being written."""

    def write(self, data: Any) -> object:
        """Append the bytes of a buffer. Raises OSError."""

    def close(self) -> None:
        """Finish the file and make it durable. Raises OSError."""


class SpoolFiles(Protocol):
    """Folders of files; all paths are absolute in their place. Every method may raise OSError."""

    def check(self) -> None:
        """Raise OSError if the place does not answer."""

    def create(self, path: str) -> Output:
        """Begin a file. Where a folder is more than part of a name, it must exist."""

    def open(self, path: str) -> pa.NativeFile:
        """Open a file for reading; FileNotFoundError if it is not there."""

    def make_folder(self, root: str, name: str) -> None:
        """Make a folder below a root, and the root; nobody but this user may enter the root."""

    def remove_folder(self, path: str, names: Sequence[str] | None = None) -> None:
        """Remove a folder with all that is in it; no error if it does not exist.

        Where a folder is only a part of names, and ``names`` are known: those of its files.
        """

    def folders(self, path: str) -> list[str]:
        """Return the names of the folders in a folder; none if it does not exist."""

    def size(self, path: str) -> int:
        """Return how many bytes the files of a folder hold together; 0 if it does not exist."""


def is_object_store(place: str) -> bool:
    """Whether a path or URI is one of an object store that this package has a client for."""
    return urlparse(place).scheme in _OBJECT_SCHEMES


def open_files(root: str, options: str) -> tuple[SpoolFiles, str]:
    """Return the files at a path or URI, and the path of that place among them. Raises `ConfigurationError`.

    ``options`` is the JSON of what the place needs to be reached (see `epochsink.spark.store_options`).
    """
    place = urlparse(root)
    if place.scheme in ("", "file"):
        return LocalFiles(), unquote(place.path) if place.scheme else root
    if is_object_store(root):
        # here, not above: executors load only what they use
        from epochsink.protocol.object_storage import ObjectFiles, open_store  # noqa: PLC0415 - see above

        return ObjectFiles(open_store(root, options)), ""
    if place.scheme == "hdfs":
        from epochsink.protocol.webhdfs import WebHdfs  # noqa: PLC0415 - likewise

        return WebHdfs(**json.loads(options)), unquote(place.path)
    raise ConfigurationError(
        f"the spool cannot be kept at {root!r}: there is no client for {place.scheme}:// in executors",
        hint="give spool= a place that driver and executors share: a mounted folder, s3a://, gs://, abfss:// or hdfs://",
    )


class LocalFiles:
    """A local or mounted POSIX file system."""

    def check(self) -> None:
        """Have nobody to ask."""

    def create(self, path: str) -> LocalOutput:
        """Begin a file, which is on the disk when it is closed."""
        return LocalOutput(path)

    def open(self, path: str) -> pa.NativeFile:
        """Open a file."""
        return pa.OSFile(path, "rb")

    def make_folder(self, root: str, name: str) -> None:
        """Make a folder; rows are the user's data: nobody else on this machine may read them."""
        Path(root, name).mkdir(parents=True, exist_ok=True)
        Path(root).chmod(0o700)

    def remove_folder(self, path: str, names: Sequence[str] | None = None) -> None:
        """Remove a folder and its files."""
        del names
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            return

    def folders(self, path: str) -> list[str]:
        """Return the names of the folders in a folder."""
        try:
            return [entry.name for entry in Path(path).iterdir()]
        except FileNotFoundError:
            return []

    def size(self, path: str) -> int:
        """Return the bytes in a folder."""
        try:
            return sum(entry.stat().st_size for entry in Path(path).iterdir())
        except FileNotFoundError:
            return 0


class LocalOutput:
    """A file that is brought to the disk beside the writing of it, so that the last fsync finds little left to do."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file = pa.OSFile(path, "wb")
        self._descriptor = os.open(path, os.O_RDONLY)
        # a task that fails closes nothing
        self._release = weakref.finalize(self, os.close, self._descriptor)
        self._thread = ThreadPoolExecutor(1)
        self._syncing: Future[None] | None = None
        self._waiting = 0

    def write(self, data: Any) -> None:
        """Append bytes. Raises OSError if the disk did not take those before."""
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
        sync_folder(Path(self._path).parent)

    def _check(self) -> None:
        # the system tells a descriptor of an error once: what the thread was told counts for the file
        if self._syncing is not None:
            self._syncing.result()
