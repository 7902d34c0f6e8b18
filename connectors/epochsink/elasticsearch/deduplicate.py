"""Find rows of an epoch that share an ``_id``, and the last one of each ``_id``.

Equal versions overwrite each other in the order of arrival, and retries and parallel requests change that order. So an
epoch writes each ``_id`` only once.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from epochsink import arrow_buffers
from epochsink.elasticsearch.unfit import without_id
from epochsink.errors import RowsRejected
from epochsink.sink import Rows

MOST_HASHED: Final = 10_000_000
"""Largest number of rows whose hashes are in memory: 8 bytes each, and as much again to sort them."""

_SHOWN: Final = 5


def count(rows: Rows, tasks: Sequence[str], total: int) -> tuple[int, int]:
    """Return how many rows the tasks have, and how many of them a later row of the same ``_id`` replaces.

    ``total`` is the number of rows that the tasks reported. Raises `RowsRejected` if rows without a rank share an
    ``_id`` across tasks: their order is unknown, so it is uncertain which row is the last.
    """
    if total <= MOST_HASHED and (counted := _counted_if_different(rows, tasks)) is not None:
        return counted, 0
    by_id = RowsById(rows, tasks, total)
    distinct = across = 0
    shown: list[str] = []
    for table in by_id.tables():
        ids = pc.count_distinct(table["id"]).as_py()
        if ids < len(table) and not ranks(table.schema):
            shared = _shared_by_tasks(table)
            across += len(shared)
            shown += shared[: _SHOWN - len(shown)].to_pylist()
        distinct += ids
    if across:
        raise RowsRejected(
            f"{across} document(s) have rows in several tasks of this epoch, and nothing says which is the newest",
            hint="give order_by= (a column or expression; the highest value wins), or partition the stream so that all "
            "rows of one id are in one partition",
            values=", ".join("{" + text for text in shown),
        )
    return by_id.count, by_id.count - distinct


def _counted_if_different(rows: Rows, tasks: Sequence[str]) -> int | None:
    """Return how many rows the tasks have if all ``_id`` are different; None if some are equal, or may be.

    Compares hashes only: this takes a fifth of the time of grouping, and in most epochs all ``_id`` are different.
    """
    numbers = [np.zeros(0, np.int64)]
    for task in tasks:
        for batch in rows.read(task):
            ids = batch.column("id").to_pylist()
            numbers.append(np.fromiter(map(hash, ids), np.int64, len(ids)))
            if _repeats(numbers[-1]):
                return None
    hashes = np.concatenate(numbers)
    return None if _repeats(hashes) else len(hashes)


def _repeats(hashes: npt.NDArray[np.int64]) -> bool:
    hashes.sort()
    return bool((hashes[1:] == hashes[:-1]).any())


def survivors(rows: Rows, tasks: Sequence[str], total: int) -> npt.NDArray[np.bool_]:
    """Return for each row of the tasks, in order, whether it is the last of its ``_id``.

    The last row has the highest ``rank``, then ``rank_2``, ... (NULL is lowest). Among equals, or without ranks, the
    later row of a task is the last. The spooled columns decide whether there are ranks, not the options of this run.
    """
    by_id = RowsById(rows, tasks, total)
    survives = np.zeros(0, np.bool_)
    for table in by_id.tables():
        if not len(survives):
            survives = np.zeros(by_id.count, np.bool_)
        survives[last(table, "id")["number"].to_numpy()] = True
    return survives


def _shared_by_tasks(table: pa.Table) -> pa.ChunkedArray:
    span = table.group_by("id").aggregate([("task", "min"), ("task", "max")])
    return span.filter(pc.not_equal(span["task_min"], span["task_max"]))["id"]


ROWS_IN_MEMORY: Final = 100_000
"""Approximate number of rows in one table."""

_MOST_FILES: Final = 256
"""Largest number of open files; a process can often have 1024. Beyond 25 million rows the tables grow instead."""

_ROWS_GATHERED: Final = 50_000
"""Number of rows spread over the files in one step, so that each file gets hundreds of them."""

_BYTES_OF_A_ROW: Final = 60


class NoTemporaryFiles(Exception):
    """The temporary folder has not enough space for the ids of an epoch."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(f"{message}: {hint}")
        self.message = message
        self.hint = hint


