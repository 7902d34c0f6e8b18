"""Clusters whose feature transaction.version is not the newest that their brokers know, as after an upgrade."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from fix_kafka import knows_newest_level, lower
from kafka_kit import commit, committing, create_topic, epoch, identity, prepare, read_all, rows, task, vote

from epochsink.kafka import Kafka, wire
from epochsink.sink import COMMITTED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fix_services import FreshName

    from epochsink_devkit.services import KafkaService

SCHEMA = pa.schema({"value": pa.string()})


@pytest.fixture(scope="module")
def broker(make_kafka: Callable[..., KafkaService]) -> Iterator[KafkaService]:
    """Return a broker whose features may be lowered."""
    with make_kafka() as service:
        yield service


@pytest.fixture
def config(broker: KafkaService, fresh_topic: FreshName) -> Kafka:
    topic = create_topic(broker.bootstrap_servers, fresh_topic())
    return Kafka(bootstrap_servers=broker.bootstrap_servers, topic=topic, timeout=30)


@pytest.mark.parametrize("level", [2, 1, 0])
def test_transactions_are_ended_at_every_transaction_version(config: Kafka, level: int) -> None:
    """By a committer that is connected since before the feature was lowered, too."""
    who = identity()
    with committing(config, who) as committer:
        assert committer.check(SCHEMA) == []
        lower(config.bootstrap_servers, level)
        assert committer.check(SCHEMA) == []
        for number in range(3):
            at = epoch(number)
            part = prepare(config, task(who, at), rows(str(number)))
            [part] = vote(committer, at, part)
            assert commit(committer, at, part) == COMMITTED
            assert commit(committer, at, part) == COMMITTED
        abandoned = prepare(config, task(who, epoch(3)), rows("abandoned"))
        [line] = committer.abort_orphans([])
        assert abandoned["transactional_id"] in line
    assert read_all(config.bootstrap_servers, str(config.topic), 3) == ["0", "1", "2"]


def test_a_coordinator_that_ends_nothing_is_found_before_the_first_row(
    config: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does whose transaction.version is below 2, and which is sent what belongs to 2."""
    if not knows_newest_level(config.bootstrap_servers):
        pytest.skip("this Kafka takes no request that belongs to 2")
    lower(config.bootstrap_servers, 0)
    monkeypatch.setattr(wire, "_NEWEST_END_TXN", 5)
    with committing(config, identity()) as committer:
        [finding] = committer.check(SCHEMA)
        assert "end transaction epochsink.check" in finding
