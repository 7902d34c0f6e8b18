"""What is asked of the brokers as rows are copied within a topic's log."""

from __future__ import annotations

import uuid
from types import SimpleNamespace
from typing import Any

import pytest

from epochsink.kafka.cluster import Cluster
from epochsink.kafka.committable import Transaction
from epochsink.kafka.errors import Refused
from epochsink.kafka.server import Topic
from epochsink.kafka.topic_log import TopicLog

MINE = Transaction("epochsink.x", 7, 3)


def appended(monkeypatch: pytest.MonkeyPatch, at: int, topic_id: str = "f" * 32) -> list[Any]:
    """Append a batch behind offset 10 of a partition, whose leader answers with another; return the requests."""
    asked: list[Any] = []
    topics = {"orders": Topic("f" * 32, {0: 4})}

    def ask_all(_: Cluster, requests: list[tuple[int | None, Any]]) -> list[Any]:
        [(anybody, about_topics), *others] = requests
        assert anybody is None
        assert [topic.name for topic in about_topics.topics] == ["orders"]
        assert [node for node, _ in others] == [4], "the leader"
        asked.extend(request for _, request in others)
        leader = SimpleNamespace(partition_index=0, leader_id=4)
        topic = SimpleNamespace(name="orders", error_code=0, topic_id=uuid.UUID("f" * 32), partitions=[leader])
        told = SimpleNamespace(index=0, error_code=0, error_message=None, base_offset=at)
        return [
            SimpleNamespace(topics=[topic]),
            SimpleNamespace(responses=[SimpleNamespace(name="orders", partition_responses=[told])]),
        ]

    monkeypatch.setattr(Cluster, "topics_known", lambda *_: topics)
    monkeypatch.setattr(Cluster, "ask_all", ask_all)
    TopicLog(Cluster("broker:9092", {}, 1.0), "orders").append(MINE, 0, b"batch", 10, topic_id)
    return asked


def test_a_batch_counts_once_all_in_sync_replicas_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer, an epoch that was prepared again could be lost with one broker."""
    [request] = appended(monkeypatch, at=10)
    assert request.acks == -1
    assert request.transactional_id == MINE.transactional_id


def test_a_batch_that_the_broker_takes_for_an_earlier_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Refused, match="has given this producer epoch twice"):
        appended(monkeypatch, at=9)


def test_a_batch_for_a_topic_that_is_not_the_one_before_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever in the new topic it has landed."""
    with pytest.raises(Refused, match="topic 'orders' was deleted and created again") as refused:
        appended(monkeypatch, at=10, topic_id="e" * 32)
    assert refused.value.code is None
