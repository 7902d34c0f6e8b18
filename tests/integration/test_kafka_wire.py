"""Requests of a transaction that are lost, late or doubled on their way, and replies that never come back."""

from __future__ import annotations

import struct
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer
from fix_kafka import lower
from kafka.protocol.producer import ProduceRequest
from kafka_kit import (
    NO_ROWS,
    ListRows,
    Reader,
    abort,
    change_settings,
    commit,
    commit_with_letters,
    committing,
    create_topic,
    epoch,
    identity,
    prepare,
    read_all,
    rows,
    task,
    told,
    transaction,
    vote,
)
from kafka_proxy import Api, Fate, KafkaProxy

from epochsink.kafka import Kafka
from epochsink.sink import COMMITTED, Chosen, Retried

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fix_services import FreshName

    from epochsink.sink import Identity
    from epochsink_devkit.services import KafkaService

STALE_EPOCH = {47, 90}
"""INVALID_PRODUCER_EPOCH and PRODUCER_FENCED: whoever sends this, the id has been used by another since."""

CONCURRENT_TRANSACTIONS = 51
"""The answer to InitProducerId for an id whose open transaction it has aborted."""


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


def test_a_row_of_a_task_is_written_when_every_replica_in_sync_has_it(wire: Wire) -> None:
    caught = wire.proxy.catch(Api.PRODUCE, Fate.LOSE_REPLY)
    prepare(wire.proxied, task(identity(), epoch(0)), rows("a"))
    (version,) = struct.unpack_from(">h", caught.frame, 6)
    assert ProduceRequest.decode(caught.frame, version=version, header=True, framed=True).acks == -1


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
            abort(committer, part)
        following = prepare(wire.direct, task(who, later, name=name), rows("later"))
        assert following["transactional_id"] == part["transactional_id"]
        assert caught.deliver() in STALE_EPOCH
        expected = ["earlier"] if decision == "commit" else []
        assert len(reader.poll(1)) == len(expected)
        [following] = vote(committer, later, following)
        assert commit(committer, later, following) == COMMITTED
    assert wire.seen(len(expected) + 1) == [*expected, "later"]


@pytest.mark.parametrize("fate", [Fate.HOLD, Fate.REPEAT], ids=lambda fate: str(fate.name))
def test_a_sweeps_request_that_comes_late_costs_the_next_use_of_the_id_a_replay_and_no_row(
    wire: Wire, fate: Fate
) -> None:
    """Of an open transaction, brokers compare the producer's id with the request, and not its epoch."""
    who, earlier, later = identity(), epoch(0), epoch(2)
    name = uuid.uuid4().hex
    prepare(wire.direct, task(who, earlier, name=name), rows("earlier"))
    caught = wire.proxy.catch(Api.INIT_PRODUCER_ID, fate)
    with committing(wire.proxied, who) as committer:
        assert len(committer.abort_orphans([])) == 1
        following = prepare(wire.direct, task(who, later, name=name), rows("later"))
        assert caught.deliver() == CONCURRENT_TRANSACTIONS
        [again] = committer.vote(later, [following], ListRows({name: [rows("later")]}))
        assert transaction(again) != transaction(following)
        assert commit(committer, later, again) == COMMITTED
    assert wire.seen(1) == ["later"]


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


@dataclass(frozen=True)
class Aside:
    """Two letters of a sink, which its topic takes by now: "b" and "c" at their beginnings."""

    wire: Wire
    who: Identity

    def retry(self, *ids: str, direct: bool = False) -> Retried:
        config = self._config(self.wire.servers if direct else self.wire.proxy.bootstrap_servers)
        with committing(config, self.who) as committer:
            found: Retried = committer.participant.operator().letters("topic").retry(Chosen(ids))
            return found

    def ids(self) -> list[str]:
        with committing(self._config(self.wire.servers), self.who) as committer:
            found = committer.participant.operator().letters("topic").read(Chosen(), 9)
            return sorted(letter.id for letter in found)

    def seen(self, count: int) -> list[str]:
        return [str(value)[0] for value in self.wire.seen(count)]

    def write(self) -> None:
        """Write an epoch of which two rows become letters, and let the topic take them afterwards."""
        config, at = self._config(self.wire.servers), epoch(0)
        self._limit("2000")
        with committing(config, self.who) as committer:
            assert committer.check(rows("a").schema) == []
            part = prepare(config, told(committer, self.who, at), rows("a", "b" * 3_000, "c" * 3_000))
            assert commit_with_letters(committer, at, committer.vote(at, [part], NO_ROWS)) == 2
        self._limit("9000")

    def _config(self, servers: str) -> Kafka:
        return Kafka(bootstrap_servers=servers, topic=self.wire.topic, on_rejected="dead_letter", timeout=30)

    def _limit(self, size: str) -> None:
        change_settings(self.wire.servers, self.wire.topic, {"max.message.bytes": size})


@pytest.fixture
def aside(wire: Wire) -> Aside:
    made = Aside(wire, identity())
    made.write()
    return made


OF_A_RETRY = [(api, fate) for api, fate in STEPS if "OFFSET" not in api.name]


@pytest.mark.parametrize(("api", "fate"), OF_A_RETRY, ids=[f"{api.name}: {fate.name}" for api, fate in OF_A_RETRY])
def test_a_retry_of_dead_letters_whose_request_or_reply_is_lost_writes_each_row_once(
    aside: Aside, api: Api, fate: Fate
) -> None:
    caught = aside.wire.proxy.catch(api, fate)
    assert aside.retry() == Retried(written=2)
    caught.wait()
    assert aside.retry(direct=True) == Retried()
    assert aside.seen(3) == ["a", "b", "c"]


@pytest.mark.parametrize("fate", [Fate.HOLD, Fate.REPEAT], ids=lambda fate: str(fate.name))
def test_a_late_end_of_a_retry_ends_no_later_one(aside: Aside, fate: Fate) -> None:
    """All retries of a sink have the same transactional id."""
    first, second = aside.ids()
    caught = aside.wire.proxy.catch(Api.END_TXN, fate)
    assert aside.retry(first) == Retried(written=1)
    assert aside.retry(second, direct=True) == Retried(written=1)
    assert caught.deliver() in STALE_EPOCH
    assert aside.seen(3) == ["a", "b", "c"]
    assert aside.ids() == []
