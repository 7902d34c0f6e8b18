"""A query with one Kafka sink, driven by hand over the production coordinator: for tests of one situation each."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

from epochsink.protocol.checkpoint import Checkpoint
from epochsink.protocol.coordinator import Coordinator, Plan
from epochsink.protocol.ledger import Ledger
from epochsink.sink import Task
from simulation.driver import offsets_file
from simulation.kafka_sink import KafkaSink
from simulation.readers import Row
from simulation.sinks import participants
from simulation.steps import at_once
from simulation.storage import MemoryFiles, MemorySpool, spool_name

if TYPE_CHECKING:
    from epochsink.sink import Epoch
    from simulation.world import World

QUERY = "query-1"


class Query:
    """One run of the query. Without a scheduler and without faults."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.files = MemoryFiles(world.files, at_once)
        self.spool = MemorySpool(world, at_once)
        self.sink = KafkaSink(world, at_once)
        (self.participant,) = participants({"K": self.sink})
        self.coordinator = Coordinator(
            query_id=QUERY,
            ledger=Ledger(self.files, uuid.uuid4().hex),
            checkpoint=Checkpoint(self.files),
            spool=self.spool,  # type: ignore[arg-type] # in memory
            participants=[self.participant],
        )
        self.coordinator.recover()

    def task(self, epoch: Epoch, number: int = 0, partition: int = 0) -> tuple[str, Any]:
        """Run one task attempt. Attempts of one number share a transactional id."""
        task = Task(self.coordinator.identity("K"), epoch, partition, f"{uuid.uuid4().hex[1:]}{number:x}")
        rows = [Row(QUERY, epoch.number, epoch.number + 100 * partition, epoch.attempt)]
        writer = self.sink.begin(task)
        writer.write(rows)
        if (QUERY, epoch.number, epoch.attempt) in self.world.spool:
            self.spool.write(QUERY, epoch, spool_name("K", task.uuid), rows)
        return task.uuid, writer.prepare()

    def begin(self, number: int) -> Epoch:
        """Begin an epoch."""
        self.files.create(f"offsets/{number}", offsets_file(number, number + 1))
        assert self.coordinator.settle(number) is Plan.WRITE
        return self.coordinator.begin(number)

    def epoch(self, number: int) -> None:
        """Prepare an epoch of one task."""
        epoch = self.begin(number)
        self.coordinator.record(epoch, {"K": [self.task(epoch)]})

    def decide(self, epoch: Epoch) -> None:
        """Let Spark decide, and commit."""
        self.decide_only(epoch.number)
        assert self.coordinator.commit_decided()

    def decide_only(self, number: int) -> None:
        """Let Spark decide; the commit thread has not seen it yet."""
        self.files.create(f"commits/{number}", b"v1")
        self.world.readers.decided.add((QUERY, number))

    def open_transactions(self) -> int:
        """Count what holds readers back."""
        return len(self.world.brokers.open_ids())
