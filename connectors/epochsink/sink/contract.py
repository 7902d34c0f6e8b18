"""The interface of a sink: its configuration, its writers, and the participant that votes and commits."""
# ruff: noqa: ARG002, B027 - the defaults take what subclasses need

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from epochsink.errors import PrepareFailed
from epochsink.sink.marks import Mark, verify_marks
from epochsink.sink.values import TRUSTS_MARKERS, Committables, Keeping, Members, Recorded, one_by_one

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

    import pyarrow as pa

    from epochsink.sink.audit import Comparison, Receipt
    from epochsink.sink.executors import Executors
    from epochsink.sink.letters import Letters
    from epochsink.sink.values import Committable, Epoch, Finding, Identity, LastDone, Recorder, Remnant, Task, Verdict


class Rows(Protocol):
    """The durable copy of one sink's rows of one epoch, as its writers received them."""

    def tasks(self) -> Sequence[str]:
        """Return the uuids of the accepted tasks that had rows, in the order of their partitions."""

    def read(self, task: str) -> Iterator[pa.RecordBatch]:
        """Yield the record batches of one task, in the order written.

        The whole file is compared with the record before the first batch is returned. Raises `SpoolMissing` if the rows
        are gone or were never kept (``spool=False``), `SpoolDamaged` if they are not the rows that were written.
        """

    def verify(self) -> None:
        """Compare every task's file with the record. Raises what `read` raises.

        Call this before writes that cannot be undone.
        """


class SinkWriter(Protocol):
    """Writes one sink's rows of one task, in a Python worker of an executor.

    The task calls ``write`` any number of times, then ``prepare`` once or ``abort`` once. If it is killed, it calls
    neither. A task without rows makes no writer.
    """

    @abstractmethod
    def write(self, batch: pa.RecordBatch) -> None:
        """Take a record batch whose columns are those of `Sink.columns`, with at least one row."""

    @abstractmethod
    def prepare(self) -> Committable:
        """Make everything written durable and invisible, and name it.

        Raises `PrepareFailed` (`RowsRejected` where no retry can help).
        """

    def abort(self) -> None:
        """Undo what can be undone cheaply. Must not raise; the driver aborts the rest."""
        return


@dataclass(frozen=True, slots=True)
class Ballot:
    """One sink's rows of an epoch, as its participant gets them.

    ``parts`` are what the accepted tasks prepared (at the vote) or what is recorded (later). ``after`` is the newest
    done epoch with rows, which the target must hold; None if the ledger has none.
    """

    parts: Committables
    rows: Rows
    after: LastDone | None = None


Ballots = Mapping[str, Ballot]
Parts = Mapping[str, Committables]
Marks = Mapping[str, Mark]


