"""Tidying an idle stream: what losing tasks leave late must not hold readers back until the next batch."""

from __future__ import annotations

import threading
import uuid
from typing import Any

import pytest

from epochsink.checkpoint import Checkpoint
from epochsink.coordinator import Coordinator, Plan
from epochsink.errors import Fenced
from epochsink.ledger import Ledger
from epochsink.protocol import Epoch, Task
from simulation.driver import offsets_file
from simulation.kafka_port import KafkaPort
from simulation.steps import at_once
from simulation.storage import MemoryFiles, MemorySpool, spool_name
from simulation.world import Row, World

QUERY = "query-1"


class Query:
    """A query with one Kafka sink, driven by hand, without a scheduler and without faults."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.files = MemoryFiles(world.files, at_once)
        self.spool = MemorySpool(world, at_once)
        self.port = KafkaPort(world, at_once)
        self.coordinator = Coordinator(
            query_id=QUERY,
            ledger=Ledger(self.files, uuid.uuid4().hex),
            checkpoint=Checkpoint(self.files),
            spool=self.spool,
            sinks={"K": self.port.committer},
        )
        self.coordinator.recover()

    def task(self, epoch: Epoch, number: int = 0) -> tuple[str, Any]:
        """Run one task attempt."""
        task = Task(self.coordinator.identity("K"), epoch, 0, uuid.uuid4().hex)
        rows = [Row(QUERY, epoch.number, 0, epoch.attempt)]
        writer = self.port.begin(task, number)
        writer.write(rows)
        if (QUERY, epoch.number, epoch.attempt) in self.world.spool:
            self.spool.write(QUERY, epoch, spool_name("K", task.uuid), rows)
        return task.uuid, writer.prepare()

    def begin(self, number: int) -> Epoch:
        """Begin an epoch."""
        self.files.create(f"offsets/{number}", offsets_file(number, number + 1))
        assert self.coordinator.settle(number) is Plan.WRITE
        return self.coordinator.begin(number)

    def decide(self, epoch: Epoch) -> None:
        """Let Spark decide, and commit."""
        self.files.create(f"commits/{epoch.number}", b"v1")
        self.world.readers.decided.add((QUERY, epoch.number))
        assert self.coordinator.commit_decided()

    def open_transactions(self) -> int:
        """Count what holds readers back."""
        return sum(one.state == "Ongoing" for one in self.world.kafka.transactions.values())


@pytest.fixture
def query() -> Query:
    return Query(World("K"))


def test_a_late_loser_is_ended_while_the_stream_is_idle(query: Query) -> None:
    epoch = query.begin(0)
    query.coordinator.record(epoch, {"K": [query.task(epoch)]})
    query.decide(epoch)
    query.task(epoch, number=1)
    assert query.open_transactions() == 1
    query.coordinator.tidy()
    assert query.open_transactions() == 0


def test_an_attempt_under_way_is_left_alone(query: Query) -> None:
    epoch = query.begin(0)
    written = {"K": [query.task(epoch)]}
    query.coordinator.tidy()
    assert query.open_transactions() == 1
    query.coordinator.record(epoch, written)
    query.coordinator.tidy()
    assert query.open_transactions() == 1
    query.decide(epoch)
    assert not query.world.readers.anomalies


def test_an_attempt_that_may_be_recorded_is_left_alone(query: Query, monkeypatch: pytest.MonkeyPatch) -> None:
    """The append has raised: nobody knows, so nothing of it is ended, by this run."""
    epoch = query.begin(0)
    written = {"K": [query.task(epoch)]}

    def unknown(*_: object) -> bool:
        raise OSError("no reply")

    with monkeypatch.context() as patched:
        patched.setattr(query.files, "create", unknown)
        with pytest.raises(OSError, match="no reply"):
            query.coordinator.record(epoch, written)
    query.coordinator.tidy()
    assert query.open_transactions() == 1


def test_an_abandoned_attempt_is_tidied(query: Query) -> None:
    epoch = query.begin(0)
    query.coordinator.abandon(epoch)
    query.task(epoch)
    query.coordinator.tidy()
    assert query.open_transactions() == 0


def test_an_unreachable_target_is_no_failure(query: Query, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(_keep: object) -> list[str]:
        raise ConnectionError("broker down")

    monkeypatch.setattr(query.port, "sweep", unreachable)
    query.coordinator.tidy()
    query.coordinator.raise_failure()


def test_a_superseded_driver_learns_it_by_tidying(query: Query) -> None:
    Query(query.world)
    with pytest.raises(Fenced):
        query.coordinator.tidy()
    with pytest.raises(Fenced):
        query.coordinator.raise_failure()


def test_an_attempt_waits_for_the_tidying_to_end(query: Query, monkeypatch: pytest.MonkeyPatch) -> None:
    """With real threads: begin() returns only after the sweep, so the sweep cannot see what it writes."""
    sweeping, go_on, begun = threading.Event(), threading.Event(), threading.Event()
    sweep = query.port.sweep

    def slow(keep: Any) -> list[str]:
        sweeping.set()
        assert go_on.wait(10)
        return sweep(keep)

    query.begin(0)
    query.coordinator.abandon(Epoch(0, "0" * 32))
    monkeypatch.setattr(query.port, "sweep", slow)
    watcher = threading.Thread(target=query.coordinator.tidy)
    watcher.start()
    assert sweeping.wait(10)

    def stream() -> None:
        query.coordinator.begin(0)
        begun.set()

    other = threading.Thread(target=stream)
    other.start()
    assert not begun.wait(0.2)
    go_on.set()
    assert begun.wait(10)
    watcher.join(10)
    other.join(10)
    assert not watcher.is_alive()
