"""Files in an object store (S3 and compatibles, Google Cloud Storage, Azure), through the library ``obstore``.

A name is given once by the store itself: a conditional create (If-None-Match, generation match) of which only one can
succeed. Nothing is renamed: on an object store that is a copy and a delete, with room for two drivers in between.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlparse

import obstore
import pyarrow as pa
from obstore.exceptions import AlreadyExistsError, BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import AzureStore, GCSStore, S3Store

from epochsink.errors import ConfigurationError
from epochsink.protocol.storage import Output, SpoolStorage, Storage, beside

if TYPE_CHECKING:
    from obstore import ReadableFile, WritableFile
    from obstore.store import ObjectStore

_AT_ONCE_BYTES: Final = 32 << 20
_RETRY_FOR: Final = timedelta(seconds=30)


@lru_cache(maxsize=16)
def open_store(url: str, options: str = "{}") -> ObjectStore:
    """Return the store below a URL; one for each place and process, so that its connections are used again.

    ``options`` is a JSON object: the store's settings by obstore's names, and ``client_options`` for its HTTP client.
    Nothing is requested yet. Raises `ConfigurationError`.
    """
    place = urlparse(url)
    prefix = unquote(place.path).strip("/") or None
    settings: dict[str, Any] = json.loads(options)
    client: Any = {**_client(settings), **settings.pop("client_options", {})}
    retry: Any = {"retry_timeout": _RETRY_FOR}
    try:
        if place.scheme in ("s3", "s3a", "s3n"):
            return S3Store(place.netloc, prefix=prefix, client_options=client, retry_config=retry, **settings)
        if place.scheme == "gs":
            return GCSStore(place.netloc, prefix=prefix, client_options=client, retry_config=retry, **settings)
        # abfss://container@account.dfs.core.windows.net/path
        container, _, host = place.netloc.partition("@")
        account = {"account_name": host.partition(".")[0]} if host else {}
        merged = {**account, **settings}
        return AzureStore(container, prefix=prefix, client_options=client, retry_config=retry, **merged)
    except (BaseError, ValueError, TypeError) as unusable:
        raise ConfigurationError(
            f"the object store at {url} cannot be opened: {unusable}",
            hint="give its settings in the Spark session (fs.s3a.*, fs.azure.*, fs.gs.*) or as storage_options=",
        ) from unusable


def _client(settings: dict[str, Any]) -> dict[str, Any]:
    # an endpoint without TLS was given on purpose
    return {"allow_http": True} if str(settings.get("endpoint", "")).startswith("http://") else {}


def open_checkpoint_files(url: str, options: str) -> ObjectStorage:
    """Return the files of a checkpoint, after a request to its store. Raises `ConfigurationError`."""
    files = ObjectStorage(open_store(url, options))
    try:
        # a store is opened without a request: wrong credentials show in the first one
        files.read("metadata")
    except OSError as unusable:
        raise ConfigurationError(
            f"checkpoint={url!r} cannot be used: {unusable}",
            hint="set endpoint, region and credentials in the Spark session (fs.s3a.*, fs.azure.*, fs.gs.*), or give "
            "them to ExactlyOnce as storage_options=",
        ) from unusable
    return files


class ObjectStorage(Storage, SpoolStorage):
    """Files below a prefix of an object store (see `epochsink.protocol.storage`)."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def create(self, name: str, data: bytes) -> bool:
        """Put an object unless the name exists; the store decides which of two requests was first."""
        with _as_oserror():
            try:
                obstore.put(self._store, name, data, mode="create")
            except AlreadyExistsError:
                # a request that the client repeats because an answer was lost finds its own object
                return self.read(name) == data
        return True

    def read(self, name: str) -> bytes | None:
        with _as_oserror():
            try:
                return obstore.get(self._store, name).bytes().to_bytes()
            except FileNotFoundError:
                return None

    def read_many(self, names: Sequence[str]) -> list[bytes | None]:
        """Return the bytes of several files, sixteen at a time."""
        return beside(self.read, names)

    def names(self, folder: str) -> list[str]:
        """Return the next parts of the names below a prefix."""
        with _as_oserror():
            listing = obstore.list_with_delimiter(self._store, folder)
        # Hadoop marks a folder by an object of its name
        paths = [each["path"] for each in listing["objects"] if each["path"] != folder]
        return [path.rpartition("/")[2] for path in [*paths, *listing["common_prefixes"]]]

    def remove_many(self, names: Sequence[str]) -> None:
        """Delete several objects, as many by one request as the store takes."""
        with _as_oserror():
            try:
                obstore.delete(self._store, list(names))
            except FileNotFoundError:
                # some stores raise this for one of many, and do not tell whether the others are deleted
                for name in names:
                    with suppress(FileNotFoundError):
                        obstore.delete(self._store, name)

    def make_durable(self, name: str) -> None:
        """Do nothing: an object that the store has taken is as durable as the store makes it."""

    def write(self, name: str) -> ObjectOutput:
        """Begin an object, which exists from its close on."""
        with _as_oserror():
            return ObjectOutput(obstore.open_writer(self._store, name))

    def open(self, name: str) -> pa.NativeFile:
        """Open an object: a small one by one request, a large one piece by piece."""
        with _as_oserror():
            answer = obstore.get(self._store, name)
            if answer.meta["size"] <= _AT_ONCE_BYTES:
                return pa.BufferReader(pa.py_buffer(answer.bytes()))
            return pa.PythonFile(ObjectInput(obstore.open_reader(self._store, name)), mode="r")

    def make_folder(self, name: str) -> None:
        """Do nothing: there are no folders. So a late task's file is not refused; the next sweep removes it."""

    def remove_folder(self, name: str, files: Sequence[str] | None = None) -> None:
        """Delete all objects below a prefix, or those known there, as many by one request as the store takes."""
        if files is not None:
            self.remove_many([f"{name}/{file}" for file in files])
            return
        with _as_oserror():
            for page in obstore.list(self._store, name):
                self.remove_many([each["path"] for each in page])

    def size(self, folder: str) -> int:
        """Return the bytes below a prefix."""
        with _as_oserror():
            return sum(each["size"] for page in obstore.list(self._store, folder) for each in page)


class ObjectInput:
    """A large object that is read piece by piece, as Arrow wants a Python file to be."""

    closed = False

    def __init__(self, reader: ReadableFile) -> None:
        self._reader = reader

    def read(self, size: int) -> bytes:
        """Return the next bytes."""
        with _as_oserror():
            return self._reader.read(size).to_bytes()

    def close(self) -> None:
        """End the requests."""
        self.closed = True


class ObjectOutput(Output):
    """An object that is being uploaded."""

    def __init__(self, writer: WritableFile) -> None:
        self._writer = writer

    def write(self, data: Any) -> None:
        """Append bytes."""
        with _as_oserror():
            # Arrow's buffers have signed bytes, which obstore refuses
            self._writer.write(memoryview(data).cast("B"))

    def close(self) -> None:
        """Finish the upload: the store keeps it from here on."""
        with _as_oserror():
            self._writer.close()


@contextmanager
def _as_oserror() -> Iterator[None]:
    try:
        yield
    except (PermissionDeniedError, UnauthenticatedError) as refused:
        raise PermissionError(f"the object store refuses: {_first_line(refused)}") from refused
    except BaseError as failure:
        raise OSError(f"the object store failed: {_first_line(failure)}") from failure


def _first_line(failure: BaseException) -> str:
    # further lines are obstore's own account of the same error
    return str(failure).strip().partition("\n")[0]
