"""Two brokers: the coordinators of prepared transactions move from one to the other, or die, or both are restarted."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import chain, count
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pytest
from fix_kafka import KEY_PASSWORD
from kafka import TopicPartition
from kafka.admin import KafkaAdminClient
from kafka.errors import KafkaError
from kafka.protocol.metadata import CoordinatorType
from kafka_kit import (
    NO_ROWS,
    await_visible,
    committing,
    create_topic,
    epoch,
    identity,
    prepare,
    prepare_kept,
    read_all,
    rows,
    take_over,
    task,
    vote,
)
from waiting import wait_until

from epochsink.kafka import Kafka
from epochsink.kafka.topic_log import TopicLog
from epochsink.sink import COMMITTED
from epochsink_devkit.services import LocalKafka
from epochsink_devkit.services.kafka import ONE_BROKER
from epochsink_devkit.services.ports import LOOPBACK, free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from fix_services import FreshName

    from epochsink.kafka.committable import Transaction
    from epochsink.sink import Committable
    from epochsink.testing.sink_rig import OneSink

Settings = dict[str, str | int | bool]

REPLICATED: Final[Settings] = {
    "offsets.topic.replication.factor": 2,
    "transaction.state.log.replication.factor": 2,
}
COORDINATORS: Final = "__transaction_state"
SLOTS: Final = 3
LOAD: Final = 500
"""Rows of a task in an epoch while brokers are restarted."""


class Cluster(NamedTuple):
    """The first broker is the controller, too."""

    first: LocalKafka
    second: LocalKafka
    over_tls: str

    @property
    def servers(self) -> str:
        return f"{self.first.bootstrap_servers},{self.second.bootstrap_servers}"


@pytest.fixture(scope="module")
def cluster(certificates: Path) -> Iterator[Cluster]:
    common: Settings = REPLICATED | {
        "listener.security.protocol.map": f"{ONE_BROKER['listener.security.protocol.map']},SSL:SSL",
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(certificates / "keystore.pem"),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(certificates / "authority.pem"),
        "ssl.client.auth": "required",
    }
    guarded = [f"{LOOPBACK}:{free_port()}" for _ in range(2)]
    listeners = [f"PLAINTEXT://{LOOPBACK}:{{port}},SSL://{address}" for address in guarded]
    controller = f"CONTROLLER://{LOOPBACK}:{{controller_port}}"
    voting = {"listeners": f"{listeners[0]},{controller}", "advertised.listeners": listeners[0]}
    with LocalKafka({**common, **voting}, short_lived=True) as first:
        voters = first.properties()["controller.quorum.voters"]
        joining: Settings = {"process.roles": "broker", "node.id": 2, "controller.quorum.voters": voters}
        reached = {"listeners": listeners[1], "advertised.listeners": listeners[1]}
        with LocalKafka({**common, **joining, **reached}, short_lived=True) as second:
            yield Cluster(first, second, ",".join(guarded))


@pytest.fixture
def config(cluster: Cluster, fresh_topic: FreshName) -> Kafka:
    topic = create_topic(cluster.servers, fresh_topic(), replicas=2)
    # transactions outlast restarts of brokers
    return Kafka(bootstrap_servers=cluster.servers, topic=topic, timeout=60, transaction_timeout=300)


def coordinators_move_to(node: int, cluster: Cluster) -> None:
    """Let one broker lead all partitions of the transactions' log."""
    client = KafkaAdminClient(bootstrap_servers=cluster.first.bootstrap_servers)
    try:

        def partitions() -> list[dict[str, Any]]:
            [found] = client.describe_topics([COORDINATORS])
            return list(found["partitions"])

        def moved() -> bool:
            with suppress(KafkaError):
                client.elect_leaders(0, {COORDINATORS: numbers})
            return all(partition["leader_id"] == node for partition in partitions())

        numbers = [partition["partition_index"] for partition in partitions()]
        order = [node, 3 - node]
        client.alter_partition_reassignments({TopicPartition(COORDINATORS, number): order for number in numbers})
        wait_until(moved, f"broker {node} leads")
    finally:
        client.close()


def coordinators(committer: OneSink, parts: list[Committable]) -> set[int]:
    """Return the brokers that the committer believes to be the coordinators."""
    ids = [part["transactional_id"] for part in parts]
    return set(committer.participant._cluster._by_coordinator(CoordinatorType.TRANSACTION, ids))


@contextmanager
def voted(cluster: Cluster, config: Kafka) -> Iterator[Callable[[], None]]:
    """Let a committer vote, for which it asks the second broker, and yield what commits all of it."""
    who, at = identity(), epoch(4)
    parts = [prepare(config, task(who, at, partition), rows(str(partition))) for partition in range(SLOTS)]

    def commit() -> None:
        assert [committer.commit(at, part, NO_ROWS) for part in parts] == [COMMITTED] * SLOTS
        await_visible(committer, at, parts)
        assert committer.newest() == 4

    coordinators_move_to(2, cluster)
    with committing(config, who) as committer:
        parts = vote(committer, at, *parts)
        assert coordinators(committer, parts) == {2}
        yield commit
        assert coordinators(committer, parts) == {1}
    assert read_all(cluster.servers, config.topic or "", SLOTS) == ["0", "1", "2"]


