"""Open a checkpoint folder wherever Spark can keep one: a local folder, an object store, any Hadoop file system.

Local folders are used by POSIX calls (`epochsink.protocol.storage.LocalStorage`): Hadoop's local file system starts
processes and takes fifty times as long.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import PySparkException

from epochsink.errors import ConfigurationError
from epochsink.protocol.checkpoint import OpenCheckpoint
from epochsink.protocol.object_storage import open_checkpoint_files
from epochsink.protocol.spool import Spool
from epochsink.protocol.storage import LocalStorage, Storage, beside, is_object_store
from epochsink.protocol.store_failure import unwritable
from epochsink.spark.classic.compat import gateway_of, hadoop_configuration_of, jvm_of
from epochsink.spark.store_options import store_options

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_SOON_COMPLETE: Final = {
    "dfs.client.block.write.locateFollowingBlock.initial.delay.ms": "10",
    "dfs.client.block.write.locateFollowingBlock.retries": "11",
}
"""How soon the HDFS client asks again whether a file is complete. It often asks the NameNode before the DataNode has
reported the block, and then waits 400 ms by default. Each wait is twice as long as the one before, so that the longest
wait in all stays about the default."""


def location_of(session: SparkSession, checkpoint: str) -> str:
    """Return where Spark finds a checkpoint folder: a path for a local file system, else a URI.

    Asks no file system for files. Raises `ConfigurationError` if Spark has no file system for it.
    """
    return _text(_resolved(session, checkpoint)[1])


def open_checkpoint(
    session: SparkSession,
    checkpoint: str,
    storage_options: Mapping[str, Any] = MappingProxyType({}),
    spool: str | None = None,
) -> OpenCheckpoint:
    """Open a checkpoint folder, and its spool: beside the ledger if ``spool`` names no other place.

    ``storage_options`` replace what the session's Hadoop settings say of an object store. Raises `ConfigurationError`
    if the folder cannot be used. Whether the spool can be used is not tried.
    """
    files, location = _open_files(session, checkpoint, storage_options)
    options = _store_options(session, spool or location, storage_options)
    return OpenCheckpoint(files, location, Spool.beside(location, options) if spool is None else Spool(spool, options))


def _open_files(session: SparkSession, checkpoint: str, storage_options: Mapping[str, Any]) -> tuple[Storage, str]:
    system, path = _resolved(session, checkpoint)
    location = _text(path)
    if system is None:
        # the store itself, not Hadoop's file system over it, whose rename copies and deletes
        return open_checkpoint_files(location, _store_options(session, location, storage_options)), location
    with _unusable(checkpoint):
        is_file = system.exists(path) and not system.getFileStatus(path).isDirectory()
    if is_file:
        raise ConfigurationError(f"checkpoint={checkpoint!r} is a file", hint="give a folder, which may not exist yet")
    if not _is_local(path):
        return HadoopStorage(session, location), location
    local = Path(location)
    if local.exists() and not os.access(local, os.W_OK | os.X_OK):
        raise ConfigurationError(
            f"checkpoint={checkpoint!r} may not be written by user id {os.geteuid()}",
            hint=unwritable(local),
        )
    return LocalStorage(local), location


def _store_options(session: SparkSession, place: str, given: Mapping[str, Any]) -> str:
    jvm, _ = jvm_of(session)
    configuration = hadoop_configuration_of(session)

    def setting(name: str) -> str | None:
        # unlike get(), this looks into credential providers too
        secret = configuration.getPassword(name)
        return None if secret is None else "".join(secret).strip()

    def user() -> str:
        return str(jvm.org.apache.hadoop.security.UserGroupInformation.getCurrentUser().getShortUserName())

    return store_options(setting, user, place, given)


def _resolved(session: SparkSession, checkpoint: str) -> tuple[Any, Any]:
    """Return Hadoop's file system for a folder, None for an object store, and its path with scheme."""
    jvm, _ = jvm_of(session)
    hadoop = jvm.org.apache.hadoop.fs
    configuration = hadoop_configuration_of(session)
    with _unusable(checkpoint):
        path = hadoop.Path(checkpoint)
        absolute = path.makeQualified(hadoop.FileSystem.getDefaultUri(configuration), hadoop.Path("/"))
        if is_object_store(str(absolute.toString())):
            return None, absolute
        system = path.getFileSystem(configuration)
        return system, path.makeQualified(system.getUri(), system.getWorkingDirectory())


def _is_local(path: Any) -> bool:
    return bool(path.toUri().getScheme() == "file")


def _text(path: Any) -> str:
    return str(Path(path.toUri().getPath()) if _is_local(path) else path.toString())


