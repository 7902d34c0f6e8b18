"""An epoch's rows once more, out of the spool: in the driver, by the same code as the task's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from epochsink.errors import SpoolMissing
from epochsink.kafka.committable import KafkaCommittable
from epochsink.kafka.writer import KafkaWriter

if TYPE_CHECKING:
    from epochsink.kafka.config import KafkaConfig
    from epochsink.sink import Rows, Task

_RESOLVE: Final = "see 'epochsink status', then 'epochsink resolve'"


def write_again(config: KafkaConfig, task: Task, lost: KafkaCommittable, rows: Rows) -> KafkaCommittable:
    """Write the rows of a lost transaction into a new one, which ``task`` names, and leave that one open.

    Raises `SpoolMissing` if the rows are gone or not as many as were written, and what a task's writer raises.
    """
    batches = rows.read(lost.task)
    first = next(batches, None)  # a spool that is gone says so before a transaction is begun
    if first is None:
        raise SpoolMissing(f"the spool of epoch {task.epoch.number}, task {lost.task} is empty", hint=_RESOLVE)
    # as it was then, whatever topic= says now
    topic = None if "topic" in first.schema.names else next(iter(lost.topics), config.topic)
    writer = KafkaWriter(config, task, lost.task, topic)
    written = first.num_rows
    try:
        writer.write(first)
        for batch in batches:
            written += batch.num_rows
            writer.write(batch)
        if written != lost.rows:
            raise SpoolMissing(
                f"epoch {task.epoch.number}: the spool of task {lost.task} holds {written} rows, and {lost.rows} were "
                "prepared",
                hint=_RESOLVE,
            )
        return KafkaCommittable.from_json(writer.prepare())
    except BaseException:
        writer.abort()
        raise
