"""The contract, held by Kafka."""

from __future__ import annotations

import time
import uuid
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from fix_kafka import NEWEST_LEVEL, at_every_transaction_version
from kafka.structs import TopicPartition as TopicPart
from kafka_kit import admin, rows, sink_on_new_topic

from epochsink.identity import TransactionalId
from epochsink.kafka.cluster import Cluster
from epochsink.kafka.committable import KafkaCommittable, WrittenPartition
from epochsink.kafka.server import TransactionState
from epochsink.kafka.topic_log import TopicLog
from epochsink.kafka.transactions import Transactions
from epochsink.sink import Epoch, Identity, Keeping, Task, identity_key
from epochsink.sink.letter_row import decode_rows
from epochsink.testing.sink_contract import OTHER_QUERY, QUERY, SinkContract
from epochsink.testing.sink_rig import SinkRig

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pyarrow as pa
    from fix_services import FreshName

    from epochsink.kafka import Kafka
    from epochsink.sink import Committable
    from epochsink_devkit.services import KafkaService

PARTITIONS = 2
LETTERS = ("3", "5")
"""The keys of rows that become dead letters."""
SECONDS = 30.0


def key_of(row: int) -> str:
    return str(row % 7)


class KafkaRig(SinkRig):
    """A topic of two partitions."""

    def __init__(self, sink: Kafka, folder: Path) -> None:
        super().__init__(sink, folder)
        self._servers = sink.bootstrap_servers
        self._topic = str(sink.topic)
        self._topics = {self._topic: PARTITIONS}
        self._cluster = Cluster(self._servers, {}, SECONDS)
        self._transactions = Transactions(self._cluster)

    def close(self) -> None:
        super().close()
        self.lose_prepared()
        self._cluster.close()

    def batch(self, rows_: list[int]) -> pa.RecordBatch:
        return rows(*[str(number) for number in rows_], keys=[key_of(number) for number in rows_])

    def visible(self) -> list[int]:
        return sorted(self.read())

    def in_order(self) -> list[list[int]]:
        found = self.read()
        return [[row for row in found if key_of(row) == key] for key in map(str, range(7))]

    def read(self) -> list[int]:
        """Read each partition to its last stable offset, and return the rows in the order of its log."""
        consumer = Consumer(
            {
                "bootstrap.servers": self._servers,
                "group.id": f"reader-{uuid.uuid4().hex}",
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
            }
        )
        places = [(topic, at) for topic, partitions in self._topics.items() for at in range(partitions)]
        consumer.assign([TopicPartition(topic, partition, 0) for topic, partition in places])
        found: list[int] = []
        ended: set[tuple[str | None, int | None]] = set()
        deadline = time.monotonic() + SECONDS
        try:
            while len(ended) < len(places):
                assert time.monotonic() < deadline, f"{self._topic} was not read to its end within {SECONDS} s"
                message = consumer.poll(1.0)
                if message is None:
                    continue
                error = message.error()
                if error is None:
                    found.append(self.row_of(message.topic() or "", message.value() or b""))
                else:
                    assert error.code() == KafkaError._PARTITION_EOF, error
                    ended.add((message.topic(), message.partition()))
        finally:
            consumer.close()
        return found

    def row_of(self, topic: str, value: bytes) -> int:
        """Return the row of a message."""
        assert topic == self._topic
        return int(value)

    def lose_prepared(self) -> None:
        """Abort every open transaction of ours by taking its id, as a zombie or a time-out does."""
        for name in self.leftovers():
            producer = Producer({"bootstrap.servers": self._servers, "transactional.id": name})
            producer.init_transactions(SECONDS)

    def leftovers(self) -> list[str]:
        names = []
        for query in (QUERY, OTHER_QUERY):
            prefix = TransactionalId.prefix(identity_key(Identity(query, self.name)))
            deadline = time.monotonic() + SECONDS
            ids = list(self._transactions.open_ids(prefix, deadline))
            described = self._transactions.describe(ids, deadline) if ids else {}
            names += [name for name, now in described.items() if now.state is TransactionState.ONGOING]
        return names


