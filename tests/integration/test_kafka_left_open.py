"""A partition has no leader while the coordinator writes the ends of transactions, and gets one afterwards.

Kafka from 4.2 on leaves such a partition out (KAFKA-20734); older ones write the end when it has a leader again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import pytest
from kafka import TopicPartition
from kafka_kit import (
    NO_ROWS,
    admin,
    commit,
    committing,
    epoch,
    id_state,
    identity,
    prepare,
    read_all,
    rows,
    task,
    transaction,
    vote,
)
from waiting import wait_until

from epochsink.kafka import Kafka
from epochsink.kafka.server import TransactionState
from epochsink.kafka.transactions import EndTxnResult
from epochsink.sink import COMMITTED
from epochsink_devkit.services import LocalKafka, versions
from epochsink_devkit.services.ports import LOOPBACK

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fix_services import FreshName

OFFSETS: Final = "__consumer_offsets"
LEAVES_OUT: Final = tuple(map(int, versions.KAFKA.split(".")[:2])) >= (4, 2)


class Cluster(NamedTuple):
    """The first broker is the controller and coordinates all transactions; no partition has two replicas."""

    first: LocalKafka
    second: LocalKafka


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with LocalKafka(short_lived=True) as first:
        voters = first.properties()["controller.quorum.voters"]
        # before the second broker joins, so that the first one has all partitions of the internal topics
        config = Kafka(bootstrap_servers=first.bootstrap_servers, topic=on_broker(first, 1, "before"), timeout=30)
        with committing(config, identity()) as committer:
            vote(committer, epoch(0), prepare(config, task(identity(), epoch(0)), rows("a")))
        listener = f"PLAINTEXT://{LOOPBACK}:{{port}}"
        joining: dict[str, str | int | bool] = {
            "process.roles": "broker",
            "node.id": 2,
            "controller.quorum.voters": voters,
            "listeners": listener,
            "advertised.listeners": listener,
        }
        with LocalKafka(joining, short_lived=True) as second:
            yield Cluster(first, second)


def on_broker(broker: LocalKafka, node: int, topic: str) -> str:
    """Create a topic of two partitions on one broker."""
    with admin(broker.bootstrap_servers) as client:
        client.create_topics({topic: {"assignments": {0: [node], 1: [node]}}}, wait_for_metadata=True)
    return topic


def move_offsets(cluster: Cluster, node: int) -> None:
    """Have a broker lead all partitions of the groups' offsets."""
    with admin(cluster.first.bootstrap_servers) as client:

        def leaders() -> dict[int, int]:
            [found] = client.describe_topics([OFFSETS])
            return {each["partition_index"]: each["leader_id"] for each in found["partitions"]}

        moves = {TopicPartition(OFFSETS, number): [node] for number in leaders()}
        client.alter_partition_reassignments(moves)
        wait_until(lambda: set(leaders().values()) == {node}, f"broker {node} leads {OFFSETS}")


@pytest.mark.parametrize("left_out", ["rows", "marker"])
def test_what_a_coordinator_leaves_out_is_written_by_the_next_start(
    cluster: Cluster, fresh_topic: FreshName, left_out: str
) -> None:
    topic = on_broker(cluster.first, 2 if left_out == "rows" else 1, fresh_topic())
    move_offsets(cluster, 1 if left_out == "rows" else 2)
    config = Kafka(bootstrap_servers=cluster.first.bootstrap_servers, topic=topic, spool=True, timeout=30)
    who, at = identity(), epoch(4)
    with committing(config, who) as committer:
        [part] = vote(committer, at, prepare(config, task(who, at), rows("a", "b")))
        ours = transaction(part)
        transactions, deadline = committer.participant._transactions, committer.participant._cluster.deadline()
        cluster.second.kill()
        try:
            # as the commit does, after it has looked: the look needs all leaders
            answer, _ = transactions.end(ours, deadline, commit=True)
            assert answer is EndTxnResult.DECIDED
            if LEAVES_OUT:
                wait_until(
                    lambda: id_state(committer, ours.transactional_id) is TransactionState.COMPLETE_COMMIT,
                    "the coordinator is done",
                )
            else:
                assert id_state(committer, ours.transactional_id) is TransactionState.PREPARE_COMMIT
        finally:
            cluster.second.start()
    for _ in range(2):
        with committing(config, who) as committer:
            assert commit(committer, at, part, NO_ROWS) == COMMITTED
            assert committer.newest() == 4
    assert read_all(cluster.first.bootstrap_servers, topic, 2) == ["a", "b"]


def test_the_left_out_end_of_an_abort_does_not_hold_readers_back(cluster: Cluster, fresh_topic: FreshName) -> None:
    """A driver died with an open transaction, and the next one has aborted it while the partition had no leader."""
    topic = on_broker(cluster.first, 2, fresh_topic())
    move_offsets(cluster, 1)
    config = Kafka(bootstrap_servers=cluster.first.bootstrap_servers, topic=topic, spool=True, timeout=30)
    who, at = identity(), epoch(4)
    orphan = transaction(prepare(config, task(who, at, partition=1), rows("orphan")))
    with committing(config, identity(2, query_id=who.query_id)) as committer:
        transactions, deadline = committer.participant._transactions, committer.participant._cluster.deadline()
        cluster.second.kill()
        try:
            transactions.fence_off([orphan], deadline)
            if LEAVES_OUT:
                wait_until(
                    lambda: id_state(committer, orphan.transactional_id) is TransactionState.COMPLETE_ABORT,
                    "the coordinator is done",
                )
        finally:
            cluster.second.start()
        [part] = vote(committer, at, prepare(config, task(who, at), rows("a", "b")))
        assert committer.commit(at, part, NO_ROWS) == COMMITTED
        lines = committer.visible(at, [part])
        assert [orphan.transactional_id in line for line in lines] == [True] * LEAVES_OUT
    assert read_all(cluster.first.bootstrap_servers, topic, 2) == ["a", "b"]
