"""The driver notes where a topic ends, for one attempt, and only where the topic keeps the rows."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest

from epochsink.errors import PrepareFailed
from epochsink.kafka import Kafka
from epochsink.kafka.cluster import Cluster
from epochsink.kafka.committable import KafkaCommittable, Transaction, WrittenPartition
from epochsink.kafka.errors import Unreachable
from epochsink.kafka.rows_in_log import LogEnds
from epochsink.kafka.topic_log import TopicLog
from epochsink.sink import Epoch

ROWS = pa.schema([("value", pa.string())])
FIRST, SECOND = Epoch(7, "a" * 32), Epoch(7, "b" * 32)


class Topic:
    """What the brokers say of the topic now."""

    def __init__(self) -> None:
        self.settings = {
            "cleanup.policy": "delete",
            "retention.ms": "-1",
            "retention.bytes": "-1",
            "unclean.leader.election.enable": "false",
        }
        self.ends = {1: 20, 0: 10}
        self.topic_id = "f" * 32
        self.is_reachable = True


@pytest.fixture
def topic(monkeypatch: pytest.MonkeyPatch) -> Topic:
    told = Topic()

    def ends(log: TopicLog) -> dict[int, int]:
        if not told.is_reachable:
            raise Unreachable("no answer")
        log.topic_id = told.topic_id
        return told.ends

    monkeypatch.setattr(TopicLog, "ends", ends)
    monkeypatch.setattr(Cluster, "topic_settings", lambda *_: dict(told.settings))
    return told


def made() -> LogEnds:
    return LogEnds(Kafka(bootstrap_servers="broker:9092", topic="orders"), Cluster("broker:9092", {}, 1.0))


def part(topic_id: str = "f" * 32) -> KafkaCommittable:
    return KafkaCommittable(
        transaction=Transaction("epochsink.x", 7, 3),
        partition=0,
        task="b" * 32,
        rows=3,
        prepared_at=0,
        topics={"orders": topic_id},
    )


@pytest.mark.usefixtures("topic")
def test_a_part_gets_what_was_noted_for_its_own_attempt() -> None:
    ends = made()
    assert ends.added(FIRST, [part()]) == [part()]
    assert ends.note(FIRST, ROWS, 60.0)
    [added] = ends.added(FIRST, [part()])
    assert added.kept_in_topic
    assert added.places == (WrittenPartition("orders", 0, 10), WrittenPartition("orders", 1, 20))
    assert ends.added(SECOND, [part()]) == [part()]


@pytest.mark.usefixtures("topic")
def test_a_part_of_another_topic_of_that_name_is_refused() -> None:
    ends = made()
    assert ends.note(FIRST, ROWS, 60.0)
    with pytest.raises(PrepareFailed, match="deleted and created again"):
        ends.added(FIRST, [part("e" * 32)])


def test_what_is_not_known_speaks_for_a_copy(topic: Topic) -> None:
    ends = made()
    assert ends.note(FIRST, ROWS, 60.0)
    topic.is_reachable = False
    assert not ends.note(SECOND, ROWS, 60.0)
    assert ends.added(FIRST, [part()]) == [part()]


def test_settings_are_judged_in_each_attempt(topic: Topic) -> None:
    ends = made()
    topic.settings["cleanup.policy"] = "compact"
    assert not ends.note(FIRST, ROWS, 60.0)
    topic.settings["cleanup.policy"] = "delete"
    assert ends.note(FIRST, ROWS, 60.0)


def test_a_vote_on_rows_that_the_topic_may_no_longer_keep_fails(topic: Topic) -> None:
    ends = made()
    assert ends.note(FIRST, ROWS, 60.0)
    topic.settings["unclean.leader.election.enable"] = "true"
    with pytest.raises(PrepareFailed, match=r"unclean\.leader\.election\.enable = true"):
        ends.require_kept(FIRST)


def test_the_topic_of_dead_letters_must_keep_them_too_and_its_ends_are_noted(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = {"orders": dict(topic.settings), "orders.dead_letter": dict(topic.settings)}
    monkeypatch.setattr(Cluster, "topic_settings", lambda _, name: kept[name])
    config = Kafka(bootstrap_servers="broker:9092", topic="orders", on_rejected="dead_letter")
    ends = LogEnds(config, Cluster("broker:9092", {}, 1.0))
    assert ends.note(FIRST, ROWS, 60.0)
    with_letters = replace(part(), topics={"orders": "f" * 32, "orders.dead_letter": "f" * 32})
    [added] = ends.added(FIRST, [with_letters])
    assert {place.topic for place in added.places} == {"orders", "orders.dead_letter"}
    kept["orders.dead_letter"]["retention.ms"] = "3600000"
    with pytest.raises(PrepareFailed, match=r"the topic of dead letters has retention\.ms"):
        ends.require_kept(FIRST)
    assert not ends.note(SECOND, ROWS, 60.0)


@pytest.mark.usefixtures("topic")
def test_once_an_attempt_has_taken_longer_than_its_transactions_rows_are_copied() -> None:
    ends, third = made(), Epoch(8, "c" * 32)
    assert ends.note(FIRST, ROWS, 0.0)
    assert ends.note(third, ROWS, 0.0), "another epoch: the one before took as long as it liked"
    assert ends.note(third, ROWS, 60.0), "a failure that came soon says nothing"
    assert not ends.note(third, ROWS, 0.0)
    assert ends.added(third, [part()]) == [part()]
    assert not ends.note(Epoch(9, "d" * 32), ROWS, 60.0), "later epochs are as large"