@contextmanager
def _unusable(checkpoint: str) -> Iterator[None]:
    try:
        yield
    except (Py4JError, PySparkException) as failure:
        raise ConfigurationError(
            f"checkpoint={checkpoint!r} cannot be used: {first_line(failure)}",
            hint="give a folder that Spark itself can use as checkpointLocation; for an object store, add its "
            "Hadoop connector to spark.jars.packages",
        ) from failure


class HadoopStorage(Storage):
    """Files below one root of any Hadoop file system (see `epochsink.protocol.storage.Storage`).

    `create` rests on ``FileContext.rename`` refusing an existing target, as Spark's own checkpoint does.
    """

    def __init__(self, session: SparkSession, root: str) -> None:
        self._jvm, _ = jvm_of(session)
        self._root = root.rstrip("/")
        configuration = hadoop_configuration_of(session)
        path = self._path("")
        self._system = path.getFileSystem(configuration)
        for name, value in _SOON_COMPLETE.items():
            configuration.set(name, value)
        # unlike a FileSystem, which all of the JVM shares, it has these settings for itself
        self._context = self._jvm.org.apache.hadoop.fs.FileContext.getFileContext(path.toUri(), configuration)
        options = self._jvm.org.apache.hadoop.fs.Options
        new_array = gateway_of(session).new_array
        self._never_overwrite = new_array(options.Rename, 1)
        self._never_overwrite[0] = options.Rename.NONE
        self._with_folders = new_array(options.CreateOpts, 1)
        self._with_folders[0] = options.CreateOpts.createParent()
        self._new = self._jvm.java.util.EnumSet.of(self._jvm.org.apache.hadoop.fs.CreateFlag.CREATE)

    def create(self, name: str, data: bytes) -> bool:
        """Write a temporary file and rename it, which fails if the name exists."""
        folder, _, last = name.rpartition("/")
        temporary = self._path(f"{folder}/.{last}.{uuid.uuid4().hex}.tmp")
        with _as_oserror():
            stream = self._context.create(temporary, self._new, self._with_folders)
            stream.write(bytearray(data))
            stream.close()
            try:
                self._context.rename(temporary, self._path(name), self._never_overwrite)
            except Py4JJavaError as refused:
                self._system.delete(temporary, False)  # noqa: FBT003 - Java's recursive flag
                if _is(refused, "FileAlreadyExistsException"):
                    return False
                raise
        return True

    def read(self, name: str) -> bytes | None:
        path = self._path(name)
        with _as_oserror():
            # Most reads are for files that do not exist yet: the next entry, the next commit. To open them would make
            # PySpark translate Java's error: forty calls into the JVM, which take longer than the NameNode's answer.
            if not self._system.exists(path):
                return None
            try:
                stream = self._system.open(path)
            except Py4JJavaError as refused:
                if _is(refused, "FileNotFoundException"):
                    return None
                raise
            try:
                return bytes(self._jvm.org.apache.commons.io.IOUtils.toByteArray(stream))
            finally:
                stream.close()

    def read_many(self, names: Sequence[str]) -> list[bytes | None]:
        return beside(self.read, names)

    def names(self, folder: str) -> list[str]:
        with _as_oserror():
            try:
                listed = self._system.listStatus(self._path(folder))
            except Py4JJavaError as refused:
                if _is(refused, "FileNotFoundException"):
                    return []
                raise
            if len(listed) == 0:
                return []
            # one call for the whole list: a call for each name takes a hundred times as long
            paths = self._jvm.org.apache.hadoop.fs.FileUtil.stat2Paths(listed)
            text = str(self._jvm.scala.runtime.ScalaRunTime.stringOf(paths))
            parent = f"{paths[0].getParent().toString()}/"
        return text.removeprefix(f"Array({parent}").removesuffix(")").split(f", {parent}")

    def remove_many(self, names: Sequence[str]) -> None:
        """Delete several files, sixteen at a time."""
        with _as_oserror():
            beside(lambda name: self._system.delete(self._path(name), False), names)  # noqa: FBT003 - Java's recursive flag

    def make_durable(self, name: str) -> None:
        """Do nothing: the store itself makes its files durable."""

    def _path(self, name: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(f"{self._root}/{name}")


@contextmanager
def _as_oserror() -> Iterator[None]:
    try:
        yield
    except (Py4JError, PySparkException) as failure:
        raise OSError(first_line(failure)) from failure


def _is(failure: Py4JJavaError, name: str) -> bool:
    return str(failure.java_exception.getClass().getName()).endswith(name)


def first_line(failure: Py4JError | PySparkException) -> str:
    """Return Java's message without its stack trace."""
    cause = getattr(failure, "java_exception", None)
    return str(cause.toString() if cause is not None else failure).partition("\n")[0]
