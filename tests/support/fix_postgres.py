"""A PostgreSQL sink driven by hand: what the coordinator would call, step by step, and the server's own truth."""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import psycopg
import pyarrow as pa
import pytest

from epochsink.errors import SpoolMissing
from epochsink.postgres import Postgres
from epochsink.postgres.row_mapping import writer_schema
from epochsink.postgres.staging import is_rank, is_reserved, rank_column
from epochsink.sink import Epoch, Identity, Outcome, Task, write_all
from epochsink.testing.sink_rig import OneSink

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from epochsink.sink import Committable, Verdict
    from epochsink_devkit.services import PostgresService


class ListedRows:
    """Rows kept in lists, by task."""

    def __init__(self, batches: dict[str, list[pa.RecordBatch]]) -> None:
        self._batches = batches

    def tasks(self) -> Sequence[str]:
        return list(self._batches)

    def verify(self) -> None:
        """Have no file to compare."""

    def read(self, task: str) -> Iterator[pa.RecordBatch]:
        if task not in self._batches:
            raise SpoolMissing(f"no rows of task {task}")
        yield from self._batches[task]


@dataclass
class Written:
    """One attempt at an epoch after phase 1 of its tasks."""

    epoch: Epoch
    committables: list[Committable]
    rows: ListedRows


@dataclass
class Driver:
    """One driver's view of a sink; `restart` makes a later driver, with a committer and a generation of its own."""

    sink: Postgres
    identity: Identity = field(default_factory=lambda: Identity(str(uuid.uuid4()), "table", 1))
    committer: OneSink = field(init=False)
    family: list[Driver] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        self.family.append(self)
        self.committer = OneSink.of(self.sink, self.identity.sink)
        self.committer.open(self.identity)

    def restart(self, sink: Postgres | None = None) -> Driver:
        later = Identity(self.identity.query_id, self.identity.sink, self.identity.generation + 1)
        return Driver(sink or self.sink, later, self.family)

    def close(self) -> None:
        """Close the committers of this driver and of all that were started from it."""
        for driver in self.family:
            driver.committer.close()

    def task(self, epoch: Epoch, partition: int = 0) -> Task:
        return Task(self.identity, epoch, partition, uuid.uuid4().hex)

    def write(self, number: int, *tasks: pa.RecordBatch | list[pa.RecordBatch]) -> Written:
        """Write one epoch by one task for each argument; the participant says how the rows are kept."""
        epoch = Epoch(number, uuid.uuid4().hex)
        first = tasks[0][0] if isinstance(tasks[0], list) else tasks[0]
        keeping = self.committer.begin(epoch, first.schema).keeping
        committables, kept = [], {}
        for partition, given in enumerate(tasks):
            batches = given if isinstance(given, list) else [given]
            task = replace(self.task(epoch, partition), keeping=keeping)
            committables.append(write_all(self.sink.writer(task), batches))
            kept[task.uuid] = batches
        return Written(epoch, committables, ListedRows(kept))

    def vote(self, written: Written) -> list[Committable]:
        return self.committer.vote(written.epoch, written.committables, written.rows)

    def prepare(self, number: int, *tasks: pa.RecordBatch | list[pa.RecordBatch]) -> tuple[Written, list[Committable]]:
        written = self.write(number, *tasks)
        return written, self.vote(written)

    def commit(self, written: Written, parts: Sequence[Committable]) -> list[Verdict]:
        return [self.committer.commit(written.epoch, part, written.rows) for part in parts]

    def run(self, number: int, *tasks: pa.RecordBatch | list[pa.RecordBatch]) -> None:
        """Take one epoch through all its steps."""
        written, parts = self.prepare(number, *tasks)
        assert [verdict.outcome for verdict in self.commit(written, parts)] == [Outcome.COMMITTED] * len(parts)
        self.committer.finish(written.epoch, parts)


