"""The contract, held by the production's participants over servers in memory and by the public in-memory sink."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from elasticsearch_rig import DONE, WithLedger

from epochsink.protocol.spool import Spool
from epochsink.sink import Epoch, Identity, Rows, Task
from epochsink.testing import LocalSink
from epochsink.testing.sink_contract import SinkContract
from epochsink.testing.sink_rig import OneSink, damage
from simulation.invariants import newest_rows
from simulation.readers import Row
from simulation.sinks import KINDS, SimulatedSink, participants
from simulation.steps import at_once
from simulation.storage import MemorySpool, spool_name
from simulation.world import OTHER, World

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from epochsink.sink import Committable, Participant, SpoolFile


class MemoryRig:
    """A sink of the simulation, without its scheduler."""

    keeps_order = False

    def __init__(self, letter: str) -> None:
        self.letter = letter
        self.world = World(letter)
        self.spool = MemorySpool(self.world, at_once)
        self.loses = letter in "KPST"
        self.origins: dict[str, dict[str, Any]] = {}

    def identity(self, query: str, generation: int) -> Identity:
        if query not in self.origins:
            self.origins[query] = dict(self._participant().open(Identity(query, self.letter)).origin)
        return Identity(query, self.letter, generation, self.origins[query])

    def _sink(self) -> SimulatedSink:
        return KINDS[self.letter](self.world, at_once)

    def _participant(self) -> Participant:
        (participant,) = participants({self.letter: self._sink()})
        return participant

    def open(self, query: str, generation: int) -> OneSink:
        opened = (WithLedger if self.letter == "E" else OneSink)(self._participant())
        opened.open(self.identity(query, generation))
        return opened

    def write(
        self, query: str, generation: int, epoch: Epoch, partition: int, rows: list[int]
    ) -> tuple[str, Committable]:
        task = Task(self.identity(query, generation), epoch, partition, uuid.uuid4().hex)
        tuples = [Row(query, epoch.number, number, epoch.attempt) for number in rows]
        self.spool.make(query, epoch)
        sink = self._sink()
        sink.participant({self.letter: sink}).open(task.identity)
        writer = sink.begin(task)
        writer.write(tuples)
        self.spool.write(query, epoch, spool_name(self.letter, task.uuid), tuples)
        self.world.readers.decided.add((query, epoch.number))
        return task.uuid, writer.prepare()

    def rows(self, query: str, epoch: Epoch, tasks: Sequence[str]) -> Rows:
        return self.spool.rows(self.identity(query, 1), epoch, tasks)

    def drop_spool(self, query: str, epoch: Epoch) -> None:
        self.spool.drop(query, epoch)

    def damage_spool(self, query: str, epoch: Epoch, task: str) -> None:
        del self.world.spool[query, epoch.number, epoch.attempt][spool_name(self.letter, task)]

    def visible(self) -> list[int]:
        assert not self.world.readers.anomalies
        return sorted(row.source for row in newest_rows(self.world, self.letter))

    def in_order(self) -> list[list[int]]:
        raise NotImplementedError

    def lose_prepared(self) -> None:
        self.world.brokers.time_out()
        for target in self.world.postgres.values():
            target.roll_back_all()
            target.staging.clear()

    def leftovers(self) -> list[str]:
        found = [name for name, _ in self.world.brokers.open_ids()]
        for target in self.world.postgres.values():
            found += [*target.prepared, *map(str, target.staging)]
        return found


class FolderRig:
    """The public in-memory sink."""

    loses = keeps_order = True

    def __init__(self, folder: Path) -> None:
        self.sink = LocalSink(folder / "sink", keeps_order=True)
        self.spool = Spool(str(folder / "spool"))
        self.files: dict[str, SpoolFile] = {}

    def open(self, query: str, generation: int) -> OneSink:
        opened = OneSink.of(self.sink)
        opened.open(Identity(query, "sink", generation))
        return opened

    def write(
        self, query: str, generation: int, epoch: Epoch, partition: int, rows: list[int]
    ) -> tuple[str, Committable]:
        task = Task(Identity(query, "sink", generation), epoch, partition, uuid.uuid4().hex)
        batch = pa.RecordBatch.from_pydict({"id": rows})
        writer = self.sink.writer(task)
        writer.write(batch)
        self.spool.make(query, epoch)
        spooled = self.spool.writer(task, batch.schema)
        spooled.write(batch)
        self.files[task.uuid] = spooled.close()
        return task.uuid, writer.prepare()

    def rows(self, query: str, epoch: Epoch, tasks: Sequence[str]) -> Rows:
        return self.spool.rows(Identity(query, "sink"), epoch, tasks, self.files)

    def drop_spool(self, query: str, epoch: Epoch) -> None:
        self.spool.drop(query, epoch)

    def damage_spool(self, query: str, epoch: Epoch, task: str) -> None:
        damage(self.spool, query, epoch, task)

    def visible(self) -> list[int]:
        return sorted(row["id"] for row in self.sink.rows())

    def in_order(self) -> list[list[int]]:
        return [[row["id"] for row in self.sink.rows()]]

    def lose_prepared(self) -> None:
        self.sink.abort_prepared()

    def leftovers(self) -> list[str]:
        return self.sink.prepared()


class TestInMemoryServers(SinkContract):
    """What the simulation is run with, but for sinks of which two share a database, and one with keys for its rows."""

    @pytest.fixture(params=sorted(KINDS.keys() - {"F", *OTHER, *OTHER.values()}))
    def rig(self, request: pytest.FixtureRequest) -> MemoryRig:
        DONE.clear()  # the sink of each case has the same name
        return MemoryRig(request.param)


class TestInMemorySink(SinkContract):
    """The sink for users' tests."""

    @pytest.fixture
    def rig(self, tmp_path: Path) -> FolderRig:
        return FolderRig(tmp_path)
