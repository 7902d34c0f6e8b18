"""What `SinkContract` has to know of a target: how rows get there, how a reader sees them, and how they are lost."""

from __future__ import annotations

import contextlib
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from epochsink.protocol.spool import Spool
from epochsink.sink import Epoch, Identity, Rows, Task

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

    from epochsink.sink import Committable, Sink, SinkCommitter, SpoolFile


def damage(spool: Spool, query: str, epoch: Epoch, task: str) -> None:
    """Change one byte of a task's file, just before the eight that end it: Arrow reads on as if nothing were."""
    (path,) = Path(spool.root).glob(f"{query}/{epoch.number}-{epoch.attempt}/*-{task}.arrow")
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)


class Rig(Protocol):
    """One kind of target. Rows are whole numbers, each of which a reader can tell from the others."""

    loses: bool
    """Whether the target can lose what is prepared, and so `lose_prepared` works and `replay` is needed."""

    def open(self, query: str, generation: int) -> SinkCommitter:
        """Return a fresh committer, as another process would have it, opened for an identity."""

    def write(
        self, query: str, generation: int, epoch: Epoch, partition: int, rows: list[int]
    ) -> tuple[str, Committable]:
        """Write, spool and prepare rows as one task attempt; return its uuid and its committable."""

    def rows(self, query: str, epoch: Epoch, tasks: Sequence[str]) -> Rows:
        """Return the spooled rows of tasks."""

    def drop_spool(self, query: str, epoch: Epoch) -> None:
        """Remove an attempt's spool, as the coordinator does for one that it abandons."""

    def damage_spool(self, query: str, epoch: Epoch, task: str) -> None:
        """Change a byte of what a task has spooled, or lose it where there are no bytes."""

    def visible(self) -> list[int]:
        """Return what a reader sees, sorted, doubled rows twice."""

    def lose_prepared(self) -> None:
        """Let the target abort everything that is prepared, as by a time-out or a DBA."""

    def leftovers(self) -> list[str]:
        """Return what of ours, prepared or staged, the target still holds."""


class SinkRig:
    """A real sink with a real spool. A subclass says how rows look, and how to see and lose them."""

    loses = True

    def __init__(self, sink: Sink, folder: Path) -> None:
        self.sink = sink
        self.spool = Spool(str(folder))
        # a name of its own for each test: markers outlive it
        self.name = f"sink-{uuid.uuid4().hex[:10]}"
        self.files: dict[str, SpoolFile] = {}
        self._origins: dict[str, dict[str, Any]] = {}
        self._opened: list[SinkCommitter] = []

    def batch(self, rows: list[int]) -> pa.RecordBatch:
        """Return rows as the sink's writer takes them."""
        raise NotImplementedError

    def schema(self) -> pa.Schema:
        """Return the schema of the rows, as `SinkCommitter.check` takes it."""
        return self.batch([0]).schema

    def identity(self, query: str, generation: int) -> Identity:
        """Return who a query is to the target; the origin is fixed the first time."""
        if query not in self._origins:
            committer = self.sink.committer()
            with contextlib.closing(committer):
                assert committer.check(self.schema()) == []
                committer.open(Identity(query, self.name))
                self._origins[query] = committer.initial_state()
        return Identity(query, self.name, generation, self._origins[query])

    def open(self, query: str, generation: int) -> SinkCommitter:
        """Return a fresh committer."""
        committer = self.sink.committer()
        committer.open(self.identity(query, generation))
        self._opened.append(committer)
        return committer

    def close(self) -> None:
        """Close every committer."""
        for committer in self._opened:
            committer.close()

    def write(
        self, query: str, generation: int, epoch: Epoch, partition: int, rows: list[int]
    ) -> tuple[str, Committable]:
        """Run one task, whose record batches are small at first."""
        task = Task(self.identity(query, generation), epoch, partition, uuid.uuid4().hex)
        batch = self.batch(rows)
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
        """Let the target lose what is prepared."""
        raise NotImplementedError

    def visible(self) -> list[int]:
        """Return what a reader sees."""
        raise NotImplementedError

    def leftovers(self) -> list[str]:
        """Return what is left."""
        raise NotImplementedError
