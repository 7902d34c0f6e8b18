"""A lost transaction's rows are taken out of the topic's own log again: all of them, as they were, or none."""

from __future__ import annotations

import re
import uuid
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from confluent_kafka import Producer
from fix_kafka import NEWEST_LEVEL, at_every_transaction_version
from kafka.structs import TopicPartition
from kafka_kit import (
    NO_ROWS,
    Reader,
    admin,
    change_settings,
    commit,
    committing,
    create_topic,
    epoch,
    identity,
    prepare,
    prepare_kept,
    recreate_topic,
    rows,
    sorted_values,
    take_over,
    unspooled,
)

from epochsink.errors import LogIncomplete, PrepareFailed
from epochsink.kafka import Kafka
from epochsink.kafka.committable import KafkaCommittable, Transaction
from epochsink.kafka.errors import Refused
from epochsink.kafka.record_batch import split
from epochsink.kafka.topic_log import TopicLog
from epochsink.sink import COMMITTED, Keeping, Outcome

if TYPE_CHECKING:
    from fix_services import FreshName

    from epochsink.sink import Committable, Epoch
    from epochsink.testing.sink_rig import OneSink
    from epochsink_devkit.services import KafkaService

newest_transaction_version = pytest.mark.parametrize("kafka", [NEWEST_LEVEL], indirect=True, ids=str)

SCHEMA = pa.schema([("key", pa.string()), ("value", pa.string())])
SECONDS = 30.0


def sink(kafka: KafkaService, topic: str, **settings: Any) -> Kafka:
    return Kafka(bootstrap_servers=kafka.bootstrap_servers, topic=topic, timeout=20, **settings)


def disturb(servers: str, topic: str, *values: str) -> None:
    """Write rows of somebody else into both partitions."""
    other = Producer({"bootstrap.servers": servers, "linger.ms": 0})
    for value in values:
        for partition in (0, 1):
            other.produce(topic, value, partition=partition)
        other.flush(SECONDS)


def transaction_of(part: Committable) -> Transaction:
    return KafkaCommittable.from_json(part).transaction


def replayed(committer: OneSink, at: Epoch, part: Committable) -> Committable:
    """Have a part found lost, and prepared again."""
    assert commit(committer, at, part).outcome is Outcome.ABORTED
    return committer.replay(at, part, NO_ROWS, uuid.uuid4().hex)


@newest_transaction_version
@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_rows_come_back_as_they_were_out_of_a_log_that_others_write_to_as_well(
    kafka: KafkaService, fresh_topic: FreshName, codec: str
) -> None:
    servers = kafka.bootstrap_servers
    topic = create_topic(servers, fresh_topic(), retention_ms="-1")
    config = sink(kafka, topic, options={"compression.type": codec, "batch.num.messages": 50, "linger.ms": 0})
    who, at = identity(), epoch(3)
    headers = pa.array([[{"key": "n", "value": str(n).encode()}] for n in range(500)])
    times = pa.array(range(1_600_000_000_000, 1_600_000_000_500), pa.timestamp("ms", "UTC"))
    sent = rows(*[f"row {n}" for n in range(500)], headers=headers, timestamp=times)
    with committing(config, who) as committer:
        assert committer.begin(at, sent.schema).keeping is Keeping.IN_TARGET
        disturb(servers, topic, "before")
        writer = config.writer(unspooled(who, at))
        for start in range(0, 500, 100):
            writer.write(sent.slice(start, 100))
            disturb(servers, topic, f"while {start}")
        [part] = committer.vote(at, [writer.prepare()], NO_ROWS)
        disturb(servers, topic, "after")
        take_over(servers, part)
        again = replayed(committer, at, part)
        assert again["rows"] == 500
        assert commit(committer, at, again) == COMMITTED
    with Reader(servers, topic) as reader, Reader(servers, topic, committed=False) as everything:
        found = [message for message in reader.until(514) if message.value().startswith(b"row")]
        both = [message for message in everything.until(1014) if message.value().startswith(b"row")]
    assert sorted_values(found) == sorted(f"row {n}" for n in range(500))

    def as_sent(messages: list[Any]) -> list[tuple[Any, ...]]:
        return sorted((m.key(), m.value(), m.headers(), m.timestamp(), m.partition()) for m in messages)

    copies = as_sent(found)
    assert as_sent(both) == sorted(copies * 2), "the aborted and the committed rows are the same"
    assert [one[2:4] for one in copies if one[1] == b"row 7"] == [([("n", b"7")], (1, 1_600_000_000_007))]