class Truth:
    """What another session sees of the server."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self._connection: psycopg.Connection[Any] | None = None

    def execute(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        """Run SQL in a session of its own that lasts; return the rows, if it has any."""
        if self._connection is None or self._connection.closed:
            self._connection = psycopg.connect(
                self.dsn, autocommit=True, prepare_threshold=None, options="-c lock_timeout=10s"
            )
        cursor = self._connection.execute(statement, values or None)
        return cursor.fetchall() if cursor.description else []

    def rows(self, table: str) -> list[tuple[Any, ...]]:
        """Return the visible rows, sorted."""
        return sorted(self.execute(f"SELECT * FROM {table}"), key=repr)  # noqa: S608 - a name that the test made

    def count(self, table: str) -> int:
        return int(self.execute(f"SELECT count(*) FROM {table}")[0][0])  # noqa: S608 - likewise

    def sessions(self, key: str) -> int:
        """Count the sessions that bear an `identity_key`; the server ends one a moment after its client."""
        asked = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE %s"
        return int(self.execute(asked, f"epochsink:{key}:%")[0][0])

    def prepared(self) -> list[str]:
        """Return the gids of all our prepared transactions: tests run one at a time."""
        return [gid for (gid,) in self.execute("SELECT gid FROM pg_prepared_xacts WHERE gid LIKE 'epochsink:%'")]

    def staging(self, schema: str) -> list[str]:
        return [
            name
            for (name,) in self.execute(
                "SELECT relname FROM pg_class WHERE relnamespace = %s::regnamespace AND relname LIKE 's\\_%%' "
                "AND relkind = 'r' ORDER BY 1",
                schema,
            )
        ]

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


def as_user(dsn: str, user: str, password: str) -> str:
    """Return the dsn of a service for another user."""
    return re.sub("//[^@]*@", f"//{user}:{password}@", dsn)


def gids(parts: Sequence[Committable]) -> list[str]:
    """Return the names of the prepared transactions of parts, sorted."""
    return sorted({part["gid"] for part in parts if part["gid"] is not None})


def tables(parts: Sequence[Committable]) -> list[str]:
    """Return the staging tables of parts, sorted."""
    members = [member for part in parts for member in part["members"].values()]
    return sorted({member["table"] for member in members if member["table"] is not None})


class MakeDriver(Protocol):
    """Makes a driver for a sink on ``table``, checked against rows like ``like``; committers are closed at the end."""

    def __call__(self, table: str | tuple[str, ...], like: pa.RecordBatch, **options: Any) -> Driver: ...


@pytest.fixture
def pg_truth(postgres: PostgresService) -> Iterator[Truth]:
    """Another session on the session's server."""
    truth = Truth(postgres.dsn)
    yield truth
    truth.close()


@pytest.fixture
def pg_schema(pg_truth: Truth) -> Iterator[str]:
    """Make a schema of the test's own: for its tables, markers and staging."""
    name = f"test_{uuid.uuid4().hex[:10]}"
    pg_truth.execute(f'CREATE SCHEMA "{name}"')
    yield name
    for gid in pg_truth.prepared():
        pg_truth.execute(f"ROLLBACK PREPARED '{gid}'")
    pg_truth.execute(f'DROP SCHEMA "{name}" CASCADE')


@pytest.fixture
def pg_driver(postgres: PostgresService, pg_schema: str) -> Iterator[MakeDriver]:
    """Drivers on the session's server."""
    drivers: list[Driver] = []

    def make(table: str | tuple[str, ...], like: pa.RecordBatch, **options: Any) -> Driver:
        given = {"marker_schema": pg_schema, **options}
        sink = Postgres(given.pop("dsn", postgres.dsn), table=table, **given)
        driver = Driver(sink)
        assert driver.committer.check(row_schema(like)) == []
        made = writer_schema(row_schema(like), deletes=sink.delete_when is not None)
        assert made.names == [name for name in like.schema.names if not is_rank(name)]
        drivers.append(driver)
        return driver

    yield make
    for driver in drivers:
        driver.close()


def row_schema(like: pa.RecordBatch) -> pa.Schema:
    """Return the schema of the row, which lacks the columns for deletes and order."""
    return pa.schema([one for one in like.schema if not is_reserved(one.name)])


def ranked(batch: pa.RecordBatch, *ranks: pa.Array) -> pa.RecordBatch:
    """Return a batch with the columns that Spark computes for ``order_by``."""
    for place, rank in enumerate(ranks):
        batch = batch.append_column(rank_column(place), rank)
    return batch