class Participant(ABC):
    """The driver's side of the sinks of one query that commit as one. Most sinks commit alone.

    It votes on each epoch, commits it after Spark has decided it, and aborts what no recorded epoch names. A prepared
    epoch of a sink is a list of *parts* (committables). A part is what the target commits in one step. Sinks that
    commit as one record the same part. Any method may be called again, by this process or by another one.

    Called from one thread at a time, except `commit`, `replay`, `unblock`, `await_visible` and `finish`, which run in a
    second thread beside `abort_orphans` and `vote` of the following epoch. `abort_orphans` may come from either thread,
    never beside `vote`, `replay` or another `abort_orphans`.
    """

    executors: Executors | None = None
    """Spark's executors; None if there are none."""
    repairs: bool = False
    """Whether done epochs can be applied again to a target that was set back (`lacking`, `reapply`)."""
    writers_read: bool = False
    """Whether tasks read what earlier epochs have left in the target: so no epoch is pending when an attempt begins."""
    retains: bool = False
    """Set by the coordinator: rows of done epochs stay in the spool, so `keeping` has all rows written there."""
    repair_warning: str = TRUSTS_MARKERS
    """What an operator must know before epochs are applied again."""

    def __init__(self, members: Members) -> None:
        self.members = dict(members)
        """The sinks, or their configurations, by name, in the order of the query."""
        self.identities: dict[str, Identity] = {}
        self.require_ours: Callable[[], object] = lambda: None
        """Raises `Fenced` if another driver has the ledger. Set by the driver, for writes that nothing else refuses."""

    def check(self, sink: str, schema: pa.Schema) -> list[str]:
        """Compare one sink's configuration and the schema of its rows with the live target; before `open`.

        Return the findings, each one sentence with the value, the rule and the hint; an empty list if there are none.
        Creates what the configuration allows to create (marker table, topic, index).
        """
        return []

    def examine(self, sink: str) -> Iterable[Finding]:
        """Look at one sink's live target as an operator does before a start; before `open`. No row moves.

        Server, clock, settings, rights, and an epoch without rows that is prepared and rolled back. Creates what
        `check` creates without knowing the columns. What the target raises may be passed on.
        """
        return ()

    def initial_state(self, sink: str) -> dict[str, Any]:
        """Return what never changes after one sink has joined a ledger (`Identity.origin`).

        Called once, after `open` with generation 0 and an empty origin. If the start fails after this, the next start
        calls it again: what it makes in the target must do no harm there.
        """
        return {}

    def open(self, identity: Identity) -> None:
        """Take the identity of one of the sinks. Called before the methods below, and again after each `take`."""
        self.identities[identity.sink] = identity

    def fence(self) -> None:
        """Make `vote` and `replay` of every other driver of these sinks raise `Fenced`, on any copy of the checkpoint.

        No fence is needed if the commit itself depends on a marker that is inserted, or replaced only as it was read.
        Called at a start, after the target was compared with the ledger. A sweep and another comparison follow.
        """

    def marks(self, sink: str) -> Marks:
        """Return what the target's own marker says is applied, for each part; empty if no epoch is applied.

        Not called if `newest` and `verify_applied` are overridden.
        """
        raise NotImplementedError

    def marks_of(self, sink: str, last: LastDone) -> Marks:
        """Return the marks that an epoch leaves when it is applied; by default one mark for all parts."""
        return {"": Mark(last.epoch, last.attempt)} if last.parts else {}

    def newest(self, sink: str) -> int | None:
        """Return the newest epoch that the target's own marker says is applied."""
        return max((mark.epoch for mark in self.marks(sink).values()), default=None)

    @abstractmethod
    def leftovers(self, sink: str) -> list[str]:
        """Return what is prepared or staged for a sink, of any generation, one line each. Changes nothing.

        Called before a ledger begins beside decided epochs, and before a sweep, which compares first if there is any.
        """

    def in_target(self) -> Sequence[Remnant]:
        """Return what these sinks have pending in the target, of any generation, and what it blocks; after `open`."""
        return ()

    def newest_generation(self, sink: str) -> int:
        """Return the highest generation in the names that a sink has left in the target; 0 if there are none.

        Called when this sink joins a ledger. The new driver takes a higher one, so that its sweep ends what is left.
        """
        return 0

    def verify_applied(self, sink: str, done: LastDone | None, pending: LastDone | None) -> None:
        """Raise `WentBack` unless the target's marker and the ledger agree on each part (see `verify_marks`).

        The target must hold ``done`` as it was recorded (None: the ledger has no epoch with rows), and nothing newer
        except parts of ``pending``. Called at every start, in every epoch before anything is swept, and before each
        commit. If the target was set back and holds a part of ``done`` prepared again, this may commit the part.
        """
        verify_marks("the target", self.marks(sink), done, pending, lambda last: self.marks_of(sink, last))

    def audit(
        self, sink: str, done: LastDone | None, pending: LastDone | None, receipts: Sequence[Receipt]
    ) -> Sequence[Comparison]:
        """Compare receipts of done epochs with the target, by default its marker. Reads only. Raises `WentBack`."""
        self.verify_applied(sink, done, pending)
        return [receipt.not_compared("this kind of sink counts no rows") for receipt in receipts]

    def letters(self, sink: str) -> Letters | None:
        """Return one sink's dead letters, for an operator; after `open`. None if this kind of sink has none."""
        return None

    def keeping(self, epoch: Epoch, schemas: Mapping[str, pa.Schema]) -> Mapping[str, Keeping]:
        """Return where tasks keep each sink's rows in this attempt; called just before the write job.

        ``schemas`` as in `check`. Must not raise: if the target cannot be asked, the rows go into the spool.
        """
        return {name: Keeping.NOT if self.members[name].spool is False else Keeping.IN_SPOOL for name in self.members}

    def settings(self, epoch: Epoch) -> Mapping[str, Mapping[str, Any]]:
        """Return what the writers of this attempt must know of the target as it is now: JSON, by sink.

        Called after `keeping`. A sink may be left out. Raises `PrepareFailed` if the target cannot be asked.
        """
        return {}

    def vote(self, epoch: Epoch, ballots: Ballots) -> Parts:
        """Make one prepared epoch of what the accepted tasks prepared, and verify that the target holds it.

        Return the parts of each sink: by default what the tasks prepared. Nothing becomes visible. What the target has
        lost since a task prepared it may be prepared again from the rows. If preparing is a transaction, it includes
        the check that ``after`` is applied. Raises `PrepareFailed` or `WentBack`.
        """
        lost = [part for sink, ballot in ballots.items() for part in ballot.parts if not self.holds(sink, part)]
        if lost:
            raise PrepareFailed(
                f"epoch {epoch.number}: the target has lost what {len(lost)} task(s) prepared, for example "
                f"{self.describe(lost[0])}"
            )
        return {sink: ballot.parts for sink, ballot in ballots.items()}

    def holds(self, sink: str, part: Committable) -> bool:
        """Return whether the target still holds what a task prepared. Not called if `vote` is overridden."""
        raise NotImplementedError

    def commit(self, epoch: Epoch, ballots: Ballots) -> Mapping[str, Sequence[Verdict]]:
        """Make parts visible; may be repeated at any time. By default one part after another.

        Return a verdict for each part. Retries after transient failures. `verify_applied` has just found ``after``
        applied; if the commit is a transaction, or can be conditional, it checks that again. A part is ABORTED only if
        the target itself says that the part is gone *and* its marker is absent. Raises `RowsRejected` if the target
        refuses rows for good: the epoch stays pending.
        """
        return {
            name: one_by_one(ballot.parts, partial(self.commit_part, name, epoch, ballot))
            for name, ballot in ballots.items()
        }

    def commit_part(self, sink: str, epoch: Epoch, ballot: Ballot, part: Committable) -> Verdict:
        """Make one part of a ballot visible. Not called if `commit` is overridden."""
        raise NotImplementedError

    @abstractmethod
    def replay(self, epoch: Epoch, part: Committable, ballots: Ballots, attempt: str) -> Committable:
        """Prepare the rows of an aborted part again, from where they are kept, under the new name ``attempt`` (uuid).

        ``ballots`` are those of the sinks that have recorded the part, with all their parts. The caller records what is
        returned before it commits it. A part that is still prepared, and waits for another, may be returned as it is.
        """

    def lacking(self, sink: str, done: LastDone) -> Committables:
        """Return the parts of a done epoch that the target's markers lack. Raises `WentBack` if that proves nothing."""
        newest = self.newest(sink)
        return done.parts if newest is None or newest < done.epoch else ()

    def holds_earlier(self, sink: str) -> bool:
        """Whether what `lacking` has found since `open` proves that the target holds all earlier epochs."""
        return True

    def reapply(self, epoch: Epoch, ballots: Ballots, record: Recorder) -> Mapping[str, Sequence[Verdict]]:
        """Apply lacking parts of a done epoch again, each once, with the marks that they left before.

        ``record`` gets a part and what was prepared in its place, before that is committed. It raises `Fenced`.
        """
        return self.commit(epoch, ballots)

    @abstractmethod
    def abort_orphans(self, keep: Committables, done: Committables = ()) -> list[str]:
        """Abort what these sinks have (any generation up to ours) and ``keep`` does not name; return a line for each.

        ``keep`` lists the parts of recorded epochs that are not done, ``done`` those of done epochs. If a part of
        ``done`` is still prepared, the target was set back: the part is never aborted, and `WentBack` is raised.
        """

    def unblock(self, epoch: Epoch, ballots: Ballots, recorded: Callable[[], Recorded]) -> list[str]:
        """Abort what keeps readers from a committed epoch: attempts that lost, where a reader waits for their end.

        Called after `commit`, before `await_visible`, beside an attempt at the following epoch, which continues. The
        rules of `abort_orphans` hold; return lines as it does. Its ``keep`` and ``done`` are what ``recorded`` returns,
        which reads the ledger again: call it if there is something to abort. It raises `Fenced` if we lost the ledger.
        """
        return []

    def await_visible(self, epoch: Epoch, ballots: Ballots) -> None:
        """Wait for a limited time until readers see all committed parts; before the epoch is done.

        Nothing to do if the target shows a part as soon as it is committed. If the commit could not be conditional,
        raises `WentBack` unless the target now holds this epoch and ``after``, and `OutcomeUnknown` if it is not known.
        """

    def describe(self, part: Committable) -> str:
        """Return a recorded part in words, for an operator; before `open`."""
        return json.dumps(part)

    def finish(self, epoch: Epoch, ballots: Ballots) -> None:
        """Remove what a committed epoch has left, such as staged rows. `abort_orphans` removes what this misses."""

    def close(self) -> None:
        """Release connections. The participant is not used afterwards."""


