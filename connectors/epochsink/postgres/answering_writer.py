"""Rows of small tasks ride in the tasks' answers: executors connect to nothing, and the driver copies the rows.

A task's limit falls with its partition's number, so that the answers of an epoch fit into the driver however many tasks
there are: with ``answer_bytes`` of 1 MiB those of 1,000 tasks hold at most 66 MiB of rows, those of 10,000 at most
103 MiB. A task with more than its limit stages its rows itself; one epoch may have tasks of both kinds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pyarrow as pa

from epochsink.errors import PrepareFailed
from epochsink.failpoints import reach
from epochsink.postgres.answers import AnsweredTask

if TYPE_CHECKING:
    from epochsink.postgres.config import PostgresConfig
    from epochsink.postgres.writer import StagingWriter
    from epochsink.sink import Committable, Task

_FIRST_TASKS: Final = 16
"""After so many tasks the limit is half; the sum over all of them grows with the logarithm of their number."""


def limit(answer_bytes: int, partition: int) -> int:
    """Return how many bytes of rows the task of a partition may answer with."""
    return answer_bytes * _FIRST_TASKS // (_FIRST_TASKS + partition)


class AnsweringWriter:
    """Keeps a task's rows for its answer; connects and stages them once they are more than its limit."""

    def __init__(self, config: PostgresConfig, task: Task) -> None:
        self._config = config
        self._task = task
        self._limit = limit(config.answer_bytes, task.partition)
        self._kept: list[pa.RecordBatch] = []
        self._staging: StagingWriter | None = None

    def write(self, batch: pa.RecordBatch) -> None:
        """Keep a record batch with at least one row, or send it. Raises as `epochsink.postgres.writer.CopyWriter`."""
        self._kept.append(batch)
        if self._staging is None and sum(kept.nbytes for kept in self._kept) <= self._limit:
            return
        if self._staging is None:
            # here, not above: the client takes a while to load, and most tasks of small epochs need none
            from epochsink.postgres.writer import StagingWriter  # noqa: PLC0415 - see above

            self._staging = StagingWriter(self._config, self._task)
        for kept in self._kept:
            self._staging.write(kept)
        self._kept.clear()

    def prepare(self) -> Committable:
        """Return the rows themselves, or what was staged. Raises as `epochsink.postgres.writer.CopyWriter`."""
        if self._staging is not None:
            return self._staging.prepare()
        if not self._kept:
            raise PrepareFailed("prepare() without a row: a task without rows makes no writer")
        stream = pa.BufferOutputStream()
        with pa.ipc.new_stream(stream, self._kept[0].schema) as batches:
            for kept in self._kept:
                batches.write_batch(kept)
        rows = sum(kept.num_rows for kept in self._kept)
        reach("postgres.copied")
        return AnsweredTask(self._task.uuid, self._task.partition, rows, stream.getvalue().to_pybytes()).to_json()

    def abort(self) -> None:
        """Let go of everything that is not yet durable."""
        self._kept.clear()
        if self._staging is not None:
            self._staging.abort()
