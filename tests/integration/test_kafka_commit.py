"""Transactions that one process prepares and another ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from epochsink.kafka import Kafka
from epochsink.protocol import COMMITTED
from kafka_kit import NO_ROWS, Reader, create_topic, epoch, identity, prepare_and_die, task

if TYPE_CHECKING:
    from collections.abc import Iterator

    from epochsink.protocol import SinkCommitter
    from epochsink.services import KafkaService
    from fix_services import FreshName


@pytest.fixture
def topic(kafka: KafkaService, fresh_topic: FreshName) -> str:
    return create_topic(kafka.bootstrap_servers, fresh_topic())


@pytest.fixture
def config(kafka: KafkaService, topic: str) -> Kafka:
    return Kafka(bootstrap_servers=kafka.bootstrap_servers, topic=topic, timeout=20)


@pytest.fixture
def committer(config: Kafka) -> Iterator[SinkCommitter]:
    made = config.committer()
    made.open(identity())
    yield made
    made.close()


def test_rows_of_a_task_that_died_after_prepare_appear_at_commit_and_not_before(
    kafka: KafkaService, topic: str, config: Kafka
) -> None:
    who, at = identity(), epoch(7)
    settings = {"bootstrap_servers": kafka.bootstrap_servers, "topic": topic}
    part = prepare_and_die(settings, task(who, at), "one", "two", "three")
    committer = config.committer()
    committer.open(who)
    try:
        with Reader(kafka.bootstrap_servers, topic) as reader:
            assert committer.vote(at, [part], NO_ROWS) == [part]
            assert committer.newest() is None
            assert reader.poll(1) == []
            assert committer.commit(at, part, NO_ROWS) == COMMITTED
            reader.until(3)
            assert reader.values() == ["one", "three", "two"]
        assert committer.newest() == 7
    finally:
        committer.close()
