"""Step 2, on the driver: plan and run the write job of an epoch. What all epochs share is made once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from epochsink.protocol.spool import Spool
from epochsink.sink import (
    Committable,
    Counts,
    Epoch,
    Identity,
    RowCount,
    Sink,
    Spooled,
    SpoolFile,
    WriterContext,
    Written,
)
from epochsink.spark.engine import WriteTasks
from epochsink.spark.engines import engine_of
from epochsink.spark.query_plan import OnePass, one_pass, refuse_loose_placement, row_schemas
from epochsink.spark.write_task import CARRIED_BY_FIRST_TASK, Answer, WriteJob, WriteOrder

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


_MAX_BYTES: Final = "spark.sql.execution.arrow.maxBytesPerBatch"
_MAX_ROWS: Final = "spark.sql.execution.arrow.maxRecordsPerBatch"
_NO_LIMIT: Final = str(2**31 - 1)
_GROWTH: Final = 8

CARRIED_BY_EPOCH: Final = 256 << 10
"""How many spooled bytes one entry of the ledger carries, if the epoch has as many tasks as the one before."""


@dataclass(frozen=True, slots=True)
class WritePlan:
    """The write job of an epoch: its tasks, a frame of their answers, and the schemas of the sinks' rows, by name."""

    tasks: WriteTasks
    answers: DataFrame
    schemas: Mapping[str, pa.Schema]


class EpochWriter:
    """Writes the epochs of a run; ``contexts`` is that of the coordinator.

    Plans in its own thread, while ledger and targets are asked.
    """

    def __init__(
        self,
        sinks: Mapping[str, Sink],
        contexts: Callable[[Epoch, Mapping[str, pa.Schema]], Mapping[str, WriterContext]],
        identity: Callable[[str], Identity],
        spool: Spool,
        *,
        show_values: bool,
    ) -> None:
        self._sinks = sinks
        self._show_values = show_values
        self._contexts = contexts
        self._identity = identity
        self._spool = spool
        self._byte_limit = ByteLimit()
        self._carry_limit = CarryLimit()
        self._passes: dict[str, OnePass] = {}
        self._tasks: WriteTasks | None = None
        # one thread for the run: the JVM has a thread and a connection for each thread that calls it
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="epochsink-plan")

    @contextmanager
    def planned(self, frame: DataFrame) -> Iterator[Future[WritePlan]]:
        """Plan the write job for a frame beside the body; after the body the plan is ready, or has failed."""
        plan = self._thread.submit(self.plan, frame)
        try:
            yield plan
        finally:
            wait([plan])

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()

    def plan(self, frame: DataFrame) -> WritePlan:
        """Return the plan of the write job for a frame."""
        # the schema of a stream's frames can change between epochs, if the user's function changes them
        engine = engine_of(frame.sparkSession)
        key = engine.schema_text(frame)
        if key not in self._passes:
            schemas = row_schemas(frame, self._sinks)
            refuse_loose_placement(frame, self._sinks, schemas)
            self._passes[key] = one_pass(self._sinks, schemas)
        passed = self._passes[key].apply(frame)
        if self._tasks is None:
            identities = {name: self._identity(name) for name in self._sinks}
            job = WriteJob(self._sinks, identities, self._spool, self._show_values)
            self._tasks = engine.write_tasks(job)
        return WritePlan(self._tasks, self._tasks.plan(passed), self._passes[key].schemas)

    def write(self, plan: WritePlan, epoch: Epoch) -> tuple[Written, Spooled, Counts]:
        """Run the write job; return what the accepted tasks have prepared, spooled and counted, by sink."""
        try:
            answers = self._run(plan, epoch)
        except BaseException:
            # the answers may have been too much for the driver
            self._carry_limit.forget()
            raise
        written: dict[str, list[tuple[str, Committable]]] = {}
        spooled: dict[str, dict[str, SpoolFile]] = {}
        counts: dict[str, RowCount] = {}
        # in the order of partitions, not of the tasks' ends: a sink that keeps order applies them so, a replay too
        for answer in sorted(answers, key=lambda answer: answer.partition):
            self._byte_limit.learn(answer.row_bytes)
            written.setdefault(answer.sink, []).append((answer.task, answer.committable))
            if answer.spooled is not None:
                spooled.setdefault(answer.sink, {})[answer.task] = answer.spooled
            counts[answer.sink] = counts.get(answer.sink, RowCount()) + answer.counted
        self._carry_limit.learn(len(answers))
        return written, spooled, counts

    def _run(self, plan: WritePlan, epoch: Epoch) -> list[Answer]:
        # after the planning, which takes a while
        contexts = self._contexts(epoch, plan.schemas)
        carried = self._carry_limit.bytes if self._spool.beside_ledger else 0
        order = WriteOrder(epoch, contexts, carried)
        with self._byte_limit.lifted(plan.answers.sparkSession):
            return [Answer.from_json(text) for text in plan.tasks.run(plan.answers, order)]


class CarryLimit:
    """Shares what one entry of the ledger may carry among the tasks of an epoch, as many as the one before had.

    Nothing is carried in a run's first epoch, whose number of tasks is unknown. Nor after a failure: so an epoch with
    many more tasks than the one before, whose answers are too much for the driver, succeeds when it runs again.
    """

    def __init__(self) -> None:
        self.bytes = 0
        """For one task and sink."""

    def learn(self, answers: int) -> None:
        """Take in how many answers an epoch had: one for each task and sink with rows."""
        self.bytes = min(CARRIED_BY_FIRST_TASK, CARRIED_BY_EPOCH // max(1, answers))

    def forget(self) -> None:
        """Begin again: an epoch has failed."""
        self.bytes = 0


class ByteLimit:
    """Lifts Spark's limit on the bytes of a record batch while rows are far too small to reach it.

    With a limit, Spark 4 measures the batch again after every row, which takes longer than to convert the row. The
    limit matters only if ``maxRecordsPerBatch`` rows exceed it. So it stays until a first epoch has shown how wide rows
    are, and returns as soon as rows a few times wider could reach it.
    """

    def __init__(self) -> None:
        self._row_bytes: float | None = None

    def learn(self, row_bytes: float) -> None:
        """Take in the average bytes of a row in some batch; the widest counts."""
        self._row_bytes = max(row_bytes, self._row_bytes or 0.0)

    @contextmanager
    def lifted(self, session: SparkSession) -> Iterator[None]:
        """Run the body without the limit if that is safe; afterwards the session's settings are as before."""
        rows = int(session.conf.get(_MAX_ROWS) or 0)
        limit = engine_of(session).byte_limit_of_batches(session)
        # without a limit on rows (zero or less), the one on bytes is the only limit
        if self._row_bytes is None or rows <= 0 or _GROWTH * rows * self._row_bytes > limit:
            yield
            return
        given = session.conf.get(_MAX_BYTES, None)
        session.conf.set(_MAX_BYTES, _NO_LIMIT)
        try:
            yield
        finally:
            if given is None:
                session.conf.unset(_MAX_BYTES)
            else:
                session.conf.set(_MAX_BYTES, given)
