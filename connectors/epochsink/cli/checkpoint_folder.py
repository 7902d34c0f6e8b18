"""Open a checkpoint folder without its query, and a local one without Spark."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlparse

from epochsink.errors import ConfigurationError
from epochsink.identity import pipeline_name
from epochsink.protocol.checkpoint import Checkpoint, OpenCheckpoint
from epochsink.protocol.ledger_entries import Take
from epochsink.protocol.spool import Spool
from epochsink.protocol.storage import LocalStorage, refuse_credentials
from epochsink.sink import Identity, Participant

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True, slots=True)
class QueryCheckpoint(OpenCheckpoint):
    """The opened checkpoint of a query that has run on it, the query's id, and how its sinks were named."""

    query_id: str
    reference: str = ""
    """MODULE:ATTRIBUTE of the sinks, "" if none were named: for the commands of what is logged."""

    @property
    def checkpoint(self) -> Checkpoint:
        """What Spark has decided."""
        return Checkpoint(self.files)

    def identity(self, sink: str, take: Take) -> Identity:
        """Return who a sink is in the generation of a take."""
        return Identity(self.query_id, sink, take.generation, take.origins[sink], pipeline_name(self.location))

    def open(self, participant: Participant, take: Take) -> None:
        """Give a participant the identities of its sinks in the generation of a take."""
        for name in participant.members:
            participant.open(self.identity(name, take))


@contextmanager
def open_place(
    checkpoint: str,
    spool: str | None = None,
    storage_options: Mapping[str, Any] = MappingProxyType({}),
    own: str | None = None,
) -> Iterator[QueryCheckpoint]:
    """Open a checkpoint folder, given as a path or URI; ``spool`` and ``storage_options`` as in `ExactlyOnce`.

    A path without scheme is a local folder. Any other file system is reached through the active Spark session. If there
    is none, one is started, configured by spark-defaults.conf, and ends with the context. Raises `ConfigurationError`
    if no query has run there, or if ``own``, the checkpoint that the sinks belong to, is another folder.
    """
    with open_files(checkpoint, spool, storage_options, own) as opened:
        query_id = Checkpoint(opened.files).query_id()
        if query_id is None:
            raise ConfigurationError(
                f"{opened.location} is not the checkpoint of a streaming query: it has no file 'metadata'",
                hint="give the query's checkpointLocation; with its scheme (hdfs://, s3a://) if it is not on "
                "this machine",
            )
        yield QueryCheckpoint(opened.files, opened.location, opened.spool, query_id)


@contextmanager
def open_files(
    checkpoint: str,
    spool: str | None = None,
    storage_options: Mapping[str, Any] = MappingProxyType({}),
    own: str | None = None,
) -> Iterator[OpenCheckpoint]:
    """Open a checkpoint folder as `open_place` does, even if no query has run there."""
    path = _local_path(checkpoint)
    if path is not None:
        if own is not None:
            _refuse_other(path, _local_path(own) or own)
        yield OpenCheckpoint(LocalStorage(Path(path)), path, Spool.beside(path) if spool is None else Spool(spool))
        return
    refuse_credentials("CHECKPOINT", checkpoint)
    # only here, so that looking at a local checkpoint does not take a JVM's start
    from epochsink.spark.classic.hadoop_storage import location_of, open_checkpoint  # noqa: PLC0415 - see above

    with session() as spark:
        opened = open_checkpoint(spark, checkpoint, storage_options, spool)
        if own is not None:
            _refuse_other(opened.location, location_of(spark, own))
        yield opened


def _local_path(checkpoint: str) -> str | None:
    """Return the path of a local folder, None for another file system."""
    parsed = urlparse(checkpoint)
    if parsed.scheme not in ("", "file"):
        return None
    return str(Path(unquote(parsed.path) if parsed.scheme else checkpoint).absolute())


def _refuse_other(location: str, own: str) -> None:
    if own != location:
        raise ConfigurationError(
            f"the sinks belong to checkpoint {own}, and this is {location}",
            hint="give the query's own checkpoint; if it was moved, name a dict of sinks in --sinks",
        )


@contextmanager
def session() -> Iterator[SparkSession]:
    """Yield the active Spark session, such as one that the user's module has started; else one that ends here."""
    try:
        from pyspark.sql import SparkSession  # noqa: PLC0415 - see above
    except ModuleNotFoundError as missing:
        raise ConfigurationError(
            f"this needs a Spark session, and the module {missing.name} is not installed",
            hint='pip install "epochsink[spark]"',
        ) from missing
    active = SparkSession.getActiveSession()
    used = active or SparkSession.builder.appName("epochsink").getOrCreate()
    try:
        yield used
    finally:
        if active is None:
            used.stop()
