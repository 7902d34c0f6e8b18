"""Write a task's rows into one transaction, and leave the transaction open for the driver."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from epochsink import arrow_buffers
from epochsink.errors import PrepareFailed, RowsRejected
from epochsink.failpoints import reach
from epochsink.identity import identity_key, marker_group
from epochsink.kafka import client_options, errors
from epochsink.kafka.committable import KafkaCommittable, Transaction, transactional_id
from epochsink.kafka.dead_letter import Rules, Sender, refused
from epochsink.kafka.librdkafka import MESSAGE, UNASSIGNED, NativeError
from epochsink.kafka.producer import TransactionalProducer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from epochsink.kafka.config import KafkaConfig
    from epochsink.sink import Committable, Task

log = logging.getLogger("epochsink.kafka")

_NOBODY: Final = (-1, -1)
"""Producer id and producer epoch in a committable without an open transaction."""


# for librdkafka NULL is "no value", so an empty value needs an address
_EMPTY: Final = np.zeros(1, dtype="u1")


class KafkaWriter:
    """Produces one attempt at one Spark partition of an epoch.

    ``spooled_as`` is the uuid under which the rows are spooled: the task's own uuid, or an earlier task's if the driver
    writes its rows again. ``topic`` is the topic of all rows, or None if each row names its own. If the task takes
    longer than the transaction timeout, the broker aborts the transaction. A task with a spool then continues: its
    committable names no open transaction, and the vote writes the rows again.
    """

    def __init__(self, config: KafkaConfig, task: Task, spooled_as: str, topic: str | None) -> None:
        self._config = config
        self._topic = topic
        self._epoch = task.epoch
        self._partition = task.partition
        self._spooled_as = spooled_as
        self._key = identity_key(task.identity)
        self._rows = self._letters = 0
        self._why = ""
        self._topics: dict[str, str] = {}
        self._rules = Rules.from_json(task.settings)
        self._sender = None if self._rules is None or topic is None else Sender(self._rules, task, topic)
        # not if the driver writes in the vote or in a replay: nothing would write the rows a third time
        again = spooled_as != task.uuid
        self._can_be_lost = task.keeping.is_spooled and config.is_redone and not again
        self._lost: NativeError | None = None
        self.transactional_id = str(transactional_id(task, bounded=config.is_redone))
        options = client_options.fitting(config.options, task.identity.origin.get("largest_batch"))
        if self._rules is not None:
            options = self._rules.options(options, client_options.BATCH_BYTES)
        try:
            # one producer, one transaction: a delayed EndTxn may end the producer's next one (KAFKA-17754)
            self._producer = TransactionalProducer(
                options,
                self.transactional_id,
                config.longest_transaction_timeout_ms(task.identity)
                if again
                else config.transaction_timeout_ms(task.identity),
                config.timeout,
                config.bootstrap_servers,
            )
            self._producer.begin()
        except NativeError as failure:
            raise self._error(failure, f"no transaction could be begun at {config.bootstrap_servers}") from failure

    def write(self, batch: pa.RecordBatch) -> None:
        """Give a batch to the client. Raises `PrepareFailed`, `RowsRejected`."""
        if self._topic is not None:
            return self._produce(self._topic, batch)
        for topic, rows in by_topic(batch):
            if topic is None:
                raise RowsRejected(
                    f"{rows.num_rows} row(s) of Spark partition {self._partition} have no topic",
                    hint="fill the column 'topic' in every row, or set topic=",
                )
            self._produce(topic, rows)
        return None

    def prepare(self) -> Committable:
        """Flush, add the marker to the transaction, and leave the transaction open. Raises `PrepareFailed`."""
        if self._rows and self._lost is not None:
            return self._committable(Transaction(self.transactional_id, *_NOBODY))
        marker_topic = next(iter(self._topics), None)
        if marker_topic is None:
            raise PrepareFailed(
                f"Spark partition {self._partition} has no rows, and an empty transaction cannot be ended"
            )
        try:
            # before the marker: it must not be committed with only some of the rows
            self._producer.flush()
            group = marker_group(self._key, self._partition, self._epoch.number % 2)
            # the attempt tells this driver from one on another copy of the checkpoint, which has the same epochs
            self._producer.mark(group, marker_topic, self._epoch.number, self._epoch.attempt)
            producer_id, producer_epoch = self._producer.identity()
        except NativeError as failure:
            if self._may_lose(failure):
                return self.prepare()
            raise self._error(failure, "its rows could not be prepared") from failure
        reach("kafka.produced")
        # after the producer id is known: this ends the client and leaves the transaction open
        self._producer.release()
        return self._committable(Transaction(self.transactional_id, producer_id, producer_epoch))

    def _committable(self, transaction: Transaction) -> Committable:
        prepared = KafkaCommittable(
            transaction=transaction,
            partition=self._partition,
            task=self._spooled_as,
            rows=self._rows,
            prepared_at=int(time.time()),
            topics=self._topics,
            rules=self._rules,
            letters=self._letters,
            why=self._why,
        )
        return prepared.to_json()

    def abort(self) -> None:
        """Abort the transaction. If that is not safe or fails, the driver's sweep or the broker's time-out aborts it.

        A prepared transaction stays open, because only the driver knows whether it is recorded.
        """
        try:
            self._producer.abort()
        except NativeError as failure:
            log.info("transaction %s will be aborted by the driver: %s", self.transactional_id, failure.text)

    def _produce(self, topic: str, batch: pa.RecordBatch) -> None:
        _refuse_partitions(batch)
        headers, timestamps = _headers(batch), _timestamps(batch)
        array = fill(batch)
        found = None if self._sender is None else refused(batch, array, self._sender.rules)
        if found is None or self._sender is None:
            self._send(topic, array, headers, timestamps)
        else:
            letters, told = self._sender.letters(batch, found, timestamps, self._rows)
            left = np.delete(np.arange(batch.num_rows), found.rows)
            # even if no row is left: the sink's own topic comes first, and has the marker
            self._send(topic, array[left], _some(headers, left), _some(timestamps, left))
            self._send(self._sender.rules.topic, fill(letters), told, None)
            self._letters += len(found.rows)
            self._why = self._why or found.reasons[0]
        self._rows += batch.num_rows

    def _send(
        self,
        topic: str,
        messages: NDArray[Any],
        headers: Sequence[Any] | None,
        timestamps: Sequence[int] | None,
    ) -> None:
        # if the transaction is lost, the rows are still counted
        if self._lost is not None:
            return
        try:
            if topic not in self._topics:
                # before the first row: if the topic is created again later, its id differs
                self._topics[topic] = self._producer.topic_id(topic)
            if headers is None and timestamps is None:
                self._producer.produce(topic, messages)
            else:
                self._producer.produce_each(topic, messages, headers, timestamps)
        except NativeError as failure:
            if not self._may_lose(failure):
                raise self._error(failure, f"rows for topic '{topic}' were refused") from failure

    def _may_lose(self, failure: NativeError) -> bool:
        """Whether the task can continue after a failure that ended its transaction."""
        if self._can_be_lost and failure.code in errors.GIVEN_UP:
            log.info(
                "transaction %s was aborted, the vote writes its rows again: %s", self.transactional_id, failure.text
            )
            self._lost = failure
            self._producer.release()
            return True
        return False

    def _error(self, failure: NativeError, doing: str) -> PrepareFailed:
        return errors.error(
            failure,
            f"epoch {self._epoch.number}, Spark partition {self._partition}: {doing}",
            transactional_id=self.transactional_id,
        )


def _some(values: Sequence[Any] | None, rows: NDArray[Any]) -> Sequence[Any] | None:
    return None if values is None else [values[row] for row in rows]


def _refuse_partitions(batch: pa.RecordBatch) -> None:
    """Refuse negative partitions: for the client -1 means "choose one", which users write as null."""
    if "partition" not in batch.schema.names:
        return
    lowest = pc.min(batch.column("partition")).as_py()
    if lowest is not None and lowest < 0:
        raise RowsRejected(
            "a row names a negative partition; partitions are numbered from 0",
            hint="write null to let the key's hash choose, for example partition='nullif(p, -1)'",
            values=f"partition {lowest}",
        )


def _headers(batch: pa.RecordBatch) -> Sequence[Any] | None:
    if "headers" not in batch.schema.names:
        return None
    column = batch.column("headers")
    entries = column.flatten()
    if entries.null_count or entries.field("key").null_count:
        raise RowsRejected(
            "a row has a header that is null, or whose key is null",
            hint='leave such headers out: headers="filter(h, x -> x.key IS NOT NULL)"; the value may be null',
        )
    headers: list[Any] = column.to_pylist()
    return headers


def _timestamps(batch: pa.RecordBatch) -> Sequence[int] | None:
    """Return milliseconds since 1970; 0 for null, for which the client uses the time of writing."""
    if "timestamp" not in batch.schema.names:
        return None
    column = batch.column("timestamp")
    unit = pa.timestamp("ms", tz=column.type.tz)
    milliseconds = pc.cast(column, unit, safe=False).cast(pa.int64())
    earliest = pc.min(milliseconds).as_py()
    if earliest is not None and earliest <= 0:
        # for librdkafka 0 means "now", and Kafka has no timestamps before 1970
        raise RowsRejected(
            "a row has a timestamp before 1970-01-01 00:00:00.001 UTC, the earliest that can be written",
            hint="correct it, or write null for the time of writing: timestamp='nullif(t, timestamp_millis(0))'",
            values=f"{earliest} ms",
        )
    values: list[int] = arrow_buffers.to_numpy(pc.fill_null(milliseconds, arrow_buffers.number(0, "int64"))).tolist()
    return values


# ---- convert Arrow columns to librdkafka's array of messages, without a Python loop over rows


def fill(batch: pa.RecordBatch) -> NDArray[Any]:
    """Return `MESSAGE` structs that point into the buffers of ``batch``, which must outlive them.

    The columns ``key`` and ``partition`` may be absent; ``key`` and ``value`` are strings or binary.
    """
    messages = np.zeros(batch.num_rows, dtype=MESSAGE)
    messages["payload"], messages["len"] = _pointers(batch.column("value"))
    names = batch.schema.names
    if "key" in names:
        messages["key"], messages["key_len"] = _pointers(batch.column("key"))
    messages["partition"] = partitions(batch) if "partition" in names else UNASSIGNED
    return messages


def partitions(batch: pa.RecordBatch) -> NDArray[Any]:
    """Return the partition of each row; -1 for null, which lets the partitioner choose."""
    return arrow_buffers.to_numpy(pc.fill_null(batch.column("partition"), arrow_buffers.number(UNASSIGNED, "int32")))


def by_topic(batch: pa.RecordBatch) -> list[tuple[str | None, pa.RecordBatch]]:
    """Split a batch by its column ``topic``, in order of first appearance; null becomes None."""
    column = batch.column("topic")
    parts = []
    for topic in pc.unique(column):
        mask = pc.equal(column, topic) if topic.is_valid else pc.is_null(column)
        parts.append((topic.as_py(), batch.filter(mask)))
    return parts


def _pointers(column: pa.Array) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the address and the length of each row's bytes; address 0 for null."""
    if pa.types.is_null(column.type):
        nothing = np.zeros(len(column), dtype="u8")
        return nothing, nothing
    # 64-bit offsets in the large types
    wide = pa.types.is_large_string(column.type) or pa.types.is_large_binary(column.type)
    _, offset_buffer, data = column.buffers()
    offsets = np.frombuffer(offset_buffer, dtype="i8" if wide else "i4")
    offsets = offsets[column.offset : column.offset + len(column) + 1]
    base = data.address if data is not None and data.address else _EMPTY.ctypes.data
    addresses = offsets[:-1].astype("u8") + np.uint64(base)
    lengths = np.diff(offsets).astype("u8")
    if column.null_count:
        nulls = arrow_buffers.to_numpy(pc.is_null(column))
        addresses[nulls] = 0
        lengths[nulls] = 0
    return addresses, lengths
