"""Prepare the rows of a lost transaction again, from the topic's log or from the spool.

Aborted records stay in the log until retention deletes them. Their batches are copied as they are. The copy must be
complete: in each partition the sequence numbers start at 0 and have no gap, and the number of records is the number
that the task wrote.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from epochsink.errors import LogIncomplete, SpoolMissing, sink_option
from epochsink.identity import marker_group
from epochsink.kafka import errors, preflight, record_batch
from epochsink.kafka.committable import KafkaCommittable, Transaction, transactional_id
from epochsink.kafka.config import KafkaConfig
from epochsink.kafka.errors import Refused, Unreachable
from epochsink.kafka.librdkafka import NativeError
from epochsink.kafka.record_batch import SEQUENCES, Batch
from epochsink.kafka.server import KafkaServer
from epochsink.kafka.topic_log import TopicLog
from epochsink.kafka.transactions import Transactions
from epochsink.kafka.writer import KafkaWriter
from epochsink.sink import Identity, Rows, Task, identity_key


def _without_rows(task: Task) -> str:
    number = task.epoch.number
    return (
        "put the files of the spool back as they were. If there is no copy, these rows are only in the source. To "
        f"close the epoch without them: epochsink resolve CHECKPOINT {number} {sink_option(task.identity.sink)} --as "
        f"discard --without-rows; its input (offsets/{number} in the checkpoint) can then be loaded by a separate query"
    )


def prepare_again(
    config: KafkaConfig, cluster: KafkaServer, task: Task, lost: KafkaCommittable, rows: Rows
) -> KafkaCommittable:
    """Write the rows of a lost transaction into a new one, which ``task`` names, and leave the new one open.

    Raises `LogIncomplete` or `SpoolMissing` if rows are missing where they are kept, and `PrepareFailed`.
    """
    task = replace(task, identity=_with_cap_of_now(cluster, task.identity))
    if not lost.kept_in_topic:
        # not today's options: the rows that became letters become letters again, and no others
        again = replace(task, settings={} if lost.rules is None else lost.rules.to_json())
        return _write_again(config, cluster, again, lost, rows)
    try:
        return _produce_again(config, cluster, task, lost)
    except NativeError as failure:
        raise errors.error(failure, _doing(task, lost)) from failure
    except Refused as failure:
        if failure.code not in errors.FENCED:
            raise
        raise errors.error(NativeError(failure.code, failure.message), _doing(task, lost)) from failure


def _with_cap_of_now(cluster: KafkaServer, identity: Identity) -> Identity:
    """Return the identity with the longest transaction timeout that the brokers allow now.

    It may be shorter than when the sink joined, and brokers refuse a longer one: the rows could never be written again.
    """
    cap = preflight.transaction_timeout_cap(cluster)
    # without the right to ask, as recorded
    return identity if cap is None else replace(identity, origin={**identity.origin, "transaction_timeout": cap})


def _write_again(
    config: KafkaConfig, cluster: KafkaServer, task: Task, lost: KafkaCommittable, rows: Rows
) -> KafkaCommittable:
    batches = rows.read(lost.task)
    first = next(batches, None)  # before a transaction is begun: this raises if the spool is gone
    if first is None:
        raise SpoolMissing(
            f"the spool of epoch {task.epoch.number}, task {lost.task} is empty", hint=_without_rows(task)
        )
    # not config.topic: topic= may have changed since
    topic = None if "topic" in first.schema.names else next(iter(lost.topics), config.topic)
    writer = KafkaWriter(config, task, lost.task, topic, cluster=cluster)
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
                hint=_without_rows(task),
            )
        return KafkaCommittable.from_json(writer.prepare())
    except BaseException:
        writer.abort()
        raise


def _doing(task: Task, lost: KafkaCommittable) -> str:
    return (
        f"epoch {task.epoch.number}, Spark partition {task.partition}: the rows of transaction "
        f"{lost.transaction.transactional_id} could not be prepared again"
    )


def _produce_again(config: KafkaConfig, cluster: KafkaServer, task: Task, lost: KafkaCommittable) -> KafkaCommittable:
    name = str(transactional_id(task, bounded=True))
    producer = cluster.producer(config.options, name, config.longest_transaction_timeout_ms(task.identity))
    transaction = None
    try:
        producer.begin()
        transaction = Transaction(name, *producer.identity())
        # rows and dead letters
        for topic in lost.topics:
            _copy(TopicLog(cluster, topic), lost, transaction, cluster.timeout, task)
        # after all batches: the marker must not be committed with only some of the rows
        group = marker_group(identity_key(task.identity), task.partition, task.epoch.number % 2)
        producer.mark(group, next(iter(lost.topics)), task.epoch.number, task.epoch.attempt)
    except BaseException:
        if transaction is not None:
            # by the driver's client: the producing one does not know its partitions, so it would not abort
            Transactions(cluster).give_up(transaction, answered=False)
        raise
    finally:
        # leaves the transaction open
        producer.release()
    return replace(lost, transaction=transaction, prepared_at=int(cluster.clock.time()), places=())


def _copy(log: TopicLog, lost: KafkaCommittable, to: Transaction, timeout: float, task: Task) -> None:
    """Copy the batches that a lost transaction has in one topic into another transaction."""
    # before the first copy: otherwise the search would also find the copies
    ends, topic_id = log.ends(), log.topic_id
    joined: set[int] = set()
    for partition, batch in lost_batches(log, lost, ends, timeout, task):
        # the broker refuses a batch for a partition that is not yet part of the transaction
        if partition not in joined:
            log.join(to, [partition])
            joined.add(partition)
        again = batch.under(to.producer_id, to.producer_epoch, batch.base_sequence)
        log.append(to, partition, again, ends[partition], topic_id)


def lost_batches(
    log: TopicLog, lost: KafkaCommittable, ends: Mapping[int, int], timeout: float, task: Task
) -> Iterator[tuple[int, Batch]]:
    """Yield the batches of a transaction with their partitions, in order within each, and prove that none is missing.

    ``ends`` holds the current ends of the partitions. ``timeout`` (seconds) bounds the wait for further records.
    Raises `LogIncomplete`, `Unreachable`.
    """
    return _Search(log, lost, ends, timeout, task).batches()


class _Search:
    """Reads the partitions from where the epoch began, and picks the batches of the lost transaction."""

    def __init__(
        self, log: TopicLog, lost: KafkaCommittable, ends: Mapping[int, int], timeout: float, task: Task
    ) -> None:
        self._log = log
        self._lost = lost
        self._rows = lost.rows_in(log.topic)
        self._timeout = timeout
        self._task = task
        self._begun_at = {place.partition: place.start for place in lost.places if place.topic == log.topic}
        self._starts: Mapping[int, int] = {}
        if gone := sorted(self._begun_at.keys() - ends.keys()):
            raise self._incomplete(f"it has no partition(s) {', '.join(map(str, gone))} any more")
        self._ends = {partition: ends[partition] for partition in self._begun_at}
        self._positions = dict(self._begun_at)
        self._next: dict[int, int] = dict.fromkeys(self._begun_at, 0)
        self._found = 0

    def batches(self) -> Iterator[tuple[int, Batch]]:
        shown = self._log.clock.monotonic()
        while self._found < self._rows and (ahead := self._ahead()):
            for partition, records in self._log.fetch(ahead).items():
                if records is None:
                    self._again_from_start(partition)
                    continue
                for batch in self._ours(partition, records):
                    yield partition, batch
            # a new leader may show records late, when its replicas have them
            if self._ahead() != ahead:
                shown = self._log.clock.monotonic()
            elif self._log.clock.monotonic() - shown > self._timeout:
                raise Unreachable(
                    f"topic '{self._log.topic}' does not show its records from {ahead} on",
                    hint="check that all brokers run; no row is lost",
                )
        if self._found != self._rows:
            raise self._incomplete(f"{self._found} of {self._rows} records of the transaction are left")

    def _ahead(self) -> dict[int, int]:
        return {partition: at for partition, at in self._positions.items() if at < self._ends[partition]}

    def _again_from_start(self, partition: int) -> None:
        """Continue after the records that retention has deleted; the count of rows shows what is missing."""
        self._starts = self._log.starts()
        at = self._positions[partition]
        self._positions[partition] = self._starts[partition] if at < self._starts[partition] else self._ends[partition]

    def _ours(self, partition: int, records: bytes) -> Iterator[Batch]:
        _, producer_id, producer_epoch = self._lost.transaction
        for after, batch in record_batch.split(records):
            # a fetch begins with the batch that contains the position
            if after <= self._positions[partition]:
                continue
            self._positions[partition] = after
            if batch is None or batch.producer_id != producer_id:
                continue
            if batch.is_control:
                # the end of the transaction: nothing after it in this partition belongs to it
                if batch.producer_epoch >= producer_epoch:
                    self._positions[partition] = self._ends[partition]
                    return
            # other epochs of this producer are earlier attempts under the same id
            elif batch.producer_epoch == producer_epoch:
                self._prove(partition, batch)
                yield batch

    def _prove(self, partition: int, batch: Batch) -> None:
        where = f"partition {partition} at offset {batch.base_offset}"
        if batch.base_sequence != self._next[partition]:
            raise self._incomplete(
                f"{where} has sequence number {batch.base_sequence} of the transaction, and "
                f"{self._next[partition]} was expected"
            )
        if not batch.is_whole:
            raise self._incomplete(
                f"{where} has a batch of {batch.records} records that was written with {batch.last_offset_delta + 1}"
            )
        self._next[partition] = (batch.base_sequence + batch.records) % SEQUENCES
        self._found += batch.records
        if self._found > self._rows:
            raise self._incomplete(f"there are more than the {self._rows} records that the task wrote")

    def _incomplete(self, why: str) -> LogIncomplete:
        number, sink = self._task.epoch.number, self._task.identity.sink
        return LogIncomplete(
            f"epoch {number}, sink '{sink}': the rows of transaction {self._lost.transaction.transactional_id}, which "
            f"was aborted, cannot be read from topic '{self._log.topic}': {why}{self._deleted()}; none of them "
            "is applied",
            hint="retention or an operator deleted or compacted them, or a broker lost them: these rows are only in "
            f"the source. To close the epoch without them: epochsink resolve CHECKPOINT {number} "
            f"{sink_option(sink)} --as discard; its input (offsets/{number} in the checkpoint) can then be loaded by a "
            "separate query. Kafka(spool=True) keeps a copy outside the topic",
        )

    def _deleted(self) -> str:
        """Return, in words, which partitions have lost records since the epoch began."""
        deleted = [
            f"; partition {partition} now begins at offset {start}, and the epoch began at {self._begun_at[partition]}"
            for partition, start in sorted(self._starts.items())
            if start > self._begun_at.get(partition, start)
        ]
        return "".join(deleted)
