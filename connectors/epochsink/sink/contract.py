"""The interface of a sink: its configuration, its writers, and the participant that votes and commits."""
# ruff: noqa: ARG002, B027 - the defaults take what subclasses need

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import pyarrow as pa

from epochsink.errors import PrepareFailed
from epochsink.sink.marks import Marks
from epochsink.sink.operator import Operator
from epochsink.sink.remnants import Remnant
from epochsink.sink.values import (
    Committable,
    Committables,
    Epoch,
    Identity,
    Joining,
    Keeping,
    LastDone,
    Members,
    Recorded,
    Task,
    Verdict,
    WriterContext,
    one_by_one,
)


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


def write_all(writer: SinkWriter, batches: Iterable[pa.RecordBatch]) -> Committable:
    """Write and prepare the rows of one task, for example in `Participant.replay`; abort if that fails."""
    try:
        for batch in batches:
            writer.write(batch)
        return writer.prepare()
    except BaseException:
        writer.abort()
        raise


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


class Participant(ABC):
    """The driver's side of the sinks of one query that commit as one. Most sinks commit alone.

    It votes on each epoch, commits it after Spark has decided it, and aborts what no recorded epoch names. A prepared
    epoch of a sink is a list of *parts* (committables). A part is what the target commits in one step. Sinks that
    commit as one record the same part. Any method may be called again, by this process or by another one.

    Called from one thread at a time, except `commit`, `replay`, `visible` and `finish`, which run in a
    second thread beside `end` and `vote` of the following epoch. `remnants` and `end` may come from either thread,
    never beside `vote`, `replay` or one another.
    """

    def __init__(self, members: Members) -> None:
        self.members = dict(members)
        """The sinks, or their configurations, by name, in the order of the query."""
        self.identities: dict[str, Identity] = {}
        self.require_ours: Callable[[], object] = lambda: None
        """Raises `Fenced` if another driver has the ledger. Set by the driver, for writes that nothing else refuses."""

    def operator(self) -> Operator:
        """Return what answers an operator's commands; asked anew for each."""
        return Operator()

    def check(self, sink: str, schema: pa.Schema) -> list[str]:
        """Compare one sink's configuration and the schema of its rows with the live target; before `open`.

        Return the findings, each one sentence with the value, the rule and the hint; an empty list if there are none.
        Creates what the configuration allows to create (marker table, topic, index), unless `would` says that
        nothing may be made: then it compares the rest.
        """
        return []

    def open(self, identity: Identity) -> Joining:
        """Take the identity of one of the sinks. Called before the methods below, and again after each `take`.

        An identity of generation 0 is that of a sink that joins a ledger. Then return what never changes after that
        (`Identity.origin`), and the highest generation in the names that this sink has left in the target: the new
        driver takes a higher one, so that its sweep ends what is left. If the start fails after this, the next start
        joins again: what is made in the target must do no harm there, and nothing is made while the engine is
        `comparing`.
        """
        self.identities[identity.sink] = identity
        return Joining()

    def fence(self) -> None:
        """Make `vote` and `replay` of every other driver of these sinks raise `Fenced`, on any copy of the checkpoint.

        No fence is needed if the commit itself depends on a marker that is inserted, or replaced only as it was read.
        Called at a start, after the target was compared with the ledger. A sweep and another comparison follow.
        """

    @abstractmethod
    def marks(self, sink: str, done: LastDone | None, pending: LastDone | None) -> Marks:
        """Return what the target's own marker says is applied, beside what ``done`` and ``pending`` leave there.

        The engine compares them (`Marks.verify`) at every start, in every epoch before anything is swept, and before
        each commit. If the target was set back and holds a part of ``done`` prepared again, this may commit the part;
        it changes nothing while the engine is `comparing`.
        """

    @abstractmethod
    def remnants(self, recorded: Recorded) -> Sequence[Remnant]:
        """Return what these sinks have prepared or staged in the target, of any generation. Changes nothing.

        `Remnant.of` is the one of the ``recorded`` parts that it belongs to. Called before a ledger begins beside
        decided epochs, and before anything is ended.
        """

    @abstractmethod
    def end(self, remnants: Sequence[Remnant]) -> list[str]:
        """Abort some of these `remnants`; return a line for each that is ended now. May be repeated.

        The engine has chosen them: no record names them, and none is of a later generation (see `orphans`). What cannot
        be ended now is left for the next sweep.
        """

    def begin(
        self, epoch: Epoch, schemas: Mapping[str, pa.Schema], *, retained: bool = False
    ) -> Mapping[str, WriterContext]:
        """Return what the writers of each sink are told in this attempt; called just before the write job.

        ``schemas`` as in `check`. All rows go into the spool if they are ``retained`` there after the epoch, or if the
        target cannot be asked whether it keeps them itself. Raises `PrepareFailed` if it cannot be asked for what the
        writers must know.
        """
        kept = {name: self.members[name].spool is not False for name in self.members}
        return {name: WriterContext(Keeping.IN_SPOOL if spooled else Keeping.NOT) for name, spooled in kept.items()}

    @abstractmethod
    def vote(self, epoch: Epoch, ballots: Ballots) -> Parts:
        """Make one prepared epoch of what the accepted tasks prepared, and verify that the target holds it.

        Return the parts of each sink. Nothing becomes visible. What the target has lost since a task prepared it may be
        prepared again from the rows. If preparing is a transaction, it includes the check that ``after`` is applied.
        Raises `PrepareFailed` or `WentBack`.
        """

    @abstractmethod
    def commit(self, epoch: Epoch, ballots: Ballots) -> Mapping[str, Sequence[Verdict]]:
        """Make parts visible; may be repeated at any time.

        Return a verdict for each part. Retries after transient failures. `marks` have just shown ``after``
        applied; if the commit is a transaction, or can be conditional, it checks that again. A part is ABORTED only if
        the target itself says that the part is gone *and* its marker is absent. Raises `RowsRejected` if the target
        refuses rows for good: the epoch stays pending.
        """

    @abstractmethod
    def replay(self, epoch: Epoch, part: Committable, ballots: Ballots, attempt: str) -> Committable:
        """Prepare the rows of an aborted part again, from where they are kept, under the new name ``attempt`` (uuid).

        If the epoch is done and a repair applies it again, ``attempt`` is "": then the recorded name stands, if the
        target can have it again.
        ``ballots`` are those of the sinks that have recorded the part, with all their parts. The caller records what is
        returned before it commits it. A part that is still prepared, and waits for another, may be returned as it is.
        """

    def visible(self, epoch: Epoch, ballots: Ballots, recorded: Callable[[], Recorded]) -> list[str]:
        """Wait, for a limited time, until readers see all committed parts; after `commit`, before the epoch is done.

        Nothing to do if the target shows a part as soon as it is committed. What keeps readers from the epoch, such as
        attempts that lost, is aborted by the rule of `orphans`; return lines as `end` does. What is recorded is what
        ``recorded`` returns, which reads the ledger again: call it if there is something to abort. It raises `Fenced`
        if we lost the ledger. An attempt at the following epoch runs beside this, and continues.

        If the commit could not be conditional, raises `WentBack` unless the target now holds this epoch and ``after``,
        and `OutcomeUnknown` if it is not known.
        """
        return []

    def finish(self, epoch: Epoch, ballots: Ballots) -> None:
        """Remove what a committed epoch has left, such as staged rows. A sweep ends what this misses."""

    def close(self) -> None:
        """Release connections. The participant is not used afterwards."""


