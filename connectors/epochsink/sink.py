"""The words of the protocol: no I/O, no Spark.

An *epoch* is one micro-batch of one streaming query. For each sink it passes through

    written (by tasks)  ->  prepared (durable, invisible)  ->  recorded (in the ledger)
    ->  decided (Spark's checkpoint holds ``commits/N``)   ->  committed (visible)  ->  done

A sink consists of a configuration (`Sink`), which crosses to the executors, a `SinkWriter` for each
task attempt there, and one `SinkCommitter` in the driver. What they exchange are *committables*: plain
JSON values that name what was prepared, so that any later process can commit or abort it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from epochsink.errors import WentBack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pyarrow as pa

Committable = dict[str, Any]
"""A JSON object that names something prepared. Never holds a secret: it is written to the ledger."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a sink is to its target: the query id of the checkpoint, and the sink's name in the query.

    ``origin`` is what the committer fixed when this sink first joined the ledger (see
    `SinkCommitter.initial_state`); it never changes afterwards. ``generation`` is the number of this
    driver's `take` of the ledger, larger than that of every driver before it. ``pipeline`` is a name for people
    (the checkpoint folder's), which decides nothing: it may change between runs.
    """

    query_id: str
    sink: str
    generation: int = 0
    origin: Mapping[str, Any] = field(default_factory=dict)
    pipeline: str = ""


@dataclass(frozen=True, slots=True)
class Epoch:
    """One attempt at one micro-batch.

    ``number`` is Spark's batch id, ``attempt`` a fresh uuid (32 hex) for each call of ``foreachBatch``, so
    that two attempts at one epoch never share a name.
    """

    number: int
    attempt: str


@dataclass(frozen=True, slots=True)
class Task:
    """One invocation of one Spark task.

    ``partition`` is the partition's index, ``uuid`` (32 hex) is fresh for every invocation, because (stage,
    partition, attempt number) is not unique in Spark.
    """

    identity: Identity
    epoch: Epoch
    partition: int
    uuid: str


@dataclass(frozen=True, slots=True)
class LastDone:
    """The newest epoch with rows that the ledger calls done in a sink: what its target must hold.

    ``attempt`` and ``parts`` are those that were recorded, so that another writer's epoch of the same number is told
    apart. Without parts it is an operator's word: the target may hold anything up to this epoch.
    """

    epoch: int
    attempt: str
    parts: tuple[Committable, ...]


@dataclass(frozen=True, slots=True)
class SpoolFile:
    """What one task's file in the spool of one sink held when it was closed: recorded, and compared at each read."""

    rows: int
    size: int
    crc32: int


Written = Mapping[str, Sequence[tuple[str, Committable]]]
"""For each sink with rows, the (task uuid, committable) of every task that Spark accepted, by partition."""
Spooled = Mapping[str, Mapping[str, SpoolFile]]
"""What the accepted tasks of an epoch have spooled: by sink, and by the task's uuid."""
NOTHING_SPOOLED: Spooled = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Mark:
    """What a target itself says of one part: the newest epoch applied, and by which attempt.

    ``attempt`` is "" where the marker does not say: earlier versions of this package did not write it.
    """

    epoch: int
    attempt: str = ""

    def agrees(self, other: Mark | None) -> bool:
        """Whether both mean the same attempt at the same epoch, as far as they say."""
        return (
            other is not None
            and self.epoch == other.epoch
            and (self.attempt == other.attempt or "" in (self.attempt, other.attempt))
        )


