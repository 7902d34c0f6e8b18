"""Call librdkafka's C interface, in the library that confluent-kafka bundles.

The classes of confluent-kafka take one message in each call, and hide the handle that `rd_kafka_produce_batch` needs.
That function takes a whole Arrow record batch. So the library is called directly.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import time
import uuid
from ctypes import c_char_p, c_int, c_int32, c_int64, c_size_t, c_ssize_t, c_void_p
from pathlib import Path
from typing import Any, Final

import numpy as np

from epochsink.errors import ConfigurationError

PRODUCER: Final = 0
UNASSIGNED: Final = -1
"""The partition number that lets the partitioner choose."""

COPY: Final = 0x2
HONOUR_PARTITION: Final = 0x8

EVENT_DELIVERY: Final = 0x1
EVENT_LOG: Final = 0x4
EVENT_ERROR: Final = 0x8
EVENT_STATISTICS: Final = 0x40

DESCRIBE_TOPICS: Final = 19
"""`rd_kafka_admin_op_t`: the request whose answer has a topic's id."""

OK: Final = 0
TIMED_OUT: Final = -185
CONF_UNKNOWN: Final = -2

POSSIBLY_PERSISTED: Final = 1
"""`rd_kafka_msg_status_t` of a message that was sent and not answered."""

_WORD: Final = (1 << 64) - 1
_LONGEST_WAIT_MS: Final = 500

MESSAGE: Final = np.dtype(
    {
        "names": ["err", "rkt", "partition", "payload", "len", "key", "key_len", "offset", "_private"],
        "formats": ["i4", "u8", "i4", "u8", "u8", "u8", "u8", "i8", "u8"],
        "offsets": [0, 8, 16, 24, 32, 40, 48, 56, 64],
        "itemsize": 72,
    }
)
"""`rd_kafka_message_t` on 64-bit machines."""


class Message(ctypes.Structure):
    """`rd_kafka_message_t`, as a delivery report shows it."""

    _fields_ = (
        ("err", c_int),
        ("topic", c_void_p),
        ("partition", c_int32),
        ("payload", c_void_p),
        ("len", c_size_t),
        ("key", c_void_p),
        ("key_len", c_size_t),
        ("offset", c_int64),
        ("private", c_void_p),
    )


class MetadataPartition(ctypes.Structure):
    """`rd_kafka_metadata_partition_t`."""

    _fields_ = (
        ("id", c_int32),
        ("err", c_int),
        ("leader", c_int32),
        ("replica_cnt", c_int),
        ("replicas", c_void_p),
        ("isr_cnt", c_int),
        ("isrs", c_void_p),
    )


class MetadataTopic(ctypes.Structure):
    """`rd_kafka_metadata_topic_t`."""

    _fields_ = (
        ("topic", c_char_p),
        ("partition_cnt", c_int),
        ("partitions", ctypes.POINTER(MetadataPartition)),
        ("err", c_int),
    )


class Metadata(ctypes.Structure):
    """`rd_kafka_metadata_t`."""

    _fields_ = (
        ("broker_cnt", c_int),
        ("brokers", c_void_p),
        ("topic_cnt", c_int),
        ("topics", ctypes.POINTER(MetadataTopic)),
        ("orig_broker_id", c_int32),
        ("orig_broker_name", c_char_p),
    )


class _Memory(ctypes.Structure):
    _fields_ = (("pointer", c_void_p), ("size", c_size_t))


class _Value(ctypes.Union):
    _fields_ = (
        ("topic", c_void_p),
        ("number", c_int),
        ("partition", c_int32),
        ("timestamp", c_int64),
        ("memory", _Memory),
        ("headers", c_void_p),
        ("_padding", ctypes.c_char * 64),
    )


class Argument(ctypes.Structure):
    """`rd_kafka_vu_t`: one argument of `rd_kafka_produceva`."""

    _fields_ = (("kind", c_int), ("value", _Value))


class TopicPartition(ctypes.Structure):
    """`rd_kafka_topic_partition_t`, up to the last field that is used here."""

    _fields_ = (
        ("topic", c_char_p),
        ("partition", c_int32),
        ("offset", c_int64),
        ("metadata", c_void_p),
        ("metadata_size", ctypes.c_size_t),
    )


def set_metadata(element: int, text: str) -> None:
    """Set the metadata of an offset, in memory from malloc, which librdkafka frees with the list."""
    allocate = ctypes.CDLL(None).malloc
    allocate.restype, allocate.argtypes = c_void_p, (ctypes.c_size_t,)
    content = text.encode()
    partition = TopicPartition.from_address(element)
    partition.metadata = allocate(max(1, len(content)))
    partition.metadata_size = len(content)
    ctypes.memmove(partition.metadata, content, len(content))


