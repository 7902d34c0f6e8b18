"""The production's Kafka sink over brokers in memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

import numpy as np
import pyarrow as pa

from epochsink.kafka import Kafka
from epochsink.kafka.committer import KafkaCommitter
from epochsink.kafka.writer import KafkaWriter
from epochsink.sink import Committable, Task
from simulation.kafka_brokers import LETTER, PARTITIONS, TOPIC
from simulation.kafka_server import TIMEOUT_SECONDS, MemoryKafka
from simulation.readers import Row
from simulation.steps import Stepper
from simulation.world import World

SCHEMA: Final = pa.schema([("value", pa.string()), ("partition", pa.int32())])


@lru_cache(8)
def configured(*, spool: bool | None) -> Kafka:
    """Return the sink's configuration."""
    return Kafka(bootstrap_servers="memory:9092", topic=TOPIC, spool=spool, timeout=TIMEOUT_SECONDS)


@lru_cache(4096)
def batch_of(rows: tuple[Row, ...]) -> pa.RecordBatch:
    """Return rows as the sink's writer gets them."""
    values = [json.dumps(row) for row in rows]
    # a task of one row writes to one partition, and one of three to both
    partitions = [(row.source + row.source // 4) % PARTITIONS for row in rows]
    return pa.record_batch([pa.array(values), pa.array(np.array(partitions, dtype="i4"))], schema=SCHEMA)


class KafkaSink:
    """One sink of one driver or command."""

    letter = LETTER
    group: str | None = None
    keeps_in_log = False

    def __init__(self, world: World, step: Stepper, *, spool: bool = True) -> None:
        self._server = MemoryKafka(world, step)
        self._config = configured(spool=(None if self.keeps_in_log else True) if spool else False)
        self._contexts: dict[str, Any] = {}
        self._participant = KafkaCommitter({LETTER: self._config}, self._server)

    def participant(self, members: Mapping[str, Any]) -> KafkaCommitter:
        """Return the production's committer, which has no other member."""
        del members
        return self._participant

    def begin(self, task: Task, attempt_number: int = 0) -> KafkaTask:
        """Begin a task's transaction."""
        del attempt_number  # the task's uuid has it
        if task.epoch.attempt not in self._contexts:
            self._contexts[task.epoch.attempt] = self._participant.begin(task.epoch, {LETTER: SCHEMA})[LETTER]
        context = self._contexts[task.epoch.attempt]
        task = replace(task, keeping=context.keeping, settings=context.settings)
        return KafkaTask(KafkaWriter(self._config, task, task.uuid, TOPIC, cluster=self._server))


class KafkaLogSink(KafkaSink):
    """Keeps the rows in the topic."""

    keeps_in_log = True


class KafkaTask:
    """A task's writer."""

    def __init__(self, writer: KafkaWriter) -> None:
        self._writer = writer

    def write(self, rows: list[Row]) -> None:
        """Write rows; a failure ends the task."""
        self._writer.write(batch_of(tuple(rows)))

    def prepare(self) -> Committable:
        """Leave the transaction open."""
        return self._writer.prepare()
