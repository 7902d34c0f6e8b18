"""Two drivers of one query, each on its own copy of the checkpoint: at no moment can both commit the same epoch."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from kafka_kit import (
    NO_ROWS,
    ListRows,
    abort,
    commit,
    committing,
    delete_markers,
    epoch,
    identity,
    prepare,
    read_all,
    rows,
    task,
    vote,
)

from epochsink.errors import Fenced, WentBack
from epochsink.sink import COMMITTED, LastDone, Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator

    from epochsink.kafka import Kafka
    from epochsink.testing.sink_rig import OneSink
    from epochsink_devkit.services import KafkaService


@pytest.fixture
def drivers(topic_sink: Kafka) -> Iterator[tuple[OneSink, OneSink]]:
    """Return the committer of a driver that runs, and one of its copy, which the same generation comes to."""
    with ExitStack() as stack:
        who = identity()
        first, second = (stack.enter_context(committing(topic_sink, who)) for _ in range(2))
        first.fence()
        yield first, second


def test_what_was_prepared_before_another_driver_took_over_is_swept_and_what_comes_after_is_refused(
    topic_sink: Kafka, drivers: tuple[OneSink, OneSink]
) -> None:
    first, second = drivers
    who, at = first.participant._identity, epoch(0)
    before = prepare(topic_sink, task(who, at), rows("a"))
    [before] = vote(first, at, before)
    second.fence()
    assert len(second.abort_orphans([])) == 1
    second.verify_applied(None, None)
    assert first.commit(at, before, NO_ROWS).outcome is Outcome.ABORTED

    after = prepare(topic_sink, task(who, at, partition=1), rows("a"))
    with pytest.raises(Fenced, match=f"process {os.getpid()} on host {socket.gethostname()}"):
        first.vote(at, [after], NO_ROWS)
    assert second.leftovers() == [], "it has ended what it will not record"

    with pytest.raises(Fenced, match="another driver writes for this query"):
        first.replay(at, before, ListRows({before["task"]: [rows("a")]}), "0" * 32)
    assert second.leftovers() == []

    mine = prepare(topic_sink, task(who, at, partition=2), rows("b"))
    assert first.abort_orphans([]) == [], "what is open may be recorded by the other driver"
    [mine] = vote(second, at, mine)
    assert commit(second, at, mine) == COMMITTED
    assert read_all(topic_sink.bootstrap_servers, str(topic_sink.topic), 1) == ["b"]


def test_what_was_committed_before_another_driver_took_over_is_seen_by_it(
    topic_sink: Kafka, drivers: tuple[OneSink, OneSink]
) -> None:
    """Also where the coordinator has not told the partitions yet: the comparison waits for that."""
    first, second = drivers
    at = epoch(0)
    parts = [
        prepare(topic_sink, task(first.participant._identity, at, partition=number), rows("a")) for number in range(8)
    ]
    second.verify_applied(None, None)
    for part in parts:
        assert first.commit(at, part, NO_ROWS) == COMMITTED
    second.fence()
    assert second.abort_orphans([]) == []
    with pytest.raises(WentBack, match="already holds epoch 0"):
        second.verify_applied(None, None)


def test_a_driver_of_a_later_generation_on_another_copy_is_not_disturbed(
    topic_sink: Kafka, drivers: tuple[OneSink, OneSink]
) -> None:
    """No sweep of ours may end what a later generation has open: on one checkpoint it would be its successor's."""
    first, second = drivers
    who, at = replace(first.participant._identity, generation=5), epoch(0)
    first.open(who)
    first.fence()
    part = prepare(topic_sink, task(who, at), rows("a"))
    with pytest.raises(WentBack, match="generation 5 has begun it, and this one is generation 1"):
        second.fence()
    [part] = vote(first, at, part)
    assert commit(first, at, part) == COMMITTED


def test_a_marker_deleted_before_the_first_epoch_is_done_doubles_nothing(
    kafka: KafkaService, topic_sink: Kafka
) -> None:
    """The transactional id itself says that it was committed: no later generation uses it."""
    who, at = identity(), epoch(0)
    part = prepare(topic_sink, task(who, at), rows("a"))
    with committing(topic_sink, who) as committer:
        assert commit(committer, at, part) == COMMITTED
    delete_markers(kafka.bootstrap_servers, who)
    with committing(topic_sink, replace(who, generation=2)) as successor:
        successor.fence()
        successor.verify_applied(None, LastDone(0, at.attempt, (part,)))
        assert successor.commit(at, part, NO_ROWS).outcome is not Outcome.ABORTED
    assert read_all(topic_sink.bootstrap_servers, str(topic_sink.topic), 1) == ["a"]


def test_a_transaction_that_was_aborted_is_told_from_a_marker_that_was_deleted(topic_sink: Kafka) -> None:
    who, at = identity(), epoch(0)
    part = prepare(topic_sink, task(who, at), rows("a"))
    with committing(topic_sink, who) as committer:
        committer.fence()
        abort(committer, part)
        assert committer.commit(at, part, NO_ROWS).outcome is Outcome.ABORTED