class SimpleParticipant(Participant):
    """A participant whose tasks prepare the parts, of which each is committed for itself.

    It votes by asking for each part whether the target still holds it, and commits one part after another.
    """

    @abstractmethod
    def holds(self, sink: str, part: Committable) -> bool:
        """Return whether the target still holds what a task prepared."""

    @abstractmethod
    def commit_part(self, sink: str, epoch: Epoch, ballot: Ballot, part: Committable) -> Verdict:
        """Make one part of a ballot visible, as `Participant.commit` does."""

    def vote(self, epoch: Epoch, ballots: Ballots) -> Parts:
        """Return what the tasks prepared. Raises `PrepareFailed` if the target does not hold all of it."""
        lost = [part for sink, ballot in ballots.items() for part in ballot.parts if not self.holds(sink, part)]
        if lost:
            raise PrepareFailed(
                f"epoch {epoch.number}: the target has lost what {len(lost)} task(s) prepared, for example "
                f"{self.operator().describe(lost[0])}"
            )
        return {sink: ballot.parts for sink, ballot in ballots.items()}

    def commit(self, epoch: Epoch, ballots: Ballots) -> Mapping[str, Sequence[Verdict]]:
        """Commit the parts in order."""
        return {
            name: one_by_one(ballot.parts, partial(self.commit_part, name, epoch, ballot))
            for name, ballot in ballots.items()
        }


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

        None: a copy is kept unless the target keeps the rows itself (`Participant.begin`, asked for each attempt).
        """
        return True

    @property
    def writers_read(self) -> bool:
        """Whether tasks read what earlier epochs have left in the target: no attempt begins while one is pending."""
        return False

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
