"""Which topic a name means now: Kafka gives each topic an id, and one that is deleted and created again has another.

This is the tasks' side, which asks by librdkafka; the driver asks by `Cluster.topic_ids`.
"""

from __future__ import annotations

import ctypes
import time
import uuid
from typing import Any, Final

from epochsink.kafka import librdkafka
from epochsink.kafka.librdkafka import OK, Library, NativeError

NO_ID: Final = uuid.UUID(int=0).hex
"""What brokers answer that do not know ids yet; it says nothing about the topic."""

_WORD: Final = (1 << 64) - 1
_TIMED_OUT: Final = -185
_LONGEST_WAIT_MS: Final = 500


def topic_id(rdkafka: Library, client: int, topic: str, seconds: float) -> str:
    """Return a topic's id (32 hex) by any client of librdkafka. Raises `NativeError`."""
    names = (ctypes.c_char_p * 1)(topic.encode())
    wanted = rdkafka.TopicCollection_of_topic_names(names, 1)
    options = rdkafka.AdminOptions_new(client, librdkafka.DESCRIBE_TOPICS)
    queue = rdkafka.queue_new(client)
    try:
        reason = ctypes.create_string_buffer(512)
        rdkafka.AdminOptions_set_request_timeout(options, max(1, int(1000 * seconds)), reason, len(reason))
        rdkafka.DescribeTopics(client, wanted, options, queue)
        return _answer(rdkafka, queue, topic, time.monotonic() + seconds)
    finally:
        rdkafka.queue_destroy(queue)
        rdkafka.AdminOptions_destroy(options)
        rdkafka.TopicCollection_destroy(wanted)


def _answer(rdkafka: Library, queue: int, topic: str, deadline: float) -> str:
    while not (event := rdkafka.queue_poll(queue, _LONGEST_WAIT_MS)):
        if time.monotonic() > deadline:
            raise NativeError(_TIMED_OUT, f"topic '{topic}' could not be described")
    try:
        code = rdkafka.event_error(event)
        if code != OK:
            raise NativeError(code, f"topic '{topic}': {rdkafka.event_error_string(event).decode(errors='replace')}")
        count = ctypes.c_size_t()
        found = rdkafka.DescribeTopics_result_topics(rdkafka.event_DescribeTopics_result(event), ctypes.byref(count))
        return _id(rdkafka, found[0], topic)
    finally:
        rdkafka.event_destroy(event)


def _id(rdkafka: Library, described: Any, topic: str) -> str:
    code = rdkafka.error_code(rdkafka.TopicDescription_error(described))
    if code != OK:
        raise NativeError(code, f"topic '{topic}': {rdkafka.describe(code)}")
    found = rdkafka.TopicDescription_topic_id(described)
    high, low = rdkafka.Uuid_most_significant_bits(found), rdkafka.Uuid_least_significant_bits(found)
    return uuid.UUID(int=((high & _WORD) << 64) | (low & _WORD)).hex
