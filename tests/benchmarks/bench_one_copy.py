"""Would one COPY into the table beat two writes? `make bench-one-copy`, without Spark: what the server makes of each.

Two writes, as the sink does it: each task spools its rows and copies them into an unlogged staging table, and the
driver moves all rows into the target by one INSERT. One COPY: each task only spools, and the driver sends the files
through one COPY into the target, beginning while later tasks still run; they hold what COPY reads, or what the spool
holds now (Arrow), which the driver then encodes; and that once all tasks have ended, as the sink does it. All ways
bring the spool to the disk, and end with a prepared transaction that is committed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import queue
import statistics
import tempfile
import time
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import psutil
import psycopg
import pyarrow as pa
from measure import console
from pgpq import ArrowToPostgresBinaryEncoder
from rich.table import Table

from epochsink.devkit.services import LocalPostgres

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

CORES: Final = 2
BATCH: Final = 10_000
CHUNK: Final = 1 << 20
END: Final = b"\xff\xff"
COLUMNS: Final = "id bigint, payload text, amount float8"


def batches(rows: int, microseconds: float = 0.0) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a task, each of which takes at least so much processor time, as it does in Spark."""
    begun = time.thread_time()
    for start in range(0, rows, BATCH):
        while time.thread_time() - begun < start * microseconds / 1e6:
            pass
        ids = np.arange(start, min(start + BATCH, rows), dtype=np.int64)
        payload = pa.array([f"{number:0100d}" for number in range(100)]).take(pa.array(ids % 100))
        yield pa.RecordBatch.from_arrays([pa.array(ids), payload, pa.array(ids * 0.5)], ["id", "payload", "amount"])


def copy(connection: psycopg.Connection[Any], table: str, pieces: Iterator[bytes]) -> None:
    """Send binary rows by one COPY."""
    with connection.cursor() as cursor, cursor.copy(f"COPY {table} FROM STDIN (FORMAT BINARY)") as sent:
        for piece in pieces:
            sent.write(piece)


def encoded(rows: int, microseconds: float = 0.0) -> tuple[bytes, Iterator[bytes]]:
    """Return COPY's header, and a task's rows."""
    given = batches(rows, microseconds)
    first = next(given)
    encoder = ArrowToPostgresBinaryEncoder(first.schema)
    header = encoder.write_header()

    def body() -> Iterator[bytes]:
        yield encoder.write_batch(first)
        for batch in given:
            yield encoder.write_batch(batch)
        # what it has held back, without the end of the whole
        yield encoder.finish().removesuffix(END)

    return header, body()


def serve(dsn: str, folder: str, tasks: Any, done: Any) -> None:
    """Run tasks as they are asked for: what an executor's core does."""
    while (task := tasks.get()) is not None:
        number, rows, way, work = task
        path = Path(folder, str(number))
        if way == "copied":
            durable(path, encoded(rows, work)[1])
        elif way == "arrow":
            spool(path, batches(rows, work), None)
        else:
            with psycopg.connect(dsn) as connection:
                connection.execute("SET synchronous_commit = off")
                with connection.cursor() as cursor, cursor.copy("COPY staging FROM STDIN (FORMAT BINARY)") as sent:
                    spool(path, batches(rows, work), sent.write)
        done.put(number)


def durable(path: Path, pieces: Iterator[bytes]) -> None:
    """Write a file that is on the disk."""
    with path.open("wb") as file:
        file.writelines(pieces)
        file.flush()
        os.fsync(file.fileno())


def spool(path: Path, rows: Iterator[pa.RecordBatch], write: Callable[[bytes], object] | None) -> None:
    """Write a task's rows as Arrow, durably, and what COPY reads of them to ``write``."""
    with path.open("wb") as file:
        encoder = None
        with pa.ipc.new_stream(file, next(batches(1)).schema) as stream:
            for batch in rows:
                stream.write_batch(batch)
                if write is not None:
                    if encoder is None:
                        encoder = ArrowToPostgresBinaryEncoder(batch.schema)
                        write(encoder.write_header())
                    write(encoder.write_batch(batch))
        file.flush()
        os.fsync(file.fileno())
    if write is not None and encoder is not None:
        write(encoder.finish())


