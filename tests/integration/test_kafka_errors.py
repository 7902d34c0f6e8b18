"""Bad rows and bad circumstances: each is named, and nothing of the epoch becomes visible or is lost."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from kafka.errors import InvalidConfigurationError
from kafka_kit import committing, create_topic, epoch, identity, prepare, rows, task

from epochsink.errors import PrepareFailed, RowsRejected
from epochsink.kafka import Kafka

if TYPE_CHECKING:
    from fix_services import FreshName

    from epochsink_devkit.services import KafkaService


def config_for(kafka: KafkaService, topic: str | None, **settings: Any) -> Kafka:
    return Kafka(bootstrap_servers=kafka.bootstrap_servers, topic=topic, timeout=30, **settings)


HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


@pytest.fixture
def topic(kafka: KafkaService, fresh_topic: FreshName) -> str:
    return create_topic(kafka.bootstrap_servers, fresh_topic())


def refusal(config: Kafka, *batches: pa.RecordBatch) -> PrepareFailed:
    with pytest.raises(PrepareFailed) as raised:
        prepare(config, task(identity(), epoch(0)), *batches)
    assert raised.value.hint
    return raised.value


def test_an_unknown_topic_is_named_at_once(kafka: KafkaService, fresh_topic: FreshName) -> None:
    missing = fresh_topic()
    began = time.monotonic()
    found = refusal(replace(config_for(kafka, missing), timeout=60), rows("a"))
    assert isinstance(found, RowsRejected)
    assert f"topic '{missing}'" in str(found)
    assert time.monotonic() - began < 30


def test_a_row_without_a_topic_is_refused(kafka: KafkaService, topic: str) -> None:
    found = refusal(config_for(kafka, None), rows("a", "b", topic=pa.array([topic, None])))
    assert isinstance(found, RowsRejected)
    assert "1 row(s) of Spark partition 0 have no topic" in str(found)


@pytest.mark.parametrize("partition", [2, 2_000_000_000])
def test_a_partition_out_of_range_is_named_with_the_range(kafka: KafkaService, topic: str, partition: int) -> None:
    found = refusal(config_for(kafka, topic), rows("a", "b", partition=pa.array([0, partition], pa.int32())))
    assert isinstance(found, RowsRejected)
    assert f"partition {partition} is out of range: topic '{topic}' has 2 partition(s), 0 to 1" in str(found)


@pytest.mark.parametrize(
    "extra", [{}, {"timestamp": pa.array([None, None], pa.timestamp("us"))}], ids=["batch", "each"]
)
def test_a_row_above_the_clients_limit_is_named_with_both_sizes(
    kafka: KafkaService, topic: str, extra: dict[str, Any]
) -> None:
    found = refusal(config_for(kafka, topic), rows("a", "x" * 2_000_000, **extra))
    assert isinstance(found, RowsRejected)
    assert "a row of 2000001 bytes" in str(found)
    assert "message.max.bytes = 1000000" in str(found)


def test_a_row_above_the_topics_limit_fails_the_task(kafka: KafkaService, fresh_topic: FreshName) -> None:
    topic = create_topic(kafka.bootstrap_servers, fresh_topic(), max_message_bytes="1000")
    found = refusal(config_for(kafka, topic), rows("a", "x" * 5_000))
    assert isinstance(found, RowsRejected)
    assert "5001 bytes" in str(found)
    assert "max.message.bytes" in str(found)


def test_batches_fit_into_a_topic_that_takes_only_small_ones(kafka: KafkaService, fresh_topic: FreshName) -> None:
    topic = create_topic(kafka.bootstrap_servers, fresh_topic(), max_message_bytes="2000")
    config = config_for(kafka, topic)
    values = [f"{number:090}" for number in range(1_000)]
    found = refusal(config, rows(*values))
    assert "lower batch.size" in str(found)
    with committing(config, identity()) as committer:
        who = replace(committer.participant._identity, origin=committer.join().origin)
    part = prepare(config, task(who, epoch(0)), rows(*values))
    assert part["rows"] == 1_000


@pytest.mark.parametrize(
    ("column", "values", "reason"),
    [
        ("timestamp", pa.array([0, None], pa.timestamp("ms")), "Values: 0 ms"),
        ("timestamp", pa.array([1, 999], pa.timestamp("us")), "Values: 0 ms"),
        ("timestamp", pa.array([5, -1], pa.timestamp("ms")), "Values: -1 ms"),
        ("partition", pa.array([None, -1], pa.int32()), "Values: partition -1"),
        ("partition", pa.array([0, -7], pa.int32()), "Values: partition -7"),
        ("headers", pa.array([None, [None]], HEADERS), "header that is null"),
        ("headers", pa.array([[], [{"key": None, "value": b"x"}]], HEADERS), "whose key is null"),
    ],
)
def test_what_would_be_written_as_something_else_is_refused(
    kafka: KafkaService, topic: str, column: str, values: pa.Array, reason: str
) -> None:
    """The client takes 0 for the present and -1 for "choose one"."""
    found = refusal(config_for(kafka, topic), rows("a", "b", **{column: values}))
    assert isinstance(found, RowsRejected)
    assert reason in str(found)


def test_a_row_without_a_key_is_refused_by_a_compacted_topic(kafka: KafkaService, fresh_topic: FreshName) -> None:
    topic = create_topic(kafka.bootstrap_servers, fresh_topic(), cleanup_policy="compact")
    found = refusal(config_for(kafka, topic), rows("a", "b", keys=["k", None]))
    assert isinstance(found, RowsRejected)
    assert "cleanup.policy=compact" in str(found)


def test_a_timestamp_that_the_topic_refuses_is_named(kafka: KafkaService, fresh_topic: FreshName) -> None:
    try:
        topic = create_topic(kafka.bootstrap_servers, fresh_topic(), message_timestamp_before_max_ms="1000")
    except InvalidConfigurationError:  # Kafka 3.5 and older
        topic = create_topic(kafka.bootstrap_servers, fresh_topic(), message_timestamp_difference_max_ms="1000")
    found = refusal(config_for(kafka, topic), rows("a", timestamp=pa.array([86_400_000], pa.timestamp("ms"))))
    assert isinstance(found, RowsRejected)
    assert "timestamp" in str(found)


def test_a_transaction_timeout_above_the_cap_is_refused_with_the_setting(kafka: KafkaService, topic: str) -> None:
    found = refusal(config_for(kafka, topic, transaction_timeout=3600), rows("a"))
    assert "transaction.max.timeout.ms" in str(found)


def test_an_unreachable_broker_fails_the_task_within_the_timeout() -> None:
    config = Kafka(bootstrap_servers="127.0.0.1:1", topic="t", timeout=2)
    began = time.monotonic()
    found = refusal(config, rows("a"))
    assert not isinstance(found, RowsRejected)
    assert "127.0.0.1:1" in str(found)
    assert "Connection refused" in str(found)
    assert time.monotonic() - began < 30
