"""A cluster that is an older state of itself."""

from __future__ import annotations

import shutil
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from kafka.protocol.producer import AddOffsetsToTxnRequest
from kafka_kit import (
    NO_ROWS,
    await_visible,
    commit,
    committing,
    create_topic,
    delete_markers,
    epoch,
    identity,
    prepare,
    read_all,
    rows,
    task,
    vote,
)

from epochsink.errors import WentBack
from epochsink.identity import marker_group
from epochsink.kafka import Kafka
from epochsink.kafka.cluster import _TRANSACTION
from epochsink.kafka.committable import KafkaCommittable
from epochsink.kafka.server import raise_for
from epochsink.sink import COMMITTED, LastDone, identity_key
from epochsink_devkit.services import LocalKafka

if TYPE_CHECKING:
    from pathlib import Path

    from epochsink_devkit.services import KafkaService


def test_a_cluster_that_is_set_back_between_check_and_commit_is_noticed_before_the_epoch_is_done(
    tmp_path: Path,
) -> None:
    """And what it holds open again of the done epoch is evidence: nothing aborts it, and it can be finished."""
    with LocalKafka(short_lived=True) as broker:
        topic = create_topic(broker.bootstrap_servers, "orders")
        topic_sink = Kafka(bootstrap_servers=broker.bootstrap_servers, topic=topic, transaction_timeout=600, timeout=20)
        who, first, second = identity(), epoch(0), epoch(1)
        parts = [prepare(topic_sink, task(who, at), rows(str(at.number))) for at in (first, second)]
        broker.stop()
        shutil.copytree(broker.data, tmp_path / "older")
        broker.start()
        done, pending = (
            LastDone(at.number, at.attempt, (part,)) for at, part in zip((first, second), parts, strict=True)
        )
        with committing(topic_sink, who) as committer:
            assert commit(committer, first, parts[0]) == COMMITTED
            committer.verify_applied(done, pending)

        broker.stop()
        shutil.rmtree(broker.data)
        shutil.copytree(tmp_path / "older", broker.data)
        broker.start()
        with committing(topic_sink, who) as committer:
            assert committer.commit(second, parts[1], NO_ROWS, done) == COMMITTED, "EndTxn takes no condition"
            with pytest.raises(WentBack, match=r"shows None in place of Mark\(epoch=0"):
                await_visible(committer, second, [parts[1]], done)
            with pytest.raises(WentBack, match="no marker of this query"):
                committer.verify_applied(done, pending)
            with pytest.raises(WentBack, match="but the ledger says that its epoch is done"):
                committer.abort_orphans([parts[1]], [parts[0]])
            assert commit(committer, first, parts[0]) == COMMITTED
            committer.verify_applied(done, pending)
            await_visible(committer, second, [parts[1]], done)
        assert read_all(broker.bootstrap_servers, topic, 2) == ["0", "1"]


@pytest.mark.parametrize("kafka", [0], indirect=True)
def test_a_marker_s_request_that_comes_after_the_commit_stops_no_start(kafka: KafkaService, topic_sink: Kafka) -> None:
    """Brokers below transaction.version 2 open the transaction again; a sweep aborts it, and the marker stays."""
    who, first = identity(), epoch(0)
    part = prepare(topic_sink, task(who, first), rows("a"))
    done = LastDone(0, first.attempt, (part,))
    with committing(topic_sink, who) as committer:
        [part] = vote(committer, first, part)
        assert commit(committer, first, part) == COMMITTED
        open_again(committer, who, part)
        assert committer.leftovers() == [part["transactional_id"]]
        committer.verify_applied(done, None)
        assert len(committer.abort_orphans([], [part])) == 1
        committer.verify_applied(done, None)
        assert committer.leftovers() == []
    assert read_all(kafka.bootstrap_servers, topic_sink.topic or "", 1) == ["a"]


