"""Brokers that are down between prepare and commit, and transactions that their broker has given up."""

from __future__ import annotations

import dataclasses
import threading
import uuid
from copy import copy
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Producer
from kafka.admin import ConfigResource
from kafka.protocol.admin.client_quotas import AlterClientQuotasRequest as Quotas
from kafka_kit import (
    NO_ROWS,
    ListRows,
    Reader,
    admin,
    await_visible,
    commit,
    committing,
    create_topic,
    epoch,
    identity,
    prepare,
    prepare_and_die,
    prepare_kept,
    read_all,
    rows,
    sorted_values,
    take_over,
    task,
    unspooled,
    vote,
)
from waiting import wait_until

from epochsink.errors import LogIncomplete, OutcomeUnknown, PrepareFailed
from epochsink.kafka import Kafka
from epochsink.kafka.writer import KafkaWriter
from epochsink.sink import COMMITTED, Keeping, Outcome
from epochsink.testing.sink_rig import OneSink
from epochsink_devkit.services import LocalKafka

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fix_services import FreshName
    from kafka.admin import KafkaAdminClient

    from epochsink.sink import Committable
    from epochsink_devkit.services import KafkaService


@pytest.fixture(scope="module")
def breakable(make_kafka: Callable[..., KafkaService]) -> Iterator[KafkaService]:
    """Start a broker to kill and pause; it looks often for transactions over time, and minds quotas at once."""
    settings = {"transaction.abort.timed.out.transaction.cleanup.interval.ms": 500, "quota.window.num": 2}
    with make_kafka(settings) as service:
        yield service


@pytest.fixture(scope="module")
def forgetful() -> Iterator[LocalKafka]:
    """Start a broker whose files can be reached, and which deletes soon what it may."""
    settings: dict[str, str | int | bool] = {
        # a reader has to get a new row before it is deleted with the older ones
        "log.retention.check.interval.ms": 2_000,
        "log.cleaner.backoff.ms": 200,
        "log.initial.task.delay.ms": 200,
    }
    with LocalKafka(settings, short_lived=True) as service:
        yield service


@pytest.fixture
def broker(breakable: KafkaService) -> Iterator[KafkaService]:
    yield breakable
    breakable.resume()
    breakable.start()


@pytest.mark.parametrize("spooled", [True, False], ids=["kept in the spool", "kept in the topic"])
def test_an_outage_longer_than_the_transaction_timeout_loses_and_doubles_nothing(
    broker: KafkaService, fresh_topic: FreshName, *, spooled: bool
) -> None:
    topic = create_topic(broker.bootstrap_servers, fresh_topic())
    config = Kafka(
        bootstrap_servers=broker.bootstrap_servers,
        topic=topic,
        transaction_timeout=5,
        timeout=30,
        spool=spooled or None,
    )
    who, at = identity(), epoch(8)
    name = uuid.uuid4().hex
    batches = [rows("a", "b"), rows("c")]
    spool = ListRows({name: batches} if spooled else {})
    committer = OneSink.of(config, "topic")
    committer.open(who)
    try:
        assert spooled or committer.begin(at, batches[0].schema).keeping is Keeping.IN_TARGET
        of = dataclasses.replace(task(who, at, name=name), keeping=Keeping.IN_SPOOL if spooled else Keeping.IN_TARGET)
        [part] = committer.vote(at, [prepare(config, of, *batches)], spool)
        wait_until(
            lambda: not committer.participant._transactions.open_ids("", committer.participant._cluster.deadline()),
            "it times out",
        )
        verdict = commit(committer, at, part, spool)
        assert verdict.outcome is Outcome.ABORTED, verdict
        replayed = committer.replay(at, part, spool, uuid.uuid4().hex)
        assert commit(committer, at, replayed, spool) == COMMITTED
    finally:
        committer.close()
    assert read_all(broker.bootstrap_servers, topic, 3) == ["a", "b", "c"]


