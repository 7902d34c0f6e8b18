"""A simulated driver: Spark's micro-batch loop around the real coordinator, and the commit thread.

What is real: `Coordinator`, `Ledger`, `Checkpoint`. Imitated: Spark (offsets/N, foreachBatch(N), commits/N), the
write job, `epochsink.spark.query_run` and `epochsink.protocol.commit_thread`, which need Spark.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from epochsink.errors import EpochsinkError, Fenced, PrepareFailed
from epochsink.protocol.coordinator import Coordinator, Plan
from epochsink.sink import Epoch, Task
from epochsink.spark.checkpoint import Checkpoint
from simulation.ports import PORTS
from simulation.scheduler import Condition, Process, Thread, wait
from simulation.storage import MemoryFiles, MemorySpool, QuickLedger, spool_name
from simulation.world import Row

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from epochsink.sink import Committable
    from simulation.port import PortBase
    from simulation.simulation import Simulation

SLOTS = 2
PASSING = (OSError, PrepareFailed, Fenced)
"""After these a supervisor starts the query again; other errors of ours are for the operator."""


@dataclass(frozen=True)
class Variant:
    """Which code runs: the production's, or a mutant's; and how the query is set up.

    ``in_batch`` recovers in the first foreachBatch, as without `ExactlyOnce.start` (None: as the schedule is);
    ``later_sinks`` are those of every driver but the first; ``purges`` lets Spark keep only its last two commits.
    """

    coordinator: type[Coordinator] = Coordinator
    ledger: Callable[..., Any] = QuickLedger
    checkpoint: Callable[..., Any] = Checkpoint
    ports: Mapping[str, type[PortBase]] | None = None
    spool: bool = True
    in_batch: bool | None = None
    later_sinks: str | None = None
    purges: bool = False

    def port(self, letter: str) -> type[PortBase]:
        """Return the class of a sink's port."""
        return (self.ports or {}).get(letter, PORTS[letter])


PRODUCTION = Variant()


