"""Open a checkpoint folder without a JVM: a local or mounted folder by POSIX, an object store by its own client."""

from __future__ import annotations

import getpass
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlparse

from epochsink.errors import ConfigurationError
from epochsink.protocol.checkpoint import OpenCheckpoint
from epochsink.protocol.spool import Spool
from epochsink.protocol.storage import LocalStorage, Storage, is_object_store
from epochsink.protocol.store_failure import unwritable
from epochsink.spark.store_options import store_options

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True, slots=True)
class CheckpointLocation:
    """Where a checkpoint is, and how to reach it. Picklable: tasks open it too."""

    location: str
    options: str
    spool: Spool

    def open(self) -> OpenCheckpoint:
        """Open the files. Raises `ConfigurationError` if the folder cannot be used."""
        return OpenCheckpoint(self._files(), self.location, self.spool)

    def _files(self) -> Storage:
        if is_object_store(self.location):
            # imported here: a checkpoint in a folder needs no client
            from epochsink.protocol.object_storage import open_checkpoint_files  # noqa: PLC0415 - see above

            return open_checkpoint_files(self.location, self.options)
        local = Path(self.location)
        if local.exists() and not (local.is_dir() and os.access(local, os.W_OK | os.X_OK)):
            raise ConfigurationError(
                f"checkpoint={self.location!r} is not a folder that user id {os.geteuid()} may write",
                hint=unwritable(local),
            )
        return LocalStorage(local)


def location_of(session: SparkSession, checkpoint: str) -> str:
    """Return where a checkpoint folder is: a path for a local file system, else a URI.

    Raises `ConfigurationError` for what only Spark's JVM can read.
    """
    del session
    place = urlparse(checkpoint)
    if is_object_store(checkpoint):
        return checkpoint.rstrip("/")
    if place.scheme not in ("", "file"):
        raise ConfigurationError(
            f"checkpoint={checkpoint!r}: Spark Connect has no way to {place.scheme}:// but through Spark's "
            "JVM, which it cannot call",
            hint="put the checkpoint on an object store (s3a://, gs://, abfss://), or in a folder mounted on the "
            "hosts of driver and executors, or run the pipeline with classic PySpark",
        )
    path = Path(unquote(place.path) if place.scheme else checkpoint)
    if not path.is_absolute():
        raise ConfigurationError(
            f"checkpoint={checkpoint!r} is a relative path, which is a different place for the client of a Spark "
            "Connect session and for its server",
            hint="give an absolute path or a URI",
        )
    # Spark has normalised it too
    return os.path.normpath(path)


def place_of(
    session: SparkSession, checkpoint: str, storage_options: Mapping[str, Any], spool: str | None
) -> CheckpointLocation:
    """Return a checkpoint's place; nothing is opened yet. Raises `ConfigurationError`.

    ``storage_options`` replace what the session's settings say of an object store.
    """
    location = location_of(session, checkpoint)

    def setting(name: str) -> str | None:
        return session.conf.get(name, None) or session.conf.get(f"spark.hadoop.{name}", None)

    def options(place: str) -> str:
        return store_options(setting, getpass.getuser, place, storage_options)

    spools = Spool.beside(location, options(location)) if spool is None else Spool(spool, options(spool))
    return CheckpointLocation(location, options(location), spools)
