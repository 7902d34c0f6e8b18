"""Step 2, on the executors: ONE pass over the rows feeds every sink, without per-row Python.

The JVM evaluates one struct column for each sink, or the columns of the only sink. ``mapInArrow`` passes the record
batches to `WriteJob.write_partition`, which spools, writes and prepares for every sink, and returns one `Answer` for
each sink that had rows.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Final, TypeVar

import pyarrow as pa
from pyspark import TaskContext, cloudpickle
from pyspark.sql.types import StringType, StructField, StructType

from epochsink import __version__, arrow_buffers
from epochsink.errors import ConfigurationError, EpochsinkError, naming
from epochsink.failpoints import reach
from epochsink.protocol.json_value import from_json
from epochsink.protocol.spool import Spool, SpoolWriter
from epochsink.sink import (
    Committable,
    Epoch,
    Identity,
    Keeping,
    RowCount,
    Sink,
    SinkWriter,
    SpoolFile,
    Task,
    WriterContext,
)
from epochsink.spark.worker_process import acknowledge_at_once, forget_archives, spare_collector

Given = TypeVar("Given")
Returned = TypeVar("Returned")

ANSWER: Final = StructType([StructField("answer", StringType())])
"""Schema of what a task returns to Spark: an `Answer` a row, as JSON."""

ORDER: Final = "epochsink.order"
"""The local property by which a job gives its tasks their `WriteOrder`."""

CARRIED_BY_FIRST_TASK: Final = 64 << 10
HALF_AT_PARTITION: Final = 16
"""The limits on the spooled bytes that a task carries: of the first partition, and where half of that is left."""

_FOUND: Final = "<found>"


class TaskFailed(Exception):
    """Carries an error of this package, as a line of text, out of a Python worker."""


def is_one_for_all(sinks: Mapping[str, Sink]) -> bool:
    """Return whether there is only one sink, which takes every row: it needs no struct, which would cost time."""
    return [sink.where for sink in sinks.values()] == [None]


@dataclass(frozen=True, slots=True)
class WriteOrder:
    """What the tasks of one attempt at an epoch must know: the value of the job's local property `ORDER`."""

    epoch: Epoch
    contexts: Mapping[str, WriterContext]
    """What the participants tell the writers of this attempt, by sink."""
    carried: int = 0
    """How many spooled bytes of a sink the first task may send with its answer, in place of a file."""

    def task(self, identity: Identity, partition: int, uuid: str) -> Task:
        """Return what the writer of one sink must know.

        What a task may carry falls with its partition: the driver knows the number of tasks of the epoch before only,
        and holds all that they carry in one entry of the ledger: at most 4.2 MiB for 1,000 tasks, 6.5 MiB for 10,000.
        """
        context = self.contexts[identity.sink]
        falling = CARRIED_BY_FIRST_TASK * HALF_AT_PARTITION // (HALF_AT_PARTITION + partition)
        carried = min(self.carried, falling) if context.keeping.is_spooled else 0
        return Task(identity, self.epoch, partition, uuid, context.keeping, carried, context.settings)

    def to_json(self) -> str:
        """Return the order as text."""
        contexts = {name: (context.keeping.name, context.settings) for name, context in self.contexts.items()}
        return json.dumps({"epoch": asdict(self.epoch), "contexts": contexts, "carried": self.carried})

    @classmethod
    def from_json(cls, text: str) -> WriteOrder:
        """Return the order that a text holds."""
        fields = json.loads(text)
        contexts = {name: WriterContext(Keeping[how], settings) for name, (how, settings) in fields["contexts"].items()}
        return cls(Epoch(**fields["epoch"]), contexts, fields["carried"])


@dataclass(frozen=True, slots=True)
class Answer:
    """What one task tells the driver of one sink that had rows."""

    sink: str
    task: str
    """The task's uuid."""
    partition: int
    committable: Committable
    spooled: SpoolFile | None
    """What the task's file in the spool holds; None if the rows are not spooled."""
    counted: RowCount
    row_bytes: float
    """The largest average of bytes in a row that a record batch of the task had, over all its sinks."""

    def to_json(self) -> str:
        """Return the answer as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Answer:
        """Return the answer that a text holds."""
        return from_json(cls, json.loads(text))


@dataclass(frozen=True, slots=True)
class WriteJob:
    """What the tasks of all epochs of a run do: the sinks in the order of the columns. Sent to executors."""

    sinks: Mapping[str, Sink]
    identities: Mapping[str, Identity]
    spool: Spool
    show_values: bool = False
    """Whether errors may quote values of rows."""

    def write_partition(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Run `write` with the order of the task's Spark job."""
        context = TaskContext.get()
        order = context.getLocalProperty(ORDER) if context is not None else None
        if order is None:
            raise RuntimeError(f"the task's job has no local property {ORDER!r}")
        yield from self.write_in_order((order, batches))

    def write_in_order(self, given: tuple[str, Iterable[pa.RecordBatch]]) -> Iterator[pa.RecordBatch]:
        """Run `write` with an order as text."""
        order, batches = given
        acknowledge_at_once()
        context = TaskContext.get()
        if context is None:
            raise RuntimeError("only a task of Spark's knows which partition its rows are")
        yield from self.write(WriteOrder.from_json(order), batches, context.partitionId())
        spare_collector()

    def write(self, order: WriteOrder, batches: Iterable[pa.RecordBatch], partition: int) -> Iterator[pa.RecordBatch]:
        """Write one partition into every sink; yield what was prepared, in one record batch.

        No other task that Spark accepts for the epoch has the number ``partition``.
        """
        task = _Attempt(self, order, partition)
        try:
            for batch in batches:
                task.write(batch)
            answers = task.prepare()
        except BaseException as failure:
            task.abort()
            if isinstance(failure, EpochsinkError):
                if not self.show_values:
                    failure.hide_values()
                # only text reaches the driver and the logs on the way; not the causes, which quote rows
                raise TaskFailed(failure.to_line()) from None
            raise
        finally:
            forget_archives()
        column = arrow_buffers.texts([answer.to_json() for answer in answers], pa.string())
        yield pa.RecordBatch.from_arrays([column], names=ANSWER.names)


