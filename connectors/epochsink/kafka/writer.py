"""Write a task's rows into one transaction, and leave the transaction open for the driver."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from epochsink import arrow_buffers
from epochsink.errors import PrepareFailed, RowsRejected
from epochsink.failpoints import reach
from epochsink.identity import marker_group
from epochsink.kafka import client_options, errors
from epochsink.kafka.committable import KafkaCommittable, Transaction, transactional_id
from epochsink.kafka.config import KafkaConfig
from epochsink.kafka.dead_letter import Rules, Sender, refused, unfit
from epochsink.kafka.librdkafka import MESSAGE, UNASSIGNED, NativeError
from epochsink.kafka.producer import TransactionalProducer
from epochsink.kafka.rendered_value import value_of
from epochsink.retry import Clock
from epochsink.sink import Committable, Task, identity_key

if TYPE_CHECKING:
    from epochsink.kafka.server import KafkaServer


log = logging.getLogger("epochsink.kafka")

_NOBODY: Final = (-1, -1)
"""Producer id and producer epoch in a committable without an open transaction."""


_BYTES: Final = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}

# for librdkafka NULL is "no value", so an empty value needs an address
_EMPTY: Final = np.zeros(1, dtype="u1")


class KafkaWriter:
    """Produces one attempt at one Spark partition of an epoch.

    ``spooled_as`` is the uuid under which the rows are spooled: the task's own uuid, or an earlier task's if the driver
    writes its rows again. ``topic`` is the topic of all rows, or None if each row names its own. ``cluster`` is what it
    produces to; None for that of the configuration.

    If the task takes longer than the transaction timeout, the broker aborts the transaction. A task with a spool then
    continues: its committable names no open transaction, and the vote writes the rows again.
    """

    def __init__(
        self,
        config: KafkaConfig,
        task: Task,
        spooled_as: str,
        topic: str | None,
        *,
        cluster: KafkaServer | None = None,
    ) -> None:
        self._config = config
        self._clock: Clock = time if cluster is None else cluster.clock
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
            timeout_ms = (
                config.longest_transaction_timeout_ms(task.identity)
                if again
                else config.transaction_timeout_ms(task.identity)
            )
            self._producer = (
                TransactionalProducer(
                    options, self.transactional_id, timeout_ms, config.timeout, config.bootstrap_servers
                )
                if cluster is None
                else cluster.producer(options, self.transactional_id, timeout_ms)
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

    def write_beside(self, topic: str, batch: pa.RecordBatch, headers: Sequence[Any]) -> None:
        """Give rows for another topic to the client, before all others, with headers. Raises `PrepareFailed`."""
        messages = fill(batch)
        for each in filter(None, (topic, self._topic)):
            # known before the first row: if a connection is lost, the client sends rows again, and asks only once
            self._send(each, messages[:0], None, None)
        self._send(topic, messages, headers, None)
        self._rows += batch.num_rows

    def prepare(self) -> Committable:
        """Flush, add the marker to the transaction, and leave the transaction open. Raises `PrepareFailed`."""
        if self._rows and self._lost is not None:
            return self._without_transaction()
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
                return self._without_transaction()
            raise self._error(failure, "its rows could not be prepared") from failure
        reach("kafka.produced")
        # after the producer id is known: this ends the client and leaves the transaction open
        self._producer.release()
        return self._committable(Transaction(self.transactional_id, producer_id, producer_epoch))

    def _without_transaction(self) -> Committable:
        """Return what names no open transaction: the vote writes the rows again from the spool."""
        return self._committable(Transaction(self.transactional_id, *_NOBODY))

    def _committable(self, transaction: Transaction) -> Committable:
        prepared = KafkaCommittable(
            transaction=transaction,
            partition=self._partition,
            task=self._spooled_as,
            rows=self._rows,
            prepared_at=int(self._clock.time()),
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
        headers, timestamps = headers_of(batch), timestamps_of(batch)
        messages, sender = fill(batch), self._sender
        if sender is None:
            _refuse_unfit(batch)
        rejects = None if sender is None else refused(batch, messages, sender.rules)
        if sender is None or rejects is None:
            self._send(topic, messages, headers, timestamps)
        else:
            letters, reasons = sender.letters(batch, rejects, self._rows)
            accepted = np.delete(np.arange(batch.num_rows), rejects.rows)
            # even if no row is accepted: the sink's own topic comes first, and has the marker
            self._send(topic, messages[accepted], _some(headers, accepted), _some(timestamps, accepted))
            self._send(sender.rules.topic, fill(letters), reasons, None)
            self._letters += len(rejects.rows)
            self._why = self._why or rejects.reasons[0]
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


def _refuse_unfit(batch: pa.RecordBatch) -> None:
    if reasons := unfit(batch):
        raise RowsRejected(
            f"{len(reasons)} row(s) cannot be written as they are: {next(iter(reasons.values()))}",
            hint="correct them in the stream, e.g. with make_valid_utf8(column) in select=; or set such rows aside "
            "with on_rejected='dead_letter'",
        )


def headers_of(batch: pa.RecordBatch) -> Sequence[Any] | None:
    """Return the headers of each row, in bytes. Raises `RowsRejected`."""
    if "headers" not in batch.schema.names:
        return None
    column = batch.column("headers")
    entries = column.flatten()
    if entries.null_count or entries.field("key").null_count:
        raise RowsRejected(
            "a row has a header that is null, or whose key is null",
            hint='leave such headers out: headers="filter(h, x -> x.key IS NOT NULL)"; the value may be null',
        )
    # as bytes: text that is not UTF-8 has no Python string
    kind = pa.list_(pa.struct([(field.name, _BYTES.get(field.type, field.type)) for field in column.type.value_type]))
    headers: list[Any] = column.cast(kind).to_pylist()
    return headers


def timestamps_of(batch: pa.RecordBatch) -> Sequence[int] | None:
    """Return milliseconds since 1970; 0 for null: the time of writing. Raises `RowsRejected`."""
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
    messages["payload"], messages["len"] = _pointers(value_of(batch))
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
        # bytes that are not UTF-8 are no topic's name: escaped, the client refuses them by name
        name = topic.as_buffer().to_pybytes().decode(errors="backslashreplace") if topic.is_valid else None
        parts.append((name, batch.filter(mask)))
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
