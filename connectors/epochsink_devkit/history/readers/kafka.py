"""Read a Kafka topic."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator
from typing import Final

import pyarrow as pa
from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._listoffsets import OffsetSpec
from kafka import errors as kafka_errors
from kafka.admin import KafkaAdminClient
from pyarrow import json

from epochsink.identity import PREFIX
from epochsink_devkit.history.readers.reader import TargetUnreachable, nothing
from epochsink_devkit.history.rows import SCHEMA

_PAGE: Final = 10_000
_ANSWER_SECONDS: Final = 10.0
_LATEST: Final = OffsetSpec.latest()  # type: ignore[no-untyped-call] # confluent-kafka has no type here
_LOG_SCHEMA: Final = SCHEMA.append(pa.field("log_part", pa.int32())).append(pa.field("log_off", pa.int64()))
_OPEN_STATES: Final = ["Ongoing", "PrepareCommit", "PrepareAbort"]


class KafkaReader:
    """Reads a topic from its beginning, read_committed, without a group. Values are JSON of the proof columns.

    ``seconds`` bounds one read.
    """

    def __init__(self, bootstrap_servers: str, topic: str, *, seconds: float = 60.0) -> None:
        self._servers = bootstrap_servers
        self._topic = topic
        self._seconds = seconds

    def read(self, fixed: Callable[[], None] = nothing) -> pa.Table:
        """Return every record up to the last stable offset of each partition, with ``log_part`` and ``log_off``."""
        records = list(self._records(fixed))
        if not records:
            return _LOG_SCHEMA.empty_table()
        options = json.ParseOptions(explicit_schema=SCHEMA, unexpected_field_behavior="ignore")
        text = io.BytesIO(b"\n".join(value for _, _, value in records))
        table = json.read_json(text, parse_options=options).select(SCHEMA.names)
        table = table.append_column("log_part", pa.array([part for part, _, _ in records], pa.int32()))
        return table.append_column("log_off", pa.array([offset for _, offset, _ in records], pa.int64()))

    def values(self) -> list[bytes]:
        """Return the values of every record up to the last stable offset of each partition."""
        return [value for _, _, value in self._records()]

    def leftovers(self) -> list[tuple[str, str]]:
        """Return partitions whose readers are held back, and transactions of ours that are open."""
        return [*self._pins(), *self._open_transactions()]

    def close(self) -> None:
        """Do nothing: every read has a consumer of its own."""

    def _records(self, fixed: Callable[[], None] = nothing) -> Iterator[tuple[int, int, bytes]]:
        deadline = time.monotonic() + self._seconds
        consumer = self._consumer()
        try:
            marks = {partition: self._marks(consumer, partition) for partition in self._partitions(consumer)}
            fixed()
            ends = {partition: end for partition, (_, end) in marks.items()}
            waiting = {partition for partition, (start, end) in marks.items() if end > start}
            consumer.assign([TopicPartition(self._topic, partition, marks[partition][0]) for partition in waiting])
            while waiting:
                if time.monotonic() > deadline:
                    raise TargetUnreachable(
                        f"partitions {sorted(waiting)} of {self._topic} did not end in {self._seconds} s"
                    )
                for message in consumer.consume(_PAGE, timeout=0.05):
                    failure, partition, offset = message.error(), message.partition(), message.offset()
                    if failure is None and partition is not None and offset is not None:
                        if offset < ends[partition]:
                            yield partition, offset, message.value() or b"{}"
                        # or else the partition's end tells, as the last record may be a transaction's marker
                        if offset + 1 >= ends[partition]:
                            waiting.discard(partition)
                    elif failure is not None and failure.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - its name
                        waiting.discard(partition or 0)
                    else:
                        raise TargetUnreachable(str(failure))
        except KafkaException as failure:
            raise TargetUnreachable(str(failure)) from failure
        finally:
            consumer.close()

    def _consumer(self) -> Consumer:
        return Consumer(
            {
                "bootstrap.servers": self._servers,
                "group.id": "epochsink-reader",  # the client wants one; nothing is ever committed to it
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "auto.offset.reset": "error",
            }
        )

    def _marks(self, consumer: Consumer, partition: int) -> tuple[int, int]:
        """Return the first offset and the last stable one."""
        marks = consumer.get_watermark_offsets(TopicPartition(self._topic, partition), timeout=_ANSWER_SECONDS)
        if marks is None:
            raise TargetUnreachable(f"partition {partition} of {self._topic} does not say where it ends")
        return marks

    def _partitions(self, client: Consumer | AdminClient) -> set[int]:
        listed = client.list_topics(self._topic, timeout=_ANSWER_SECONDS).topics[self._topic]
        if listed.error is not None:
            raise TargetUnreachable(f"{self._topic}: {listed.error}")
        return set(listed.partitions)

    def _pins(self) -> list[tuple[str, str]]:
        admin = AdminClient({"bootstrap.servers": self._servers})
        try:
            high, stable = (self._ends(admin, isolation) for isolation in IsolationLevel)
        except KafkaException as failure:
            raise TargetUnreachable(str(failure)) from failure
        return [
            (
                "pin",
                f"partition {part} of {self._topic}: last stable offset {stable[part]}, high watermark {high[part]}",
            )
            for part in sorted(high)
            if stable[part] < high[part]
        ]

    def _ends(self, admin: AdminClient, isolation: IsolationLevel) -> dict[int, int]:
        wanted = {TopicPartition(self._topic, part): _LATEST for part in self._partitions(admin)}
        answers = admin.list_offsets(wanted, isolation_level=isolation)
        return {one.partition: answer.result(timeout=_ANSWER_SECONDS).offset for one, answer in answers.items()}

    def _open_transactions(self) -> list[tuple[str, str]]:
        try:
            admin = KafkaAdminClient(bootstrap_servers=self._servers.split(","))
            try:
                listings = admin.list_transactions(state_filters=_OPEN_STATES)
            finally:
                admin.close()
        except kafka_errors.KafkaError as failure:
            raise TargetUnreachable(str(failure)) from failure
        names = sorted(one.transactional_id for listed in listings.values() for one in listed)
        return [("orphan", f"open transaction {name}") for name in names if name.startswith(f"{PREFIX}.")]
