"""Read the records of a topic as read_committed readers see them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, TopicPartition

from epochsink.kafka import producer_events
from epochsink.kafka.client_options import TRANSLATION
from epochsink.kafka.errors import Unreachable

_POLL_SECONDS: Final = 0.5
_OPEN: Final = "a transaction that is open there hides whether letters were written already"


class CommittedRecord(NamedTuple):
    """A record; ``at_ms`` is its timestamp."""

    partition: int
    offset: int
    at_ms: int
    headers: Sequence[tuple[str, bytes | None]]
    value: bytes


def committed_records(
    servers: str, options: Mapping[str, str], timeout: float, topic: str, ends: Mapping[int, int] | None
) -> Iterator[CommittedRecord]:
    """Yield the committed records of all partitions. Raises `Unreachable`.

    Up to ``ends``, even if transactions that are open now have to end first; without it, up to where they begin.
    """
    connection = {name: value for name, value in options.items() if name in TRANSLATION}
    reading = {
        "bootstrap.servers": servers,
        # without a group that the brokers would know: nothing is committed
        "group.id": f"epochsink.letters.{uuid.uuid4().hex}",
        "isolation.level": "read_committed",
        "enable.auto.commit": False,
        "enable.partition.eof": True,
        # so long would the broker keep an answer back that says "the end"
        "fetch.wait.max.ms": 20,
        "auto.offset.reset": "earliest",
    }
    # without a logger the client would write to stderr
    consumer = Consumer(connection | reading, logger=producer_events.log)
    try:
        known = list(_partitions(consumer, servers, timeout, topic))
        consumer.assign([TopicPartition(topic, partition, OFFSET_BEGINNING) for partition in known])
        waiting, arrived = set(known), time.monotonic()
        while waiting:
            message: Any = consumer.poll(_POLL_SECONDS)
            if message is None:
                if time.monotonic() - arrived > timeout:
                    raise _unreachable(servers, topic, "no record came" if ends is None else _OPEN)
                continue
            arrived, error = time.monotonic(), message.error()
            end = None if ends is None else ends.get(message.partition(), 0)
            if error is None:
                if end is None or message.offset() < end:
                    yield _record(message)
                if end is not None and message.offset() + 1 >= end:
                    waiting.discard(message.partition())
            elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - the client's name of it
                # before the end: a transaction is open there
                if end is None or message.offset() >= end:
                    waiting.discard(message.partition())
            elif not error.retriable():
                raise _unreachable(servers, topic, error.str())
    finally:
        consumer.close()


def _record(message: Any) -> CommittedRecord:
    headers = message.headers() or ()
    return CommittedRecord(
        message.partition(), message.offset(), message.timestamp()[1], headers, message.value() or b""
    )


def _partitions(consumer: Any, servers: str, timeout: float, topic: str) -> Iterator[int]:
    try:
        yield from consumer.list_topics(topic, timeout=timeout).topics[topic].partitions
    except KafkaException as failure:
        raise _unreachable(servers, topic, failure.args[0].str()) from failure


def _unreachable(servers: str, topic: str, why: str) -> Unreachable:
    return Unreachable(
        f"topic '{topic}' of {servers} could not be read: {why}",
        hint="type it again; check that all brokers run, and that the user may READ the topic",
    )
