"""Define for `SinkContract` how rows get into a target, how a reader sees them, and how they are lost."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Protocol, Self

import pyarrow as pa

from epochsink.protocol.spool import Spool
from epochsink.protocol.sweep import end_orphans
from epochsink.sink import (
    Ballot,
    Committable,
    Epoch,
    Identity,
    Joining,
    Keeping,
    LastDone,
    Participant,
    RemnantState,
    Rows,
    Sink,
    SpoolFile,
    Task,
    Verdict,
    WriterContext,
    comparing,
)


def damage(spool: Spool, query: str, epoch: Epoch, task: str) -> None:
    """Change the byte before the last eight of a task's file, which Arrow does not check."""
    (path,) = Path(spool.root).glob(f"{query}/{epoch.number}-{epoch.attempt}/*-{task}.arrow")
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)


class _NoRows:
    """No rows, for calls that do not read any."""

    def tasks(self) -> Sequence[str]:
        return ()

    def read(self, task: str) -> Iterator[pa.RecordBatch]:
        raise AssertionError(task)

    def verify(self) -> None:
        return


NO_ROWS: Final = _NoRows()


class OneSink:
    """The participant of a single sink, for tests. Its methods have no parameter for the sink's name."""

    def __init__(self, participant: Participant) -> None:
        self._participant = participant
        (self._name,) = participant.members

    @classmethod
    def of(cls, sink: Sink, name: str = "sink") -> Self:
        """Return the participant of a sink of this name."""
        return cls(sink.participant({name: sink}))

    @property
    def participant(self) -> Any:
        """The participant itself, for methods that its class adds."""
        return self._participant

    def check(self, schema: pa.Schema) -> list[str]:
        """Return the findings of `Participant.check`."""
        return self._participant.check(self._name, schema)

    def open(self, identity: Identity) -> Joining:
        """Give the sink its identity."""
        self._identity = identity
        return self._participant.open(identity)

    def join(self) -> Joining:
        """Let the sink join a ledger; then it is who it was opened for again."""
        joined = self._participant.open(replace(self._identity, generation=0, origin={}))
        left = (each.generation for each in self._participant.remnants(((), ())))
        joined = replace(joined, generation=max(joined.generation, *left, 0))
        self._participant.open(self._identity)
        return joined

    def fence(self) -> None:
        """Fence other drivers."""
        self._participant.fence()

    def newest(self) -> int | None:
        """Return the newest epoch applied."""
        with comparing():
            return self._participant.marks(self._name, None, None).newest

    def leftovers(self) -> list[str]:
        """Return the names of what is prepared."""
        left = self._participant.remnants(((), ()))
        return [each.name for each in left if each.state is not RemnantState.RUNNING]

    def verify_applied(self, done: LastDone | None, pending: LastDone | None) -> None:
        """Compare target and ledger."""
        self._participant.marks(self._name, done, pending).verify(done, pending)

    def begin(self, epoch: Epoch, schema: pa.Schema) -> WriterContext:
        """Return what the writers of an attempt are told."""
        return self._participant.begin(epoch, {self._name: schema})[self._name]

    def vote(
        self, epoch: Epoch, written: Sequence[Committable], rows: Rows, after: LastDone | None = None
    ) -> list[Committable]:
        """Return the parts that the vote makes of tasks' committables."""
        return list(self._participant.vote(epoch, {self._name: Ballot(written, rows, after)})[self._name])

    def commit(self, epoch: Epoch, part: Committable, rows: Rows, after: LastDone | None = None) -> Verdict:
        """Commit one part."""
        (verdict,) = self.commit_all(epoch, [part], rows, after)
        return verdict

    def commit_all(
        self, epoch: Epoch, parts: Sequence[Committable], rows: Rows, after: LastDone | None = None
    ) -> Sequence[Verdict]:
        """Commit several parts."""
        return self._participant.commit(epoch, {self._name: Ballot(parts, rows, after)})[self._name]

    def replay(
        self, epoch: Epoch, part: Committable, rows: Rows, attempt: str, after: LastDone | None = None
    ) -> Committable:
        """Prepare a part again."""
        return self._participant.replay(epoch, part, {self._name: Ballot([part], rows, after)}, attempt)

    def abort_orphans(self, keep: Sequence[Committable], done: Sequence[Committable] = ()) -> list[str]:
        """Sweep."""
        return end_orphans(self._participant, (keep, done))

    def visible(
        self,
        epoch: Epoch,
        parts: Sequence[Committable],
        after: LastDone | None = None,
        *,
        keep: Sequence[Committable] | None = None,
        done: Sequence[Committable] = (),
    ) -> list[str]:
        """Make sure that readers see an epoch; ``keep`` is what the ledger names, the epoch's parts if left out."""
        ballots = {self._name: Ballot(parts, NO_ROWS, after)}
        return self._participant.visible(epoch, ballots, lambda: (parts if keep is None else keep, done))

    def finish(self, epoch: Epoch, parts: Sequence[Committable]) -> None:
        """Remove the leftovers of a committed epoch."""
        self._participant.finish(epoch, {self._name: Ballot(parts, NO_ROWS)})

    def close(self) -> None:
        """Close the participant."""
        self._participant.close()