class Bench:
    """The server, and two processes that run tasks."""

    def __init__(self, stack: ExitStack, tasks: int, work: float) -> None:
        self.count, self.work = tasks, work
        self.server = stack.enter_context(LocalPostgres())
        self.folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="epochsink-bench-"))
        context = multiprocessing.get_context("spawn")
        self.tasks, self.done = context.Queue(), context.Queue()
        given = (self.server.dsn, self.folder, self.tasks, self.done)
        self.cores = [context.Process(target=serve, args=given) for _ in range(CORES)]
        for core in self.cores:
            core.start()
        stack.callback(self._end)
        self.driver = stack.enter_context(psycopg.connect(self.server.dsn, autocommit=True))

    def _end(self) -> None:
        for _ in self.cores:
            self.tasks.put(None)
        for core in self.cores:
            core.join(60)

    def staged(self, rows: int) -> None:
        """Write twice."""
        self.driver.execute(f"CREATE UNLOGGED TABLE staging ({COLUMNS}) WITH (autovacuum_enabled = false)")
        self._begin_tasks(rows, "staged")
        for _ in range(self.count):
            Path(self.folder, str(self._next_done())).unlink()
        self.driver.execute("BEGIN")
        self.driver.execute("INSERT INTO target SELECT * FROM staging")
        self._end_transaction()
        self.driver.execute("DROP TABLE staging")

    def copied(self, rows: int) -> None:
        """Write once, from files that hold what COPY reads."""
        self._copy_once(rows, "copied", self._stream)

    def encoded(self, rows: int) -> None:
        """Write once, from files of Arrow that the driver encodes."""
        self._copy_once(rows, "arrow", lambda: self._encode(self._next_done() for _ in range(self.count)))

    def late(self, rows: int) -> None:
        """Write once, likewise, when all tasks have ended."""
        self._copy_once(rows, "arrow", lambda: self._encode([self._next_done() for _ in range(self.count)]))

    def _copy_once(self, rows: int, way: str, pieces: Callable[[], Iterator[bytes]]) -> None:
        self._begin_tasks(rows, way)
        self.driver.execute("BEGIN")
        header, _ = encoded(1)
        copy(self.driver, "target", chain([header], pieces(), [END]))
        self._end_transaction()

    def _encode(self, tasks: Iterable[int]) -> Iterator[bytes]:
        for number in tasks:
            path = Path(self.folder, str(number))
            with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as stream:
                encoder = ArrowToPostgresBinaryEncoder(stream.schema)
                encoder.write_header()
                for batch in stream:
                    yield encoder.write_batch(batch)
            yield encoder.finish().removesuffix(END)
            path.unlink()

    def _stream(self) -> Iterator[bytes]:
        for _ in range(self.count):
            path = Path(self.folder, str(self._next_done()))
            with path.open("rb") as file:
                while chunk := file.read(CHUNK):
                    yield chunk
            path.unlink()

    def _begin_tasks(self, rows: int, way: str) -> None:
        for number in range(self.count):
            self.tasks.put((number, rows // self.count, way, self.work))

    def _next_done(self) -> int:
        while True:
            try:
                return int(self.done.get(timeout=1))
            except queue.Empty:
                if not all(core.is_alive() for core in self.cores):
                    raise RuntimeError("a process that runs tasks has ended: see its error above") from None

    def _end_transaction(self) -> None:
        self.driver.execute("PREPARE TRANSACTION 'bench'")
        self.driver.execute("COMMIT PREPARED 'bench'")

    def measured(self, way: Callable[[int], None], rows: int) -> tuple[float, float]:
        """Return the seconds and the processor seconds of an epoch into an empty table."""
        self.driver.execute(f"DROP TABLE IF EXISTS target; CREATE TABLE target ({COLUMNS}); CHECKPOINT")
        os.sync()
        begun, before = time.perf_counter(), _processor_seconds()
        way(rows)
        seconds, used = time.perf_counter() - begun, _processor_seconds() - before
        found = self.driver.execute("SELECT count(*) FROM target").fetchone()
        if found != (rows // self.count * self.count,):
            raise RuntimeError(f"{found} rows arrived of {rows}")
        return seconds, used


def _processor_seconds() -> float:
    mine = psutil.Process()
    return sum(sum(process.cpu_times()[:4]) for process in (mine, *mine.children(recursive=True)))


def main() -> None:
    """Measure both ways in turn, at each size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="10000,1000000,10000000", help="of an epoch (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=5, help="turns over both ways (default: %(default)s)")
    parser.add_argument("--tasks", type=int, default=8, help="of an epoch (default: %(default)s)")
    parser.add_argument("--work", type=float, default=0.0, help="least processor microseconds a row (default: none)")
    parser.add_argument("--only", default="", metavar="TEXT", help="measure the ways alone that have it in their names")
    options = parser.parse_args()
    lines = []
    with ExitStack() as stack:
        bench = Bench(stack, options.tasks, options.work)
        ways: dict[str, Callable[[int], None]] = {
            "two writes": bench.staged,
            "one COPY": bench.copied,
            "one COPY, driver encodes": bench.encoded,
            "one COPY, driver encodes, after all tasks": bench.late,
        }
        ways = {name: way for name, way in ways.items() if options.only in name}
        for rows in map(int, options.rows.split(",")):
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
            for turn in range(options.turns + 1):
                for name in list(ways)[:: 1 if turn % 2 else -1]:
                    found[name].append(bench.measured(ways[name], rows))
            show(rows, found)
            first, *others = ways
            for name in others:
                pairs = zip(found[first][1:], found[name][1:], strict=True)
                ratio = statistics.median(two[0] / one[0] for two, one in pairs)
                said = f"{name} vs {first}".replace(",", "").replace(" ", "-").lower()
                lines.append(f"RATIO postgres-{said}-{rows} {ratio:.2f} (aim 1.0)")
    for line in lines:
        console.print(line, highlight=False)


def show(rows: int, found: dict[str, list[tuple[float, float]]]) -> None:
    """Print the turns after the first, which warms up."""
    table = Table(title=f"{rows:,} rows, from the first task to COMMIT PREPARED: median and range")
    for heading in ("", "s", "processor s"):
        table.add_column(heading, justify="right")
    for name, turns in found.items():
        columns = [[turn[what] for turn in turns[1:]] for what in (0, 1)]
        table.add_row(name, *(f"{statistics.median(one):.3f} ({min(one):.3f}-{max(one):.3f})" for one in columns))
    console.print(table)


if __name__ == "__main__":
    main()