# The ids of a backfill in memory would take some 200 bytes each, 10 GB for 50 million rows. So a large epoch is spread
# over files by the hash of its ids, and the driver reads one file at a time.
class RowsById:
    """The columns "id", "rank", "rank_2", ... of some tasks, with "task" and "number", a row's place in the epoch.

    ``total`` is the expected number of rows. ``count`` is the actual number, known once the first table is read.
    """

    def __init__(self, rows: Rows, tasks: Sequence[str], total: int) -> None:
        self._rows = rows
        self._tasks = tasks
        self._total = total
        self._written = 0
        self.count = 0

    def tables(self) -> Iterator[pa.Table]:
        """Yield tables of rows. One table holds all rows of an id, or at least the last one of each task.

        `last` decides which row is the last. Raises `NoTemporaryFiles`.
        """
        if self._total <= ROWS_IN_MEMORY:
            yield pa.Table.from_batches(self._batches())
            return
        with self._temporary_folder() as folder:
            files = [folder / str(number) for number in range(min(_MOST_FILES, self._files_wanted()))]
            self._spread(folder, files)
            for path in files:
                if path.exists():
                    with self._naming(folder), pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as stream:
                        table = _without_most_repetitions(stream)
                    yield table
                    path.unlink()

    @contextmanager
    def _temporary_folder(self) -> Iterator[Path]:
        with ExitStack() as stack:
            with self._naming(Path(tempfile.tempdir or os.environ.get("TMPDIR", "/tmp"))):  # noqa: S108 - for a message
                name = stack.enter_context(tempfile.TemporaryDirectory(prefix="epochsink-"))
            yield Path(name)

    @contextmanager
    def _naming(self, folder: Path) -> Iterator[None]:
        """Turn an error of the file system into one that names the folder and the space that it needs."""
        try:
            yield
        except OSError as error:
            free = f"{shutil.disk_usage(folder).free >> 20} MiB are free" if folder.exists() else "it does not exist"
            raise NoTemporaryFiles(
                f"finding equal ids among {self._total} rows needs files of about {self._megabytes_wanted()} MiB in "
                f"the driver's temporary folder {folder}, where {free}: {error}",
                "free space there, or set the driver's TMPDIR to a folder with enough space, or make the epochs "
                "smaller (for example with maxOffsetsPerTrigger)",
            ) from error

    def _megabytes_wanted(self) -> int:
        per_row = self._written / self.count if self.count else _BYTES_OF_A_ROW
        return math.ceil(self._total * per_row / 2**20)

    def _files_wanted(self) -> int:
        return -(-self._total // ROWS_IN_MEMORY)

    def _batches(self) -> Iterator[pa.RecordBatch]:
        for partition, task in enumerate(self._tasks):
            for batch in self._rows.read(task):
                size = batch.num_rows
                ranked = batch.select(["id", *ranks(batch.schema)])
                numbers = arrow_buffers.numbers(np.arange(self.count, self.count + size))
                ranked = ranked.set_column(0, "id", _different(ranked.column("id"), numbers))
                ranked = ranked.append_column("task", pa.array(np.full(size, partition, np.int32)))
                yield ranked.append_column("number", numbers)
                self.count += size

    def _spread(self, folder: Path, files: Sequence[Path]) -> None:
        writers: dict[int, pa.ipc.RecordBatchStreamWriter] = {}
        try:
            for rows, places in self._gathered(len(files)):
                order = np.argsort(places, kind="stable")
                table = rows.take(pa.array(order))
                self._written += table.nbytes
                buckets, starts = np.unique(places[order], return_index=True)
                # Not around the reading: errors of the spool are not errors of this folder.
                with self._naming(folder):
                    for place, start, end in zip(buckets.tolist(), starts, [*starts[1:], len(order)], strict=True):
                        if place not in writers:
                            writers[place] = pa.ipc.new_stream(str(files[place]), table.schema)
                        writers[place].write_table(table.slice(start, end - start))
            with self._naming(folder):
                for writer in writers.values():
                    writer.close()
        except BaseException:
            for writer in writers.values():
                with suppress(OSError):
                    writer.close()
            raise

    def _gathered(self, files: int) -> Iterator[tuple[pa.Table, npt.NDArray[np.int64]]]:
        """Yield rows, and the number of the file for each of them."""
        batches: list[pa.RecordBatch] = []
        places: list[npt.NDArray[np.int64]] = []
        for batch in self._batches():
            batches.append(batch)
            # Python's hash of a text is as fast here as numpy would be, and different in each process: no pattern in
            # the ids can send all of them to one file.
            ids = batch.column("id").to_pylist()
            places.append(np.fromiter(map(hash, ids), np.int64, len(ids)) % files)
            if sum(map(len, places)) >= _ROWS_GATHERED:
                yield pa.Table.from_batches(batches), np.concatenate(places)
                batches, places = [], []
        if batches:
            yield pa.Table.from_batches(batches), np.concatenate(places)


def _different(ids: pa.Array, numbers: pa.Array) -> pa.Array:
    """Return ids in which each row without one has an id of its own: it replaces no other row."""
    missing = without_id(ids)
    if not missing.true_count:
        return ids
    new_ids = pc.binary_join_element_wise(
        arrow_buffers.text("}"), numbers.cast(pa.large_string()), arrow_buffers.text("")
    )
    return pc.if_else(missing, new_ids.cast(ids.type), ids)


def _without_most_repetitions(batches: Iterable[pa.RecordBatch]) -> pa.Table:
    """Return the rows of a file, or only the last row of each id if repeated ids make them many."""
    kept: list[pa.RecordBatch] = []
    size, limit = 0, 2 * ROWS_IN_MEMORY
    for batch in batches:
        kept.append(batch)
        size += batch.num_rows
        if size >= limit:
            kept = last(pa.Table.from_batches(kept), "id", "task").to_batches()
            size = sum(map(len, kept))
            limit = max(limit, 2 * size)  # if most ids are different, do not try again with each batch
    return pa.Table.from_batches(kept)


def last(table: pa.Table, *group: str) -> pa.Table:
    """Return the last row of each group: the one with the highest "rank", then "rank_2", ..., then "number".

    In Spark's order: NULL is the lowest value, NaN the highest, and -0.0 equals 0.0.
    """
    sorted_by, keys = table, []
    for name in ranks(table.schema):
        if pa.types.is_floating(table.schema.field(name).type):
            # Arrow would sort NaN to the end, with the nulls.
            sorted_by = sorted_by.append_column(f"{name} is NaN", pc.is_nan(table[name]))
            keys.append(f"{name} is NaN")
        keys.append(name)
    # Descending, because Arrow sorts nulls to the end in either direction.
    descending = [(name, "descending") for name in (*keys, "number")]
    order = pc.sort_indices(sorted_by, sort_keys=descending).to_numpy()
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    placed = table.append_column("place", pa.array(place))
    best = placed.group_by(list(group)).aggregate([("place", "min")])["place_min"].to_numpy()
    return table.take(pa.array(order[best]))


def ranks(schema: pa.Schema) -> list[str]:
    """Return the names of the spooled columns that decide which row of an id is the newest, in order of precedence."""
    return [name for name in schema.names if name == "rank" or name.startswith("rank_")]
