"""A simulated driver: Spark's micro-batch loop around the real coordinator, and the commit thread.

What is real: `Coordinator`, `Ledger`, `Checkpoint`. Imitated: Spark (offsets/N, foreachBatch(N), commits/N), the
write job, `epochsink.spark.query_run` and `epochsink.protocol.commit_thread`, which need Spark.
"""

from __future__ import annotations

import json
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from epochsink.cli.repair import Repair
from epochsink.errors import ConfigurationError, EpochsinkError, Fenced, PrepareFailed
from epochsink.protocol.checkpoint import Checkpoint
from epochsink.protocol.coordinator import Coordinator, Plan
from epochsink.protocol.joining import REWRITE
from epochsink.sink import Epoch, Task
from simulation.readers import Row
from simulation.scheduler import Process
from simulation.sinks import KINDS, participants
from simulation.storage import MemoryFiles, MemorySpool, QuickLedger, spool_name
from simulation.threads import Condition, Thread

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from epochsink.sink import Committable, SpoolFile
    from simulation.simulation import Simulation
    from simulation.world import Folders, Spooled

SLOTS = 2
EPOCHS = 3
PASSING = (OSError, PrepareFailed, Fenced)
"""After these a supervisor starts the query again; other errors of ours are for the operator."""


RETAIN_SECONDS = 1e9


@dataclass(frozen=True)
class Variant:
    """Which code runs: the production's, or a mutant's; and how the query is set up.

    ``in_batch`` recovers in the first foreachBatch, as without `ExactlyOnce.start` (None: as the schedule is);
    ``later_sinks`` are those of every driver but the first; ``purges`` lets Spark keep only its last two commits.
    ``refuses_second_calls`` is the guard of `epochsink.spark.query_run`. ``kept`` are the sinks whose targets keep the
    rows themselves, so that these are not spooled. If the query ``retains`` done epochs, a target that was set back is
    repaired by ``repair``, which is killed at the steps ``dies_in_repair``, one after another; if it
    ``repairs_on_copies``, every second one works on a copy of the checkpoint. ``faults_wait``: a fault that meets
    nothing at its step strikes at the first later one where it does. An epoch has ``rows``, in as many tasks as there
    are slots.
    """

    coordinator: type[Coordinator] = Coordinator
    ledger: Callable[..., Any] = QuickLedger
    checkpoint: Callable[..., Any] = Checkpoint
    kinds: Mapping[str, type[Any]] = field(default_factory=dict)
    spool: bool = True
    in_batch: bool | None = None
    later_sinks: str | None = None
    purges: bool = False
    spool_keeper: type[MemorySpool] = MemorySpool
    refuses_second_calls: bool = True
    kept: str = ""
    retains: bool = False
    dies_in_repair: tuple[int, ...] = ()
    repairs_on_copies: bool = False
    repair: type[Repair] = Repair
    faults_wait: bool = False
    rows: int = SLOTS

    def kind(self, letter: str) -> type[Any]:
        """Return the class of a sink."""
        return self.kinds.get(letter, KINDS[letter])


PRODUCTION = Variant()
WAITING = Variant(faults_wait=True)


@dataclass(slots=True)
class Written:
    """What the accepted tasks of an epoch have prepared, and what they have spooled, by sink."""

    parts: dict[str, list[tuple[str, Committable]]] = field(default_factory=dict)
    files: dict[str, dict[str, SpoolFile]] = field(default_factory=dict)