class KafkaLettersRig(KafkaRig):
    """Rows of two keys of seven have no key, and become dead letters. A reader looks at both topics."""

    def __init__(self, sink: Kafka, folder: Path) -> None:
        super().__init__(sink, folder)
        self._topics[str(sink.letters_topic)] = 1

    def batch(self, rows_: list[int]) -> pa.RecordBatch:
        keys = [None if key_of(number) in LETTERS else key_of(number) for number in rows_]
        return rows(*[str(number) for number in rows_], keys=keys)

    def row_of(self, topic: str, value: bytes) -> int:
        row = int(value if topic == self._topic else next(decode_rows([value]))["value"][0].as_py())
        assert (key_of(row) in LETTERS) == (topic != self._topic)
        return row


class KafkaLogRig(KafkaRig):
    """Spools nothing: the topic keeps the rows."""

    def __init__(self, sink: Kafka, folder: Path) -> None:
        super().__init__(sink, folder)
        self._log = TopicLog(self._cluster, self._topic)
        self._places: dict[str, tuple[WrittenPartition, ...]] = {}

    def write(
        self, query: str, generation: int, epoch: Epoch, partition: int, rows_: list[int]
    ) -> tuple[str, Committable]:
        """Run one task, and add to its committable what the driver has noted before the first one."""
        places = self._places.setdefault(
            epoch.attempt, tuple(WrittenPartition(self._topic, number, end) for number, end in self._log.ends().items())
        )
        task = Task(self.identity(query, generation), epoch, partition, uuid.uuid4().hex, Keeping.NOT)
        writer = self.sink.writer(task)
        writer.write(self.batch(rows_))
        part = replace(KafkaCommittable.from_json(writer.prepare()), kept_in_topic=True, places=places)
        return task.uuid, part.to_json()

    def drop_spool(self, query: str, epoch: Epoch) -> None:
        """Leave an abandoned attempt's records to retention."""

    def damage_spool(self, query: str, epoch: Epoch, task: str) -> None:
        """Delete all records, as retention does."""
        del query, epoch, task
        with admin(self._servers) as client:
            client.delete_records({TopicPart(self._topic, at): end for at, end in self._log.ends().items()})


@at_every_transaction_version
class TestKafka(SinkContract):
    """With a copy in the spool; on clusters with each level of transaction.version."""

    @pytest.fixture
    def rig(self, kafka: KafkaService, fresh_topic: FreshName, tmp_path: Path) -> Iterator[KafkaRig]:
        sink = sink_on_new_topic(kafka.bootstrap_servers, fresh_topic(), PARTITIONS)
        with closing(KafkaRig(sink, tmp_path)) as rig:
            yield rig


@pytest.mark.parametrize("kafka", [NEWEST_LEVEL], indirect=True, ids=["kept in the topic"])
class TestKafkaLog(SinkContract):
    """Without a copy, out of the topic's own log; the tests of that run at the other levels too."""

    @pytest.fixture
    def rig(self, kafka: KafkaService, fresh_topic: FreshName, tmp_path: Path) -> Iterator[KafkaLogRig]:
        with closing(
            KafkaLogRig(sink_on_new_topic(kafka.bootstrap_servers, fresh_topic(), PARTITIONS), tmp_path)
        ) as rig:
            yield rig


@pytest.mark.parametrize("kafka", [NEWEST_LEVEL], indirect=True, ids=["with letters"])
class TestKafkaLetters(SinkContract):
    """With dead letters: the contract holds for rows and letters together."""

    @pytest.fixture
    def rig(self, kafka: KafkaService, fresh_topic: FreshName, tmp_path: Path) -> Iterator[KafkaLettersRig]:
        plain = sink_on_new_topic(kafka.bootstrap_servers, fresh_topic(), PARTITIONS)
        with closing(KafkaLettersRig(replace(plain, key="id", on_rejected="dead_letter"), tmp_path)) as rig:
            yield rig
