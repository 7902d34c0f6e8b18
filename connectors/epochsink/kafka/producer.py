"""Produce one transaction with librdkafka, flush it, and leave it open.

A producer has one transaction only: a delayed EndTxn of the first could end a second one (KAFKA-17754). The end of the
producer neither commits nor aborts the transaction: it stays open at the coordinator. That is what "prepared" means.
"""

from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from epochsink.errors import ConfigurationError
from epochsink.kafka import client_options, errors, librdkafka
from epochsink.kafka.client_options import BYTES_IN_FLIGHT
from epochsink.kafka.errors import LEADER_NOT_AVAILABLE
from epochsink.kafka.librdkafka import OK, TIMED_OUT, Argument, ArgumentKind, Library, NativeError, library
from epochsink.kafka.producer_events import Events

ROWS_PER_CALL: Final = 10_000

_QUEUE_FULL: Final = -184
_UNKNOWN_PARTITION: Final = -190
_TOO_LARGE: Final = 10
_PURGE_QUEUED: Final = 0x1
_PURGE_ALL: Final = 0x3
_PURGED: Final = (-152, -151)
_ABORT_SECONDS: Final = 5.0
_LONGEST_SLICE_MS: Final = 500
_BELIEVED_SECONDS: Final = 3.0
"""If handshakes fail for this long, the settings are assumed to be wrong."""


_LEAST_BYTES_IN_FLIGHT: Final = 1 << 20
_PART_OF_DELIVERY_TIME: Final = 0.25
_PACE_SECONDS: Final = 1.0
"""Before this time, a broker's throughput is not known."""

_FEW_BROKERS: Final = 6
_broker_counts: Final[dict[str, int]] = {}
"""How many brokers a producer of this process has last seen, by ``bootstrap_servers``."""


