"""Rows of small tasks ride in the tasks' answers, those of large ones are in the spool: the driver copies both.

A task's limit falls with its partition's number, so that the answers of an epoch fit into the driver however many tasks
there are: with ``answer_bytes`` of 64 KiB those of 1,000 tasks hold at most 4.2 MiB of rows, those of 10,000 at most
6.5 MiB. A task with more leaves them to the spool if the vote can take them from there, or stages them itself; tasks of
both sizes may be in one epoch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from epochsink.errors import PrepareFailed
from epochsink.failpoints import reach
from epochsink.postgres.answers import AnsweredTask
from epochsink.sink import Keeping
from epochsink.sink.falling_limit import limit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from epochsink.postgres.config import PostgresConfig
    from epochsink.postgres.writer import StagingWriter
    from epochsink.sink import Committable, Task


class AnsweringWriter:
    """Keeps a task's rows for its answer; those beyond its limit are in the spool anyway, or are staged."""

    def __init__(self, config: PostgresConfig, task: Task) -> None:
        self._config = config
        self._task = task
        self._votes_from_spool = task.keeping is Keeping.IN_SPOOL_ALONE
        self._limit = limit(config.answer_bytes, task.partition)
        self._schema: pa.Schema | None = None
        self._rows = self._bytes = 0
        self._kept: list[pa.RecordBatch] = []
        self._staging: StagingWriter | None = None

    def write(self, batch: pa.RecordBatch) -> None:
        """Keep a record batch with at least one row, or send it. Raises as `epochsink.postgres.writer.CopyWriter`."""
        self._schema = batch.schema
        self._rows += batch.num_rows
        self._bytes += batch.nbytes
        self._kept.append(batch)
        if not self._is_large:
            return
        if not self._votes_from_spool:
            self._stage(self._kept)
        self._kept.clear()

    def prepare(self) -> Committable:
        """Return the rows themselves, or where they are. Raises as `epochsink.postgres.writer.CopyWriter`."""
        if self._staging is not None:
            return self._staging.prepare()
        if self._schema is None:
            raise PrepareFailed("prepare() without a row: a task without rows makes no writer")
        is_spooled = self._is_large or (self._votes_from_spool and self._bytes <= self._task.carried)
        if is_spooled:
            # what the spool keeps of so few rows goes to the driver by itself
            self._kept.clear()
        stream = pa.BufferOutputStream()
        with pa.ipc.new_stream(stream, self._schema) as batches:
            for kept in self._kept:
                batches.write_batch(kept)
        reach("postgres.copied")
        task, answer = self._task, stream.getvalue().to_pybytes()
        return AnsweredTask(task.uuid, task.partition, self._rows, answer, is_spooled).to_json()

    def abort(self) -> None:
        """Let go of everything that is not yet durable."""
        self._kept.clear()
        if self._staging is not None:
            self._staging.abort()

    @property
    def _is_large(self) -> bool:
        return self._bytes > self._limit

    def _stage(self, batches: Sequence[pa.RecordBatch]) -> None:
        if self._staging is None:
            # here, not above: the client takes a while to load, and most tasks need none
            from epochsink.postgres.writer import StagingWriter  # noqa: PLC0415 - see above

            self._staging = StagingWriter(self._config, self._task)
        for batch in batches:
            self._staging.write(batch)