class ArgumentKind:
    """`rd_kafka_vtype_t`: the kind of an `Argument`."""

    TOPIC: Final = 2
    PARTITION: Final = 3
    VALUE: Final = 4
    KEY: Final = 5
    FLAGS: Final = 7
    TIMESTAMP: Final = 8
    HEADERS: Final = 10


_SIGNATURES: Final[dict[str, tuple[Any, tuple[Any, ...]]]] = {
    "AdminOptions_destroy": (None, (c_void_p,)),
    "AdminOptions_new": (c_void_p, (c_void_p, c_int)),
    "AdminOptions_set_request_timeout": (c_int, (c_void_p, c_int, c_char_p, c_size_t)),
    "DescribeTopics": (None, (c_void_p, c_void_p, c_void_p, c_void_p)),
    "DescribeTopics_result_topics": (ctypes.POINTER(c_void_p), (c_void_p, ctypes.POINTER(c_size_t))),
    "TopicCollection_destroy": (None, (c_void_p,)),
    "TopicCollection_of_topic_names": (c_void_p, (ctypes.POINTER(c_char_p), c_size_t)),
    "TopicDescription_error": (c_void_p, (c_void_p,)),
    "TopicDescription_topic_id": (c_void_p, (c_void_p,)),
    "Uuid_least_significant_bits": (c_int64, (c_void_p,)),
    "Uuid_most_significant_bits": (c_int64, (c_void_p,)),
    "abort_transaction": (c_void_p, (c_void_p, c_int)),
    "begin_transaction": (c_void_p, (c_void_p,)),
    "conf_destroy": (None, (c_void_p,)),
    "conf_get": (c_int, (c_void_p, c_char_p, c_char_p, ctypes.POINTER(c_size_t))),
    "conf_new": (c_void_p, ()),
    "conf_set": (c_int, (c_void_p, c_char_p, c_char_p, c_char_p, c_size_t)),
    "conf_set_events": (None, (c_void_p, c_int)),
    "consumer_group_metadata_destroy": (None, (c_void_p,)),
    "consumer_group_metadata_new": (c_void_p, (c_char_p,)),
    "destroy": (None, (c_void_p,)),
    "err2name": (c_char_p, (c_int,)),
    "err2str": (c_char_p, (c_int,)),
    "error_code": (c_int, (c_void_p,)),
    "error_destroy": (None, (c_void_p,)),
    "error_is_retriable": (c_int, (c_void_p,)),
    "error_string": (c_char_p, (c_void_p,)),
    "event_DescribeTopics_result": (c_void_p, (c_void_p,)),
    "event_destroy": (None, (c_void_p,)),
    "event_error": (c_int, (c_void_p,)),
    "event_error_string": (c_char_p, (c_void_p,)),
    "event_log": (
        c_int,
        (c_void_p, ctypes.POINTER(c_char_p), ctypes.POINTER(c_char_p), ctypes.POINTER(c_int)),
    ),
    "event_message_next": (ctypes.POINTER(Message), (c_void_p,)),
    "event_stats": (c_char_p, (c_void_p,)),
    "event_type": (c_int, (c_void_p,)),
    "flush": (c_int, (c_void_p, c_int)),
    "header_add": (c_int, (c_void_p, c_char_p, c_ssize_t, c_char_p, c_ssize_t)),
    "headers_destroy": (None, (c_void_p,)),
    "headers_new": (c_void_p, (c_size_t,)),
    "init_transactions": (c_void_p, (c_void_p, c_int)),
    "message_status": (c_int, (ctypes.POINTER(Message),)),
    "metadata": (
        c_int,
        (c_void_p, c_int, c_void_p, ctypes.POINTER(ctypes.POINTER(Metadata)), c_int),
    ),
    "metadata_destroy": (None, (ctypes.POINTER(Metadata),)),
    "new": (c_void_p, (c_int, c_void_p, c_char_p, c_size_t)),
    "outq_len": (c_int, (c_void_p,)),
    "produce_batch": (c_int, (c_void_p, c_int32, c_int, c_void_p, c_int)),
    "produceva": (c_void_p, (c_void_p, ctypes.POINTER(Argument), c_size_t)),
    "purge": (c_int, (c_void_p, c_int)),
    "queue_destroy": (None, (c_void_p,)),
    "queue_get_main": (c_void_p, (c_void_p,)),
    "queue_new": (c_void_p, (c_void_p,)),
    "queue_poll": (c_void_p, (c_void_p, c_int)),
    "send_offsets_to_transaction": (c_void_p, (c_void_p, c_void_p, c_void_p, c_int)),
    "set_log_queue": (c_int, (c_void_p, c_void_p)),
    "topic_destroy": (None, (c_void_p,)),
    "topic_name": (c_char_p, (c_void_p,)),
    "topic_new": (c_void_p, (c_void_p, c_char_p, c_void_p)),
    "topic_partition_list_add": (c_void_p, (c_void_p, c_char_p, c_int32)),
    "topic_partition_list_destroy": (None, (c_void_p,)),
    "topic_partition_list_new": (c_void_p, (c_int,)),
    "topic_partition_list_set_offset": (c_int, (c_void_p, c_char_p, c_int32, c_int64)),
    "version_str": (c_char_p, ()),
}