def test_a_broker_killed_between_prepare_and_commit_still_commits_all(
    broker: KafkaService, fresh_topic: FreshName
) -> None:
    topic = create_topic(broker.bootstrap_servers, fresh_topic())
    settings: dict[str, Any] = {
        "bootstrap_servers": broker.bootstrap_servers,
        "topic": topic,
        "transaction_timeout": 300,
    }
    config = Kafka(**settings, timeout=90)
    who, at = identity(), epoch(0)
    first = prepare(config, task(who, at, partition=0), rows("c"))
    second = prepare_and_die(settings, task(who, at, partition=1), "a", "b")

    committer = OneSink.of(config, "topic")
    committer.open(who)
    try:
        [first, second] = vote(committer, at, first, second)
        assert commit(committer, at, first) == COMMITTED
        broker.kill()
        restart = threading.Thread(target=broker.start)
        restart.start()
        # asked while nobody answers: the commit itself waits for the broker
        assert commit(committer, at, second) == COMMITTED
        restart.join()
        assert commit(committer, at, first) == COMMITTED
        assert read_all(broker.bootstrap_servers, topic, 3) == ["a", "b", "c"]
        assert committer.newest() == 0
    finally:
        committer.close()


def test_a_broker_that_does_not_answer_leaves_the_outcome_unknown_and_the_vote_refused(
    broker: KafkaService, fresh_topic: FreshName
) -> None:
    topic = create_topic(broker.bootstrap_servers, fresh_topic())
    config = Kafka(bootstrap_servers=broker.bootstrap_servers, topic=topic, timeout=30)
    who, at = identity(), epoch(0)
    part = prepare(config, task(who, at), rows("a"))
    committer = OneSink.of(dataclasses.replace(config, timeout=2), "topic")
    committer.open(who)
    try:
        assert committer.newest() is None
        broker.pause()
        assert committer.commit(at, part, NO_ROWS).outcome is Outcome.UNKNOWN
        with pytest.raises(OutcomeUnknown, match="has not shown it to readers within 2 s"):
            await_visible(committer, at, [part])
        with pytest.raises(PrepareFailed, match="could not be asked"):
            committer.vote(at, [part], NO_ROWS)
        with pytest.raises(OSError, match="did not answer within 2 s"):
            committer.abort_orphans([part])
        broker.resume()
        wait_until(lambda: committer.commit(at, part, NO_ROWS) == COMMITTED, "the broker answers again")
    finally:
        committer.close()
    assert read_all(broker.bootstrap_servers, topic, 1) == ["a"]


def short_lived(broker: KafkaService, topic: str, **settings: Any) -> Kafka:
    """Return a sink whose transactions end before the epoch does."""
    return Kafka(bootstrap_servers=broker.bootstrap_servers, topic=topic, transaction_timeout=1, timeout=30, **settings)


def test_an_epoch_that_takes_longer_than_its_transactions_is_prepared_again_in_the_vote(
    broker: KafkaService, fresh_topic: FreshName
) -> None:
    """One task ended long ago, and one outlasts its own transaction: what the driver writes again lives longer."""
    topic = create_topic(broker.bootstrap_servers, fresh_topic())
    config = short_lived(broker, topic)
    who, at = dataclasses.replace(identity(), origin={"transaction_timeout": 900.0}), epoch(0)
    names = [uuid.uuid4().hex, uuid.uuid4().hex]
    spool = ListRows({names[0]: [rows("a")], names[1]: [rows("b"), rows("c"), rows("d")]})
    early = prepare(config, task(who, at, 0, names[0]), *spool.read(names[0]))
    slow = KafkaWriter(config, task(who, at, 1, names[1]), names[1], config.topic)
    b, c, d = spool.read(names[1])
    slow.write(b)
    with admin(broker.bootstrap_servers) as client:
        slow._producer.flush()
        wait_until(lambda: not opened(client), "both time out")
        slow.write(c)
        slow.write(d)
        with committing(config, who) as committer:
            voted = committer.vote(at, [early, slow.prepare()], spool)
            assert [part["rows"] for part in voted] == [1, 3]
            assert len(opened(client)) == 2
            assert [commit(committer, at, part, spool) for part in voted] == [COMMITTED, COMMITTED]
    assert read_all(broker.bootstrap_servers, topic, 4) == ["a", "b", "c", "d"]


