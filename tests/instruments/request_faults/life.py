"""One life of a driver in a process of its own: the production coordinator, committers, writers, spool and ledger.

Only Spark is played by hand: ``offsets/N``, foreachBatch(N) with two tasks, ``commits/N``.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
import traceback
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from epochsink.errors import CheckFailed, EpochsinkError
from epochsink.protocol.checkpoint import Checkpoint
from epochsink.protocol.coordinator import Coordinator, Plan
from epochsink.protocol.ledger import Ledger
from epochsink.protocol.spool import Spool
from epochsink.protocol.storage import LocalStorage
from epochsink.sink import WriterContext, participants_of
from epochsink.spark.write_task import Answer, TaskFailed, WriteJob, WriteOrder, is_one_for_all
from epochsink_devkit.history.history import HistoryLog
from epochsink_devkit.history.rows import SCHEMA, Workload, stamp
from request_faults import guards
from request_faults.disk import Disk
from request_faults.families import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from multiprocessing.connection import Connection

    from epochsink.sink import Epoch, SpoolFile

RUN: Final = "run"
ROWS: Final = 5
"""Rows of each of the two source partitions in an epoch, one of each of the partition's keys."""
WORKLOAD: Final = Workload(keys=ROWS, deletes=1 << 40)
CARRIED: Final = 4096
"""Bytes of a task's rows that may travel with its answer, in place of a file."""
COMMIT_SECONDS: Final = 20.0
TELL_STACKS: Final = signal.SIGUSR1
"""Has a driver write where its threads are to `stacks_file`."""


def stacks_file(folder: Path) -> Path:
    """Return the file that the driver which lives in a folder writes its stacks to."""
    return folder / "stacks.txt"


class Overtaken(Exception):
    """Spark found an entry in its log that it has not written: another driver runs."""


class Stalled(Exception):
    """An epoch that is decided does not get committed, and nothing says why."""


@dataclass(frozen=True)
class Life:
    """What one driver does: recover, run every epoch before ``epochs`` that is not decided, drain.

    ``kinds`` and ``options`` make the sinks. ``dies_at`` is a failpoint.
    """

    folder: str
    query: str
    kinds: Mapping[str, str]
    options: Mapping[str, Mapping[str, Any]]
    epochs: int
    dies_at: str = ""

    @property
    def checkpoint(self) -> Path:
        """The checkpoint's folder."""
        return Path(self.folder) / "checkpoint"

    @property
    def disk(self) -> Disk:
        """The disk that holds the checkpoint."""
        return Disk(self.checkpoint, Path(self.folder) / "disk", frozenset({"offsets", "commits"}))


def live(life: Life, driver: str, tell: Connection) -> None:
    """Be the driver; tell the parent when it has recovered, and how it ended."""
    stacks = stacks_file(Path(life.folder)).open("w")  # open for as long as the process lives
    faulthandler.register(TELL_STACKS, stacks)
    if life.dies_at:
        os.environ["EPOCHSINK_FAILPOINT"] = life.dies_at
    life.disk.watch()
    if file := os.environ.get(guards.VARIABLE):
        guards.Watch(Path(file), lambda: "a plan").begin()
    try:
        _Driver(life, driver).run(tell)
    except (EpochsinkError, TaskFailed, ConnectionError, Overtaken, Stalled) as failure:
        tell.send(("refused", type(failure).__name__, str(failure)))
    except BaseException:  # noqa: BLE001 - the parent calls it a fault of ours
        tell.send(("broke", "", traceback.format_exc()))
    else:
        tell.send(("ended", "", ""))
    # without the clients' tidying up, which takes as long as the life
    os._exit(0)