class NativeError(Exception):
    """A failed call of librdkafka: its error code (``rd_kafka_resp_err_t``), its text, and whether a retry may help."""

    def __init__(self, code: int, text: str, *, retriable: bool = False) -> None:
        super().__init__(text)
        self.code = code
        self.text = text
        self.retriable = retriable


class Library:
    """The functions in `_SIGNATURES`, as attributes without the prefix ``rd_kafka_``."""

    def __init__(self, path: str) -> None:
        native = ctypes.CDLL(path)
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(native, f"rd_kafka_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Any:
        # for types, which do not see the functions set above; called only for a name that has none
        raise AttributeError(f"rd_kafka_{name} has no signature here")

    def check(self, error: int | None) -> None:
        """Raise NativeError for a ``rd_kafka_error_t *`` that is not NULL."""
        if not error:
            return
        raised = NativeError(
            self.error_code(error),
            self.error_string(error).decode(errors="replace"),
            retriable=bool(self.error_is_retriable(error)),
        )
        self.error_destroy(error)
        raise raised

    def describe(self, code: int) -> str:
        """Return what an error code means, in librdkafka's words."""
        return f"{self.err2str(code).decode()} ({self.err2name(code).decode()})"


def topic_id(rdkafka: Library, client: int, topic: str, seconds: float) -> str:
    """Return a topic's id (32 hex), within ``seconds``; ``client`` is any handle. Raises `NativeError`."""
    names = (ctypes.c_char_p * 1)(topic.encode())
    wanted = rdkafka.TopicCollection_of_topic_names(names, 1)
    options = rdkafka.AdminOptions_new(client, DESCRIBE_TOPICS)
    queue = rdkafka.queue_new(client)
    try:
        reason = ctypes.create_string_buffer(512)
        rdkafka.AdminOptions_set_request_timeout(options, max(1, int(1000 * seconds)), reason, len(reason))
        rdkafka.DescribeTopics(client, wanted, options, queue)
        return _topic_answer(rdkafka, queue, topic, time.monotonic() + seconds)
    finally:
        rdkafka.queue_destroy(queue)
        rdkafka.AdminOptions_destroy(options)
        rdkafka.TopicCollection_destroy(wanted)


def _topic_answer(rdkafka: Library, queue: int, topic: str, deadline: float) -> str:
    while not (event := rdkafka.queue_poll(queue, _LONGEST_WAIT_MS)):
        if time.monotonic() > deadline:
            raise NativeError(TIMED_OUT, f"topic '{topic}' could not be described")
    try:
        code = rdkafka.event_error(event)
        if code != OK:
            raise NativeError(code, f"topic '{topic}': {rdkafka.event_error_string(event).decode(errors='replace')}")
        count = ctypes.c_size_t()
        descriptions = rdkafka.DescribeTopics_result_topics(
            rdkafka.event_DescribeTopics_result(event), ctypes.byref(count)
        )
        return _id_of(rdkafka, descriptions[0], topic)
    finally:
        rdkafka.event_destroy(event)


def _id_of(rdkafka: Library, described: Any, topic: str) -> str:
    code = rdkafka.error_code(rdkafka.TopicDescription_error(described))
    if code != OK:
        raise NativeError(code, f"topic '{topic}': {rdkafka.describe(code)}")
    pointer = rdkafka.TopicDescription_topic_id(described)
    high, low = rdkafka.Uuid_most_significant_bits(pointer), rdkafka.Uuid_least_significant_bits(pointer)
    return uuid.UUID(int=((high & _WORD) << 64) | (low & _WORD)).hex


@functools.cache
def library() -> Library:
    """Return librdkafka. Raises ConfigurationError if confluent-kafka is not installed."""
    try:
        import confluent_kafka  # noqa: PLC0415 - an optional dependency
    except ImportError as missing:
        raise ConfigurationError(
            "the Kafka sink needs the package confluent-kafka, which is not installed here",
            hint="install epochsink[kafka] on the driver and on every executor",
        ) from missing
    package = Path(confluent_kafka.__file__).parent
    # wheels for Linux and macOS bundle the library; a build from source uses the system's library
    bundled = [
        *package.parent.glob("confluent_kafka.libs/librdkafka*.so*"),
        *package.glob(".dylibs/librdkafka*.dylib"),
    ]
    path = str(bundled[0]) if bundled else ctypes.util.find_library("rdkafka")
    if path is None:
        raise ConfigurationError(
            f"librdkafka was not found beside {package} or on this system",
            hint="install confluent-kafka from a wheel, or librdkafka where the dynamic linker finds it",
        )
    return Library(path)