def test_what_has_expired_before_the_vote_is_taken_out_of_the_topic_by_the_vote(
    broker: KafkaService, fresh_topic: FreshName
) -> None:
    """Where no copy is kept; what is copied lives longer, and a broker that dies takes nothing along."""
    topic = create_topic(broker.bootstrap_servers, fresh_topic())
    config = short_lived(broker, topic)
    who, at = dataclasses.replace(identity(), origin={"transaction_timeout": 900.0}), epoch(0)
    with committing(config, who) as committer:
        assert committer.begin(at, rows("a").schema).keeping is Keeping.IN_TARGET
        early = prepare(config, unspooled(who, at), rows("a", "b"))
        with admin(broker.bootstrap_servers) as client:
            wait_until(lambda: not opened(client), "it times out")
        broker.kill()
        broker.start()
        [voted] = committer.vote(at, [early], NO_ROWS)
        assert commit(committer, at, voted) == COMMITTED
    assert read_all(broker.bootstrap_servers, topic, 2) == ["a", "b"]


def test_a_task_that_outlasts_its_transaction_where_the_topic_keeps_rows_goes_on_in_an_attempt_with_a_copy(
    broker: KafkaService, fresh_topic: FreshName
) -> None:
    topic = create_topic(broker.bootstrap_servers, fresh_topic())
    config = short_lived(broker, topic)
    who, at, name = dataclasses.replace(identity(), origin={"transaction_timeout": 900.0}), epoch(0), uuid.uuid4().hex
    again, spool = dataclasses.replace(at, attempt=uuid.uuid4().hex), ListRows({name: [rows("a"), rows("b")]})
    with committing(config, who) as committer, admin(broker.bootstrap_servers) as client:

        def outlast(writer: KafkaWriter) -> Committable:
            writer.write(rows("a"))
            writer._producer.flush()
            wait_until(lambda: not opened(client), "it times out")
            writer.write(rows("b"))
            return writer.prepare()

        assert committer.begin(at, rows("a").schema).keeping is Keeping.IN_TARGET
        alone = unspooled(who, at)
        with pytest.raises(PrepareFailed, match="longer than transaction_timeout="):
            outlast(KafkaWriter(config, alone, alone.uuid, topic))
        assert committer.begin(again, rows("a").schema).keeping is not Keeping.IN_TARGET
        part = outlast(KafkaWriter(config, task(who, again, 0, name), name, topic))
        voted = committer.vote(again, [part], spool)
        assert [commit(committer, again, each, spool) for each in voted] == [COMMITTED]
        assert committer.begin(epoch(1), rows("a").schema).keeping is not Keeping.IN_TARGET
    assert read_all(broker.bootstrap_servers, topic, 2) == ["a", "b"]


def lose_disk(broker: LocalKafka, topic: str) -> None:
    """Have the broker come back without what it kept of a topic, as after an unclean leader election."""
    broker.kill()
    for partition in (0, 1):
        for file in (broker.data / f"{topic}-{partition}").iterdir():
            if file.name != "partition.metadata":
                file.unlink()
    broker.start()


def have_deleted(broker: LocalKafka, topic: str, **settings: str) -> None:
    """Change the topic's settings, go on writing until nothing of the epoch is left, and change them back."""
    named = {name.replace("_", "."): value for name, value in settings.items()} | {"segment.ms": "100"}
    before = {"cleanup.policy": "delete", "retention.ms": "-1"}
    other = Producer({"bootstrap.servers": broker.bootstrap_servers, "linger.ms": 0})

    def deleted() -> bool:
        for partition in (0, 1):
            other.produce(topic, b"other", key=b"other", partition=partition)
        other.flush(10)
        with Reader(broker.bootstrap_servers, topic, committed=False) as everything:
            found = everything.poll(0.5)
        # what was written last comes after all that is left of the epoch
        read = {message.partition() for message in found if message.value() == b"other"} == {0, 1}
        return read and not {b"a", b"b"} & {message.value() for message in found}

    with admin(broker.bootstrap_servers) as client:
        client.alter_configs([ConfigResource("topic", topic, configs=named)])
        wait_until(deleted, "the broker deletes")
        client.alter_configs([ConfigResource("topic", topic, configs=before)])


def shorten_retention(broker: LocalKafka, topic: str) -> None:
    have_deleted(broker, topic, retention_ms="1")


def compact(broker: LocalKafka, topic: str) -> None:
    have_deleted(broker, topic, cleanup_policy="compact", min_cleanable_dirty_ratio="0", delete_retention_ms="0")


