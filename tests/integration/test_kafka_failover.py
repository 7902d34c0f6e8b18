"""Two brokers: the coordinators of prepared transactions move from one to the other, or die."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pytest
from kafka import TopicPartition
from kafka.admin import KafkaAdminClient
from kafka.errors import KafkaError
from kafka.protocol.metadata import CoordinatorType
from kafka_kit import NO_ROWS, committing, create_topic, epoch, identity, prepare, read_all, rows, task, wait_for

from epochsink.devkit.services import LocalKafka
from epochsink.devkit.services.ports import LOOPBACK
from epochsink.kafka import Kafka
from epochsink.sink import COMMITTED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fix_services import FreshName

    from epochsink.kafka.committer import KafkaCommitter
    from epochsink.sink import Committable

REPLICATED: Final[dict[str, str | int | bool]] = {
    "offsets.topic.replication.factor": 2,
    "transaction.state.log.replication.factor": 2,
}
COORDINATORS: Final = "__transaction_state"
SLOTS: Final = 3


class Cluster(NamedTuple):
    """The first broker is the controller, too."""

    first: LocalKafka
    second: LocalKafka

    @property
    def servers(self) -> str:
        return f"{self.first.bootstrap_servers},{self.second.bootstrap_servers}"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with LocalKafka(REPLICATED, short_lived=True) as first:
        voters = first.properties()["controller.quorum.voters"]
        joining = REPLICATED | {"process.roles": "broker", "node.id": 2, "controller.quorum.voters": voters}
        with LocalKafka({**joining, "listeners": f"PLAINTEXT://{LOOPBACK}:{{port}}"}, short_lived=True) as second:
            yield Cluster(first, second)


@pytest.fixture
def config(cluster: Cluster, fresh_topic: FreshName) -> Kafka:
    topic = create_topic(cluster.servers, fresh_topic(), replicas=2)
    return Kafka(bootstrap_servers=cluster.servers, topic=topic, timeout=60)


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
        wait_for(moved, f"broker {node} leads")
    finally:
        client.close()


def coordinators(committer: KafkaCommitter, parts: list[Committable]) -> set[int]:
    """Return the brokers that the committer believes to be the coordinators."""
    ids = [part["transactional_id"] for part in parts]
    return set(committer._cluster._by_coordinator(CoordinatorType.TRANSACTION, ids))


@contextmanager
def voted(cluster: Cluster, config: Kafka) -> Iterator[Callable[[], None]]:
    """Let a committer vote, for which it asks the second broker, and yield what commits all of it."""
    who, at = identity(), epoch(4)
    parts = [prepare(config, task(who, at, partition), rows(str(partition))) for partition in range(SLOTS)]

    def commit() -> None:
        assert [committer.commit(at, part, NO_ROWS) for part in parts] == [COMMITTED] * SLOTS
        committer.await_visible(at, parts)
        assert committer.newest() == 4

    coordinators_move_to(2, cluster)
    with committing(config, who) as committer:
        assert committer.vote(at, parts, NO_ROWS) == parts
        assert coordinators(committer, parts) == {2}
        yield commit
        assert coordinators(committer, parts) == {1}
    assert read_all(cluster.servers, config.topic or "", SLOTS) == ["0", "1", "2"]


def test_transactions_whose_coordinators_have_moved_since_the_vote_are_committed(
    cluster: Cluster, config: Kafka
) -> None:
    with voted(cluster, config) as commit:
        coordinators_move_to(1, cluster)
        commit()


def test_transactions_whose_coordinators_have_died_since_the_vote_are_committed_by_their_successors(
    cluster: Cluster, config: Kafka
) -> None:
    """The last test of this cluster: its second broker does not come back."""
    with voted(cluster, config) as commit:
        cluster.second.kill()
        commit()
