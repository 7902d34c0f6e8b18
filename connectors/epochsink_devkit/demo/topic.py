"""Use a Kafka topic as a destination, read with read_committed from the beginning."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from confluent_kafka import Consumer, KafkaError, TopicPartition

from epochsink.errors import ServiceError
from epochsink.kafka import Kafka
from epochsink_devkit.demo.destination import Copies, Offsets
from epochsink_devkit.demo.kill_plan import Step
from epochsink_devkit.demo.orders import PARTITIONS, make_topic
from epochsink_devkit.history.readers.kafka import KafkaReader

if TYPE_CHECKING:
    from confluent_kafka import Message
    from pyspark.sql import DataFrame


_PAGE: Final = 10_000
_LOOK_SECONDS: Final = 0.05
_READ_SECONDS: Final = 60.0
_ERRORS_ONLY: Final = 3


@dataclass(frozen=True, slots=True)
class KafkaTopic:
    """A topic of orders, as JSON."""

    label: ClassVar[str] = "Kafka"
    steps: ClassVar[Sequence[Step]] = (
        Step("kafka.produced", "in a task, its rows are in an open Kafka transaction"),
        # An epoch has two transactions; kill after the first one of an epoch.
        Step("kafka.commit.between", "one Kafka transaction is committed, the next is not", (1, 3), always=True),
    )

    bootstrap_servers: str
    topic: str

    def create(self) -> None:
        """Make the topic."""
        make_topic(self.bootstrap_servers, self.topic)

    def sink(self) -> Kafka:
        """Return the sink for `ExactlyOnce`."""
        return Kafka(bootstrap_servers=self.bootstrap_servers, topic=self.topic, key="order_id")

    def append(self, frame: DataFrame) -> None:
        """Append a batch with Spark's own sink."""
        messages = frame.selectExpr("CAST(order_id AS STRING) AS key", "to_json(struct(*)) AS value")
        options = {"kafka.bootstrap.servers": self.bootstrap_servers, "topic": self.topic}
        messages.write.format("kafka").options(**options).save()

    def eye(self) -> _Log:
        """Start a consumer."""
        return _Log(self.bootstrap_servers, self.topic)

    def copies(self) -> Copies:
        """Read to the end."""
        deadline = time.monotonic() + _READ_SECONDS
        copies = Counter[int]()
        with closing(self.eye()) as log:
            while not log.has_ended:
                if time.monotonic() > deadline:
                    raise ServiceError(f"the topic {self.topic} could not be read to its end in {_READ_SECONDS:.0f} s")
                copies.update(order["order_id"] for order in log.more())
        return copies

    def reader(self) -> KafkaReader:
        """Return a reader that finds open transactions."""
        return KafkaReader(self.bootstrap_servers, self.topic)


class _Log:
    def __init__(self, bootstrap_servers: str, topic: str) -> None:
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap_servers,
                "group.id": "epochsink-demo",  # required by the client; no offsets are committed
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "log_level": _ERRORS_ONLY,
            }
        )
        self._consumer.assign([TopicPartition(topic, partition, 0) for partition in range(PARTITIONS)])
        self._ended: set[int | None] = set()
        self._visible = 0
        self._new: list[dict[str, Any]] = []

    def look(self) -> int:
        self._new = []
        while messages := self.more():
            self._new += messages
        self._visible += len(self._new)
        return self._visible

    def beyond(self, decided: Offsets) -> set[int]:
        return {
            order["order_id"]
            for order in self._new
            if order["source_offset"] >= decided.get(order["source_partition"], 0)
        }

    def close(self) -> None:
        self._consumer.close()

    @property
    def has_ended(self) -> bool:
        """Whether every partition was read to its end."""
        return len(self._ended) == PARTITIONS

    def more(self) -> list[dict[str, Any]]:
        """Return the orders that arrived since the last call."""
        return [
            json.loads(message.value() or b"")
            for message in self._consumer.consume(_PAGE, timeout=_LOOK_SECONDS)
            if self._is_order(message)
        ]

    def _is_order(self, message: Message) -> bool:
        failure = message.error()
        if failure is None:
            self._ended.discard(message.partition())
            return True
        if failure.code() != KafkaError._PARTITION_EOF:  # noqa: SLF001 - its name
            raise ServiceError(f"the demo's topic cannot be read: {failure}")
        self._ended.add(message.partition())
        return False