@pytest.mark.parametrize("meanwhile", [lose_disk, shorten_retention, compact])
def test_an_expired_epoch_whose_rows_its_topic_has_not_kept_is_refused_and_nothing_of_it_is_applied(
    forgetful: LocalKafka, fresh_topic: FreshName, meanwhile: Callable[[LocalKafka, str], None]
) -> None:
    servers = forgetful.bootstrap_servers
    topic = create_topic(servers, fresh_topic())
    config = Kafka(bootstrap_servers=servers, topic=topic, timeout=30)
    who, at = identity(), epoch(0)
    with committing(config, who) as committer:
        part = prepare_kept(committer, config, at, rows("a", "b"))
        take_over(servers, part)
        meanwhile(forgetful, topic)
        assert commit(committer, at, part).outcome is Outcome.ABORTED
        with pytest.raises(LogIncomplete, match="none of them is applied"):
            committer.replay(at, part, NO_ROWS, uuid.uuid4().hex)
        with admin(servers) as client:
            assert opened(client) == []
    with Reader(servers, topic) as reader:
        assert not {"a", "b"} & set(sorted_values(reader.poll(1.0)))


def test_without_a_spool_an_epoch_that_takes_longer_than_its_transactions_is_told_so(
    broker: KafkaService, fresh_topic: FreshName
) -> None:
    config = short_lived(broker, create_topic(broker.bootstrap_servers, fresh_topic()), spool=False)
    who, at = identity(), epoch(0)
    part = prepare(config, task(who, at, 0), rows("a"))
    second = task(who, at, 1)
    writer = KafkaWriter(config, second, second.uuid, config.topic)
    writer.write(rows("b"))
    writer._producer.flush()
    with admin(broker.bootstrap_servers) as client:
        wait_until(lambda: not opened(client), "both time out")
    with pytest.raises(PrepareFailed, match="longer than transaction_timeout="):
        writer.prepare()
    writer.abort()
    with committing(config, who) as committer, pytest.raises(PrepareFailed, match="longer than transaction_timeout="):
        committer.vote(at, [part], NO_ROWS)


def hold_to(servers: str, client_id: str, bytes_a_second: float) -> None:
    """Set a quota for producers of this name."""
    entity = Quotas.EntryData.EntityData(entity_type="client-id", entity_name=client_id)
    change = Quotas.EntryData.OpData(key="producer_byte_rate", value=bytes_a_second, remove=False)
    request = Quotas(entries=[Quotas.EntryData(entity=[entity], ops=[change])], validate_only=False)
    with admin(servers) as client:
        answer = client._manager.run(client._manager.send, request, None)
    assert [entry.error_code for entry in answer.entries] == [0]


def test_an_epoch_that_a_quota_holds_up_for_longer_than_its_transaction_is_delivered_once(
    broker: KafkaService, fresh_topic: FreshName
) -> None:
    """The task's delivery time runs out with its transaction; the vote gives the rows all the time that there is."""
    topic = create_topic(broker.bootstrap_servers, fresh_topic())
    hold_to(broker.bootstrap_servers, "held", 500_000)
    config = short_lived(broker, topic, options={"client.id": "held"})
    who, at, name = dataclasses.replace(identity(), origin={"transaction_timeout": 900.0}), epoch(0), uuid.uuid4().hex
    values = [str(number).zfill(1_000) for number in range(2_500)]
    spool = ListRows({name: [rows(*values[start : start + 500]) for start in range(0, len(values), 500)]})
    part = prepare(config, task(who, at, 0, name), *spool.read(name))
    with committing(config, who) as committer:
        voted = committer.vote(at, [part], spool)
        assert voted != [part], "it has taken longer than a second"
        assert [commit(committer, at, each, spool) for each in voted] == [COMMITTED]
    assert read_all(broker.bootstrap_servers, topic, len(values)) == values


def test_without_a_spool_an_epoch_that_a_quota_holds_up_fails_and_spark_runs_it_again(
    broker: KafkaService, fresh_topic: FreshName
) -> None:
    topic = create_topic(broker.bootstrap_servers, fresh_topic())
    hold_to(broker.bootstrap_servers, "held", 500_000)
    config = short_lived(broker, topic, spool=False, options={"client.id": "held"})
    with pytest.raises(PrepareFailed, match=r"did not take the rows within delivery\.timeout\.ms"):
        prepare(config, task(identity(), epoch(0)), rows(*["x" * 1_000] * 2_500))