class Sink(Protocol):
    """A destination's configuration: immutable, picklable, validated without I/O when constructed.

    The defaults: all columns, all rows, a spool, any distribution of rows over tasks, no promised order, commits alone.
    """

    @property
    def select(self) -> Sequence[str]:
        """SQL expressions over the stream's columns that make the row; ``("*",)`` for all of them."""
        return ("*",)

    @property
    def where(self) -> str | None:
        """SQL predicate over the stream's columns: which rows go to this sink; None for all."""
        return None

    @property
    def spool(self) -> bool | None:
        """Whether a durable copy of the rows is kept until the epoch is done.

        None: a copy is kept unless the target keeps the rows itself (`Participant.keeping`, asked for each attempt).
        """
        return True

    @property
    def distribute_by(self) -> Sequence[str]:
        """SQL expressions by which rows must be distributed over tasks; empty if any task may get any row."""
        return ()

    @property
    def keeps_order(self) -> bool:
        """Whether rows must reach the target in the order that they have in the stream's partitions, e.g. by key.

        Such a sink is not combined with one that has a `distribute_by`: the shuffle loses that order.
        """
        return False

    def count_deletes(self, rows: pa.RecordBatch) -> int:
        """Return how many rows of a batch, with the columns that the writer gets, delete a key."""
        return 0

    @property
    def commits_with(self) -> Hashable | None:
        """Equal for sinks of a kind that commit as one, by the same participant; None for a sink that commits alone."""
        return None

    def placement(self, schema: pa.Schema) -> tuple[Mapping[str, str], Sequence[str]]:
        """Return expressions that decide where the row of a key is stored, by argument, and those that make the key.

        All are SQL over the stream's columns; ``schema`` as in `columns`. An expression that depends on anything but
        the key is refused: rows of one key would be stored in several places. Raises `ConfigurationError`.
        """
        return {}, ()

    def check_columns(self, schema: pa.Schema) -> None:
        """Refuse types of the columns that `columns` makes. Raises `ConfigurationError`.

        ``schema`` has the types that Spark has planned. Called by `ExactlyOnce.check`, before the first row.
        """
        return

    @abstractmethod
    def columns(self, row: str, schema: pa.Schema) -> Sequence[str]:
        """Return the SQL expressions (with ``AS`` names) that make the writer's input.

        ``row`` is the SQL name of the struct of the selected columns and ``schema`` its fields; the
        expressions may use it and every column of the stream. Raises `ConfigurationError`.
        """

    @abstractmethod
    def writer(self, task: Task) -> SinkWriter:
        """Make the writer of one task attempt; connects. Raises `PrepareFailed`."""

    @abstractmethod
    def participant(self, members: Members) -> Participant:
        """Make the driver's side of the sinks that commit as one, by name; does not connect yet."""


def participants_of(sinks: Mapping[str, Sink]) -> list[Participant]:
    """Return the participants of a query's sinks, in the order in which it names the first of each."""
    groups: dict[object, dict[str, Sink]] = {}
    for name, sink in sinks.items():
        together = (name,) if sink.commits_with is None else (type(sink), sink.commits_with)
        groups.setdefault(together, {})[name] = sink
    return [next(iter(members.values())).participant(members) for members in groups.values()]
