"""One query with two sinks whose checkpoint is on a store like HDFS or S3, with Spark's part played by hand."""

from __future__ import annotations

import json
import uuid
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from epochsink.protocol.checkpoint import Checkpoint
from epochsink.protocol.coordinator import Coordinator, Plan
from epochsink.protocol.ledger import SUMMARISED_AFTER, Ledger
from epochsink.sink import Keeping, WriterContext, participants_of
from epochsink.spark.write_task import Answer, WriteJob, WriteOrder, is_one_for_all
from epochsink.testing import LocalSink

if TYPE_CHECKING:
    from pathlib import Path

    from epochsink.protocol.spool import Spool
    from epochsink.protocol.storage import Storage
    from epochsink.sink import Epoch, SpoolFile

QUERY = "5f0c4a50-2f54-4d0e-9a40-6e33d6a1f001"


class StoredQuery:
    """A checkpoint in ``files`` with a ``spool``; the sinks are folders on this machine."""

    def __init__(self, files: Storage, spool: Spool, folder: Path) -> None:
        self.files = files
        self.spool = spool
        self.sinks = {name: LocalSink(folder / name) for name in ("table", "topic")}
        self.files.create("metadata", json.dumps({"id": QUERY}).encode())

    def driver(self, summarised_after: int = SUMMARISED_AFTER) -> Coordinator:
        """Return a driver, which has recovered."""
        made = Coordinator(
            query_id=QUERY,
            ledger=Ledger(self.files, uuid.uuid4().hex, summarised_after=summarised_after),
            checkpoint=Checkpoint(self.files),
            spool=self.spool,
            participants=participants_of(self.sinks),
        )
        made.recover()
        return made

    def run(self, epochs: int, *, lose: int = -1, summarised_after: int = SUMMARISED_AFTER) -> None:
        """Be one run of the query, up to an epoch; once epoch ``lose`` is decided, both targets lose what is prepared.

        Epoch N has the rows 10 N to 10 N + 9.
        """
        driver = self.driver(summarised_after)
        for number in range(Checkpoint(self.files).newest_decided() + 1, epochs):
            self.prepare(driver, number, *range(10 * number, 10 * number + 10))
            self.decide(number)
            if number == lose:
                for sink in self.sinks.values():
                    sink.abort_prepared()
            assert driver.commit_decided()
        driver.drain()

    def prepare(self, driver: Coordinator, number: int, *ids: int) -> None:
        """Play foreachBatch for an epoch, which is planned once and for all."""
        self.files.create(f"offsets/{number}", f'v1\n{{"batchWatermarkMs":0}}\n{{"t":{number}}}'.encode())
        if driver.settle(number) is Plan.RUN_FOR_STATE:
            return
        epoch = driver.begin(number)
        written: dict[str, list[Any]] = {name: [] for name in self.sinks}
        spooled: dict[str, dict[str, SpoolFile]] = {name: {} for name in self.sinks}
        for answer in self._task(driver, epoch, ids):
            assert answer.spooled is not None
            written[answer.sink].append((answer.task, answer.committable))
            spooled[answer.sink][answer.task] = answer.spooled
        driver.record(epoch, written, spooled)

    def _task(self, driver: Coordinator, epoch: Epoch, ids: tuple[int, ...]) -> list[Answer]:
        """Be Spark's one task: what executors run, on the same rows for each sink."""
        identities = {name: driver.identity(name) for name in self.sinks}
        rows = pa.StructArray.from_arrays([pa.array(ids, pa.int64())], ["id"])
        batch = pa.RecordBatch.from_arrays([rows for _ in self.sinks], list(self.sinks))
        if is_one_for_all(self.sinks):
            batch = pa.RecordBatch.from_struct_array(rows)
        # by turns, the record carries what is spooled, and files do
        contexts = dict.fromkeys(self.sinks, WriterContext(Keeping.IN_SPOOL))
        order = WriteOrder(epoch, contexts, epoch.number % 2 * 1_000_000)
        job = WriteJob(self.sinks, identities, self.spool)
        return [Answer.from_json(row["answer"]) for rows in job.write(order, [batch], 0) for row in rows.to_pylist()]

    def decide(self, number: int) -> None:
        """Write commits/N, as Spark does last."""
        self.files.create(f"commits/{number}", b'v1\n{"nextBatchWatermarkMs":0}')

    def forget(self, folder: str, number: int) -> None:
        """Remove offsets/N or commits/N, as an older copy of the checkpoint would lack it."""
        self.files.remove_many([f"{folder}/{number}"])

    def values(self) -> list[int]:
        """Return the visible rows, the same in both sinks."""
        table, topic = (sorted(row["id"] for row in sink.rows()) for sink in self.sinks.values())
        assert table == topic
        return table

    def remains(self) -> list[str]:
        """Return what is prepared and invisible, and what is in the spool."""
        prepared = [name for sink in self.sinks.values() for name in sink.prepared()]
        return prepared + [str(attempt) for attempt in self.spool.attempts(QUERY)]
