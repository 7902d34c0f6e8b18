"""A checkpoint folder, opened without its query; a local one without Spark too."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlparse

from epochsink.errors import ConfigurationError
from epochsink.protocol.checkpoint import Checkpoint
from epochsink.protocol.spool import Spool
from epochsink.protocol.storage import LocalStorage

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from epochsink.protocol.storage import Storage


@dataclass(frozen=True, slots=True)
class Place:
    """One query's checkpoint: where it is, whose it is, and the spool that goes with it."""

    location: str
    files: Storage
    query_id: str
    spool: Spool

    @property
    def checkpoint(self) -> Checkpoint:
        """What Spark has decided."""
        return Checkpoint(self.files)


@contextmanager
def open_place(
    checkpoint: str, spool: str | None = None, storage_options: Mapping[str, Any] = MappingProxyType({})
) -> Iterator[Place]:
    """Open a checkpoint folder, given as a path or URI; ``spool`` and ``storage_options`` as in `ExactlyOnce`.

    A path without scheme is a local folder. Any other file system is reached through a Spark session, configured by
    spark-defaults.conf, which ends with the context. Raises `ConfigurationError` if no query has run there.
    """
    with _files_of(checkpoint, spool, storage_options) as (files, location, options):
        query_id = Checkpoint(files).query_id()
        if query_id is None:
            raise ConfigurationError(
                f"{location} is not the checkpoint of a streaming query: it has no file 'metadata'",
                hint="give the query's checkpointLocation; with its scheme (hdfs://, s3a://) if it is not on "
                "this machine",
            )
        beside = Spool.beside(location, options)
        yield Place(location, files, query_id, beside if spool is None else Spool(spool, options))


@contextmanager
def _files_of(
    checkpoint: str, spool: str | None, storage_options: Mapping[str, Any]
) -> Iterator[tuple[Storage, str, str]]:
    """Yield a checkpoint's files and location, and the options of the spool."""
    parsed = urlparse(checkpoint)
    if parsed.scheme in ("", "file"):
        path = Path(unquote(parsed.path) if parsed.scheme else checkpoint).absolute()
        yield LocalStorage(path), str(path), "{}"
        return
    # only here, so that looking at a local checkpoint does not take a JVM's start
    from pyspark.sql import SparkSession  # noqa: PLC0415 - see above

    from epochsink.spark.hadoop_storage import open_checkpoint  # noqa: PLC0415 - likewise
    from epochsink.spark.store_options import store_options  # noqa: PLC0415 - likewise

    session = SparkSession.builder.appName("epochsink").getOrCreate()
    try:
        files, location = open_checkpoint(session, checkpoint, storage_options)
        yield files, location, store_options(session, spool or location, storage_options)
    finally:
        session.stop()