class TransactionalProducer:
    """A transaction that is begun, filled and flushed. Used by one thread.

    Every method may raise `NativeError`. ``timeout`` (seconds) bounds each wait for the cluster, except the wait for
    deliveries, which ``delivery.timeout.ms`` bounds.
    """

    def __init__(
        self,
        options: Mapping[str, str],
        transactional_id: str,
        transaction_timeout_ms: int,
        timeout: float,
        bootstrap_servers: str,
    ) -> None:
        self._rdkafka = library()
        self.transactional_id = transactional_id
        self._timeout = timeout
        self._topics: dict[str, int] = {}
        self._partitions: dict[str, int] = {}
        self._size_sum = self._count = 0
        self._marking = False
        self._made_at = time.monotonic()
        self._servers = bootstrap_servers
        if _broker_counts.get(bootstrap_servers, _FEW_BROKERS + 1) <= _FEW_BROKERS:
            options = client_options.CONNECTED_AT_ONCE | dict(options)
        self._native = self._connectable(
            client_options.merged(options, bootstrap_servers, transactional_id, transaction_timeout_ms, timeout)
        )
        queue: int = self._rdkafka.queue_get_main(self._native)
        # None is the main queue; otherwise librdkafka would write its log to stderr
        self._rdkafka.set_log_queue(self._native, None)
        self._events = Events(self._rdkafka, queue)
        # ends the client's threads with this object; the transaction stays open
        self._release = weakref.finalize(self, _destroy, self._rdkafka, self._native, queue, self._topics)

    def _connectable(self, wanted: Mapping[str, str]) -> int:
        conf = client_options.configure(self._rdkafka, wanted)
        self.limit = int(client_options.value(self._rdkafka, conf, "message.max.bytes"))
        self._delivery_seconds = int(client_options.value(self._rdkafka, conf, "message.timeout.ms")) / 1000
        self._rdkafka.conf_set_events(conf, Events.ENABLED)
        reason = ctypes.create_string_buffer(512)
        client: int | None = self._rdkafka.new(librdkafka.PRODUCER, conf, reason, len(reason))
        if not client:
            self._rdkafka.conf_destroy(conf)
            raise ConfigurationError(f"options: librdkafka refuses them: {reason.value.decode(errors='replace')}")
        return client

    @property
    def _client(self) -> int:
        """The handle; its use after the release would crash the process."""
        if not self._release.alive:
            raise RuntimeError("this producer has been released")
        return self._native

    # ---- the transaction's life

    def begin(self) -> None:
        """Fence earlier users of the id, abort what they left open, and begin."""
        # in short slices: librdkafka itself may wait for half a second before it looks for the coordinator again
        self._until_done(lambda ms: self._rdkafka.init_transactions(self._client, ms), slice_ms=10)
        self._rdkafka.check(self._rdkafka.begin_transaction(self._client))

    def flush(self) -> None:
        """Wait until the broker has every row. Raises `NativeError` if a row could not be delivered."""
        while self._rdkafka.outq_len(self._client) > 0:
            self._rdkafka.flush(self._client, 100)
            self._events.serve(0)
            self._raise_undelivered()
        self._events.serve(0)
        self._raise_undelivered()

    def mark(self, group: str, topic: str, offset: int, metadata: str = "") -> None:
        """Add an offset of a consumer group, with metadata, to the transaction. Call it after `flush`.

        This also checks that the transaction has not been fenced and has not failed.
        """
        self._marking = True
        self._until_done(lambda ms: self._send_offset(group, topic, offset, ms, metadata), slice_ms=5_000)
        self._marking = False

    def identity(self) -> tuple[int, int]:
        """Return the producer id and producer epoch, with which any process can end the transaction."""
        deadline = time.monotonic() + self._timeout
        self._events.serve(0)
        while (producer := self._events.producer) is None:
            if time.monotonic() >= deadline:
                raise NativeError(TIMED_OUT, "neither librdkafka's log nor its statistics contain the producer id")
            self._events.serve(client_options.STATISTICS_MS)
        return producer

    def release(self) -> None:
        """End the producer's threads and connections, and leave the transaction open. May be repeated."""
        self._release()

    def abort(self) -> None:
        """Discard queued rows, abort the transaction and release the producer. Does nothing after `release`.

        Raises `NativeError`, and leaves the transaction open, if a broker may still read a request of this producer.
        The abort leaves the producer epoch as it is, so such a request would open a transaction that no coordinator
        knows.
        """
        if not self._release.alive:
            return
        # short: the task has already failed, and the driver can abort too
        self._timeout = min(self._timeout, _ABORT_SECONDS)
        try:
            # not what was sent: its answer is awaited
            self._rdkafka.purge(self._client, _PURGE_QUEUED)
            deadline = time.monotonic() + self._timeout
            while (sent := self._rdkafka.outq_len(self._client)) > 0 and time.monotonic() < deadline:
                self._events.serve(10)
            # a row that waits for its next try is discarded, and a broker may still read the try before
            if sent or self._events.unanswered or self._marking:
                raise NativeError(TIMED_OUT, "a request is not answered, and a broker may carry it out after the abort")
            self._until_done(lambda ms: self._rdkafka.abort_transaction(self._client, ms))
        finally:
            self.release()

    # ---- rows

    def partition_count(self, topic: str) -> int:
        """Return the number of partitions of a topic. Raises `NativeError` if the topic does not exist."""
        if topic not in self._partitions:
            deadline = time.monotonic() + self._timeout
            while not (count := self._ask_partition_count(topic)):
                if time.monotonic() > deadline:
                    raise NativeError(LEADER_NOT_AVAILABLE, f"topic '{topic}' has no leader")
                self._events.serve(50)
            self._partitions[topic] = count
        return self._partitions[topic]

    def topic_id(self, topic: str) -> str:
        """Return the current id of a topic (32 hex). Raises `NativeError` if the topic does not exist."""
        self.partition_count(topic)  # waits until a new topic has a leader
        return librdkafka.topic_id(self._rdkafka, self._client, topic, self._timeout)

    def produce(self, topic: str, messages: NDArray[Any]) -> None:
        """Produce `MESSAGE` structs; their bytes are copied before this returns."""
        # here, because librdkafka would accept such rows and report them only later
        self._refuse_partitions(topic, messages["partition"])
        handle = self._topic(topic)
        self._count += len(messages)
        self._size_sum += int(messages["len"].sum()) + int(messages["key_len"].sum())
        for start in range(0, len(messages), ROWS_PER_CALL):
            remaining = messages[start : start + ROWS_PER_CALL]
            while len(remaining):
                self._make_room()
                remaining = self._produce_once(topic, handle, remaining)

    def produce_each(
        self, topic: str, messages: NDArray[Any], headers: Sequence[Any] | None, timestamps: Sequence[int] | None
    ) -> None:
        """Produce rows one by one, with headers, in bytes, and timestamps (milliseconds since 1970, 0 for now)."""
        self._refuse_partitions(topic, messages["partition"])
        handle = self._topic(topic)
        for index, (_, _, partition, payload, size, key, key_size, _, _) in enumerate(messages.tolist()):
            arguments = (Argument * 7)()
            for slot, kind in enumerate(
                (ArgumentKind.TOPIC, ArgumentKind.FLAGS, ArgumentKind.PARTITION, ArgumentKind.VALUE, ArgumentKind.KEY)
            ):
                arguments[slot].kind = kind
            arguments[0].value.topic = handle
            arguments[1].value.number = librdkafka.COPY
            arguments[2].value.partition = partition
            arguments[3].value.memory = (payload or None, size)
            arguments[4].value.memory = (key or None, key_size)
            arguments[5].kind = ArgumentKind.TIMESTAMP
            arguments[5].value.timestamp = timestamps[index] if timestamps else 0
            self._produce_one(topic, arguments, headers[index] if headers else None, size + key_size)

    # ---- steps

    def _produce_once(self, topic: str, handle: int, messages: NDArray[Any]) -> NDArray[Any]:
        """Produce messages; return those for which the queue had no room."""
        taken = self._rdkafka.produce_batch(
            handle,
            librdkafka.UNASSIGNED,
            librdkafka.COPY | librdkafka.HONOUR_PARTITION,
            messages.ctypes.data,
            len(messages),
        )
        if taken == len(messages):
            return messages[:0]
        refused = messages[(messages["err"] != OK) & (messages["err"] != _QUEUE_FULL)]
        if len(refused):
            first = refused[0]
            raise self._refused(topic, int(first["err"]), int(first["len"] + first["key_len"]))
        self._events.serve(10)
        return np.ascontiguousarray(messages[messages["err"] == _QUEUE_FULL])

    def _produce_one(self, topic: str, arguments: Any, headers: Sequence[Any] | None, size: int) -> None:
        self._count += 1
        self._size_sum += size
        while True:
            self._make_room()
            native = self._headers(headers)
            arguments[6].kind = ArgumentKind.HEADERS if native else ArgumentKind.FLAGS
            if native:
                arguments[6].value.headers = native
            else:
                arguments[6].value.number = librdkafka.COPY
            try:
                self._rdkafka.check(self._rdkafka.produceva(self._client, arguments, len(arguments)))
            except NativeError as failure:
                # librdkafka owns the headers only after success
                if native:
                    self._rdkafka.headers_destroy(native)
                if failure.code != _QUEUE_FULL:
                    raise self._refused(topic, failure.code, size) from None
                self._events.serve(10)
            else:
                return

    def _headers(self, headers: Sequence[Any] | None) -> int | None:
        if not headers:
            return None
        native: int = self._rdkafka.headers_new(len(headers))
        for header in headers:
            name, value = header["key"], header["value"]
            self._rdkafka.header_add(native, name, len(name), value, 0 if value is None else len(value))
        return native

    def _refuse_partitions(self, topic: str, partitions: NDArray[Any]) -> None:
        count = self.partition_count(topic)
        wrong = partitions[(partitions < librdkafka.UNASSIGNED) | (partitions >= count)]
        if len(wrong):
            raise NativeError(
                _UNKNOWN_PARTITION,
                f"partition {wrong[0]} is out of range: topic '{topic}' has {count} partition(s), 0 to {count - 1}",
            )

    def _refused(self, topic: str, code: int, size: int) -> NativeError:
        if code == _TOO_LARGE:
            return NativeError(
                code,
                f"a row of {size} bytes for topic '{topic}' is larger than message.max.bytes = {self.limit} allows",
            )
        return NativeError(code, self._rdkafka.describe(code))

    def _topic(self, topic: str) -> int:
        if topic not in self._topics:
            self._topics[topic] = self._rdkafka.topic_new(self._client, topic.encode(), None)
        return self._topics[topic]

    def _ask_partition_count(self, topic: str) -> int:
        answer = ctypes.POINTER(librdkafka.Metadata)()
        wait_ms = int(self._timeout * 1000)
        code = self._rdkafka.metadata(self._client, 0, self._topic(topic), ctypes.byref(answer), wait_ms)
        if code != OK:
            raise NativeError(code, self._with_trouble(self._rdkafka.describe(code)))
        _broker_counts[self._servers] = answer.contents.broker_cnt
        try:
            description = answer.contents.topics[0]
            if description.err not in (OK, LEADER_NOT_AVAILABLE):
                raise NativeError(description.err, f"topic '{topic}': {self._rdkafka.describe(description.err)}")
            return 0 if description.err else int(description.partition_cnt)
        finally:
            self._rdkafka.metadata_destroy(answer)

    def _make_room(self) -> None:
        """Wait while librdkafka's queue is longer than `window` allows; its size is estimated from the average row."""
        average = max(1, self._size_sum // self._count)
        while (held := self._rdkafka.outq_len(self._client) * average) > self._window(held):
            self._events.serve(5)
        self._events.serve(0)
        self._raise_undelivered()

    def _window(self, held: int) -> int:
        elapsed = time.monotonic() - self._made_at
        return window(self._size_sum - held, elapsed, self._delivery_seconds)

    def _send_offset(self, group: str, topic: str, offset: int, wait_ms: int, metadata: str = "") -> int | None:
        rdkafka = self._rdkafka
        offsets = rdkafka.topic_partition_list_new(1)
        librdkafka.set_metadata(rdkafka.topic_partition_list_add(offsets, topic.encode(), 0), metadata)
        rdkafka.topic_partition_list_set_offset(offsets, topic.encode(), 0, offset)
        member = rdkafka.consumer_group_metadata_new(group.encode())
        try:
            error: int | None = rdkafka.send_offsets_to_transaction(self._client, offsets, member, wait_ms)
        finally:
            rdkafka.consumer_group_metadata_destroy(member)
            rdkafka.topic_partition_list_destroy(offsets)
        return error

    def _until_done(self, call: Callable[[int], int | None], slice_ms: int = 500) -> None:
        """Repeat a call while it times out; raise errors for which a retry cannot help.

        ``call`` gets its time limit in milliseconds: ``slice_ms`` at first, then longer ones.
        """
        if self._events.trouble is not None and errors.may_flap(self._events.trouble.code):
            self._events.trouble = None  # from an earlier wait, which succeeded
        deadline = time.monotonic() + self._timeout
        while True:
            wait_ms = max(1, min(slice_ms, int((deadline - time.monotonic()) * 1000)))
            try:
                self._rdkafka.check(call(wait_ms))
            except NativeError as failure:
                self._events.serve(0)
                self._raise_permanent_trouble()
                if not failure.retriable:
                    raise
                if time.monotonic() >= deadline:
                    waited = f"not done within {self._timeout:g} s: {failure.text}"
                    raise NativeError(failure.code, self._with_trouble(waited)) from None
            else:
                return
            slice_ms = min(2 * slice_ms, max(slice_ms, _LONGEST_SLICE_MS))

    def _with_trouble(self, text: str) -> str:
        return f"{text}; the client's last error: {self._events.trouble.text}" if self._events.trouble else text

    def _raise_permanent_trouble(self) -> None:
        trouble = self._events.trouble
        if trouble is None or not errors.is_permanent(trouble.code):
            return
        # the restart of a broker breaks handshakes off, which looks like a wrong certificate or password
        lasted = time.monotonic() - self._events.trouble_since
        if not errors.may_flap(trouble.code) or lasted >= _BELIEVED_SECONDS:
            raise trouble

    def _raise_undelivered(self) -> None:
        if self._events.undelivered is None:
            return
        if self._events.undelivered.code in _PURGED:
            # librdkafka dropped the rows because the transaction failed: any call on the transaction returns the reason
            self._rdkafka.check(self._send_offset("epochsink", next(iter(self._topics)), 0, 1_000))
        raise self._events.undelivered


def window(taken: int, seconds: float, delivery_seconds: float) -> int:
    """Return how many bytes may wait for a broker that has taken ``taken`` bytes in ``seconds``.

    librdkafka drops rows that wait for more than ``delivery_seconds``. So for a slow broker, or one with a quota, only
    the bytes that it takes in a fraction of that time may wait.
    """
    if seconds < _PACE_SECONDS:
        return BYTES_IN_FLIGHT
    in_time = taken / seconds * delivery_seconds * _PART_OF_DELIVERY_TIME
    return min(BYTES_IN_FLIGHT, max(_LEAST_BYTES_IN_FLIGHT, int(in_time)))


def _destroy(rdkafka: Library, client: int, events: int, topics: Mapping[str, int]) -> None:
    # purge first: destroy would wait until queued rows are delivered
    rdkafka.purge(client, _PURGE_ALL)
    for handle in topics.values():
        rdkafka.topic_destroy(handle)
    rdkafka.queue_destroy(events)
    rdkafka.destroy(client)
