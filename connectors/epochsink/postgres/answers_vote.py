"""The vote on rows that tasks have not staged: one COPY into the target, within the transaction that is prepared.

They come from the tasks' answers or from the spool. Only an append goes that way. Rows that replace others, that the
merge casts, that rules or policies concern, that share a transaction with another sink's, or that wait for the decision
in a logged table are staged first: by the driver, as tasks do it. So are those beside which a task has staged its own.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import psycopg

from epochsink.errors import PrepareFailed
from epochsink.postgres.binary_copy import CopyIn
from epochsink.postgres.committable import PreparedPart, StagedTask, read_written
from epochsink.postgres.place import Place
from epochsink.postgres.relation import Relation
from epochsink.postgres.row_mapping import writer_schema
from epochsink.postgres.table_shape import require_unchanged
from epochsink.postgres.vote import prepare_once, whole
from epochsink.postgres.writer import StagingWriter, fitted, merge_of
from epochsink.sink import Task

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa

    from epochsink.postgres.answers import AnsweredTask
    from epochsink.postgres.catalog import Target
    from epochsink.postgres.committable import Merge
    from epochsink.postgres.config import PostgresConfig
    from epochsink.postgres.server import Connection
    from epochsink.postgres.sessions import Session
    from epochsink.postgres.types import Encoding
    from epochsink.postgres.vote import Voter
    from epochsink.sink import Epoch, Identity, Rows

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Answers:
    """What the tasks of an epoch have answered that have staged nothing, and the spool."""

    tasks: Sequence[AnsweredTask]
    spool: Rows

    def read(self) -> Iterator[pa.RecordBatch]:
        """Yield all their record batches. Raises `PrepareFailed`."""
        for task in self.tasks:
            yield from task.read(self.spool)


def is_copied(config: PostgresConfig, session: Session, row: pa.Schema) -> bool | None:
    """Return whether rows go straight into the table as it is now; None if that cannot be told."""
    if config.key or not config.atomic:
        return False
    try:
        found = fitted(session.connection(), config, writer_schema(row, deletes=False), direct=False)
    except (psycopg.Error, PrepareFailed) as untold:
        _log.warning("tasks stage their rows for %s: %s", Relation.of(config.table), untold)
        return None
    return _takes_copy(config, *found)


def _takes_copy(config: PostgresConfig, target: Target, encodings: Sequence[Encoding]) -> bool:
    return not (
        config.mode(target.max_prepared_transactions) == "staged"
        or target.row_security
        or target.has_rules
        or any(encoding.staged_as is not None for encoding in encodings)
    )


def stage(
    connection: Connection, config: PostgresConfig, identity: Identity, epoch: Epoch, answers: Answers
) -> list[StagedTask]:
    """Copy answered rows into the attempt's staging table, by one COPY. Raises `RowsRejected`, `PrepareFailed`."""
    answered = answers.tasks
    tasks = [Task(identity, epoch, answer.partition, answer.task) for answer in answered]
    writer = StagingWriter(config, tasks[0], connection)
    try:
        for task, answer in zip(tasks, answered, strict=True):
            writer.go_on_as(task)
            for batch in answer.read(answers.spool):
                writer.write(batch)
        staged = read_written(writer.prepare())
    except BaseException:
        writer.abort()
        raise
    if not isinstance(staged, StagedTask):
        raise TypeError(staged)
    return [replace(staged, task=answer.task, rows=answer.rows) for answer in answered]


def vote_by_copy(connection: Connection, voter: Voter, epoch: Epoch, answers: Answers) -> Sequence[PreparedPart]:
    """Copy an epoch's rows into the target and prepare that; () with nothing done, if they have to be staged.

    Raises `PrepareFailed`, `WentBack`, `pyarrow.ArrowInvalid`, `psycopg.Error`.
    """
    answered = answers.tasks
    target, encodings = fitted(connection, voter.config, answered[0].schema, direct=False)
    if not _takes_copy(voter.config, target, encodings):
        return ()
    name, tasks = whole(voter, epoch), tuple(answer.task for answer in answered)
    rows, merge = sum(answer.rows for answer in answered), merge_of(voter.config, target, encodings)
    part = PreparedPart(str(name), epoch.attempt, tasks, rows, merge, place=Place.of(connection))
    prepare_once(connection, epoch, [voter], name, lambda: _copy(connection, merge, encodings, answers))
    return (part,)


def _copy(connection: Connection, merge: Merge, encodings: Sequence[Encoding], answers: Answers) -> None:
    copy = CopyIn(connection, merge.target.quoted, encodings)
    try:
        for batch in answers.read():
            copy.write(batch)
        # a trigger may have swallowed or redirected rows, as it may in an INSERT: how many arrived says nothing
        copy.finish()
    except BaseException:
        copy.cancel()
        raise
    # COPY has no casts, and passes rules by; its lock keeps the table as it is now: was it so before?
    require_unchanged(connection, merge, copied=True)
