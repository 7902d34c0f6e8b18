"""What is asked of the brokers as rows are copied within a topic's log."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from epochsink.kafka.cluster import Cluster, Topic
from epochsink.kafka.committable import Transaction
from epochsink.kafka.errors import Refused
from epochsink.kafka.topic_log import TopicLog

MINE = Transaction("epochsink.x", 7, 3)


def appended(monkeypatch: pytest.MonkeyPatch, at: int) -> list[Any]:
    """Append a batch behind offset 10 of a partition, whose leader answers with another; return the requests."""
    asked: list[Any] = []

    def ask(_: Cluster, request: Any, node: int) -> Any:
        asked.append(request)
        assert node == 4, "the leader"
        told = SimpleNamespace(error_code=0, error_message=None, base_offset=at)
        return SimpleNamespace(responses=[SimpleNamespace(partition_responses=[told])])

    monkeypatch.setattr(Cluster, "topics_once", lambda *_: {"orders": Topic("f" * 32, {0: 4})})
    monkeypatch.setattr(Cluster, "ask", ask)
    TopicLog(Cluster("broker:9092", {}, 1.0), "orders").append(MINE, 0, b"batch", 10)
    return asked


def test_a_batch_counts_once_all_in_sync_replicas_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer, an epoch that was prepared again could be lost with one broker."""
    [request] = appended(monkeypatch, at=10)
    assert request.acks == -1
    assert request.transactional_id == MINE.transactional_id


def test_a_batch_that_the_broker_takes_for_an_earlier_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Refused, match="has given this producer epoch twice"):
        appended(monkeypatch, at=9)