class _Driver:
    def __init__(self, life: Life, driver: str) -> None:
        self._life = life
        self._driver = driver
        self._files = LocalStorage(life.checkpoint)
        self._checkpoint = Checkpoint(self._files)
        self._spool = Spool.beside(str(life.checkpoint))
        self._log = HistoryLog(Path(life.folder) / "history")
        self._families = {name: FAMILIES[kind] for name, kind in life.kinds.items()}
        self._sinks = {name: family.sink(**life.options[name]) for name, family in self._families.items()}
        self._participants = participants_of(self._sinks)
        self._coordinator = Coordinator(
            query_id=life.query,
            ledger=Ledger(self._files, uuid.uuid4().hex),
            checkpoint=self._checkpoint,
            spool=self._spool,
            participants=self._participants,
            location=str(life.checkpoint),
        )
        self._ran = False

    def run(self, tell: Connection) -> None:
        for participant in self._participants:
            for name in participant.members:
                found = participant.check(name, SCHEMA)
                if found:
                    raise CheckFailed.of(found)
        self._coordinator.recover()
        generation = self._coordinator.identity(next(iter(self._sinks))).generation
        self._log.write("took", run=RUN, driver=self._driver, generation=generation)
        tell.send(("recovered", "", ""))
        for number in range(self._checkpoint.newest_decided() + 1, self._life.epochs):
            self._plan(number)
            self._call(number)
            self._decide(number)
            self._commit()
        self._coordinator.drain()
        self._coordinator.tidy()
        for participant in self._participants:
            participant.close()

    def _plan(self, number: int) -> None:
        end = ROWS * (number + 1)
        # a second source, of which no row goes anywhere: who plans an epoch anew plans other input
        text = f'v1\n{{"batchWatermarkMs":0}}\n{{"orders":{{"0":{end},"1":{end}}}}}\n{{"clock":{time.time_ns()}}}'
        # an earlier driver may have planned the first one
        if not self._log_of_spark(f"offsets/{number}", text) and self._ran:
            raise Overtaken(f"offsets/{number} is there")
        self._ran = True

    def _call(self, number: int) -> None:
        """Be one call of foreachBatch."""
        if self._coordinator.settle(number) is Plan.RUN_FOR_STATE:
            return
        epoch = self._coordinator.begin(number)
        facts = {"run": RUN, "driver": self._driver, "epoch": number, "attempt": epoch.attempt}
        self._log.write("invoked", **facts)
        try:
            try:
                written = self._write(epoch)
            except BaseException:
                # as the write job does: nothing has tried to record it
                self._coordinator.abandon(epoch)
                raise
            self._coordinator.record(epoch, *written)
        except BaseException as failure:
            self._log.write("raised", attempt=epoch.attempt, error=type(failure).__name__)
            raise
        self._log.write("returned", attempt=epoch.attempt)

    def _write(self, epoch: Epoch) -> tuple[dict[str, list[Any]], dict[str, dict[str, SpoolFile]]]:
        contexts: dict[str, WriterContext] = {}
        for participant in self._participants:
            contexts |= participant.begin(epoch, dict.fromkeys(participant.members, SCHEMA))
        identities = {name: self._coordinator.identity(name) for name in self._sinks}
        job = WriteJob(self._sinks, identities, self._spool)
        written: dict[str, list[Any]] = {}
        spooled: dict[str, dict[str, SpoolFile]] = {}
        for partition in range(2):
            batch = self._batch(epoch, partition)
            # by turns, rows travel with the answer and stay in a file
            order = WriteOrder(epoch, contexts, epoch.number % 2 * CARRIED)
            try:
                answers = [row for rows in job.write(order, [batch], partition) for row in rows.column(0).to_pylist()]
            except OSError as failure:
                # a task of Spark fails with whatever it raises, and its driver hears of it as this
                raise TaskFailed(repr(failure)) from failure
            for answer in map(Answer.from_json, answers):
                written.setdefault(answer.sink, []).append((answer.task, answer.committable))
                if answer.spooled is not None:
                    spooled.setdefault(answer.sink, {})[answer.task] = answer.spooled
        return written, spooled

    def _batch(self, epoch: Epoch, partition: int) -> pa.RecordBatch:
        """Return what a task gets: the rows of one source partition, as each sink's columns."""
        rows = _rows_of(epoch.number, partition, epoch.attempt)
        made = {name: family.batch(rows) for name, family in self._families.items()}
        if is_one_for_all(self._sinks):
            (batch,) = made.values()
            return batch
        columns = [batch.to_struct_array() for batch in made.values()]
        return pa.RecordBatch.from_arrays(columns, names=list(made))

    def _decide(self, number: int) -> None:
        """Write commits/N, as Spark does when foreachBatch has returned."""
        if not self._log_of_spark(f"commits/{number}", 'v1\n{"nextBatchWatermarkMs":0}'):
            raise Overtaken(f"commits/{number} is there")

    def _log_of_spark(self, name: str, text: str) -> bool:
        """Write an entry as Spark does: whole or not at all, and not synced; return whether it was not there."""
        target = self._life.checkpoint / name
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
        temporary.write_text(text)
        try:
            target.hardlink_to(temporary)
        except FileExistsError:
            return False
        finally:
            temporary.unlink()
        return True

    def _commit(self) -> None:
        """Be the commit thread."""
        deadline = time.monotonic() + COMMIT_SECONDS
        while not self._coordinator.commit_decided():
            self._coordinator.queue.raise_failure()
            if time.monotonic() > deadline:
                raise Stalled(f"nothing is committed for {COMMIT_SECONDS:.0f} s")
            time.sleep(0.02)


def _rows_of(number: int, partition: int, attempt: str) -> pa.Table:
    source = WORKLOAD.source({part: ROWS * (number + 1) if part == partition else 0 for part in range(2)})
    new = source.slice(ROWS * number)
    return stamp(new, run=RUN, epoch=number, attempt=attempt)


# what the first call imports: drivers are forked from a process that has imported this module
for _family in FAMILIES.values():
    _family.batch(_rows_of(0, 0, ""))
if guards.VARIABLE in os.environ:
    guards.guards()


def source_of(epochs: int) -> pa.Table:
    """Return the source rows of all epochs before a number."""
    return WORKLOAD.source({0: ROWS * epochs, 1: ROWS * epochs})