@at_every_transaction_version
def test_what_was_taken_from_the_log_can_be_lost_and_taken_again(kafka: KafkaService, fresh_topic: FreshName) -> None:
    servers = kafka.bootstrap_servers
    topic = create_topic(servers, fresh_topic())
    config = sink(kafka, topic)
    who, at = identity(), epoch(4)
    with committing(config, who) as committer:
        part = prepare_kept(committer, config, at, rows("a", "b", "c"))
        for _ in range(3):
            take_over(servers, part)
            part = replayed(committer, at, part)
        assert commit(committer, at, part) == COMMITTED
    with Reader(servers, topic) as reader:
        assert sorted_values(reader.until(3)) == ["a", "b", "c"]


@at_every_transaction_version
def test_a_task_whose_transaction_ended_before_the_vote_is_taken_from_the_log(
    kafka: KafkaService, fresh_topic: FreshName
) -> None:
    servers = kafka.bootstrap_servers
    topic = create_topic(servers, fresh_topic())
    config = sink(kafka, topic)
    who, at = identity(), epoch(0)
    with committing(config, who) as committer:
        assert committer.begin(at, SCHEMA).keeping is Keeping.IN_TARGET
        parts = [prepare(config, unspooled(who, at, n), rows(f"{n}a", f"{n}b")) for n in range(2)]
        take_over(servers, parts[1])
        voted = committer.vote(at, parts, NO_ROWS)
        assert [one["task"] for one in voted] == [part["task"] for part in parts]
        assert transaction_of(voted[0]) == transaction_of(parts[0])
        assert transaction_of(voted[1]) != transaction_of(parts[1])
        assert [commit(committer, at, part) for part in voted] == [COMMITTED] * 2
    with Reader(servers, topic) as reader:
        assert sorted_values(reader.until(4)) == ["0a", "0b", "1a", "1b"]


@at_every_transaction_version
def test_rows_that_the_log_holds_no_more_are_named_and_none_of_the_others_is_applied(
    kafka: KafkaService, fresh_topic: FreshName
) -> None:
    servers = kafka.bootstrap_servers
    topic = create_topic(servers, fresh_topic())
    config = sink(kafka, topic, options={"batch.num.messages": 10, "linger.ms": 0})
    who, at = identity(), epoch(0)
    with committing(config, who) as committer:
        part = prepare_kept(committer, config, at, rows(*[str(n) for n in range(200)]))
        take_over(servers, part)
        with admin(servers) as client:
            client.delete_records({TopicPartition(topic, 1): 25})
        with pytest.raises(LogIncomplete, match=r"partition 1 now begins at offset 25(.|\n)*resolve CHECKPOINT 0"):
            replayed(committer, at, part)
        assert committer.leftovers() == []
    disturb(servers, topic, "end")
    with Reader(servers, topic) as reader:
        assert sorted_values(reader.until(2)) == ["end", "end"]


@newest_transaction_version
@pytest.mark.parametrize(
    "settings", [{"message_timestamp_type": "LogAppendTime"}, {"compression_type": "gzip"}], ids=str
)
def test_batches_that_the_broker_has_stamped_or_compressed_itself_are_taken_as_well(
    kafka: KafkaService, fresh_topic: FreshName, settings: dict[str, Any]
) -> None:
    servers = kafka.bootstrap_servers
    topic = create_topic(servers, fresh_topic(), **settings)
    config = sink(kafka, topic, options={"compression.type": "lz4"})
    who, at = identity(), epoch(0)
    with committing(config, who) as committer:
        part = prepare_kept(committer, config, at, rows(*[str(n) for n in range(200)]))
        take_over(servers, part)
        assert commit(committer, at, replayed(committer, at, part)) == COMMITTED
    with Reader(servers, topic) as reader:
        assert sorted_values(reader.until(200)) == sorted(str(n) for n in range(200))


@newest_transaction_version
def test_a_topic_that_was_created_anew_while_it_was_written_to_fails_the_vote(
    kafka: KafkaService, fresh_topic: FreshName
) -> None:
    servers = kafka.bootstrap_servers
    topic = create_topic(servers, fresh_topic())
    config = sink(kafka, topic)
    who, at = identity(), epoch(0)
    with committing(config, who) as committer:
        assert committer.begin(at, SCHEMA).keeping is Keeping.IN_TARGET
        recreate_topic(servers, topic)
        part = prepare(config, unspooled(who, at), rows("a"))
        with pytest.raises(PrepareFailed, match="deleted and created again"):
            committer.vote(at, [part], NO_ROWS)


