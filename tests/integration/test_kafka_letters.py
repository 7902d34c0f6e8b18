"""Rows that a topic cannot take go to the topic of letters in the transaction of their epoch."""

from __future__ import annotations

import dataclasses
import uuid
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from fix_kafka import NEWEST_LEVEL
from kafka.structs import TopicPartition
from kafka_kit import (
    NO_ROWS,
    ListRows,
    Reader,
    admin,
    change_settings,
    commit_with_letters,
    committing,
    create_topic,
    epoch,
    identity,
    prepare,
    read_all,
    rows,
    setting_aside,
    take_over,
    task,
    told,
)

from epochsink.errors import PrepareFailed, RowsRejected
from epochsink.kafka import Kafka
from epochsink.kafka.dead_letter import NO_KEY, rendered
from epochsink.sink import Chosen, Compared, Keeping, Outcome, Receipt
from epochsink.sink.letter_row import decode_rows

if TYPE_CHECKING:
    from fix_services import FreshName

    from epochsink_devkit.services import KafkaService

pytestmark = pytest.mark.parametrize("kafka", [NEWEST_LEVEL], indirect=True, ids=str)

LARGE = "x" * 3_000
COMPACT: Any = {"cleanup_policy": "compact", "max_message_bytes": "2000"}
SCHEMA = rows("a").schema


def letters(kafka: KafkaService, topic: str, count: int) -> list[tuple[dict[str, Any], dict[str, str]]]:
    """Return row and headers of each letter that read_committed readers see, in the order of the log."""
    with Reader(kafka.bootstrap_servers, f"{topic}.dead_letter") as reader:
        found = reader.until(count)
    rows = (rendered(row) for one in found for row in decode_rows([one.value()]))
    return [
        (row, {name: value.decode() for name, value in one.headers()}) for row, one in zip(rows, found, strict=True)
    ]


def test_rows_that_the_topic_cannot_take_are_letters_visible_with_their_epoch(
    kafka: KafkaService, fresh_topic: FreshName
) -> None:
    servers = kafka.bootstrap_servers
    topic = create_topic(servers, fresh_topic(), **COMPACT)
    config, who, at = setting_aside(kafka, topic), identity(), epoch(0)
    with committing(config, who) as committer:
        first = prepare(
            config, told(committer, who, at), rows("a", "b", keys=["1", None]), rows(LARGE, "c", keys=["2", "3"])
        )
        second = prepare(config, told(committer, who, at, 1), rows(LARGE, keys=[None]))
        parts = committer.vote(at, [first, second], NO_ROWS)
        for each in (topic, config.letters_topic):
            with Reader(servers, str(each)) as reader:
                assert reader.poll(0.3) == [], "nothing is visible before the commit"
        assert commit_with_letters(committer, at, parts) == 3
        assert committer.newest() == 0
    assert read_all(servers, topic, 2) == ["a", "c"]
    found = letters(kafka, topic, 3)
    assert len(found) == 3
    by_place = {headers["position"]: (row, headers) for row, headers in found}
    assert by_place["0/1"][0] == {"key": None, "value": "b"}
    assert by_place["0/1"][1]["error"] == NO_KEY
    assert by_place["0/2"][0] == {"key": "2", "value": LARGE}
    assert "max.message.bytes = 2000 of the topic" in by_place["0/2"][1]["error"]
    # of a row that breaks both rules, the size is the reason
    assert "max.message.bytes" in by_place["1/0"][1]["error"]
    told_of = {(headers["sink"], headers["epoch"], headers["attempt"]) for _, headers in found}
    assert told_of == {("topic", "0", at.attempt)}


def test_what_is_a_letter_is_what_the_broker_refuses_and_nothing_else(
    kafka: KafkaService, fresh_topic: FreshName
) -> None:
    servers = kafka.bootstrap_servers
    topic = create_topic(servers, fresh_topic(), 1, max_message_bytes="2000")
    config, who = setting_aside(kafka, topic), identity()
    stopping = Kafka(bootstrap_servers=servers, topic=topic, timeout=20)
    # the last size that fits, and the one after it: without letters the broker itself draws the line there
    sizes = [1_929, 1_930]
    with committing(config, who) as committer:
        for number, size in enumerate(sizes):
            at = epoch(number)
            row = rows("y" * size, keys=["k"])
            part = prepare(config, told(committer, who, at), row)
            assert part["letters"] == number
            assert commit_with_letters(committer, at, committer.vote(at, [part], NO_ROWS)) == number
            alone = task(identity(), epoch(0))
            if number:
                with pytest.raises(RowsRejected, match=r"too large|larger than"):
                    prepare(stopping, alone, row)
            else:
                prepare(stopping, alone, row)
    assert len(letters(kafka, topic, 1)) == 1


