"""Small streams with known epochs: one file of JSON rows is one epoch."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from folder_sink import FolderSink
from pyspark.sql import is_remote
from waiting import wait_until

from epochsink import ExactlyOnce

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from epochsink.sink import Sink
    from epochsink.spark.query_handle import ExactlyOnceQuery

SCHEMA = "id long, word string, at timestamp"
DEADLINE = 60.0


class Stream:
    """A folder of input files, a checkpoint (or the one at ``url``) and a sink, in one temporary folder."""

    def __init__(self, spark: SparkSession, folder: Path, url: str | None = None) -> None:
        self.spark = spark
        self.folder = folder
        self.input = folder / "input"
        self.input.mkdir(exist_ok=True)
        self.checkpoint = folder / "checkpoint"
        self._url = url
        self.sink = FolderSink(str(folder / "sink"))
        self._made: list[ExactlyOnce] = []
        self._files = 0

    @property
    def url(self) -> str:
        """Where the checkpoint is, as Spark is told."""
        return self._url or str(self.checkpoint)

    def put(self, ids: Iterable[int]) -> None:
        """Add one input file, which makes one epoch; a row's timestamp is its id in seconds."""
        number = self._files
        self._files += 1
        rows = [
            json.dumps({"id": i, "word": f"word {i}", "at": f"1970-01-01T00:{i // 60:02}:{i % 60:02}Z"}) for i in ids
        ]
        draft = self.folder / f"draft-{number:06}.json"
        draft.write_text("\n".join(rows))
        # a source takes files in the order of their times
        draft.rename(self.input / f"{number:06}.json")
        _set_time(self.input / f"{number:06}.json", number)

    def frame(self) -> DataFrame:
        """Return the stream: one file each micro-batch."""
        reader = self.spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1)
        return reader.json(str(self.input))

    def exactly_once(self, sinks: dict[str, Sink] | None = None, **options: Any) -> ExactlyOnce:
        """Return the object under test on this stream's checkpoint and sink."""
        chosen: dict[str, Any] = sinks or {"folder": self.sink}
        made = ExactlyOnce(checkpoint=self.url, sinks=chosen, **options)
        self._made.append(made)
        return made

    def run(self, once: ExactlyOnce | None = None, frame: DataFrame | None = None, mode: str = "append") -> ExactlyOnce:
        """Process all input that there is, and return when it is visible."""
        once = once or self.exactly_once()
        query = self.start(once, frame, mode)
        query.awaitTermination()
        return once

    def start(self, once: ExactlyOnce, frame: DataFrame | None = None, mode: str = "append") -> ExactlyOnceQuery:
        """Start a run over all input that there is."""
        chosen = self.frame() if frame is None else frame
        return once.start(chosen.writeStream.trigger(availableNow=True).outputMode(mode))

    def start_endless(self, once: ExactlyOnce) -> ExactlyOnceQuery:
        """Start a run that goes on looking for input."""
        return once.start(self.frame().writeStream.trigger(processingTime="20 milliseconds"))

    def by_hand(self, function: Callable[[DataFrame, int], None], *, endless: bool = False) -> StreamingQuery:
        """Start a query whose foreachBatch is set by hand."""
        writer: DataStreamWriter = self.frame().writeStream.foreachBatch(function)
        writer = writer.trigger(processingTime="20 milliseconds") if endless else writer.trigger(availableNow=True)
        return writer.option("checkpointLocation", self.url).start()

    def settle(self, once: ExactlyOnce) -> None:
        """Do what makes the end of a query by hand the end of its commits. Raises what stopped them."""
        if is_remote():
            once.recover(self.spark)
        else:
            once.await_committed()

    def committed(self) -> list[int]:
        """Return the epochs that the checkpoint has decided."""
        return sorted(int(path.name) for path in (self.checkpoint / "commits").glob("[0-9]*"))

    def ledger(self) -> list[dict[str, Any]]:
        """Return the ledger's entries."""
        entries = sorted((self.checkpoint / "epochsink" / "ledger").glob("[0-9]*"))
        return [json.loads(path.read_text()) for path in entries]

    def done(self) -> list[int]:
        """Return the epochs that the ledger says are done."""
        return [entry["epoch"] for entry in self.ledger() if entry["entry"] == "done"]

    def forget_commit(self, epoch: int) -> None:
        """Remove commits/N, as an older copy of the checkpoint would lack it."""
        (self.checkpoint / "commits" / str(epoch)).unlink()
        (self.checkpoint / "commits" / f".{epoch}.crc").unlink(missing_ok=True)

    def forget_offsets(self, epoch: int) -> None:
        """Remove offsets/N, and what the file source noted for it."""
        for folder in (self.checkpoint / "offsets", self.checkpoint / "sources" / "0"):
            (folder / str(epoch)).unlink()
            (folder / f".{epoch}.crc").unlink(missing_ok=True)

    def forget_state(self, epoch: int) -> None:
        """Remove the state that epoch N left, as a copy of the checkpoint made during the epoch would lack it."""
        found = [path for path in (self.checkpoint / "state").rglob(f"{epoch + 1}.*") if path.is_file()]
        assert found, f"no state of epoch {epoch}"
        for path in found:
            path.unlink()
            path.with_name(f".{path.name}.crc").unlink(missing_ok=True)

    def end(self) -> None:
        """Wait until every commit thread has ended."""
        for once in self._made:
            run = once._run
            if run is not None:
                wait_until(run.has_ended, "the commit thread ends")


class Boom(Exception):
    """Raised by `raising_after`."""


def raising_after(once: ExactlyOnce, epoch: int) -> Callable[[DataFrame, int], None]:
    """Return a foreachBatch that fails once an epoch is recorded, so that Spark never decides it."""

    def batch(frame: DataFrame, number: int) -> None:
        once(frame, number)
        if number == epoch:
            raise Boom(f"after epoch {epoch}")

    return batch


def _set_time(path: Path, number: int) -> None:
    seconds = 1_000_000_000 + number * 10
    os.utime(path, (seconds, seconds))
