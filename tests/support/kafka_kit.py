"""What the Kafka tests share: rows in lists, readers, and a task in a process of its own."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa
from confluent_kafka import Consumer, Producer, TopicPartition
from kafka.admin import AbortTransactionSpec, ConfigResource, KafkaAdminClient
from kafka.structs import TopicPartition as KafkaPartition
from waiting import wait_until

from epochsink.errors import SpoolMissing
from epochsink.identity import marker_group
from epochsink.kafka import Kafka
from epochsink.kafka.committable import KafkaCommittable
from epochsink.sink import Ballot, Epoch, Identity, Keeping, Outcome, Task, identity_key, write_all
from epochsink.testing.sink_rig import OneSink

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from epochsink.kafka.committable import Transaction
    from epochsink.kafka.server import TransactionState
    from epochsink.sink import Committable, LastDone, Rows, Verdict
    from epochsink_devkit.services import KafkaService

DEADLINE_SECONDS = 30.0


class ListRows:
    """The spool of a test: record batches by the uuid of the task that wrote them."""

    def __init__(self, batches: Mapping[str, Sequence[pa.RecordBatch]]) -> None:
        self._batches = dict(batches)

    def tasks(self) -> Sequence[str]:
        return list(self._batches)

    def verify(self) -> None:
        """Have no file to compare."""

    def read(self, task: str) -> Iterator[pa.RecordBatch]:
        if task not in self._batches:
            raise SpoolMissing(f"no spool of task {task}", hint="none: a test's")
        yield from self._batches[task]


NO_ROWS = ListRows({})


def identity(generation: int = 1, *, query_id: str | None = None, sink: str = "topic") -> Identity:
    return Identity(query_id or uuid.uuid4().hex, sink, generation)


def epoch(number: int) -> Epoch:
    return Epoch(number, uuid.uuid4().hex)


def task(who: Identity, at: Epoch, partition: int = 0, name: str | None = None) -> Task:
    return Task(who, at, partition, name or uuid.uuid4().hex)


def unspooled(who: Identity, at: Epoch, partition: int = 0) -> Task:
    return dataclasses.replace(task(who, at, partition), keeping=Keeping.NOT)


def rows(*values: str | bytes | None, keys: Sequence[str | None] | None = None, **columns: Any) -> pa.RecordBatch:
    """Make a batch with the writer's columns; keys are 0, 1, 2, ... unless given."""
    keys = [str(index) for index in range(len(values))] if keys is None else keys
    return pa.record_batch({"key": pa.array(keys, pa.string()), "value": pa.array(list(values)), **columns})


def prepare(config: Kafka, of: Task, *batches: pa.RecordBatch) -> Committable:
    return write_all(config.writer(of), batches)


def prepare_kept(committer: OneSink, config: Kafka, at: Epoch, *batches: pa.RecordBatch) -> Committable:
    """Prepare an epoch of one task, whose rows the topic itself keeps, and have it voted on."""
    assert committer.begin(at, batches[0].schema).keeping is Keeping.IN_TARGET
    [part] = committer.vote(at, [prepare(config, unspooled(committer.participant._identity, at), *batches)], NO_ROWS)
    return part


def vote(committer: OneSink, at: Epoch, *parts: Committable) -> list[Committable]:
    """Vote on parts whose transactions are all open, and return what is to be recorded."""
    voted = committer.vote(at, parts, NO_ROWS)
    assert [transaction(part) for part in voted] == [transaction(part) for part in parts]
    return voted


def transaction(part: Committable) -> Transaction:
    return KafkaCommittable.from_json(part).transaction


def id_state(committer: OneSink, name: str) -> TransactionState:
    """Return the state of a transactional id at its coordinator."""
    participant = committer.participant
    state: TransactionState = participant._transactions.describe([name], participant._cluster.deadline())[name].state
    return state