def test_more_letters_than_the_limit_stop_the_query_before_the_vote_and_leave_nothing(
    kafka: KafkaService, fresh_topic: FreshName
) -> None:
    servers = kafka.bootstrap_servers
    topic = create_topic(servers, fresh_topic())
    config, who, at = setting_aside(kafka, topic, key="id", letters_limit=0.5), identity(), epoch(0)
    with committing(config, who) as committer:
        half = prepare(config, told(committer, who, at), rows("a", "b", keys=["1", None]))
        [part] = committer.vote(at, [half], NO_ROWS)
        assert commit_with_letters(committer, at, [part]) == 1
        at = epoch(1)
        good = prepare(config, told(committer, who, at), rows("c", keys=["1"]))
        bad = prepare(config, told(committer, who, at, 1), rows("d", "e", keys=[None, None]))
        with pytest.raises(
            RowsRejected, match=r"cannot take 2 of 3 rows, more than letters_limit=0\.5: the row has no key"
        ):
            committer.vote(at, [good, bad], NO_ROWS)
        assert committer.leftovers() == [], "no reader waits for it"
    assert read_all(servers, topic, 1) == ["a"]
    assert [row["value"] for row, _ in letters(kafka, topic, 1)] == ["b"]


@pytest.mark.parametrize("all_are_letters", [False, True])
def test_letters_are_taken_from_the_log_again_with_the_rows(
    kafka: KafkaService, fresh_topic: FreshName, *, all_are_letters: bool
) -> None:
    servers = kafka.bootstrap_servers
    topic = create_topic(servers, fresh_topic())
    config, who, at = setting_aside(kafka, topic, key="id"), identity(), epoch(3)
    keys = [None, None, None] if all_are_letters else ["1", None, "2"]
    with committing(config, who) as committer:
        assert committer.begin(at, SCHEMA).keeping is Keeping.IN_TARGET
        of = told(committer, who, at, keeping=Keeping.IN_TARGET)
        [part] = committer.vote(at, [prepare(config, of, rows("a", "b", "c", keys=keys))], NO_ROWS)
        for _ in range(2):
            take_over(servers, part)
            assert committer.commit(at, part, NO_ROWS).outcome is Outcome.ABORTED
            part = committer.replay(at, part, NO_ROWS, uuid.uuid4().hex)
        lost = 3 if all_are_letters else 1
        assert commit_with_letters(committer, at, [part]) == lost
        [compared] = committer.participant.operator().audit("topic", [Receipt(3, 3, 0, lost, [part])], 3)
        assert compared.result is Compared.AGREES
    assert read_all(servers, topic, 3 - lost) == ([] if all_are_letters else ["a", "c"])
    assert [row["value"] for row, _ in letters(kafka, topic, lost)] == (["a", "b", "c"] if all_are_letters else ["b"])


def test_a_replay_from_the_spool_chooses_the_same_letters_whatever_the_options_and_limits_are_now(
    kafka: KafkaService, fresh_topic: FreshName
) -> None:
    servers = kafka.bootstrap_servers
    topic = create_topic(servers, fresh_topic(), **COMPACT)
    config, who, at = setting_aside(kafka, topic), identity(), epoch(0)
    batch = rows("a", "b", LARGE, keys=["1", None, "2"])
    with committing(config, who) as committer:
        of = told(committer, who, at)
        [part] = committer.vote(at, [prepare(config, of, batch)], NO_ROWS)
    take_over(servers, part)
    change_settings(servers, topic, {"cleanup.policy": "compact", "max.message.bytes": "9000"})
    later = Kafka(bootstrap_servers=servers, topic=topic, timeout=20)
    spooled = ListRows({of.uuid: [batch]})
    with committing(later, dataclasses.replace(who, generation=2)) as committer:
        assert committer.commit(at, part, spooled).outcome is Outcome.ABORTED
        part = committer.replay(at, part, spooled, uuid.uuid4().hex)
        assert commit_with_letters(committer, at, [part]) == 2
    assert read_all(servers, topic, 1) == ["a"]
    assert sorted(row["value"] for row, _ in letters(kafka, topic, 2)) == sorted(["b", LARGE])


def test_letters_that_are_lost_before_the_commit_are_missed_like_rows(
    kafka: KafkaService, fresh_topic: FreshName
) -> None:
    servers = kafka.bootstrap_servers
    topic = create_topic(servers, fresh_topic())
    config, who, at = setting_aside(kafka, topic, key="id", spool=True), identity(), epoch(0)
    batch = rows("a", "b", keys=["1", None])
    with committing(config, who) as committer:
        of = told(committer, who, at)
        [part] = committer.vote(at, [prepare(config, of, batch)], NO_ROWS)
        with admin(servers) as client:
            client.delete_records({TopicPartition(f"{topic}.dead_letter", 0): -1})
        verdict = committer.commit(at, part, NO_ROWS)
        assert verdict.outcome is Outcome.ABORTED, verdict
        part = committer.replay(at, part, ListRows({of.uuid: [batch]}), uuid.uuid4().hex)
        assert commit_with_letters(committer, at, [part]) == 1
    assert read_all(servers, topic, 1) == ["a"]
    assert [row["value"] for row, _ in letters(kafka, topic, 1)] == ["b"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"cleanup_policy": "compact", "max_message_bytes": "9000000"}, "dead letters have no key; set it to delete"),
        ({"max_message_bytes": "1000000"}, "a dead letter may need twice what topic"),
    ],
    ids=["compacted", "too-small"],
)
def test_a_topic_of_letters_that_could_lose_or_refuse_them_is_found_by_the_check(
    kafka: KafkaService, fresh_topic: FreshName, settings: Any, said: str
) -> None:
    servers = kafka.bootstrap_servers
    topic = create_topic(servers, fresh_topic())
    aside = create_topic(servers, fresh_topic(), 1, **settings)
    config = Kafka(bootstrap_servers=servers, topic=topic, on_rejected="dead_letter", dead_letter_topic=aside)
    with committing(config, identity()) as committer:
        [finding] = committer.check(SCHEMA)
    assert said in finding