class Rig(Protocol):
    """One kind of target. Rows are integers, and a reader can tell them apart."""

    loses: bool
    """Whether the target can lose what is prepared. If so, `lose_prepared` works and `replay` is needed."""
    keeps_order: bool
    """Whether the sink promises an order (`epochsink.sink.Sink.keeps_order`). If so, `in_order` works."""

    def open(self, query: str, generation: int) -> OneSink:
        """Return a new participant, as in another process, opened for an identity."""

    def write(
        self, query: str, generation: int, epoch: Epoch, partition: int, rows: list[int]
    ) -> tuple[str, Committable]:
        """Write, spool and prepare rows as one task attempt; return its uuid and its committable."""

    def rows(self, query: str, epoch: Epoch, tasks: Sequence[str]) -> Rows:
        """Return the spooled rows of tasks."""

    def drop_spool(self, query: str, epoch: Epoch) -> None:
        """Remove an attempt's spool, as the coordinator does for one that it abandons."""

    def damage_spool(self, query: str, epoch: Epoch, task: str) -> None:
        """Change a byte of a task's spooled rows, or lose the rows if they are not in a file."""

    def visible(self) -> list[int]:
        """Return the rows that a reader sees, sorted. A duplicated row appears twice."""

    def in_order(self) -> list[list[int]]:
        """Return each visible sequence of rows whose order the sink promises, for example the rows of one key."""

    def lose_prepared(self) -> None:
        """Abort everything that is prepared in the target, as a time-out or an administrator could."""

    def leftovers(self) -> list[str]:
        """Return the names of what the sink has prepared or staged in the target."""


class SinkRig:
    """A real sink with a real spool. A subclass defines the rows, how to see them and how to lose them."""

    loses = True
    keeping = Keeping.IN_SPOOL
    """Where rows are kept, as told to tasks (`Participant.begin`). The rig always spools them."""

    def __init__(self, sink: Sink, folder: Path) -> None:
        self.sink = sink
        self.spool = Spool(str(folder))
        # A new name for each test, because markers remain in the target.
        self.name = f"sink-{uuid.uuid4().hex[:10]}"
        self.files: dict[str, SpoolFile] = {}
        self._origins: dict[str, dict[str, Any]] = {}
        self._opened: list[OneSink] = []

    @property
    def keeps_order(self) -> bool:
        """Whether the sink promises an order."""
        return self.sink.keeps_order

    def batch(self, rows: list[int]) -> pa.RecordBatch:
        """Return rows in the form that the sink's writer expects."""
        raise NotImplementedError

    def schema(self) -> pa.Schema:
        """Return the schema of the rows, in the form that `Participant.check` expects."""
        return self.batch([0]).schema

    def identity(self, query: str, generation: int) -> Identity:
        """Return the sink's identity in a query. The first call makes its origin."""
        if query not in self._origins:
            with contextlib.closing(OneSink.of(self.sink, self.name)) as joining:
                assert joining.check(self.schema()) == []
                self._origins[query] = dict(joining.open(Identity(query, self.name)).origin)
        return Identity(query, self.name, generation, self._origins[query])

    def open(self, query: str, generation: int) -> OneSink:
        """Return a new participant."""
        opened = OneSink.of(self.sink, self.name)
        opened.open(self.identity(query, generation))
        self._opened.append(opened)
        return opened

    def close(self) -> None:
        """Close every participant."""
        for opened in self._opened:
            opened.close()

    def write(
        self, query: str, generation: int, epoch: Epoch, partition: int, rows: list[int]
    ) -> tuple[str, Committable]:
        """Run one task, whose first record batches are small."""
        batch = self.batch(rows)
        identity = self.identity(query, generation)
        with contextlib.closing(OneSink.of(self.sink, self.name)) as asking:
            asking.open(identity)
            settings = asking.begin(epoch, batch.schema).settings
        task = Task(identity, epoch, partition, uuid.uuid4().hex, self.keeping, settings=settings)
        self.spool.make(query, epoch)
        spooled = self.spool.writer(task, batch.schema)
        writer = self.sink.writer(task)
        for start, length in ((0, 1), (1, 1), (2, len(rows))):
            some = batch.slice(start, length)
            if some.num_rows:
                spooled.write(some)
                writer.write(some)
        self.files[task.uuid] = spooled.close()
        return task.uuid, writer.prepare()

    def rows(self, query: str, epoch: Epoch, tasks: Sequence[str]) -> Rows:
        """Return spooled rows."""
        return self.spool.rows(Identity(query, self.name), epoch, tasks, self.files)

    def drop_spool(self, query: str, epoch: Epoch) -> None:
        """Drop an attempt's spool."""
        self.spool.drop(query, epoch)

    def damage_spool(self, query: str, epoch: Epoch, task: str) -> None:
        """Change a byte of a task's file."""
        damage(self.spool, query, epoch, task)

    def lose_prepared(self) -> None:
        """Make the target lose what is prepared."""
        raise NotImplementedError

    def visible(self) -> list[int]:
        """Return the rows that a reader sees."""
        raise NotImplementedError

    def in_order(self) -> list[list[int]]:
        """Return each visible sequence of rows that has an order."""
        raise NotImplementedError

    def leftovers(self) -> list[str]:
        """Return what is left."""
        raise NotImplementedError