_TASK = """
import json, os, signal, sys
import pyarrow as pa
from kafka_kit import prepare, rows
from epochsink.kafka import Kafka
from epochsink.sink import Epoch, Identity, Task
config, query_id, sink, generation, number, attempt, partition, name, values = json.load(sys.stdin)
of = Task(Identity(query_id, sink, generation), Epoch(number, attempt), partition, name)
print(json.dumps(prepare(Kafka(**config), of, rows(*values))), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def prepare_and_die(settings: Mapping[str, Any], of: Task, *values: str) -> Committable:
    """Prepare rows in another process, which then kills itself; return the committable that it left."""
    who, at = of.identity, of.epoch
    told = [
        dict(settings),
        who.query_id,
        who.sink,
        who.generation,
        at.number,
        at.attempt,
        of.partition,
        of.uuid,
        values,
    ]
    done = subprocess.run(
        [sys.executable, "-c", _TASK],
        input=json.dumps(told),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd=__file__.rpartition("/")[0],
    )
    assert done.returncode == -9, done.stderr
    committable: Committable = json.loads(done.stdout)
    return committable


@contextmanager
def committing(config: Kafka, who: Identity) -> Iterator[OneSink]:
    """Yield the sink's committer, opened for an identity."""
    committer = OneSink.of(config, "topic")
    committer.open(who)
    try:
        yield committer
    finally:
        committer.close()


def await_visible(committer: OneSink, at: Epoch, parts: Sequence[Committable], after: LastDone | None = None) -> None:
    """Wait until readers see parts; what is open beside them stays as it is."""
    committer.participant._commits.await_visible(at, Ballot(parts, NO_ROWS, after))


def commit(committer: OneSink, at: Epoch, part: Committable, spooled: Rows = NO_ROWS) -> Verdict:
    """Commit one part, and wait until readers see it."""
    verdict = committer.commit(at, part, spooled)
    if verdict.outcome is Outcome.COMMITTED:
        await_visible(committer, at, [part])
    return verdict


def committed(committer: OneSink, at: Epoch, parts: Sequence[Committable]) -> set[int]:
    """Commit parts, and return the indices of those that are."""
    verdicts = committer.commit_all(at, parts, NO_ROWS)
    return {index for index, verdict in enumerate(verdicts) if verdict.outcome is Outcome.COMMITTED}


def abort(committer: OneSink, part: Committable) -> None:
    """End a part's transaction with "abort", as somebody else might."""
    committer.participant._sweep.abort(KafkaCommittable.from_json(part).transaction)


def abort_at_partitions(broker: KafkaService, topic: str, part: Committable) -> None:
    """Abort a transaction as ``kafka-transactions.sh abort`` does: the coordinator is not told."""
    with admin(broker.bootstrap_servers) as client:
        for partition in (0, 1):
            at = KafkaPartition(topic, partition)
            client.abort_transaction(AbortTransactionSpec(at, part["producer_id"], part["producer_epoch"]))
        name = part["transactional_id"]
        assert client.describe_transactions([name])[name].state.value == "Ongoing"


def take_over(servers: str, *parts: Committable) -> None:
    """End open transactions by taking their ids, as a zombie does, and as the broker does after the time-out."""
    for part in parts:
        Producer({"bootstrap.servers": servers, "transactional.id": part["transactional_id"]}).init_transactions(
            DEADLINE_SECONDS
        )


@contextmanager
def admin(servers: str) -> Iterator[KafkaAdminClient]:
    client = KafkaAdminClient(bootstrap_servers=servers)
    try:
        yield client
    finally:
        client.close()


def change_settings(servers: str, topic: str, wanted: Mapping[str, str]) -> None:
    """Give a topic settings; returns when the broker has them, which is a moment after the controller's answer."""
    asked = [ConfigResource("topic", topic, configs=list(wanted))]

    def settings() -> dict[str, str]:
        found = client.describe_configs(asked, config_filter="all")["topic"][topic]
        return {name: found[name]["value"] for name in wanted}

    with admin(servers) as client:
        client.alter_configs([ConfigResource("topic", topic, configs=dict(wanted))])
        wait_until(lambda: settings() == wanted, "the broker has the settings")


def delete_markers(servers: str, identity: Identity, parities: Sequence[int] = (0,)) -> None:
    """Delete the groups with the markers of the first Spark partition; a coordinator may refuse at first."""
    left = [marker_group(identity_key(identity), 0, parity) for parity in parities]
    with admin(servers) as client:

        def deleted() -> bool:
            left[:] = [group for group, answer in client.delete_groups(left).items() if answer != "OK"]
            return not left

        wait_until(deleted, "the markers are deleted")