def opened(client: KafkaAdminClient) -> list[Any]:
    return [listed for listings in client.list_transactions(state_filters=["Ongoing"]).values() for listed in listings]


def test_rows_that_the_broker_does_not_take_in_time_are_not_passed_over(
    broker: KafkaService, fresh_topic: FreshName
) -> None:
    topic = create_topic(broker.bootstrap_servers, fresh_topic())
    short = {"delivery.timeout.ms": 2_000, "socket.timeout.ms": 1_000}
    config = Kafka(bootstrap_servers=broker.bootstrap_servers, topic=topic, timeout=30, spool=False, options=short)
    writer = config.writer(task(identity(), epoch(0)))
    writer.write(rows("a"))
    broker.pause()
    writer.write(rows("b"))
    with pytest.raises(PrepareFailed, match="was not delivered"):
        writer.prepare()
    writer.abort()


def test_a_task_rides_out_a_broker_that_is_killed_and_comes_back(broker: KafkaService, fresh_topic: FreshName) -> None:
    topic = create_topic(broker.bootstrap_servers, fresh_topic())
    # a broker may take longer than a minute to come back, which is how long a transaction lasts by default
    config = Kafka(bootstrap_servers=broker.bootstrap_servers, topic=topic, timeout=60, transaction_timeout=300)
    who, at = identity(), epoch(0)
    writer = config.writer(task(who, at))
    expected = [str(number) for number in range(20_000)]
    writer.write(rows(*expected[:10_000]))
    broker.kill()
    writer.write(rows(*expected[10_000:]))
    broker.start()
    part = writer.prepare()
    committer = OneSink.of(config, "topic")
    committer.open(who)
    try:
        assert commit(committer, at, part) == COMMITTED
    finally:
        committer.close()
    assert read_all(broker.bootstrap_servers, topic, 20_000) == sorted(expected)


def test_markers_are_read_from_the_broker_that_leads_their_group_now(
    kafka: KafkaService, fresh_topic: FreshName
) -> None:
    """kafka-python asks the first leader of a group for good; with several brokers that one moves, or dies."""
    topic = create_topic(kafka.bootstrap_servers, fresh_topic())
    config = Kafka(bootstrap_servers=kafka.bootstrap_servers, topic=topic, timeout=10)
    who, at = identity(), epoch(3)
    part = prepare(config, task(who, at), rows("a"))
    with committing(config, who) as committer:
        assert commit(committer, at, part) == COMMITTED
        cluster = committer.participant._cluster
        assert committer.newest() == at.number
        known = cluster.admin()._manager.cluster._coordinators
        known.update(dict.fromkeys(known, 99))  # a broker that is gone
        assert committer.newest() == at.number


@pytest.mark.parametrize("failure", [None, ConnectionResetError], ids=["away", "reset"])
def test_a_broker_that_was_away_when_the_list_of_brokers_was_made_is_found_when_it_is_back(
    failure: type[OSError] | None, kafka: KafkaService, fresh_topic: FreshName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kafka-python asks for the list every five minutes; a vote or a commit must not wait for that.

    After an OSError, as over TLS from a broker that stops, it never asks again.
    """
    topic = create_topic(kafka.bootstrap_servers, fresh_topic())
    config = Kafka(bootstrap_servers=kafka.bootstrap_servers, topic=topic, timeout=10)
    who, at = identity(), epoch(3)
    part = prepare(config, task(who, at), rows("a"))
    with committing(config, who) as committer:
        [part] = vote(committer, at, part)
        manager = committer.participant._cluster.admin()._manager
        if failure is not None:

            async def fail() -> None:
                raise failure

            with monkeypatch.context() as failing:
                failing.setattr(manager.cluster, "refresh_metadata", fail)
                manager.cluster.request_update()
                wait_until(lambda: manager.cluster._refresh_loop_future.is_done, "the end of its loop")
        known = manager.cluster._brokers
        # as another one of the cluster's, which is there to be asked
        number, other = next(iter(known.items()))
        other = copy(other)
        other.node_id = 99
        known.clear()
        known[99] = other
        manager._conns.pop(number, None)
        assert commit(committer, at, part) == COMMITTED
        assert list(manager.cluster._brokers) == [number]