@dataclass(slots=True)
class _Share:
    """The writers of one sink in one task."""

    writer: SinkWriter
    spool: SpoolWriter | None
    counted: RowCount = field(default_factory=RowCount)


class _Attempt:
    """One invocation of one task. Its uuid is fresh: Spark may run the same task attempt number twice."""

    def __init__(self, job: WriteJob, order: WriteOrder, partition: int) -> None:
        self._job = job
        self._order = order
        self._partition = partition
        # not Spark's numbers: two processes may run the same attempt of a task
        self._uuid = uuid.uuid4().hex
        self._shares: dict[str, _Share] = {}
        self._row_bytes = 0.0

    def write(self, batch: pa.RecordBatch) -> None:
        self._row_bytes = max(self._row_bytes, batch.nbytes / max(1, batch.num_rows))
        if is_one_for_all(self._job.sinks):
            if batch.num_rows:
                self._write_one(next(iter(self._job.sinks)), batch)
            return
        for name, column in zip(self._job.sinks, batch.columns, strict=True):
            chosen = column.drop_null() if column.null_count else column
            if len(chosen):
                self._write_one(name, pa.RecordBatch.from_struct_array(chosen))

    def _write_one(self, name: str, rows: pa.RecordBatch) -> None:
        with naming(name):
            # not before the first row: a task without rows for a sink connects to nothing
            share = self._shares.get(name) or self._begin(name, rows.schema)
            if share.spool is not None:
                share.spool.write(rows)
            share.writer.write(rows)
            share.counted += RowCount(rows.num_rows, self._job.sinks[name].count_deletes(rows), rows.nbytes)

    def _begin(self, name: str, schema: pa.Schema) -> _Share:
        reach("task.begin")
        task = self._order.task(self._job.identities[name], self._partition, self._uuid)
        spool = self._job.spool.writer(task, schema) if task.keeping.is_spooled else None
        self._shares[name] = share = _Share(self._job.sinks[name].writer(task), spool)
        return share

    def prepare(self) -> list[Answer]:
        reach("task.written")
        with ThreadPoolExecutor(1) as beside:
            # spool and targets take the last rows in parallel; the driver is told of both or of neither
            spooling = beside.submit(self._close_spools)
            prepared = {}
            for name, share in self._shares.items():
                with naming(name):
                    prepared[name] = share.writer.prepare()
            spooled = spooling.result()
        reach("task.prepared")
        return [
            Answer(
                name,
                self._uuid,
                self._partition,
                committable,
                spooled.get(name),
                self._shares[name].counted,
                self._row_bytes,
            )
            for name, committable in prepared.items()
        ]

    def _close_spools(self) -> dict[str, SpoolFile]:
        spooled = {name: share.spool.close() for name, share in self._shares.items() if share.spool is not None}
        reach("task.spooled")
        return spooled

    def abort(self) -> None:
        for share in self._shares.values():
            share.writer.abort()


def with_same_version(function: Callable[[Given], Returned]) -> Callable[[Given], Returned]:
    """Return a function for tasks that calls ``function`` if the executor has the driver's version of epochsink.

    With another version it fails with `ConfigurationError`, in the text of the task's error.
    """
    # bytes until the versions are compared: dataclasses are unpickled by the position of their fields, so that a field
    # which only one version has would shift the others
    sealed = cloudpickle.dumps(function)  # type: ignore[no-untyped-call]
    expected, unset = __version__, _FOUND
    refusal = other_version("an executor", _FOUND).to_line()

    def run(given: Given) -> Returned:
        # a function inside a function is pickled as code: the executor needs no epochsink to unpickle it
        import pickle  # noqa: PLC0415

        import epochsink  # noqa: PLC0415

        if epochsink.__version__ != expected:
            raise RuntimeError(refusal.replace(unset, epochsink.__version__))
        answer: Returned = pickle.loads(sealed)(given)  # noqa: S301 - the driver's own
        return answer

    return run


def other_version(place: str, version: str, sent: str = __version__) -> ConfigurationError:
    """Return the error for a ``place`` that has version ``found`` of epochsink, another than the sender's."""
    return ConfigurationError(
        f"{place} has epochsink {version}, and the driver has {sent}: a task would misread what the driver sends",
        hint=f"install epochsink {sent} in the Python of every executor (PYSPARK_PYTHON), then start the query "
        "again; no row of the epoch is visible",
    )