@newest_transaction_version
@pytest.mark.parametrize(
    "change",
    [
        {"cleanup.policy": "compact"},
        {"unclean.leader.election.enable": "true"},
        {"retention.ms": "3600000"},
        {"retention.bytes": "1000000"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_settings_that_change_under_a_query_are_seen_in_the_same_attempt_and_in_the_next(
    kafka: KafkaService, fresh_topic: FreshName, change: dict[str, str]
) -> None:
    """The topic may no longer keep what was just written: it is written again, with a copy."""
    servers = kafka.bootstrap_servers
    topic = create_topic(servers, fresh_topic())
    config = sink(kafka, topic)
    who, first, second = identity(), epoch(0), epoch(0)
    [(name, value)] = change.items()

    with committing(config, who) as committer:
        assert committer.begin(first, SCHEMA).keeping is Keeping.IN_TARGET
        part = prepare(config, unspooled(who, first), rows("a"))
        change_settings(servers, topic, {name: value})
        with pytest.raises(PrepareFailed, match=rf"may no longer keep the rows(.|\n)*{re.escape(name)} = {value}"):
            committer.vote(first, [part], NO_ROWS)
        assert committer.begin(second, SCHEMA).keeping is Keeping.IN_SPOOL
        before = {"cleanup.policy": "delete", "unclean.leader.election.enable": "false"}.get(name, "-1")
        change_settings(servers, topic, {name: before})
        assert committer.begin(second, SCHEMA).keeping is Keeping.IN_TARGET


def test_fewer_replicas_that_have_to_acknowledge_are_said_as_soon_as_the_settings_are_read_again(
    kafka: KafkaService, fresh_topic: FreshName, caplog: pytest.LogCaptureFixture
) -> None:
    """Once for each change, and not for a higher number."""
    topic = create_topic(kafka.bootstrap_servers, fresh_topic(), min_insync_replicas="2")
    with committing(sink(kafka, topic), identity()) as committer:
        said = []
        for needed in ("2", "1", "1", "2"):
            change_settings(kafka.bootstrap_servers, topic, {"min.insync.replicas": needed})
            caplog.clear()
            committer.begin(epoch(0), SCHEMA)
            said.append("min.insync.replicas was lowered from 2 to 1 while the query runs" in caplog.text)
    assert said == [False, True, False, False]


@newest_transaction_version
def test_a_topic_that_is_created_anew_while_rows_are_copied_within_it_is_named(
    kafka: KafkaService, fresh_topic: FreshName, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = kafka.bootstrap_servers
    topic = create_topic(servers, fresh_topic(), retention_ms="-1")
    config, at = sink(kafka, topic), epoch(0)

    def append_anew(log: TopicLog, *arguments: Any) -> None:
        recreate_topic(servers, topic)
        append(log, *arguments)

    append = TopicLog.append
    with committing(config, identity()) as committer:
        part = prepare_kept(committer, config, at, rows("a"))
        take_over(servers, part)
        monkeypatch.setattr(TopicLog, "append", append_anew)
        with pytest.raises(Refused, match=f"topic '{topic}' was deleted and created again"):
            replayed(committer, at, part)


def test_a_batch_that_the_broker_takes_for_an_earlier_one_is_not_taken_for_appended(
    kafka: KafkaService, fresh_topic: FreshName
) -> None:
    """As where the coordinator has forgotten that it gave a producer its epoch, and gives it once more."""
    topic = create_topic(kafka.bootstrap_servers, fresh_topic())
    config = sink(kafka, topic)
    with committing(config, identity()) as committer:
        prepare_kept(committer, config, epoch(0), rows("a"))
        log = TopicLog(committer.participant._cluster, topic)
        [(partition, (_, batch))] = [
            (partition, each) for partition, found in log.fetch(log.starts()).items() for each in split(found or b"")
        ]
        assert batch is not None
        deadline = committer.participant._cluster.deadline()
        twice = Transaction("twice", *committer.participant._transactions.initialise("twice", deadline))
        copied = batch.under(twice.producer_id, twice.producer_epoch, 0)
        for first in (True, False):
            log.join(twice, [partition])
            end, topic_id = log.ends()[partition], log.topic_id
            if first:
                log.append(twice, partition, copied, end, topic_id)
                log.append(twice, partition, copied, end, topic_id)
                assert log.ends()[partition] == end + 1
            else:
                with pytest.raises(Refused, match="has given this producer epoch twice"):
                    log.append(twice, partition, copied, end, topic_id)
            committer.participant._transactions.end(twice, deadline, commit=False)
