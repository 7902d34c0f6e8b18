"""Leave a task's rows to the spool, from which the vote copies them.

A task that does so connects to nothing, and this module imports no client: to load one takes each worker a while.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import pyarrow as pa

from epochsink.errors import PrepareFailed
from epochsink.sink import Committable, Rows, Task


@dataclass(frozen=True, slots=True)
class SpooledTask:
    """What a task answers that has only spooled its rows. It is not recorded: the vote makes a `Part` of it."""

    task: str
    rows: int


class SpooledWriter:
    """Counts the rows of one task attempt; the engine spools them."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._rows = 0

    def write(self, batch: pa.RecordBatch) -> None:
        """Count the rows of a record batch."""
        self._rows += batch.num_rows

    def prepare(self) -> Committable:
        """Return how many rows the spool must hold. Raises `PrepareFailed` if there was no row."""
        if not self._rows:
            raise PrepareFailed("prepare() without a row: a task without rows makes no writer")
        return asdict(SpooledTask(self._task.uuid, self._rows))

    def abort(self) -> None:
        """Do nothing: the engine removes what is spooled."""


@dataclass(frozen=True, slots=True)
class AcceptedRows:
    """One sink's rows of an epoch in the spool: those of the accepted tasks, ``count`` in all."""

    tasks: tuple[str, ...]
    count: int
    spool: Rows

    @classmethod
    def of(cls, tasks: Sequence[SpooledTask], spool: Rows) -> AcceptedRows:
        """Return the rows that the vote reads."""
        return cls(tuple(task.task for task in tasks), sum(task.rows for task in tasks), spool)

    def read(self) -> Iterator[tuple[str, pa.RecordBatch]]:
        """Yield each record batch with the uuid of its task. Raises `SpoolMissing`, `SpoolDamaged`, `OSError`."""
        for task in self.tasks:
            for batch in self.spool.read(task):
                yield task, batch