class Driver(Process):
    """One run of the query: a process with a stream thread and a commit thread."""

    def __init__(self, simulation: Simulation, number: int) -> None:
        self.simulation = simulation
        self.number = number
        self.variant = simulation.variant
        self.failure: BaseException | None = None
        self.stream_ended = False
        self.running: int | None = None
        self.attempts: dict[int, Epoch] = {}
        self.recovered = False
        world, step = simulation.world, simulation.step
        self.files = MemoryFiles(world.files, step)
        self.spool = MemorySpool(world, step)
        self.ports = {
            letter: self.variant.port(letter)(world, step, spool=self.variant.spool)
            for letter in (simulation.sinks if number == 0 else self.variant.later_sinks or simulation.sinks)
        }
        self.coordinator = self.variant.coordinator(
            query_id=simulation.query,
            ledger=self.variant.ledger(self.files, uuid.uuid4().hex),
            checkpoint=self.variant.checkpoint(self.files),
            spool=self.spool,
            sinks={letter: port.committer for letter, port in self.ports.items()},
            monitor=Condition(),  # type: ignore[arg-type]
        )
        self.threads = [
            Thread("stream", self._stream, self._stream_ended),
            Thread("commit thread", self._watch, self._thread_ended),
        ]

    # ---- threads

    def _stream_ended(self, failure: BaseException | None) -> None:
        self.stream_ended = True
        self._thread_ended(failure)

    def _thread_ended(self, failure: BaseException | None) -> None:
        self.failure = self.failure or failure
        if failure is not None:
            self.simulation.note(f"        driver {self.number} fails: {type(failure).__name__} {failure}")
        if all(thread.request is None for thread in self.threads):
            self.dead = self._verdict()
            self.simulation.note(f"        driver {self.number} ends: {self.dead}")

    def _verdict(self) -> str:
        if self.failure is None:
            return "done"
        if isinstance(self.failure, PASSING):
            return "error"
        if not isinstance(self.failure, EpochsinkError):
            self.simulation.flag(f"DEFECT {type(self.failure).__name__}: {self.failure}")
        if self is self.simulation.active:
            self.simulation.loud = self.failure
        elif self.simulation.blames_zombies:
            self.simulation.flag(f"ZOMBIE CONCLUDES {type(self.failure).__name__}: {self.failure}")
        return "loud"

    # ---- the stream thread

    def _stream(self) -> None:
        in_batch = self.variant.in_batch
        if not (self.simulation.schedule == 1 if in_batch is None else in_batch):
            self._recover()
        number, planned = self._read_logs()
        while True:
            offsets = planned.get(number)
            if offsets is None:
                offsets = self._plan(number, planned)
                if offsets is None:
                    return
            planned[number] = offsets
            self._foreach_batch(number, *offsets)
            self._commit(number)
            number += 1

    def _recover(self) -> None:
        self.coordinator.recover()
        self.recovered = True

    def _read_logs(self) -> tuple[int, dict[int, tuple[int, int]]]:
        folders = self.simulation.world.files

        def apply() -> tuple[int, dict[int, tuple[int, int]]]:
            newest = max(map(int, folders.get("commits", {})), default=-1)
            offsets = folders.get("offsets", {}).items()
            return newest + 1, {int(name): parse_offsets(data) for name, data in offsets}

        return self.simulation.step("SPARK reads its logs", apply, reads=True)

    def _plan(self, number: int, planned: dict[int, tuple[int, int]]) -> tuple[int, int] | None:
        if number and number - 1 not in planned:
            raise SparkRefuses(f"offsets/{number - 1} is missing")
        start = planned[number - 1][1] if number else 0
        total = self.simulation.source_rows
        if start >= total:
            return None
        # a query that catches up takes larger batches, so that the same epoch may get other input
        end = min(start + SLOTS + self.simulation.catching_up, total)
        if not self.files.create(f"offsets/{number}", offsets_file(start, end)):
            raise OSError(f"concurrent update of offsets/{number}")
        return start, end

    def _commit(self, number: int) -> None:
        folders = self.simulation.world.files
        commits = folders.setdefault("commits", {})

        def apply() -> bool:
            if str(number) in commits or folders.get("commits") is not commits:
                return False
            commits[str(number)] = b'v1\n{"nextBatchWatermarkMs":0}'
            self.simulation.decided(number)
            if self.variant.purges:
                commits.pop(str(number - 2), None)
            return True

        if not self.simulation.step(f"SPARK commits/{number}", apply):
            raise OSError(f"concurrent update of commits/{number}")

    def _foreach_batch(self, number: int, start: int, end: int) -> None:
        if not self.recovered:
            self._recover()
        if self.coordinator.settle(number) is Plan.RUN_FOR_STATE:
            return
        epoch = self.coordinator.begin(number)
        self.running, self.attempts[number] = number, epoch
        try:
            written = self._write(epoch, list(range(start, end)))
        except BaseException:
            self.coordinator.abandon(epoch)
            raise
        self.coordinator.record(epoch, written)
        self.running = None

    def _write(self, epoch: Epoch, source: list[int]) -> dict[str, list[tuple[str, Committable]]]:
        if self.simulation.attempts % 2:
            # a re-run need not keep the order of rows, nor their partitions
            source.reverse()
        self.simulation.attempts += 1
        rows = [Row(self.simulation.query, epoch.number, at, epoch.attempt) for at in source]
        written: dict[str, list[tuple[str, Committable]]] = {}
        for partition in range(SLOTS):
            part = rows[partition::SLOTS]
            if part:
                self.run_task(epoch, partition, part, 0, written)
        return written

    def run_task(
        self,
        epoch: Epoch,
        partition: int,
        rows: list[Row],
        attempt_number: int,
        written: dict[str, list[tuple[str, Committable]]],
    ) -> None:
        """Write, spool and prepare one task's rows in every sink, as `epochsink.spark.write_task` does."""
        identifier = uuid.uuid4().hex
        writers = {}
        for letter, port in self.ports.items():
            task = Task(self.coordinator.identity(letter), epoch, partition, identifier)
            writers[letter] = writer = self._begin(port, task, attempt_number)
            writer.write(rows)
        for letter in self.ports:
            if self.variant.spool or letter in "EF":
                query_id = self.simulation.query
                self.spool.write(query_id, epoch, spool_name(letter, identifier), rows)
        for letter, writer in writers.items():
            written.setdefault(letter, []).append((identifier, writer.prepare()))

    def _begin(self, port: Any, task: Task, attempt_number: int) -> Any:
        return port.begin(task, attempt_number)

    def lose_a_task(self, number: int, back: int) -> bool:
        """Let a losing attempt of partition 0's task prepare, all at once; return whether there was one to lose."""
        if self.running is None or self.running - back not in self.attempts or not self.recovered:
            return False
        epoch = self.attempts[self.running - back]
        row = Row(self.simulation.query, epoch.number, epoch.number * SLOTS, f"loser{self.simulation.now}")
        try:
            self.run_task(epoch, 0, [row], number, {})
        except FileNotFoundError:
            self.simulation.note("        the losing task found no folder in the spool")
        return True

    # ---- the commit thread

    def _watch(self) -> None:
        coordinator = self.coordinator
        try:
            while not self.stream_ended:
                seen = self.simulation.commits_made
                if coordinator.commit_decided():
                    self._tidy()
                    wait(lambda: bool(coordinator.pending) or self.stream_ended)
                else:
                    self._wait_for_commit_after(seen)
            coordinator.raise_failure()
            if self.recovered:
                coordinator.drain()
        except BaseException as failure:
            coordinator.fail(failure)
            raise

    def _wait_for_commit_after(self, seen: int) -> None:
        wait(lambda: self.simulation.commits_made != seen or self.stream_ended)

    def _tidy(self) -> None:
        if self.recovered:
            self.coordinator.tidy()


class SparkRefuses(EpochsinkError):
    """Spark itself refuses a damaged checkpoint."""


def offsets_file(start: int, end: int) -> bytes:
    """Return an offsets file in Spark's format."""
    header = json.dumps({"batchWatermarkMs": 0, "batchTimestampMs": 0, "conf": {}})
    return f'v1\n{header}\n{{"start":{start},"end":{end}}}'.encode()


def parse_offsets(data: bytes) -> tuple[int, int]:
    """Return the first and last source row of an offsets file."""
    source = json.loads(data.decode().splitlines()[2])
    return source["start"], source["end"]
