"""Topics that are deleted, and perhaps created again, under a pending epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from kafka_kit import (
    NO_ROWS,
    ListRows,
    await_visible,
    commit,
    committing,
    epoch,
    identity,
    prepare,
    read_all,
    recreate_topic,
    rows,
    task,
    vote,
)

from epochsink.errors import OutcomeUnknown, PrepareFailed, WentBack
from epochsink.kafka import Kafka
from epochsink.sink import COMMITTED, LastDone, Outcome

if TYPE_CHECKING:
    from epochsink_devkit.services import KafkaService


def test_a_topic_recreated_between_prepare_and_commit_gets_the_rows_again(topic_sink: Kafka) -> None:
    who, at = identity(), epoch(0)
    of, batch = task(who, at), rows("a", "b")
    part = prepare(topic_sink, of, batch)
    with committing(topic_sink, who) as committer:
        [part] = vote(committer, at, part)
        recreate_topic(topic_sink.bootstrap_servers, str(topic_sink.topic))
        verdict = commit(committer, at, part)
        assert verdict.outcome is Outcome.ABORTED
        assert str(topic_sink.topic) in verdict.evidence
        spooled = ListRows({of.uuid: [batch]})
        replayed = committer.replay(at, part, spooled, "e" * 32)
        assert replayed["topics"] != part["topics"]
        assert committer.abort_orphans([replayed]) == [], "the transaction that has lost its topic is ended"
        assert commit(committer, at, replayed, spooled) == COMMITTED
    assert read_all(topic_sink.bootstrap_servers, str(topic_sink.topic), 2) == ["a", "b"]


def test_a_topic_recreated_before_the_vote_gets_the_rows_again(topic_sink: Kafka) -> None:
    who, at = identity(), epoch(0)
    of, batch = task(who, at), rows("a", "b")
    part = prepare(topic_sink, of, batch)
    recreate_topic(topic_sink.bootstrap_servers, str(topic_sink.topic))
    with committing(topic_sink, who) as committer:
        [voted] = committer.vote(at, [part], ListRows({of.uuid: [batch]}))
        assert commit(committer, at, voted) == COMMITTED
    assert read_all(topic_sink.bootstrap_servers, str(topic_sink.topic), 2) == ["a", "b"]


def test_a_topic_deleted_while_its_transaction_is_committed_stops_the_query(topic_sink: Kafka) -> None:
    """And the next start finds no proof either that the rows were seen."""
    who, at = identity(), epoch(0)
    part = prepare(topic_sink, task(who, at), rows("a", "b"))
    with committing(topic_sink, who) as committer:
        end = committer.participant._transactions.end

        def end_late(*arguments: Any, **settings: Any) -> Any:
            recreate_topic(topic_sink.bootstrap_servers, str(topic_sink.topic))
            return end(*arguments, **settings)

        committer.participant._transactions.end = end_late
        assert committer.commit(at, part, NO_ROWS) == COMMITTED
        with pytest.raises(OutcomeUnknown, match=f"{topic_sink.topic} were deleted"):
            await_visible(committer, at, [part])
    with committing(topic_sink, who) as committer:
        assert committer.commit(at, part, NO_ROWS).outcome is Outcome.UNKNOWN


def test_a_topic_deleted_while_many_transactions_are_committed_stops_the_query(topic_sink: Kafka) -> None:
    """All of them are decided before the first answer, and then the topic goes."""
    who, at = identity(), epoch(0)
    parts = [prepare(topic_sink, task(who, at, partition), rows("a", "b")) for partition in range(8)]
    with committing(topic_sink, who) as committer:
        transactions = committer.participant._transactions
        commit_many = transactions.commit_many

        def followed_by_the_end(*arguments: Any) -> Any:
            decided = commit_many(*arguments)
            assert len(decided) == len(parts)
            recreate_topic(topic_sink.bootstrap_servers, str(topic_sink.topic))
            return decided

        transactions.commit_many = followed_by_the_end
        assert committer.commit_all(at, parts, NO_ROWS) == [COMMITTED] * len(parts)
        with pytest.raises(OutcomeUnknown, match=f"{topic_sink.topic} were deleted"):
            await_visible(committer, at, parts)


def test_without_a_spool_a_topic_that_was_recreated_stops_the_query(kafka: KafkaService, topic_sink: Kafka) -> None:
    who, at = identity(), epoch(0)
    unspooled = Kafka(bootstrap_servers=kafka.bootstrap_servers, topic=topic_sink.topic, spool=False)
    part = prepare(unspooled, task(who, at), rows("a"))
    recreate_topic(topic_sink.bootstrap_servers, str(topic_sink.topic))
    with committing(unspooled, who) as committer:
        with pytest.raises(PrepareFailed, match=f"topic.*{topic_sink.topic}.*deleted"):
            committer.vote(at, [part], NO_ROWS)
        assert committer.commit(at, part, NO_ROWS).outcome is Outcome.UNKNOWN


def test_a_topic_recreated_since_the_newest_epoch_stops_the_query_until_that_is_accepted(topic_sink: Kafka) -> None:
    """What it held is gone: that is for an operator to see. A pending epoch is then written to the new topic."""
    who, first, second = identity(), epoch(0), epoch(1)
    done = prepare(topic_sink, task(who, first), rows("gone with the topic"))
    of, batch = task(who, second), rows("a")
    pending = prepare(topic_sink, of, batch)
    last, following = LastDone(0, first.attempt, (done,)), LastDone(1, second.attempt, (pending,))
    with committing(topic_sink, who) as committer:
        assert commit(committer, first, done) == COMMITTED
        recreate_topic(topic_sink.bootstrap_servers, str(topic_sink.topic))
        another = f"{topic_sink.topic} of Kafka.* are not those that epoch 0 was written to"
        with pytest.raises(WentBack, match=another):
            committer.verify_applied(last, following)
        with pytest.raises(WentBack, match=another):
            committer.commit(second, pending, NO_ROWS, last)
        with pytest.raises(WentBack, match=another):
            committer.vote(second, [prepare(topic_sink, task(who, second, partition=1), rows("b"))], NO_ROWS, last)
    by_word = LastDone(0, "", ())
    with committing(topic_sink, who) as committer:
        committer.verify_applied(by_word, following)
        assert committer.commit(second, pending, NO_ROWS, by_word).outcome is Outcome.ABORTED
        spooled = ListRows({of.uuid: [batch]})
        replayed = committer.replay(second, pending, spooled, "e" * 32, by_word)
        assert committer.commit(second, replayed, spooled, by_word) == COMMITTED
        await_visible(committer, second, [replayed], by_word)
        committer.abort_orphans([])
    assert read_all(topic_sink.bootstrap_servers, str(topic_sink.topic), 1) == ["a"]