def test_a_topic_of_letters_that_is_gone_fails_the_attempt(kafka: KafkaService, fresh_topic: FreshName) -> None:
    topic = create_topic(kafka.bootstrap_servers, fresh_topic())
    config = Kafka(bootstrap_servers=kafka.bootstrap_servers, topic=topic, on_rejected="dead_letter")
    with (
        committing(config, identity()) as committer,
        pytest.raises(PrepareFailed, match=r"\.dead_letter' does not exist"),
    ):
        committer.begin(epoch(0), SCHEMA)


def test_rows_with_headers_and_timestamps_keep_them_beside_letters(kafka: KafkaService, fresh_topic: FreshName) -> None:
    topic = create_topic(kafka.bootstrap_servers, fresh_topic())
    config, who, at = setting_aside(kafka, topic, key="id"), identity(), epoch(0)
    times = pa.array([1_600_000_000_000, 1_600_000_000_001, 1_600_000_000_002], pa.timestamp("ms", "UTC"))
    headers = pa.array([[{"key": "n", "value": str(n).encode()}] for n in range(3)])
    batch = rows("a", "b", "c", keys=["1", None, "2"], timestamp=times, headers=headers)
    with committing(config, who) as committer:
        assert (
            commit_with_letters(
                committer, at, committer.vote(at, [prepare(config, told(committer, who, at), batch)], NO_ROWS)
            )
            == 1
        )
    with Reader(kafka.bootstrap_servers, topic) as reader:
        found = sorted((m.value(), m.headers(), m.timestamp()[1]) for m in reader.until(2))
    assert found == [(b"a", [("n", b"0")], 1_600_000_000_000), (b"c", [("n", b"2")], 1_600_000_000_002)]
    [(row, _)] = letters(kafka, topic, 1)
    assert row == {
        "key": None,
        "value": "b",
        "headers": [{"key": "n", "value": "1"}],
        "timestamp": "2020-09-13T12:26:40.001Z",
    }


def test_as_many_letters_as_the_limit_allows_do_not_stop_the_query(kafka: KafkaService, fresh_topic: FreshName) -> None:
    """0.29 times 100 is a little less than 29 in floating point."""
    topic = create_topic(kafka.bootstrap_servers, fresh_topic())
    config, who, at = setting_aside(kafka, topic, key="id", letters_limit=0.29), identity(), epoch(0)
    batch = rows(*["v"] * 100, keys=[None] * 29 + ["k"] * 71)
    with committing(config, who) as committer:
        part = prepare(config, told(committer, who, at), batch)
        assert commit_with_letters(committer, at, committer.vote(at, [part], NO_ROWS)) == 29


def test_an_operator_sees_the_committed_letters_of_one_sink_newest_first(
    kafka: KafkaService, fresh_topic: FreshName
) -> None:
    topic = create_topic(kafka.bootstrap_servers, fresh_topic())
    config, who, other = setting_aside(kafka, topic, key="id"), identity(), identity()
    for writes, number, values in ((who, 0, ("a", "b")), (other, 0, ("of another query",)), (who, 1, ("c",))):
        at = epoch(number)
        with committing(config, writes) as committer:
            part = prepare(config, told(committer, writes, at), rows(*values, keys=[None] * len(values)))
            commit_with_letters(committer, at, committer.vote(at, [part], NO_ROWS))
    with committing(config, who) as committer:
        prepare(config, told(committer, who, epoch(2)), rows("not committed", keys=[None]))
        letters = committer.participant.operator().letters("topic")
        assert letters is not None
        newest, *others = letters.read(Chosen(), 10)
        assert (newest.epoch, newest.error, newest.row) == (1, NO_KEY, {"key": None, "value": "c"})
        assert sorted(letter.row["value"] for letter in others) == ["a", "b"]
        assert letters.read(Chosen(), 1) == [newest]
        assert letters.read(Chosen(ids=(others[0].id,)), 10) == [others[0]]
        assert (letters.count(Chosen()), letters.count(Chosen(epoch=0)), letters.count(Chosen(epoch=2))) == (3, 2, 0)
