"""`make bench-database-work`: what a small epoch costs PostgreSQL and its client, by step, without Spark.

Two tasks, one after the other in this process, and the driver's steps, of the same rows: answered by the tasks; staged
by them; one transaction for each, with a new session and with one that is kept. And what it takes to connect.
"""

from __future__ import annotations

import argparse
import statistics
import time
import uuid
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import psycopg
import pyarrow as pa
from measure import console, processor_by_kind

from epochsink import Postgres
from epochsink.devkit.services import LocalPostgres
from epochsink.postgres.server import Server
from epochsink.postgres.writer import DirectWriter
from epochsink.sink import Epoch, Identity, Outcome, Task

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from epochsink.devkit.services import PostgresService
    from epochsink.sink import Committable

TASKS: Final = 2
WAYS: Final[dict[str, dict[str, Any]]] = {
    "answers": {},
    "staging": {"answer_bytes": 0},
    "by task": {"atomic": False},
    "by task, session kept": {"atomic": False},
    "upsert, answers": {"key": "id"},
    "upsert, staging": {"key": "id", "answer_bytes": 0},
}
KEPT: Final = "by task, session kept"
SKIPPED: Final = 5
WHOLE: Final = "in all"


class NoRows:
    """Stands for the spool, which nobody reads."""

    def tasks(self) -> Sequence[str]:
        return ()

    def read(self, task: str) -> Iterator[pa.RecordBatch]:
        raise AssertionError(task)

    def verify(self) -> None:
        raise AssertionError


@dataclass
class Spent:
    """Milliseconds by step, and processor milliseconds of both sides, of each epoch."""

    steps: dict[str, list[float]] = field(default_factory=dict)
    processor: list[tuple[float, float]] = field(default_factory=list)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.steps.setdefault(name, []).append((time.perf_counter() - began) * 1000)

    @contextmanager
    def epoch(self) -> Iterator[None]:
        before = processor_milliseconds()
        with self.step(WHOLE):
            yield
        client, server = (new - old for new, old in zip(processor_milliseconds(), before, strict=True))
        self.processor.append((client, server))

    def line(self) -> str:
        """Return what the epochs took after the first ones: medians, the range of all, means of processor time."""
        counted = {name: taken[SKIPPED:] for name, taken in self.steps.items()}
        whole = counted.pop(WHOLE)
        steps = "".join(f", {name} {statistics.median(taken):.1f}" for name, taken in counted.items())
        # the clock of processor time ticks every 10 ms, so only many epochs together say something
        client, server = (statistics.mean(one) for one in zip(*self.processor[SKIPPED:], strict=True))
        return (
            f"{statistics.median(whole):.1f} ms ({min(whole):.1f}-{max(whole):.1f}){steps}; "
            f"processor: client {client:.1f}, server {server:.1f} ms"
        )


def processor_milliseconds() -> tuple[float, float]:
    """Return what this process has used so far, and what the server below it has, ended sessions among it."""
    used = processor_by_kind()
    return used["driver"] * 1000, used["server"] * 1000


class Bench:
    """One way, into a table of its own."""

    def __init__(self, server: PostgresService, options: dict[str, Any], rows: int, *, is_kept: bool) -> None:
        table = f"target_{uuid.uuid4().hex[:8]}"
        with psycopg.connect(server.dsn, autocommit=True) as connection:
            connection.execute(f"CREATE TABLE {table} (id bigint PRIMARY KEY, payload text)")
        self._sink = Postgres(server.dsn, table=table, **options)
        self._identity = Identity(str(uuid.uuid4()), "bench", 1)
        self._committer = self._sink.committer()
        self._committer.open(self._identity)
        self._rows = rows
        self._kept = Server.of(self._sink).connect("epochsink bench") if is_kept else None
        if findings := self._committer.check(self._batch(0, 0).schema):
            raise RuntimeError(findings)
        self.spent = Spent()

    def epoch(self, number: int) -> None:
        """Take an epoch through all steps."""
        epoch, answers = Epoch(number, uuid.uuid4().hex), []
        batches = [self._batch(number, partition) for partition in range(TASKS)]
        with self.spent.epoch():
            with self.spent.step("tasks"):
                answers = [self._task(epoch, partition, batch) for partition, batch in enumerate(batches)]
            with self.spent.step("vote"):
                parts = self._committer.vote(epoch, answers, NoRows())
            with self.spent.step("commit"):
                verdicts = [self._committer.commit(epoch, part, NoRows()) for part in parts]
            with self.spent.step("finish"):
                self._committer.finish(epoch, parts)
        if {verdict.outcome for verdict in verdicts} != {Outcome.COMMITTED}:
            raise RuntimeError(verdicts)

    def close(self) -> None:
        """End the sessions."""
        self._committer.close()
        if self._kept is not None:
            self._kept.close()

    def _task(self, epoch: Epoch, partition: int, batch: pa.RecordBatch) -> Committable:
        task = Task(self._identity, epoch, partition, uuid.uuid4().hex)
        writer = self._sink.writer(task) if self._kept is None else DirectWriter(self._sink, task, self._kept)
        writer.write(batch)
        return writer.prepare()

    def _batch(self, number: int, partition: int) -> pa.RecordBatch:
        each = self._rows // TASKS
        start = (number * TASKS + partition) * each
        ids = pa.array(range(start, start + each), pa.int64())
        return pa.record_batch({"id": ids, "payload": pa.array(["x" * 100] * each)})


def connecting(server: PostgresService, turns: int) -> Spent:
    """Return what opening and closing a session takes as tasks do it."""
    spent, known = Spent(), Server.of(Postgres(server.dsn, table="target"))
    for _ in range(turns):
        with spent.epoch():
            known.connect("epochsink bench").close()
    return spent


def main() -> None:
    """Measure all ways in turn, and print a line for each that a program reads."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000, help="of an epoch (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=60, help="epochs of each way (default: %(default)s)")
    options = parser.parse_args()
    with LocalPostgres() as server:
        ways = {name: Bench(server, given, options.rows, is_kept=name == KEPT) for name, given in WAYS.items()}
        for number in range(options.epochs):
            for bench in ways.values():
                bench.epoch(number)
        found = {name: bench.spent for name, bench in ways.items()}
        for bench in ways.values():
            bench.close()
        found["connect and close once"] = connecting(server, options.epochs)
    for name, spent in found.items():
        console.print(f"WORK postgres {name}: {spent.line()}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
