"""`make bench ONLY=wide`: what an epoch of many tasks costs the driver, from 2 to 1,000 tasks with rows in every sink.

Tasks are played by two processes that write, spool and prepare as Spark's do, one after another: a job of 1,000 tasks
on two cores takes Spark minutes and says nothing of the driver. Vote, record, commit and done are its own code.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import shutil
import tempfile
import threading
import time
import uuid
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import psycopg
import pyarrow as pa
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from measure import console
from rich.table import Table

from epochsink import Elasticsearch, Kafka, Postgres
from epochsink.protocol.checkpoint import Checkpoint
from epochsink.protocol.coordinator import Coordinator
from epochsink.protocol.ledger import Ledger
from epochsink.protocol.spool import Spool
from epochsink.protocol.storage import LocalStorage
from epochsink.sink import Task
from epochsink.testing.sink_rig import OneSink
from epochsink_devkit.services import LocalElasticsearch, LocalKafka, LocalPostgres

if TYPE_CHECKING:
    from epochsink.sink import Epoch, Identity, Sink, SpoolFile

TASKS = (2, 20, 200, 1_000)
ROWS = 10
"""Rows of each task: what grows with rows is measured elsewhere."""
PROCESSES = 2
MEGABYTE = 1e6
SPARE = 16
"""Prepared transactions beyond those of the tasks."""


def play(
    sink: Sink, spool: Spool, identity: Identity, epoch: Epoch, partition: int
) -> tuple[str, Any, SpoolFile | None]:
    """Be one task of one sink; return its uuid, its committable, and what it has spooled."""
    task = Task(identity, epoch, partition, uuid.uuid4().hex)
    first = (epoch.number * 10_000 + partition) * ROWS
    ids = list(range(first, first + ROWS))
    batch = rows(sink, ids)
    kept = None
    if sink.spool is not False:  # nobody asks the target here whether it keeps them
        file = spool.writer(task, batch.schema)
        file.write(batch)
        kept = file.close()
    writer = sink.writer(task)
    writer.write(batch)
    return task.uuid, writer.prepare(), kept


def rows(sink: Sink, ids: list[int]) -> pa.RecordBatch:
    """Return rows in a sink's own columns."""
    if isinstance(sink, Kafka):
        keys = pa.array([str(each) for each in ids], pa.string())
        return pa.record_batch({"key": keys, "value": pa.array([f"row {each}" for each in ids])})
    if isinstance(sink, Elasticsearch):
        return pa.RecordBatch.from_pydict({"source": pa.array([json.dumps({"n": each}) for each in ids], pa.string())})
    return pa.RecordBatch.from_pydict({"id": pa.array(ids, pa.int64())})


class Wide:
    """One query with one sink on a local checkpoint; Spark's part is played by hand."""

    def __init__(self, folder: Path, sink: Sink) -> None:
        self.files = LocalStorage(folder)
        self.spool = Spool.beside(str(folder))
        self.sink = sink
        self.participant = sink.participant({"out": sink})
        self.coordinator = Coordinator(
            query_id=str(uuid.uuid4()),
            ledger=Ledger(self.files, uuid.uuid4().hex),
            checkpoint=Checkpoint(self.files),
            spool=self.spool,
            participants=[self.participant],
        )
        self.coordinator.recover()

    def epoch(self, number: int, tasks: int, pool: ProcessPoolExecutor) -> tuple[float, float, float]:
        """Take an epoch of so many tasks through its steps; return seconds of tasks, of vote and record, of commit."""
        self.files.create(f"offsets/{number}", f'v1\n{{"batchWatermarkMs":0}}\n{{"n":{number}}}'.encode())
        self.coordinator.settle(number)
        epoch = self.coordinator.begin(number)
        identity = self.coordinator.identity("out")
        begun = time.perf_counter()
        played = pool.map(play, *zip(*((self.sink, self.spool, identity, epoch, n) for n in range(tasks)), strict=True))
        answers = list(played)
        written = time.perf_counter()
        files = {task: kept for task, _, kept in answers if kept is not None}
        self.coordinator.record(epoch, {"out": [(task, part) for task, part, _ in answers]}, {"out": files})
        recorded = time.perf_counter()
        self.files.create(f"commits/{number}", b'v1\n{"nextBatchWatermarkMs":0}')
        decided = time.perf_counter()
        if not self.coordinator.commit_decided():
            raise AssertionError(f"epoch {number} is not done")
        return written - begun, recorded - written, time.perf_counter() - decided


def peak_above(before: int, over: threading.Event, peak: list[float]) -> None:
    """Note the largest memory of this process."""
    me = psutil.Process()
    while not over.wait(0.02):
        peak[0] = max(peak[0], (me.memory_info().rss - before) / MEGABYTE)


def measure(name: str, sink: Sink, counts: list[int], table: Table) -> None:
    """Add a line for each width."""
    folder = Path(tempfile.mkdtemp(prefix="epochsink-bench-"))
    # a fresh process plays tasks as a Python worker of Spark does
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
        wide = Wide(folder, sink)
        wide.epoch(0, PROCESSES, pool)
        for number, tasks in enumerate(counts, 1):
            gc.collect()
            peak, over = [0.0], threading.Event()
            watch = threading.Thread(target=peak_above, args=(psutil.Process().memory_info().rss, over, peak))
            watch.start()
            written, vote, commit = wide.epoch(number, tasks, pool)
            over.set()
            watch.join()
            figures = (written, vote * 1000, vote * 1000 / tasks, commit * 1000, commit * 1000 / tasks, peak[0])
            table.add_row(
                name, f"{tasks:,}", *(f"{figure:.1f}" if figure >= 1 else f"{figure:.2f}" for figure in figures)
            )
            console.print(f"{name}, {tasks:,} tasks: {vote:.2f} s vote and record, {commit:.2f} s commit")
    wide.participant.close()
    shutil.rmtree(folder)


def main() -> None:
    """Measure everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", default=",".join(map(str, TASKS)), help="widths (default: %(default)s)")
    counts = [int(each) for each in parser.parse_args().tasks.split(",")]
    table = Table(title=f"{ROWS} rows in each task", title_justify="left")
    headings = ("sink", "tasks", "tasks, s", "vote, ms", "a task", "commit, ms", "a task", "driver's memory, MB more")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "sink" else "right")
    with ExitStack() as stack:
        # two epochs of a transaction a task may be prepared together
        postgres = stack.enter_context(LocalPostgres({"max_prepared_transactions": 2 * max(counts) + SPARE}))
        with psycopg.connect(postgres.dsn, autocommit=True) as connection:
            for name in ("whole", "split"):
                connection.execute(f"CREATE TABLE {name} (id bigint)")
        measure("PostgreSQL, atomic", Postgres(postgres.dsn, table="whole"), counts, table)
        measure("PostgreSQL, a transaction a task", Postgres(postgres.dsn, table="split", atomic=False), counts, table)
        broker = stack.enter_context(LocalKafka())
        admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
        admin.create_topics([NewTopic("wide", 2)])["wide"].result(30)
        measure("Kafka", Kafka(bootstrap_servers=broker.bootstrap_servers, topic="wide"), counts, table)
        server = stack.enter_context(LocalElasticsearch())
        index = Elasticsearch(server.url, index="wide", create=True)
        OneSink.of(index).check(pa.schema([("n", pa.int64())]))  # which makes the index
        measure("Elasticsearch", index, counts, table)
    console.print(table)


if __name__ == "__main__":
    main()
