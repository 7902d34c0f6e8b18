"""Topics that are deleted, and perhaps created again, under a pending epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from kafka_kit import (
    NO_ROWS,
    ListRows,
    commit,
    committing,
    epoch,
    identity,
    prepare,
    read_all,
    recreate_topic,
    rows,
    sink_on_new_topic,
    task,
    vote,
)

from epochsink.errors import PrepareFailed, WentBack
from epochsink.kafka import Kafka
from epochsink.sink import COMMITTED, LastDone, Outcome

if TYPE_CHECKING:
    from fix_services import FreshName

    from epochsink.devkit.services import KafkaService


@pytest.fixture
def config(kafka: KafkaService, fresh_topic: FreshName) -> Kafka:
    return sink_on_new_topic(kafka.bootstrap_servers, fresh_topic())


def test_a_topic_recreated_between_prepare_and_commit_gets_the_rows_again(config: Kafka) -> None:
    who, at = identity(), epoch(0)
    of, batch = task(who, at), rows("a", "b")
    part = prepare(config, of, batch)
    with committing(config, who) as committer:
        [part] = vote(committer, at, part)
        recreate_topic(config.bootstrap_servers, str(config.topic))
        verdict = commit(committer, at, part)
        assert verdict.outcome is Outcome.ABORTED
        assert str(config.topic) in verdict.evidence
        spooled = ListRows({of.uuid: [batch]})
        replayed = committer.replay(at, part, spooled, "e" * 32)
        assert replayed["topics"] != part["topics"]
        assert committer.abort_orphans([replayed]) == [], "the transaction that has lost its topic is ended"
        assert commit(committer, at, replayed, spooled) == COMMITTED
    assert read_all(config.bootstrap_servers, str(config.topic), 2) == ["a", "b"]


def test_a_topic_recreated_before_the_vote_gets_the_rows_again(config: Kafka) -> None:
    who, at = identity(), epoch(0)
    of, batch = task(who, at), rows("a", "b")
    part = prepare(config, of, batch)
    recreate_topic(config.bootstrap_servers, str(config.topic))
    with committing(config, who) as committer:
        [voted] = committer.vote(at, [part], ListRows({of.uuid: [batch]}))
        assert commit(committer, at, voted) == COMMITTED
    assert read_all(config.bootstrap_servers, str(config.topic), 2) == ["a", "b"]


def test_a_topic_deleted_while_its_transaction_is_committed_stops_the_query(config: Kafka) -> None:
    """And the next start finds no proof either that the rows were seen."""
    who, at = identity(), epoch(0)
    part = prepare(config, task(who, at), rows("a", "b"))
    with committing(config, who) as committer:
        end = committer.participant._transactions.end

        def end_late(*arguments: Any, **settings: Any) -> Any:
            recreate_topic(config.bootstrap_servers, str(config.topic))
            return end(*arguments, **settings)

        committer.participant._transactions.end = end_late
        verdict = committer.commit(at, part, NO_ROWS)
        assert verdict.outcome is Outcome.UNKNOWN
        assert f"{config.topic} were deleted" in verdict.evidence
    with committing(config, who) as committer:
        # the marker, an offset on that topic, went with it
        with pytest.raises(WentBack, match="shows None"):
            committer.await_visible(at, [part])
        assert committer.commit(at, part, NO_ROWS).outcome is Outcome.UNKNOWN


def test_a_topic_deleted_while_many_transactions_are_committed_stops_the_query(config: Kafka) -> None:
    """All of them are decided before the first answer, and then the topic goes."""
    who, at = identity(), epoch(0)
    parts = [prepare(config, task(who, at, partition), rows("a", "b")) for partition in range(8)]
    with committing(config, who) as committer:
        transactions = committer.participant._transactions
        commit_many = transactions.commit_many

        def followed_by_the_end(*arguments: Any) -> Any:
            decided = commit_many(*arguments)
            assert len(decided) == len(parts)
            recreate_topic(config.bootstrap_servers, str(config.topic))
            return decided

        transactions.commit_many = followed_by_the_end
        verdicts = committer.commit_all(at, parts, NO_ROWS)
    assert {verdict.outcome for verdict in verdicts} == {Outcome.UNKNOWN}


def test_without_a_spool_a_topic_that_was_recreated_stops_the_query(kafka: KafkaService, config: Kafka) -> None:
    who, at = identity(), epoch(0)
    unspooled = Kafka(bootstrap_servers=kafka.bootstrap_servers, topic=config.topic, spool=False)
    part = prepare(unspooled, task(who, at), rows("a"))
    recreate_topic(config.bootstrap_servers, str(config.topic))
    with committing(unspooled, who) as committer:
        with pytest.raises(PrepareFailed, match=f"topic.*{config.topic}.*deleted"):
            committer.vote(at, [part], NO_ROWS)
        assert committer.commit(at, part, NO_ROWS).outcome is Outcome.UNKNOWN


def test_a_topic_recreated_since_the_newest_epoch_stops_the_query_until_that_is_accepted(config: Kafka) -> None:
    """What it held is gone: that is for an operator to see. A pending epoch is then written to the new topic."""
    who, first, second = identity(), epoch(0), epoch(1)
    done = prepare(config, task(who, first), rows("gone with the topic"))
    of, batch = task(who, second), rows("a")
    pending = prepare(config, of, batch)
    last, following = LastDone(0, first.attempt, (done,)), LastDone(1, second.attempt, (pending,))
    with committing(config, who) as committer:
        assert commit(committer, first, done) == COMMITTED
        recreate_topic(config.bootstrap_servers, str(config.topic))
        another = f"{config.topic} of Kafka.* are not those that epoch 0 was written to"
        with pytest.raises(WentBack, match=another):
            committer.verify_applied(last, following)
        with pytest.raises(WentBack, match=another):
            committer.commit(second, pending, NO_ROWS, last)
        with pytest.raises(WentBack, match=another):
            committer.vote(second, [prepare(config, task(who, second, partition=1), rows("b"))], NO_ROWS, last)
    by_word = LastDone(0, "", ())
    with committing(config, who) as committer:
        committer.verify_applied(by_word, following)
        assert committer.commit(second, pending, NO_ROWS, by_word).outcome is Outcome.ABORTED
        spooled = ListRows({of.uuid: [batch]})
        replayed = committer.replay(second, pending, spooled, "e" * 32, by_word)
        assert committer.commit(second, replayed, spooled, by_word) == COMMITTED
        committer.await_visible(second, [replayed], by_word)
        committer.abort_orphans([])
    assert read_all(config.bootstrap_servers, str(config.topic), 1) == ["a"]