def verify_marks(
    target: str,
    found: Mapping[str, Mark],
    done: LastDone | None,
    pending: LastDone | None,
    marks_of: Callable[[LastDone], Mapping[str, Mark]],
) -> None:
    """Raise `WentBack` unless a target's marks say what the ledger does: for `SinkCommitter.verify_applied`.

    ``found`` has the marks by part, ``marks_of`` gives those that an epoch leaves. ``target`` is for the message.
    """
    must = marks_of(done) if done and done.parts else {}
    may = marks_of(pending) if pending else {}
    newest = max((last.epoch for last in (done, pending) if last), default=-1)
    for part in found.keys() | must.keys():
        mark, wanted = found.get(part), must.get(part)
        if mark is None:
            raise _marker_is_gone(target, wanted)
        # an operator's word: the target may hold anything up to that epoch
        if done and not done.parts and mark.epoch <= done.epoch:
            continue
        if mark.agrees(wanted) or mark.agrees(may.get(part)):
            continue
        if mark.epoch > newest:
            raise _target_is_newer(target, mark, newest)
        if wanted is not None and mark.epoch < wanted.epoch:
            raise _target_is_older(target, mark, wanted)
        if mark.epoch == newest or wanted is not None:
            ours = next((one for one in (may.get(part), wanted) if one and one.epoch == mark.epoch), None)
            raise _written_by_another(target, mark, ours)


def _target_is_newer(target: str, mark: Mark, newest: int) -> WentBack:
    return WentBack(
        f"{target} already holds epoch {mark.epoch} of this query, and the ledger knows only epochs up to {newest}: "
        "the checkpoint is the older copy, or a driver on another copy of it is running",
        hint="stop the other driver, or restore the newer copy of the checkpoint; to process the input since then "
        "again, start with a new checkpoint folder after removing those epochs' rows",
    )


def _target_is_older(target: str, mark: Mark, wanted: Mark) -> WentBack:
    return WentBack(
        f"{target} holds epoch {mark.epoch} as the newest of this query, and the ledger says that epoch {wanted.epoch} "
        "is done: the target is the older copy (restored from a backup, or failed over to a standby that lacked "
        f"the last commits), and the rows of epochs {mark.epoch + 1} to {wanted.epoch} are missing in it",
        hint="put the newer state back; or load those epochs' input with a query of its own, then say so: "
        f"epochsink accept CHECKPOINT {wanted.epoch} --sink NAME",
    )


def _marker_is_gone(target: str, wanted: Mark | None) -> WentBack:
    number = wanted.epoch if wanted else -1
    return WentBack(
        f"{target} has no marker of this query any more, and the ledger says that epoch {number} is done: the target "
        "was restored from a backup, or somebody deleted the marker; which epochs it holds is unknown",
        hint=f"look whether the rows up to epoch {number} are there; when they are, say so: epochsink accept "
        f"CHECKPOINT {number} --sink NAME",
    )


def _written_by_another(target: str, mark: Mark, wanted: Mark | None) -> WentBack:
    ours = f"attempt {wanted.attempt}" if wanted else "nothing of it there"
    return WentBack(
        f"epoch {mark.epoch} was applied to {target} by attempt {mark.attempt or 'unknown'}, and the ledger records "
        f"{ours}: a driver on another copy of this checkpoint writes for the same query",
        hint="stop the other driver; keep the copy whose ledger names that attempt (see 'epochsink status --json')",
    )


def json_text(expression: str) -> str:
    """Return the SQL that renders a struct, map or array as JSON: microseconds, in UTC, null fields, all digits."""
    time = "yyyy-MM-dd\\'T\\'HH:mm:ss.SSSSSS"  # by default Spark cuts to milliseconds
    options = f"'timeZone', 'UTC', 'timestampFormat', '{time}XXX', 'timestampNTZFormat', '{time}'"
    return f"to_json({expression}, map({options}, 'ignoreNullFields', 'false'))"


class Outcome(enum.Enum):
    """What became of something prepared. A time-out is UNKNOWN, never ABORTED."""

    COMMITTED = "committed"
    ABORTED = "aborted"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Verdict:
    """An outcome and the evidence for it, in words for the operator."""

    outcome: Outcome
    evidence: str = ""


COMMITTED = Verdict(Outcome.COMMITTED)