class Driver(Process):
    """One run of the query: a process with a stream thread and a commit thread, on one copy of the checkpoint."""

    def __init__(self, simulation: Simulation, number: int, folders: Folders, spool: Spooled) -> None:
        self.simulation = simulation
        self.number = number
        self.folders = folders
        self.variant = simulation.variant
        self.failure: BaseException | None = None
        self.stream_ended = False
        self.running: int | None = None
        self.attempts: dict[int, Epoch] = {}
        self.recovered = False
        self.skips = False
        self.called = -1
        self.swallowed: list[int] = []
        """Epochs whose error the user's function has caught."""
        self.unheard: BaseException | None = None
        """The error of a start that the user's function has caught."""
        world, step = simulation.world, simulation.step
        self.files = MemoryFiles(folders, step)
        self.spool = self.variant.spool_keeper(world, step, spool)
        self.sinks = {
            letter: self.variant.kind(letter)(world, step, spool=self.variant.spool)
            for letter in (simulation.sinks if number == 0 else self.variant.later_sinks or simulation.sinks)
        }
        self.coordinator = self.variant.coordinator(
            query_id=simulation.query,
            ledger=self.variant.ledger(self.files, uuid.uuid4().hex),
            checkpoint=self.variant.checkpoint(self.files),
            spool=self.spool,  # type: ignore[arg-type] # in memory
            participants=participants(self.sinks),
            # a driver that recovers in its first batch finds that Spark has begun it
            join_running=REWRITE if simulation.joins else False,
            retain_seconds=RETAIN_SECONDS if self.variant.retains else 0.0,
            monitor=Condition(simulation.wait),  # type: ignore[arg-type]
        )
        self.threads = [
            Thread("stream", self._stream, self._stream_ended),
            Thread("commit thread", self._watch, self._thread_ended),
        ]

    def skip_next(self) -> bool:
        """Let the user's function not call us for the next epoch."""
        self.skips = True
        return True

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
            if self.swallowed and self.simulation.undocumented(self.folders):
                self.simulation.flag("UNHEARD: a run ends well that has not prepared what Spark has decided")
            return "done"
        if isinstance(self.failure, PASSING):
            return "error"
        if not isinstance(self.failure, EpochsinkError):
            self.simulation.flag(f"DEFECT {type(self.failure).__name__}: {self.failure}")
        if self.simulation.leads(self):
            self.simulation.stopped(self, self.failure)
        elif self.simulation.blames_zombies:
            self.simulation.zombies.append(self.failure)
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
            self._users_function(number, list(range(*offsets)))
            if self.swallowed and self.failure is not None:
                # the commit thread has ended, and has made Spark end the query
                raise self.failure
            self._commit(number)
            number += 1

    def _recover(self) -> None:
        self.coordinator.recover()
        self.recovered = True

    def _read_logs(self) -> tuple[int, dict[int, tuple[int, int]]]:
        folders = self.folders

        def apply() -> tuple[int, dict[int, tuple[int, int]]]:
            decided = max(map(int, folders.get("commits", {})), default=-1)
            offsets = {int(name): parse_offsets(data) for name, data in folders.get("offsets", {}).items()}
            # of several that are planned and not decided, Spark runs the newest one alone
            return max([decided + 1, *offsets]), offsets

        return self.simulation.step("SPARK reads its logs", apply, reads=True)

    def _plan(self, number: int, planned: dict[int, tuple[int, int]]) -> tuple[int, int] | None:
        if number and number - 1 not in planned:
            raise SparkRefuses(f"offsets/{number - 1} is missing")
        start = planned[number - 1][1] if number else 0
        total = self.simulation.source_rows
        if start >= total:
            return None
        # a query that catches up takes larger batches, so that the same epoch may get other input
        end = min(start + self.variant.rows + self.simulation.catching_up, total)
        alone = self.simulation.undocumented(self.folders).intersection(self.swallowed)
        # each fault may fail an epoch of its own, and that error is swallowed too
        told = len(alone) <= max(1, self.simulation.struck)
        if self.simulation.schedule == 0 and not told and "pause" not in self.simulation.faults:
            self.simulation.flag("UNHEARD: Spark goes on and on without us")
        if not self.files.create(f"offsets/{number}", offsets_file(start, end)):
            raise OSError(f"concurrent update of offsets/{number}")
        return start, end

    def _commit(self, number: int) -> None:
        folders = self.folders
        commits = folders.setdefault("commits", {})

        def apply() -> bool:
            if str(number) in commits or folders.get("commits") is not commits:
                return False
            commits[str(number)] = b'v1\n{"nextBatchWatermarkMs":0}'
            self.simulation.decided(number, folders)
            if self.variant.purges:
                commits.pop(str(number - 2), None)
            return True

        if not self.simulation.step(f"SPARK commits/{number}", apply):
            raise OSError(f"concurrent update of commits/{number}")

    def _users_function(self, number: int, source: list[int]) -> None:
        """Be the function given to foreachBatch: call us once and let errors pass, or as a fault wants it."""
        if self.skips:
            self.skips = False
            return self.simulation.left_out(number, source)
        calls = [source[:1], source[1:]] if self.simulation.doubling else [source]
        try:
            for rows in calls:
                self._called(number, rows)
        except Exception as error:
            if not self.simulation.swallows:
                raise
            self.simulation.note(f"        the user's function swallows {type(error).__name__} {error}")
            self.swallowed.append(number)
            self.unheard = None if self.recovered else error
            self.simulation.left_out(number, source)
        return None

    def _called(self, number: int, source: list[int]) -> None:
        """Guard against a second call, as `epochsink.spark.query_run` does, then prepare."""
        if number == self.called:
            if not self.variant.refuses_second_calls:
                return
            mistake = ConfigurationError(f"called twice in epoch {number}")
            self.simulation.left_out(number, source)
            self.simulation.refused.add(number)
            self._dispute(number)
            self.coordinator.fail(mistake)
            raise mistake
        self._foreach_batch(number, source)
        self.called = number

    def _dispute(self, number: int) -> None:
        for _ in range(2):
            with suppress(Fenced):
                try:
                    self.coordinator.dispute(number)
                except OSError as failure:
                    self.simulation.note(f"        {failure}: once more")
                else:
                    return

    def _foreach_batch(self, number: int, source: list[int]) -> None:
        if not self.recovered:
            self._recover()
        if self.coordinator.settle(number) is Plan.RUN_FOR_STATE:
            return
        epoch = self.coordinator.begin(number)
        self.running, self.attempts[number] = number, epoch
        try:
            written = self._write(epoch, source)
        except BaseException:
            self.coordinator.abandon(epoch)
            raise
        self.coordinator.record(epoch, written.parts, written.files)
        self.running = None

    def _write(self, epoch: Epoch, source: list[int]) -> Written:
        if self.simulation.attempts % 2:
            # a re-run need not keep the order of rows, nor their partitions
            source.reverse()
        self.simulation.attempts += 1
        rows = [Row(self.simulation.query, epoch.number, at, epoch.attempt) for at in source]
        written = Written()
        for partition in range(SLOTS):
            part = rows[partition::SLOTS]
            if part:
                self.run_task(epoch, partition, part, 0, written)
        return written

    def run_task(self, epoch: Epoch, partition: int, rows: list[Row], attempt_number: int, written: Written) -> None:
        """Write, spool and prepare one task's rows in every sink, as `epochsink.spark.write_task` does."""
        # the last digit numbers the transactional ids that attempts share
        identifier = f"{uuid.uuid4().hex[1:]}{attempt_number:x}"
        writers = {}
        for letter, sink in self.sinks.items():
            task = Task(self.coordinator.identity(letter), epoch, partition, identifier)
            writers[letter] = writer = sink.begin(task, attempt_number)
            writer.write(rows)
        for letter in self.sinks:
            if (self.variant.spool or letter in "EFPSABCD") and letter not in self.variant.kept:
                query_id, name = self.simulation.query, spool_name(letter, identifier)
                files = written.files.setdefault(letter, {})
                files[identifier] = self.spool.write(query_id, epoch, name, rows)
        for letter, writer in writers.items():
            written.parts.setdefault(letter, []).append((identifier, writer.prepare()))

    def lose_a_task(self, number: int, back: int) -> bool:
        """Let a losing attempt of partition 0's task prepare, all at once; return whether there was one to lose."""
        if self.running is None or self.running - back not in self.attempts or not self.recovered:
            return False
        epoch = self.attempts[self.running - back]
        row = Row(self.simulation.query, epoch.number, epoch.number * self.variant.rows, f"loser{self.simulation.now}")
        try:
            self.run_task(epoch, 0, [row], number, Written())
        except FileNotFoundError:
            self.simulation.note("        the losing task found no folder in the spool")
        return True

    # ---- the commit thread

    def _watch(self) -> None:
        coordinator = self.coordinator
        try:
            while not self.stream_ended:
                seen = self.simulation.commits_made
                self._refuse_unheard_start()
                if coordinator.commit_decided():
                    self._tidy()
                    self.simulation.wait(partial(self._has_work, seen))
                else:
                    self._wait_for_commit_after(seen)
            coordinator.queue.raise_failure()
            self._refuse_unheard_start()
            if self.recovered:
                coordinator.drain()
        except BaseException as failure:
            coordinator.fail(failure)
            raise

    def _refuse_unheard_start(self) -> None:
        """End a query whose start has failed in its first batch, unheard."""
        if self.unheard is not None and str(self.swallowed[-1]) in self.folders.get("commits", {}):
            raise self.unheard

    def _has_work(self, seen: int) -> bool:
        """Whether an epoch is pending, or one has been decided whose error was swallowed."""
        news = bool(self.swallowed) and self.simulation.commits_made != seen
        return bool(self.coordinator.queue.pending) or news or self.stream_ended

    def _wait_for_commit_after(self, seen: int) -> None:
        self.simulation.wait(lambda: self.simulation.commits_made != seen or self._is_decided() or self.stream_ended)

    def _is_decided(self) -> bool:
        """Whether an epoch that has become pending since the last look is decided already."""
        return any(str(number) in self.folders.get("commits", {}) for number in self.coordinator.queue.pending[:1])

    def _tidy(self) -> None:
        if self.recovered:
            self.coordinator.tidy()


class SparkRefuses(EpochsinkError):
    """Spark itself refuses a damaged checkpoint."""


@cache
def offsets_file(start: int, end: int) -> bytes:
    """Return an offsets file in Spark's format."""
    header = json.dumps({"batchWatermarkMs": 0, "batchTimestampMs": 0, "conf": {}})
    return f'v1\n{header}\n{{"start":{start},"end":{end}}}'.encode()


@cache
def parse_offsets(data: bytes) -> tuple[int, int]:
    """Return the first and last source row of an offsets file."""
    source = json.loads(data.decode().splitlines()[2])
    return source["start"], source["end"]