def create_topic(servers: str, topic: str, partitions: int = 2, replicas: int = 1, **config: str) -> str:
    """Create a topic; underscores in the names of settings stand for dots."""
    settings = {name.replace("_", "."): value for name, value in config.items()}
    how = {"num_partitions": partitions, "replication_factor": replicas, "configs": settings}
    with admin(servers) as client:
        client.create_topics({topic: how}, wait_for_metadata=True)
    return topic


def sink_on_new_topic(servers: str, topic: str, partitions: int = 2) -> Kafka:
    """Create a topic, and return the sink that writes to it."""
    create_topic(servers, topic, partitions)
    return Kafka(bootstrap_servers=servers, topic=topic, timeout=20)


def setting_aside(kafka: KafkaService, topic: str, **settings: Any) -> Kafka:
    """Return a sink with dead letters; their topic exists."""
    given = {"on_rejected": "dead_letter", "timeout": 20, **settings}
    made = Kafka(bootstrap_servers=kafka.bootstrap_servers, topic=topic, **given)
    with committing(made, identity()) as committer:
        assert committer.check(rows("a").schema) == []
    return made


def told(committer: OneSink, who: Identity, at: Epoch, partition: int = 0, **more: Any) -> Task:
    """Return a task that knows what the driver tells it."""
    return dataclasses.replace(
        task(who, at, partition), settings=committer.begin(at, rows("a").schema).settings, **more
    )


def commit_with_letters(committer: OneSink, at: Epoch, parts: list[Committable]) -> int:
    """Commit an epoch; return how many rows the verdicts call dead letters."""
    verdicts = committer.commit_all(at, parts, NO_ROWS)
    assert {verdict.outcome for verdict in verdicts} == {Outcome.COMMITTED}
    await_visible(committer, at, parts)
    return sum(verdict.set_aside or 0 for verdict in verdicts)


def recreate_topic(servers: str, topic: str, partitions: int = 2) -> None:
    """Delete a topic and create another one of the same name."""
    with admin(servers) as client:
        client.delete_topics([topic])
        wait_until(lambda: client.describe_topics([topic])[0]["error_code"] == 3, f"{topic} is gone")
    create_topic(servers, topic, partitions)


class Reader:
    """Reads all of a topic from its beginning, without a group. Only what is committed, unless told otherwise."""

    def __init__(self, servers: str, topic: str, *, committed: bool = True, **settings: str) -> None:
        self._topic = topic
        self._consumer = Consumer(
            {
                "bootstrap.servers": servers,
                "group.id": f"reader-{uuid.uuid4().hex}",
                "isolation.level": "read_committed" if committed else "read_uncommitted",
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "enable.partition.eof": False,
                **settings,
            }
        )
        partitions = self._consumer.list_topics(topic, timeout=10).topics[topic].partitions
        self._consumer.assign([TopicPartition(topic, partition, 0) for partition in partitions])
        self.messages: list[Any] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._consumer.close()

    def poll(self, seconds: float = 0.5) -> list[Any]:
        """Take in what comes within some time; return all messages so far."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            message = self._consumer.poll(left)
            if message is not None:
                assert message.error() is None, message.error()
                self.messages.append(message)
        return self.messages

    def until(self, count: int) -> list[Any]:
        """Read until there are so many messages, and no more of them follow at once."""
        wait_until(lambda: len(self.poll(0.1)) >= count, f"{count} messages in {self._topic}")
        return self.poll(0.2)

    def values(self) -> list[str | None]:
        return sorted_values(self.messages)


def sorted_values(messages: Sequence[Any]) -> list[str | None]:
    texts = [None if message.value() is None else message.value().decode() for message in messages]
    return sorted(texts, key=lambda text: (text is not None, text or ""))


def read_all(servers: str, topic: str, count: int) -> list[str | None]:
    """Return the values in a topic that a read_committed reader sees, in order, once there are ``count``."""
    with Reader(servers, topic) as reader:
        return sorted_values(reader.until(count))