class Rows(Protocol):
    """The durable copy of one sink's rows of one epoch, as its writers received them."""

    def tasks(self) -> Sequence[str]:
        """Return the uuids of the accepted tasks that had rows, in the order of their partitions."""

    def read(self, task: str) -> Iterator[pa.RecordBatch]:
        """Yield the record batches of one task, in the order written.

        The first batch comes after the whole file was compared with what is recorded of it. Raises `SpoolMissing` if
        the rows are gone or were never kept (``spool=False``), `SpoolDamaged` if they are not those that were written.
        """

    def verify(self) -> None:
        """Compare every task's file with what is recorded of it; raises what `read` raises.

        For who applies rows one after another and cannot take any back.
        """


class SinkWriter(Protocol):
    """Writes one sink's share of one task. Lives in a Python worker of an executor.

    Calls: ``write`` any number of times, then ``prepare`` once or ``abort`` once. Neither may be called at
    all: a killed task gets no goodbye. A task without rows makes no writer.
    """

    def write(self, batch: pa.RecordBatch) -> None:
        """Take a record batch whose columns are those of `Sink.columns`, with at least one row."""

    def prepare(self) -> Committable:
        """Make everything written durable and invisible, and name it.

        Raises `PrepareFailed` (`RowsRejected` where no retry can help).
        """

    def abort(self) -> None:
        """Undo what can be undone cheaply. Must not raise; what stays is swept by the driver."""


class SinkCommitter(Protocol):
    """The driver's side of one sink.

    Called from one thread at a time, except `commit`, `replay` and `finish`, which run in a second thread
    beside `abort_orphans` and `vote` of the following epoch. `abort_orphans` may come from either thread, never beside
    `vote`, `replay` or another `abort_orphans`.

    A prepared epoch of a sink is a list of *parts* (committables), each committed on its own; a part is
    the unit of atomicity that the target offers. Every method may be repeated, by another process too.
    """

    def check(self, schema: pa.Schema) -> list[str]:
        """Compare the configuration and the row's schema with the live target.

        Return the findings, each one sentence that names the value, the rule and the hint; none if all
        is well. Creates what the configuration allows to create (marker table, topic, index).
        """

    def initial_state(self) -> dict[str, Any]:
        """Return what to fix for good as this sink joins a ledger for the first time (`Identity.origin`)."""

    def open(self, identity: Identity) -> None:
        """Learn who this sink is. Called before any method below, and again after each `take`."""

    def newest(self) -> int | None:
        """Return the newest epoch of this identity that the target's own marker says is applied."""

    def leftovers(self) -> list[str]:
        """Return what of this identity is prepared or staged, of any generation, a line each. Changes nothing.

        Called, as `newest` is, before a ledger begins on a checkpoint that already holds decided epochs.
        """

    def verify_applied(self, done: LastDone | None, pending: LastDone | None) -> None:
        """Raise `WentBack` unless the target's marker says what the ledger does, part by part (see `verify_marks`).

        The target must hold ``done`` (None: the ledger knows of no epoch with rows), as it was recorded, and beyond
        that nothing but parts of ``pending``. Called at every start, in every epoch before anything is swept, and
        before each commit. May finish a part of ``done`` that the target, set back, holds prepared again.
        """

    def vote(
        self, epoch: Epoch, written: Sequence[Committable], rows: Rows, after: LastDone | None = None
    ) -> list[Committable]:
        """Turn the accepted tasks' committables into one prepared epoch, verified against the target.

        ``written`` is never empty. Nothing becomes visible. What a task prepared and the target has lost since may be
        prepared again out of ``rows``. Where preparing is a transaction, that ``after`` is applied is part of it (None:
        not known). Raises `PrepareFailed` or `WentBack`.
        """

    def commit(self, epoch: Epoch, part: Committable, rows: Rows, after: LastDone | None = None) -> Verdict:
        """Decide that a part becomes visible; right to repeat at any time. It retries after passing failures itself.

        `verify_applied` has just found ``after`` applied (None: not known). Where the commit is a transaction, or may
        be conditional, it says so once more. ABORTED only where the target itself says that the part is gone *and* its
        marker is absent. Raises `RowsRejected` if the target refuses rows for good: the epoch stays pending.
        """

    def replay(
        self, epoch: Epoch, part: Committable, rows: Rows, attempt: str, after: LastDone | None = None
    ) -> Committable:
        """Prepare an aborted part's rows again, from the spool, under the new name ``attempt`` (uuid).

        ``after`` as in `vote`. The caller records what is returned before it commits it.
        """

    def abort_orphans(self, keep: Sequence[Committable], done: Sequence[Committable] = ()) -> list[str]:
        """Abort everything of this identity (any generation up to ours) that ``keep`` does not name.

        ``keep`` lists the parts of recorded epochs that are not done. A part of ``done``, which lists those of done
        epochs, that is still prepared shows a target that was set back: it is never aborted, and `WentBack` is
        raised. Return one line for each thing ended.
        """

    def await_visible(self, epoch: Epoch, parts: Sequence[Committable], after: LastDone | None = None) -> None:
        """Wait, for a while, until readers see what `commit` has decided: all parts at once, before the epoch is done.

        A target that shows a part as soon as it is committed has nothing to wait for; what is not visible by then
        will be. Where a commit could not be made conditional, raises `WentBack` unless the target now holds this epoch
        and ``after``.
        """

    def finish(self, epoch: Epoch, parts: Sequence[Committable]) -> None:
        """Clear away what a committed epoch has left (staging rows). Best effort; `abort_orphans` finds the rest."""

    def close(self) -> None:
        """Release connections. The committer is not used afterwards."""


