"""Findings before the first row moves, each with its hint."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from kafka_kit import (
    ListRows,
    abort,
    admin,
    commit,
    committing,
    create_topic,
    epoch,
    identity,
    prepare,
    read_all,
    rows,
    task,
    vote,
)

from epochsink.kafka import Kafka, NewTopic
from epochsink.sink import COMMITTED, Keeping, comparing
from epochsink.testing.sink_rig import OneSink

if TYPE_CHECKING:
    from collections.abc import Callable

    from fix_services import FreshName

    from epochsink_devkit.services import KafkaService

ORDERS = pa.schema([("order_id", pa.int64()), ("amount", pa.float64())])


def findings(kafka: KafkaService, topic: str | None, schema: pa.Schema = ORDERS, **settings: Any) -> list[str]:
    config = Kafka(bootstrap_servers=kafka.bootstrap_servers, topic=topic, **({"timeout": 10} | settings))
    committer = OneSink.of(config, "topic")
    try:
        return committer.check(schema)
    finally:
        committer.close()


def test_a_fitting_topic_has_no_findings(kafka: KafkaService, fresh_topic: FreshName) -> None:
    topic = create_topic(kafka.bootstrap_servers, fresh_topic())
    assert findings(kafka, topic, key="order_id") == []
    assert findings(kafka, topic, transaction_timeout=900) == []


def test_a_missing_topic_is_named(kafka: KafkaService, fresh_topic: FreshName) -> None:
    topic = fresh_topic()
    [finding] = findings(kafka, topic)
    assert f"topic '{topic}' does not exist" in finding
    assert "create=True" in finding


def test_a_missing_topic_is_created_as_said_and_then_left_alone(kafka: KafkaService, fresh_topic: FreshName) -> None:
    topic = fresh_topic()
    how = NewTopic(partitions=5, replication=1, config={"cleanup.policy": "compact"})
    assert findings(kafka, topic, key="order_id", create=how) == []
    assert findings(kafka, topic, key="order_id", create=NewTopic(partitions=9)) == []
    with admin(kafka.bootstrap_servers) as client:
        [described] = client.describe_topics([topic])
    assert len(described["partitions"]) == 5


def test_a_comparison_creates_no_topic_and_says_what_a_start_would_create(
    kafka: KafkaService, fresh_topic: FreshName
) -> None:
    topic, letters = fresh_topic(), fresh_topic()
    given: dict[str, Any] = {"create": NewTopic(partitions=5), "on_rejected": "dead_letter"}
    with comparing() as would:
        assert findings(kafka, topic, dead_letter_topic=letters, **given) == []
    assert would == [f"create topic '{topic}' as {NewTopic(partitions=5)}"]
    create_topic(kafka.bootstrap_servers, topic)
    with comparing() as would:
        assert findings(kafka, topic, dead_letter_topic=letters, **given) == []
    assert [line.partition(" as ")[0] for line in would] == [f"create topic '{letters}'"]
    with admin(kafka.bootstrap_servers) as client:
        assert letters not in client.list_topics()


@pytest.mark.parametrize("how", [NewTopic(replication=7), NewTopic(config={"no.such.setting": "1"})], ids=str)
def test_a_topic_that_cannot_be_created_so_is_named(kafka: KafkaService, fresh_topic: FreshName, how: NewTopic) -> None:
    topic = fresh_topic()
    [finding] = findings(kafka, topic, create=how)
    assert f"topic '{topic}' could not be created" in finding


def test_more_in_sync_replicas_than_replicas_is_named(kafka: KafkaService, fresh_topic: FreshName) -> None:
    topic = create_topic(kafka.bootstrap_servers, fresh_topic(), min_insync_replicas="2")
    [finding] = findings(kafka, topic)
    assert "min.insync.replicas = 2 and 1 replica(s)" in finding


def test_a_client_limit_above_the_topics_is_named(kafka: KafkaService, fresh_topic: FreshName) -> None:
    topic = create_topic(kafka.bootstrap_servers, fresh_topic(), max_message_bytes="5000")
    [finding] = findings(kafka, topic, options={"message.max.bytes": 6000})
    assert "message.max.bytes = 6000" in finding
    assert "max.message.bytes = 5000" in finding


def test_a_compacted_topic_asks_for_a_key(kafka: KafkaService, fresh_topic: FreshName) -> None:
    topic = create_topic(kafka.bootstrap_servers, fresh_topic(), cleanup_policy="compact,delete")
    [finding] = findings(kafka, topic)
    assert "takes only rows with a key" in finding
    assert findings(kafka, topic, key="order_id") == []
    assert findings(kafka, topic, pa.schema([("key", pa.string()), ("value", pa.string())])) == []


def test_a_transaction_timeout_above_the_cap_is_named_with_the_cap(kafka: KafkaService, fresh_topic: FreshName) -> None:
    topic = create_topic(kafka.bootstrap_servers, fresh_topic())
    [finding] = findings(kafka, topic, transaction_timeout=901)
    assert "transaction_timeout = 901 s" in finding
    assert "transaction.max.timeout.ms = 900000" in finding


def test_brokers_that_allow_only_short_transactions_are_fitted(make_kafka: Callable[..., KafkaService]) -> None:
    """Shorter than those that `check` begins elsewhere, and than the default of ``transaction_timeout=``."""
    with make_kafka({"transaction.max.timeout.ms": 3000}) as kafka:
        topic = create_topic(kafka.bootstrap_servers, "short")
        assert findings(kafka, topic, key="order_id") == []
        assert findings(kafka, topic, transaction_timeout=3) == []
        [finding] = findings(kafka, topic, transaction_timeout=4)
        assert "set it to at most 3" in finding
        config = Kafka(bootstrap_servers=kafka.bootstrap_servers, topic=topic, timeout=10)
        with committing(config, identity()) as committer:
            who, at = dataclasses.replace(identity(), origin=committer.join().origin), epoch(0)
            committer.open(who)
            [part] = vote(committer, at, prepare(config, task(who, at), rows("a")))
            assert commit(committer, at, part) == COMMITTED


@pytest.mark.parametrize("keeping", [Keeping.IN_SPOOL, Keeping.IN_TARGET])
def test_brokers_that_allow_shorter_transactions_than_when_the_sink_joined_take_lost_rows_again(
    make_kafka: Callable[..., KafkaService], keeping: Keeping
) -> None:
    with make_kafka({"transaction.max.timeout.ms": 3000}) as kafka:
        topic = create_topic(kafka.bootstrap_servers, "short")
        config = Kafka(bootstrap_servers=kafka.bootstrap_servers, topic=topic, timeout=10, transaction_timeout=3)
        who, at = dataclasses.replace(identity(), origin={"transaction_timeout": 900.0}), epoch(0)
        with committing(config, who) as committer:
            assert committer.begin(at, rows("a").schema).keeping is Keeping.IN_TARGET
            of = dataclasses.replace(task(who, at), keeping=keeping)
            part = prepare(config, of, rows("a"))
            abort(committer, part)
            [again] = committer.vote(at, [part], ListRows({of.uuid: [rows("a")]}))
            assert commit(committer, at, again) == COMMITTED
            assert read_all(kafka.bootstrap_servers, topic, 1) == ["a"]


def test_times_that_outlast_the_transaction_are_named(kafka: KafkaService, fresh_topic: FreshName) -> None:
    topic = create_topic(kafka.bootstrap_servers, fresh_topic())
    assert findings(kafka, topic, options={"delivery.timeout.ms": 120_000}) == []
    [finding] = findings(kafka, topic, transaction_timeout=60, options={"delivery.timeout.ms": 120_000})
    assert "message.timeout.ms" in finding
    assert "transaction.timeout.ms" in finding


def test_wrong_types_are_found_together_with_what_else_is_wrong(kafka: KafkaService, fresh_topic: FreshName) -> None:
    wrong = pa.schema([("key", pa.int64()), ("value", pa.string())])
    [finding] = findings(kafka, fresh_topic(), wrong)
    assert "column 'key' is of type int64" in finding
    [finding] = findings(kafka, None)
    assert "no topic is set" in finding


def test_an_unreachable_cluster_is_one_finding() -> None:
    committer = OneSink.of(Kafka(bootstrap_servers="127.0.0.1:1", topic="t", timeout=2), "topic")
    [finding] = committer.check(ORDERS)
    committer.close()
    assert "127.0.0.1:1" in finding
    assert "Connection refused" in finding
