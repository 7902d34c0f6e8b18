"""Requests of a transaction that are lost, late or doubled on their way, and replies that never come back."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer
from fix_kafka import lower
from kafka_kit import (
    Reader,
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
from kafka_proxy import Api, Fate, KafkaProxy

from epochsink.kafka import Kafka
from epochsink.sink import COMMITTED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fix_services import FreshName

    from epochsink.devkit.services import KafkaService

STALE_EPOCH = {47, 90}
"""INVALID_PRODUCER_EPOCH and PRODUCER_FENCED: whoever sends this, the id has been used by another since."""


@dataclass(frozen=True)
class Wire:
    """A topic, reached directly or through the proxy."""

    proxy: KafkaProxy
    servers: str
    topic: str

    @property
    def direct(self) -> Kafka:
        return Kafka(bootstrap_servers=self.servers, topic=self.topic, timeout=30)

    @property
    def proxied(self) -> Kafka:
        return Kafka(bootstrap_servers=self.proxy.bootstrap_servers, topic=self.topic, timeout=30)

    def seen(self, count: int) -> list[str | None]:
        return read_all(self.servers, self.topic, count)


@pytest.fixture(scope="module")
def broker(make_kafka: Callable[..., KafkaService]) -> Iterator[tuple[KafkaProxy, KafkaService]]:
    with KafkaProxy() as proxy, make_kafka(proxy.listener) as service:
        yield proxy, service


@pytest.fixture
def wire(broker: tuple[KafkaProxy, KafkaService], fresh_topic: FreshName) -> Wire:
    proxy, service = broker
    return Wire(proxy, service.bootstrap_servers, create_topic(service.bootstrap_servers, fresh_topic(), 1))


STEPS = [(api, fate) for api in Api for fate in (Fate.DROP, Fate.LOSE_REPLY)]


@pytest.mark.parametrize(("api", "fate"), STEPS, ids=[f"{api.name}: {fate.name}" for api, fate in STEPS])
def test_a_request_or_a_reply_that_is_lost_loses_and_doubles_no_row(wire: Wire, api: Api, fate: Fate) -> None:
    """At each step of a task and of the commit: the connection breaks, and the client asks again."""
    who, at = identity(), epoch(0)
    caught = wire.proxy.catch(api, fate)
    part = prepare(wire.proxied, task(who, at), rows("a", "b"), rows("c"))
    with committing(wire.proxied, who) as committer:
        [part] = vote(committer, at, part)
        assert commit(committer, at, part) == COMMITTED
        caught.wait()
        assert committer.newest() == 0
        assert commit(committer, at, part) == COMMITTED
    assert wire.seen(3) == ["a", "b", "c"]


@pytest.mark.parametrize("fate", [Fate.HOLD, Fate.REPEAT], ids=lambda fate: str(fate.name))
@pytest.mark.parametrize("decision", ["commit", "abort"])
def test_a_late_end_of_a_transaction_ends_no_later_one_of_the_same_id(wire: Wire, fate: Fate, decision: str) -> None:
    """KAFKA-17754, on the side of the driver."""
    who, earlier, later = identity(), epoch(0), epoch(2)
    name = uuid.uuid4().hex
    part = prepare(wire.direct, task(who, earlier, name=name), rows("earlier"))
    caught = wire.proxy.catch(Api.END_TXN, fate)
    with committing(wire.proxied, who) as committer, Reader(wire.servers, wire.topic) as reader:
        if decision == "commit":
            assert commit(committer, earlier, part) == COMMITTED
        else:
            assert len(committer.abort_orphans([])) == 1
        following = prepare(wire.direct, task(who, later, name=name), rows("later"))
        assert following["transactional_id"] == part["transactional_id"]
        assert caught.deliver() in STALE_EPOCH
        expected = ["earlier"] if decision == "commit" else []
        assert len(reader.poll(1)) == len(expected)
        [following] = vote(committer, later, following)
        assert commit(committer, later, following) == COMMITTED
    assert wire.seen(len(expected) + 1) == [*expected, "later"]


def test_a_late_abort_by_a_task_does_not_abort_the_attempt_after_it(wire: Wire) -> None:
    """KAFKA-17754, on the side of a task: librdkafka's EndTxn leaves the producer's epoch as it is."""
    who, at = identity(), epoch(0)
    name = uuid.uuid4().hex
    failing = wire.proxied.writer(task(who, at, name=name))
    failing.write(rows("given up"))
    # what never reached the broker needs no EndTxn
    failing._producer.flush()  # type: ignore[attr-defined] # of this sink
    caught = wire.proxy.catch(Api.END_TXN, Fate.HOLD)
    failing.abort()
    part = prepare(wire.direct, task(who, at, name=name), rows("again"))
    assert caught.deliver() in STALE_EPOCH
    with committing(wire.direct, who) as committer:
        [part] = vote(committer, at, part)
        assert commit(committer, at, part) == COMMITTED
    assert wire.seen(1) == ["again"]


def test_a_producer_that_is_used_again_falls_for_it(wire: Wire) -> None:
    """Prove that these tests can fail: a late commit of the first transaction shows the rows of the second."""
    producer = Producer({"bootstrap.servers": wire.proxy.bootstrap_servers, "transactional.id": wire.topic})
    producer.init_transactions(30)
    caught = wire.proxy.catch(Api.END_TXN, Fate.HOLD)
    for value in ("first", "second"):
        producer.begin_transaction()
        producer.produce(wire.topic, value=value.encode())
        if value == "first":
            producer.commit_transaction(30)
    producer.flush(30)
    assert caught.deliver() == 0
    assert wire.seen(2) == ["first", "second"], "nobody has committed the second"


@pytest.mark.parametrize("fate", [Fate.HOLD, Fate.REPEAT], ids=lambda fate: str(fate.name))
@pytest.mark.parametrize("decision", ["commit", "abort"])
@pytest.mark.parametrize("level", [2, 1, 0])
def test_rows_that_come_after_the_end_of_their_transaction_are_refused(
    wire: Wire, fate: Fate, decision: str, level: int
) -> None:
    """They would belong to a transaction that nobody knows: never visible, and holding all readers back for ever."""
    lower(wire.servers, level)
    who, at = identity(), epoch(0)
    caught = wire.proxy.catch(Api.PRODUCE, fate)
    part = prepare(wire.proxied, task(who, at), rows("in time"))
    later = epoch(1)
    after = prepare(wire.direct, task(who, later), rows("after"))
    with committing(wire.direct, who) as committer:
        if decision == "commit":
            assert commit(committer, at, part) == COMMITTED
        else:
            assert len(committer.abort_orphans([after])) == 1
        caught.deliver()
        assert commit(committer, later, after) == COMMITTED
    expected = ["after", "in time"] if decision == "commit" else ["after"]
    assert wire.seen(len(expected)) == expected
