"""A query with two sinks whose tables refer to each other, Spark's part played by hand; killed where a test says."""

from __future__ import annotations

import os
import signal
import uuid
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from epochsink.postgres import Postgres
from epochsink.protocol.checkpoint import Checkpoint
from epochsink.protocol.coordinator import Coordinator, Plan
from epochsink.protocol.ledger import Ledger
from epochsink.protocol.ledger_entries import Done
from epochsink.protocol.spool import Spool
from epochsink.protocol.storage import LocalStorage
from epochsink.sink import Task, participants_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from epochsink.sink import Committable, Epoch, Keeping, Participant, SpoolFile

QUERY: Final = "6f1ed002-ab5d-4ddc-9f4d-0123456789ab"
Rows = list[dict[str, Any]]


@dataclass
class FamilyTables:
    """One query: its checkpoint, and the options of its sinks by name. Crosses to processes that are to be killed."""

    folder: str
    sinks: dict[str, dict[str, Any]]
    types: dict[str, dict[str, str]]
    made: dict[str, Postgres] = field(default_factory=dict)
    participants: list[Participant] = field(default_factory=list)

    def driver(self) -> Coordinator:
        """Return a driver's coordinator, recovered, its sinks checked."""
        files = LocalStorage(Path(self.folder))
        self.close()
        self.made = {name: Postgres(**options) for name, options in self.sinks.items()}
        self.participants = participants_of(self.made)
        for participant in self.participants:
            for name in participant.members:
                found = participant.check(name, self._batch(name, []).schema)
                assert found == [], found
        made = Coordinator(
            query_id=QUERY,
            ledger=Ledger(files, uuid.uuid4().hex),
            checkpoint=Checkpoint(files),
            spool=self.spool,
            participants=self.participants,
            location="family",
        )
        made.recover()
        return made

    def close(self) -> None:
        """Close the sessions of the newest driver."""
        for participant in self.participants:
            participant.close()

    @property
    def spool(self) -> Spool:
        """The query's spool."""
        return Spool.beside(self.folder)

    def plan(self, number: int) -> None:
        """Write offsets/N, as Spark does first."""
        LocalStorage(Path(self.folder)).create(
            f"offsets/{number}", f'v1\n{{"batchWatermarkMs":0}}\n{{"offset":{number}}}'.encode()
        )

    def decide(self, number: int) -> None:
        """Write commits/N, as Spark does last."""
        LocalStorage(Path(self.folder)).create(f"commits/{number}", b'v1\n{"nextBatchWatermarkMs":0}')

    def prepare(self, driver: Coordinator, number: int, rows: Mapping[str, Rows]) -> None:
        """Play foreachBatch for an epoch: two tasks for each sink, or nothing if it is recorded."""
        self.plan(number)
        if driver.settle(number) is not Plan.WRITE:
            return
        epoch = driver.begin(number)
        written: dict[str, list[tuple[str, Committable]]] = {}
        spooled: dict[str, dict[str, SpoolFile]] = {}
        for name, given in rows.items():
            for partition, share in enumerate(filter(None, (given[::2], given[1::2]))):
                task, committable, file = self._task(driver, name, epoch, partition, share)
                written.setdefault(name, []).append((task, committable))
                spooled.setdefault(name, {})[task] = file
        driver.record(epoch, written, spooled)

    def run(self, driver: Coordinator, number: int, rows: Mapping[str, Rows]) -> None:
        """Take an epoch through all its steps."""
        self.prepare(driver, number, rows)
        self.decide(number)
        assert driver.commit_decided()

    def _task(
        self, driver: Coordinator, name: str, epoch: Epoch, partition: int, rows: Rows
    ) -> tuple[str, Committable, SpoolFile]:
        batch = self._batch(name, rows)
        keeping = self.keeping(name, epoch, batch.schema)
        task = Task(driver.identity(name), epoch, partition, uuid.uuid4().hex, keeping)
        spool = self.spool.writer(task, batch.schema)
        writer = self.made[name].writer(task)
        spool.write(batch)
        writer.write(batch)
        return task.uuid, writer.prepare(), spool.close()

    def keeping(self, name: str, epoch: Epoch, schema: pa.Schema) -> Keeping:
        """Return what the sink's participant says of an attempt."""
        (participant,) = (one for one in self.participants if name in one.members)
        contexts = participant.begin(epoch, dict.fromkeys(participant.members, schema))
        return contexts[name].keeping

    def _batch(self, name: str, rows: Rows) -> pa.RecordBatch:
        schema = pa.schema([(column, pa.type_for_alias(kind)) for column, kind in self.types[name].items()])
        if rows and "epochsink_delete" in rows[0]:
            schema = schema.append(pa.field("epochsink_delete", pa.bool_()))
        return pa.RecordBatch.from_pylist(rows, schema)

    def ledger(self) -> list[dict[str, Any]]:
        """Return each sink's parts, epoch by epoch, as they stand in the ledger."""
        history = Ledger(LocalStorage(Path(self.folder)), uuid.uuid4().hex).read()
        return [{name: share.parts for name, share in one.shares.items()} for one in history.epochs.values()]

    def say_done(self, number: int) -> None:
        """Record an epoch as done, whatever the target holds."""
        ledger = Ledger(LocalStorage(Path(self.folder)), uuid.uuid4().hex)
        ledger.take(QUERY, {}, -1)
        ledger.append(Done(number))

    def play(self, epochs: Sequence[Mapping[str, Rows]], *, drains: bool = False) -> None:
        """Run all epochs that are not decided, then end. ``drains``: the last is committed only then."""
        driver = self.driver()
        first = Checkpoint(LocalStorage(Path(self.folder))).newest_decided() + 1
        for number in range(first, len(epochs)):
            self.prepare(driver, number, epochs[number])
            self.decide(number)
            if not drains or number < len(epochs) - 1:
                assert driver.commit_decided()
        driver.drain()
        self.close()

    def killed_at(self, point: str, epochs: Sequence[Mapping[str, Rows]]) -> bool:
        """Play in a process that dies by SIGKILL at a failpoint; return whether it came there."""
        context = get_context("forkserver")
        context.set_forkserver_preload(["family_tables"])
        process = context.Process(target=_play, args=(self.folder, self.sinks, self.types, point, epochs))
        process.start()
        process.join(60)
        assert process.exitcode in (0, -signal.SIGKILL), f"{point}: {process.exitcode}"
        return process.exitcode != 0


def _play(
    folder: str, sinks: dict[str, Any], types: dict[str, Any], point: str, epochs: Sequence[Mapping[str, Rows]]
) -> None:
    os.environ["EPOCHSINK_FAILPOINT"] = point
    FamilyTables(folder, sinks, types).play(epochs, drains=point.startswith("coordinator.drain"))