class Sink(Protocol):
    """A destination's configuration: immutable, picklable, validated without I/O when constructed."""

    @property
    def select(self) -> Sequence[str]:
        """SQL expressions over the stream's columns that make the row; ``("*",)`` for all of them."""

    @property
    def where(self) -> str | None:
        """SQL predicate over the stream's columns: which rows go to this sink. None for all."""

    @property
    def spool(self) -> bool:
        """Whether a durable copy of the rows is kept until the epoch is done."""

    @property
    def distribute_by(self) -> Sequence[str]:
        """SQL expressions by which rows must be spread over tasks; empty where it does not matter."""

    def columns(self, row: str, schema: pa.Schema) -> Sequence[str]:
        """Return the SQL expressions (with ``AS`` names) that make the writer's input.

        ``row`` is the SQL name of the struct of the selected columns and ``schema`` its fields; the
        expressions may use it and every column of the stream. Raises `ConfigurationError`.
        """

    def writer(self, task: Task) -> SinkWriter:
        """Make the writer of one task attempt; connects. Raises `PrepareFailed`."""

    def committer(self) -> SinkCommitter:
        """Make the driver's side; does not connect yet."""


class CheckpointReader(Protocol):
    """What the coordinator asks of Spark's checkpoint: see `epochsink.spark.checkpoint.Checkpoint`."""

    def is_decided(self, epoch: int) -> bool: ...  # noqa: D102 - described there
    def has_commit(self, epoch: int) -> bool: ...  # noqa: D102 - described there
    def newest_decided(self) -> int: ...  # noqa: D102 - described there
    def offsets_digest(self, epoch: int) -> str: ...  # noqa: D102 - described there
    def make_durable(self, epoch: int) -> None: ...  # noqa: D102 - described there


class SpoolKeeper(Protocol):
    """What the coordinator asks of the spool: see `epochsink.protocol.spool.Spool`."""

    def rows(  # noqa: D102 - described there
        self, identity: Identity, epoch: Epoch, tasks: Sequence[str], files: Mapping[str, SpoolFile]
    ) -> Rows: ...
    def make(self, query_id: str, epoch: Epoch) -> None: ...  # noqa: D102 - described there
    def drop(self, query_id: str, epoch: Epoch) -> None: ...  # noqa: D102 - described there
    def attempts(self, query_id: str) -> list[Epoch]: ...  # noqa: D102 - described there