def test_what_a_broker_coordinates_that_has_joined_since_is_listed(cluster: Cluster, config: Kafka) -> None:
    """The driver's client lists the brokers every five minutes: until then, it does not know a new one."""
    who, at = identity(), epoch(4)
    parts = [prepare(config, task(who, at, partition), rows(str(partition))) for partition in range(SLOTS)]
    # afterwards: before the first transaction, its log has no partition that could move
    coordinators_move_to(2, cluster)
    with committing(config, who) as committer:
        opened = sorted(part["transactional_id"] for part in parts)
        wait_until(lambda: committer.leftovers() == opened, "broker 2 has loaded them")
        known = committer.participant._cluster.admin()._manager.cluster
        del known._brokers[2]
        assert committer.leftovers() == opened
        parts = vote(committer, at, *parts)
        assert [committer.commit(at, part, NO_ROWS) for part in parts] == [COMMITTED] * SLOTS
        await_visible(committer, at, parts)
        known._brokers.pop(2, None)
        marks = committer.participant._markers.read_all(committer.participant._cluster.deadline())
        assert len(marks) == SLOTS


def test_transactions_whose_coordinators_have_moved_since_the_vote_are_committed(
    cluster: Cluster, config: Kafka
) -> None:
    with voted(cluster, config) as commit:
        coordinators_move_to(1, cluster)
        commit()


def test_rows_are_taken_out_of_a_topic_whose_leaders_change_meanwhile(
    cluster: Cluster, config: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One broker stops after the first batch was copied: the other one leads its partitions then."""
    config = dataclasses.replace(config, options={"batch.num.messages": 5, "linger.ms": 0})
    who, at, values = identity(), epoch(2), [str(number) for number in range(100)]
    append, stopped = TopicLog.append, list[int]()

    def append_and_stop(log: TopicLog, transaction: Transaction, partition: int, *batch: Any) -> None:
        append(log, transaction, partition, *batch)
        if not stopped:
            stopped.append(partition)
            known = log._cluster.topics_known([log.topic])[log.topic]
            assert set(known.leaders.values()) == {1, 2}
            cluster.second.stop()

    with committing(config, who) as committer:
        part = prepare_kept(committer, config, at, rows(*values))
        take_over(cluster.servers, part)
        monkeypatch.setattr(TopicLog, "append", append_and_stop)
        try:
            replayed = committer.replay(at, part, NO_ROWS, "e" * 32)
        finally:
            cluster.second.start()
        assert stopped
        assert committer.commit(at, replayed, NO_ROWS) == COMMITTED
        await_visible(committer, at, [replayed])
    assert read_all(cluster.servers, config.topic or "", 100) == sorted(values)


def test_epochs_go_on_over_tls_while_each_broker_is_restarted(
    cluster: Cluster, certificates: Path, fresh_topic: FreshName
) -> None:
    """In order, as an upgrade does it: handshakes are cut short, leaders and coordinators move twice."""
    topic = create_topic(cluster.servers, fresh_topic(), replicas=2)
    tls = {
        "security.protocol": "SSL",
        "ssl.ca.location": str(certificates / "authority.pem"),
        "ssl.certificate.location": str(certificates / "client.pem"),
        "ssl.key.location": str(certificates / "client.encrypted.key"),
        "ssl.key.password": KEY_PASSWORD,
    }
    config = Kafka(bootstrap_servers=cluster.over_tls, topic=topic, timeout=60, transaction_timeout=300, options=tls)
    who, written = identity(), list[str]()

    def restart_each() -> None:
        for broker in (cluster.second, cluster.first):
            broker.stop()
            broker.start()

    with committing(config, who) as committer, ThreadPoolExecutor(1) as operator:
        restarts = operator.submit(restart_each)
        for number in count():
            last = restarts.done()
            at = epoch(number)
            values = [[f"{number:05}-{slot}-{row:04}" for row in range(LOAD)] for slot in range(SLOTS)]
            parts = [prepare(config, task(who, at, slot), rows(*mine)) for slot, mine in enumerate(values)]
            parts = vote(committer, at, *parts)
            assert [committer.commit(at, part, NO_ROWS) for part in parts] == [COMMITTED] * SLOTS
            await_visible(committer, at, parts)
            written += chain.from_iterable(values)
            if last:
                break
        restarts.result()
        assert committer.newest() == number
    assert read_all(cluster.servers, topic, len(written)) == written


def test_transactions_whose_coordinators_have_died_since_the_vote_are_committed_by_their_successors(
    cluster: Cluster, config: Kafka
) -> None:
    """The last test of this cluster: its second broker does not come back."""
    with voted(cluster, config) as commit:
        cluster.second.kill()
        commit()