@pytest.mark.parametrize("kafka", [0], indirect=True)
@pytest.mark.parametrize("is_markers", [True, False])
def test_a_request_that_comes_before_a_commit_is_known_does_not_make_its_rows_be_written_again(
    kafka: KafkaService, topic_sink: Kafka, *, is_markers: bool
) -> None:
    """The driver has crashed between the commit and its record: the id is open, and readers have the rows."""
    who, first = identity(), epoch(0)
    part = prepare(topic_sink, task(who, first), rows("a"))
    with committing(topic_sink, who) as committer:
        [part] = vote(committer, first, part)
        assert commit(committer, first, part) == COMMITTED
        if is_markers:
            open_again(committer, who, part)
        else:
            add_again(committer, part)
    with committing(topic_sink, who) as successor:
        assert commit(successor, first, part) == COMMITTED
        assert successor.leftovers() == []
        successor.verify_applied(LastDone(0, first.attempt, (part,)), None)
    assert read_all(kafka.bootstrap_servers, topic_sink.topic or "", 1) == ["a"]


def add_again(committer: Any, part: Any) -> None:
    """Send the request that adds the rows' partitions once more, as a late duplicate does."""
    known = KafkaCommittable.from_json(part)
    cluster: Any = committer.participant._cluster
    for place in known.places:
        add = partial(cluster.add_partitions, known.transaction, place.topic, [place.partition])
        # refused until the end of the commit is written to all partitions
        cluster.until(cluster.deadline(), add)


def open_again(committer: Any, who: Any, part: Any) -> None:
    """Send the first half of the marker's request once more, as a late duplicate does."""
    late = AddOffsetsToTxnRequest(
        transactional_id=part["transactional_id"],
        producer_id=part["producer_id"],
        producer_epoch=part["producer_epoch"],
        group_id=marker_group(identity_key(who), 0, 0),
        max_version=3,
    )
    cluster: Any = committer.participant._cluster

    def attempt() -> None:
        [answer] = cluster.ask_coordinators(_TRANSACTION, [part["transactional_id"]], lambda _: late)
        # refused until the end of the commit is written to all partitions
        raise_for(answer.error_code, "adding the marker's group once more")

    cluster.until(cluster.deadline(), attempt)


def test_each_epochs_marker_shows_its_loss_though_the_next_epoch_is_there(
    kafka: KafkaService, topic_sink: Kafka
) -> None:
    who, first, second = identity(), epoch(0), epoch(1)
    parts = [prepare(topic_sink, task(who, at), rows("a")) for at in (first, second)]
    done = LastDone(0, first.attempt, (parts[0],))
    with committing(topic_sink, who) as committer:
        assert commit(committer, first, parts[0]) == COMMITTED
        assert committer.commit(second, parts[1], NO_ROWS, done) == COMMITTED
        await_visible(committer, second, [parts[1]], done)
        delete_markers(kafka.bootstrap_servers, who)
        with pytest.raises(WentBack, match="shows None in place of"):
            await_visible(committer, second, [parts[1]], done)
        with pytest.raises(WentBack, match="no marker of this query"):
            committer.verify_applied(done, LastDone(1, second.attempt, (parts[1],)))


def test_a_start_sees_newer_epochs_in_partitions_that_the_ledger_does_not_know(topic_sink: Kafka) -> None:
    """The checkpoint is the older copy, and the epochs since then had rows in other Spark partitions."""
    who, at, later = identity(), epoch(0), epoch(1)
    part = prepare(topic_sink, task(who, at), rows("a"))
    done = LastDone(0, at.attempt, (part,))
    with committing(topic_sink, who) as committer:
        assert commit(committer, at, part) == COMMITTED
        committer.verify_applied(done, None)
        assert commit(committer, later, prepare(topic_sink, task(who, later, partition=7), rows("b"))) == COMMITTED
    for last in (done, None):
        with committing(topic_sink, who) as restored, pytest.raises(WentBack, match=r"already holds epoch [01]"):
            restored.verify_applied(last, None)
