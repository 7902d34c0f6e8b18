"""The production's PostgreSQL sinks over servers in memory, by letter.

P copies an epoch's rows into its table and prepares that, S stages them and merges them after the decision; A and B, C
and D do so as two sinks of one database. Of T each task prepares its own transaction.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing, nullcontext
from dataclasses import asdict
from functools import cache
from typing import Any, Final

from epochsink.identity import PreparedName
from epochsink.postgres import Postgres
from epochsink.postgres.committable import Part
from epochsink.postgres.committer import PostgresCommitter
from epochsink.postgres.config import Commit, PostgresConfig
from epochsink.postgres.errors import translated
from epochsink.postgres.server import Server
from epochsink.postgres.sessions import SessionName
from epochsink.postgres.spooled import AcceptedRows, SpooledTask
from epochsink.postgres.table import Table
from epochsink.sink import Participant, Task
from simulation.postgres_database import COLUMN, MemoryDatabase, MemoryIncoming
from simulation.readers import Row
from simulation.steps import Stepper
from simulation.world import World


@cache
def configured(letter: str, commit: Commit, *, atomic: bool, options: int) -> Postgres:
    """Return a sink as a user constructs it: each number of options has a key or none, and sets rows aside or not."""
    return Postgres(
        "host=localhost",
        table=f"table_{letter.lower()}",
        key=COLUMN if options % 2 else None,
        select=COLUMN,
        commit=commit,
        atomic=atomic,
        on_rejected="dead_letter" if options // 2 % 2 and atomic else "stop",
    )


class PostgresSink:
    """Makes writers and the committer. A sink with the other options has a key."""

    letter = "P"
    group: str | None = None
    commit: Commit = "prepared"
    atomic = True

    def __init__(self, world: World, step: Stepper, *, spool: bool = True) -> None:
        del spool  # always, unless tasks write themselves
        self._world = world
        self._step = world.copying(self.letter, step)
        self.config = configured(self.letter, self.commit, atomic=self.atomic, options=world.options)

    def begin(self, task: Task, attempt_number: int = 0) -> Any:
        """Return a task's writer."""
        self._world.write_with(task.epoch.attempt, len(self.config.key) + 2 * self.config.sets_aside)
        return SpooledRows(task)

    def participant(self, members: Mapping[str, Any]) -> Participant:
        """Return the production's committer of sinks that commit as one."""
        configs = {name: sink.config for name, sink in members.items()}
        committer = PostgresCommitter(configs, connect=self.connect, writer=self.writer)
        # one thread runs all of a driver, and hands over at its requests alone
        committer._asking_lock = nullcontext()  # type: ignore[assignment]
        return committer

    def connect(self, server: Server, name: str, retry_seconds: float) -> MemoryDatabase:
        """Open a session."""
        return MemoryDatabase(self._world, self._step, self.letter, name)

    def writer(self, config: PostgresConfig, task: Task, *, again: bool = False) -> PreparingTask:
        """Return the writer of a task that prepares its own transaction."""
        name = SessionName(Table(config, task.identity).key, task.identity.generation, task.epoch.attempt)
        return PreparingTask(self.connect(Server(), str(name), 0.0), Table(config, task.identity), task)


class StagedSink(PostgresSink):
    """Merges after the decision."""

    letter = "S"
    commit: Commit = "staged"


class ByTaskSink(PostgresSink):
    """Its tasks prepare."""

    letter = "T"
    atomic = False

    def begin(self, task: Task, attempt_number: int = 0) -> Any:
        """Open a transaction."""
        self._world.write_with(task.epoch.attempt, len(self.config.key) + 2 * self.config.sets_aside)
        return self.writer(self.config, task)


class SharedSink(PostgresSink):
    """One of two in a database."""

    letter = "A"
    group: str | None = "database"


class OtherSharedSink(SharedSink):
    """The other one."""

    letter = "B"


class SharedStagedSink(StagedSink):
    """One of two in a database."""

    letter = "C"
    group = "database"


class OtherSharedStagedSink(SharedStagedSink):
    """The other one."""

    letter = "D"


KINDS: Final[tuple[type[PostgresSink], ...]] = (
    PostgresSink,
    StagedSink,
    ByTaskSink,
    SharedSink,
    OtherSharedSink,
    SharedStagedSink,
    OtherSharedStagedSink,
)


class SpooledRows:
    """A task that leaves its rows to the spool, as `epochsink.postgres.spooled.SpooledWriter` does."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._rows = 0

    def write(self, rows: list[Row]) -> None:
        """Count."""
        self._rows += len(rows)

    def prepare(self) -> Any:
        """Answer how many."""
        return asdict(SpooledTask(self._task.uuid, self._rows))


class PreparingTask:
    """A task that prepares its own transaction, as `epochsink.postgres.writer.DirectWriter` does."""

    def __init__(self, database: MemoryDatabase, table: Table, task: Task) -> None:
        self._database, self._table, self._task = database, table, task
        self._written: list[Row] = []

    def write(self, rows: list[Row] | Row) -> None:
        """COPY: nobody sees it, and it goes with its session."""
        self._written += [rows] if isinstance(rows, Row) else rows

    def abort(self) -> None:
        """Give up."""
        self._database.close()

    def prepare(self) -> Any:
        """PREPARE TRANSACTION of the rows with their marker."""
        task, database = self._task, self._database
        rows = AcceptedRows((task.uuid,), len(self._written), _Rows(task.uuid, self._written))
        name = PreparedName.of(task.identity, task.epoch, task.uuid)
        with translated("preparing"), closing(database):
            incoming = MemoryIncoming(database, self._table, rows)
            with database.transaction():
                incoming.copy()
                self._table.marker.insert(database, task.epoch.number, task.uuid, task.epoch.attempt)
                database.prepare(name)
        return Part(task.epoch.attempt, {task.identity.sink: incoming.member()}, str(name)).to_json()


class _Rows:
    """A task's rows, as they come from the spool."""

    def __init__(self, task: str, rows: list[Row]) -> None:
        self._task, self._rows = task, rows

    def tasks(self) -> list[str]:
        return [self._task]

    def read(self, task: str) -> Any:
        yield from self._rows

    def verify(self) -> None:
        """Nothing is damaged."""
