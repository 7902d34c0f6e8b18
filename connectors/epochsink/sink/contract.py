"""What a sink has to be: configuration, writer and committer, and the rows that they are handed."""
# ruff: noqa: ARG002 - the defaults take what those who override them need

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa

    from epochsink.sink.outcome import Verdict
    from epochsink.sink.values import Committable, Epoch, Identity, LastDone, Task


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

    Who derives from it inherits `check` that finds nothing, an empty `initial_state`, a `newest_generation` of 0, and
    `fence`, `await_visible`, `finish` and `close` that have nothing to do.
    """

    def check(self, schema: pa.Schema) -> list[str]:
        """Compare the configuration and the row's schema with the live target.

        Return the findings, each one sentence that names the value, the rule and the hint; none if all
        is well. Creates what the configuration allows to create (marker table, topic, index).
        """
        return []

    def initial_state(self) -> dict[str, Any]:
        """Return what to fix for good as this sink joins a ledger for the first time (`Identity.origin`).

        `open` was called, with generation 0 and an empty origin. What this leaves in the target may stay there
        unrecorded: a start that ends here is followed by another one.
        """
        return {}

    def open(self, identity: Identity) -> None:
        """Learn who this sink is. Called before any method below, and again after each `take`."""

    def fence(self) -> None:
        """Shut out every other driver of this identity, on whatever copy of the checkpoint; for a target that needs it.

        One that commits on a condition (a marker that is inserted, or replaced only as it was read) has nothing to do.
        Called at a start, once the target was compared with the ledger. A sweep and another comparison follow.
        From then on `vote` and `replay` of the others raise `Fenced`.
        """
        return

    def newest(self) -> int | None:
        """Return the newest epoch of this identity that the target's own marker says is applied."""

    def leftovers(self) -> list[str]:
        """Return what of this identity is prepared or staged, of any generation, a line each. Changes nothing.

        Called, as `newest` is, before a ledger begins on a checkpoint that already holds decided epochs.
        """

    def newest_generation(self) -> int:
        """Return the highest generation in the names that this identity has left in the target, 0 if there are none.

        Called as this sink joins a ledger, after `open` with generation 0: the take goes above it. So what a ledger
        that was lost has left is older than the new driver, whose `abort_orphans` ends it.
        """
        return 0

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
        and ``after``, and `OutcomeUnknown` if it does not say: the epoch is not done then.
        """
        return

    def finish(self, epoch: Epoch, parts: Sequence[Committable]) -> None:
        """Clear away what a committed epoch has left (staging rows). Best effort; `abort_orphans` finds the rest."""
        return

    def close(self) -> None:
        """Release connections. The committer is not used afterwards."""
        return


class Sink(Protocol):
    """A destination's configuration: immutable, picklable, validated without I/O when constructed.

    Who derives from it inherits a `select` of all columns, no `where`, a spool, rows spread as they come, and no
    promise of order.
    """

    @property
    def select(self) -> Sequence[str]:
        """SQL expressions over the stream's columns that make the row; ``("*",)`` for all of them."""
        return ("*",)

    @property
    def where(self) -> str | None:
        """SQL predicate over the stream's columns: which rows go to this sink. None for all."""
        return None

    @property
    def spool(self) -> bool | None:
        """Whether a durable copy of the rows is kept until the epoch is done.

        None: unless the target keeps them itself (`KeepingCommitter.keeps_rows`, asked for each attempt).
        """
        return True

    @property
    def distribute_by(self) -> Sequence[str]:
        """SQL expressions by which rows must be spread over tasks; empty where it does not matter."""
        return ()

    @property
    def keeps_order(self) -> bool:
        """Whether rows must reach the target in the order that they have in the stream's partitions, e.g. by key.

        Such a sink is not combined with one that has a `distribute_by`: the shuffle loses that order.
        """
        return False

    def columns(self, row: str, schema: pa.Schema) -> Sequence[str]:
        """Return the SQL expressions (with ``AS`` names) that make the writer's input.

        ``row`` is the SQL name of the struct of the selected columns and ``schema`` its fields; the
        expressions may use it and every column of the stream. Raises `ConfigurationError`.
        """

    def writer(self, task: Task) -> SinkWriter:
        """Make the writer of one task attempt; connects. Raises `PrepareFailed`."""

    def committer(self) -> SinkCommitter:
        """Make the driver's side; does not connect yet."""
