"""A producer of one small transaction waits for the brokers' answers only, and for no timer of the client's."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from epochsink.kafka import client_options, producer, producer_events
from epochsink.kafka.producer import TransactionalProducer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from epochsink.kafka import Kafka
    from epochsink.kafka.librdkafka import Library

NEVER_MS = "86400000"
AT_ONCE = "enable.sparse.connections"


@contextmanager
def begun(sink: Kafka, **options: str) -> Iterator[TransactionalProducer]:
    each = TransactionalProducer(options, f"epochsink.test.{sink.topic}", 60_000, 10.0, sink.bootstrap_servers)
    each.begin()
    yield each
    each.abort()


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[str, str]]:
    """Return the settings of each client that is made, the first one of which is the first of its process."""
    given: list[Mapping[str, str]] = []
    configure = client_options.configure

    def configured(rdkafka: Library, options: Mapping[str, str]) -> int:
        given.append(options)
        return configure(rdkafka, options)

    monkeypatch.setattr(client_options, "configure", configured)
    monkeypatch.setattr(producer, "_broker_counts", {})
    return given


def test_a_producer_knows_itself_before_any_statistics(topic_sink: Kafka, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails with a new librdkafka, its log has other words, and each small task waits for statistics."""
    monkeypatch.setitem(client_options._FORCED, "statistics.interval.ms", NEVER_MS)
    with begun(topic_sink) as each:
        producer_id, producer_epoch = each.identity()
    assert producer_id >= 0
    assert producer_epoch >= 0


def test_the_statistics_say_the_same(topic_sink: Kafka, monkeypatch: pytest.MonkeyPatch) -> None:
    # again: the second producer of an id has another epoch than 0
    for _ in range(2):
        with begun(topic_sink) as each:
            by_log = each.identity()
            each._events.producer = None
            with monkeypatch.context() as other_words:
                other_words.setattr(producer_events, "_GOT_PRODUCER", b"")
                assert each.identity() == by_log


def test_a_user_sees_other_parts_of_the_log_too(topic_sink: Kafka, settings: list[Mapping[str, str]]) -> None:
    with begun(topic_sink, debug="broker") as each:
        each.identity()
    assert settings[-1]["debug"] == "broker,eos"


def test_few_brokers_are_connected_to_at_once(
    topic_sink: Kafka, settings: list[Mapping[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each task has a producer of its own: of a large cluster, it is to connect to those only that it needs."""
    assert topic_sink.topic is not None
    for _ in range(2):
        with begun(topic_sink) as each:
            each.partition_count(topic_sink.topic)
    # a user may know better
    with begun(topic_sink, **{AT_ONCE: "true"}):
        pass
    monkeypatch.setattr(producer, "_FEW_BROKERS", 0)
    with begun(topic_sink):
        pass
    assert [given.get(AT_ONCE) for given in settings] == [None, "false", "true", None]
