"""Transactions that one process prepares and another ends, on clusters with each level of transaction.version."""

from __future__ import annotations

import dataclasses
import gc
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from fix_kafka import at_every_transaction_version
from kafka_kit import (
    NO_ROWS,
    ListRows,
    Reader,
    abort,
    await_visible,
    commit,
    committed,
    committing,
    create_topic,
    delete_markers,
    epoch,
    identity,
    prepare,
    prepare_and_die,
    read_all,
    rows,
    task,
    transaction,
    vote,
)
from query_by_hand import Query
from waiting import wait_until

from epochsink.errors import OutcomeUnknown, PrepareFailed, SpoolMissing, WentBack
from epochsink.kafka import Kafka
from epochsink.kafka.applied_epochs import Markers
from epochsink.kafka.committable import KafkaCommittable
from epochsink.kafka.server import Description, TransactionState
from epochsink.kafka.transactions import EndTxnResult, Transactions
from epochsink.sink import COMMITTED, LastDone, Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fix_services import FreshName

    from epochsink.sink import Epoch, Identity, Task
    from epochsink_devkit.services import KafkaService

pytestmark = at_every_transaction_version


@pytest.fixture
def topic(kafka: KafkaService, fresh_topic: FreshName) -> str:
    return create_topic(kafka.bootstrap_servers, fresh_topic())


@pytest.fixture
def config(kafka: KafkaService, topic: str) -> Kafka:
    return Kafka(bootstrap_servers=kafka.bootstrap_servers, topic=topic, timeout=20)


def native_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.essential
def test_rows_of_a_task_that_died_after_prepare_appear_at_commit_and_not_before(
    kafka: KafkaService, topic: str, config: Kafka
) -> None:
    who, at = identity(), epoch(7)
    settings = {"bootstrap_servers": kafka.bootstrap_servers, "topic": topic}
    part = prepare_and_die(settings, task(who, at), "one", "two", "three")
    with committing(config, who) as committer, Reader(kafka.bootstrap_servers, topic) as reader:
        [part] = vote(committer, at, part)
        assert committer.newest() is None
        assert reader.poll(1) == []
        assert commit(committer, at, part) == COMMITTED
        reader.until(3)
        assert reader.values() == ["one", "three", "two"]
        assert committer.newest() == 7


def test_a_commit_may_be_repeated_by_anybody_and_shows_the_rows_once(
    kafka: KafkaService, topic: str, config: Kafka
) -> None:
    who, at = identity(), epoch(0)
    part = prepare(config, task(who, at), rows("a", "b"))
    for _ in range(2):
        with committing(config, who) as committer:
            assert commit(committer, at, part) == COMMITTED
            assert commit(committer, at, part) == COMMITTED
    assert read_all(kafka.bootstrap_servers, topic, 2) == ["a", "b"]


def test_each_slot_is_committed_on_its_own(kafka: KafkaService, topic: str, config: Kafka) -> None:
    who, at = identity(), epoch(5)
    first = prepare(config, task(who, at, partition=0), rows("a"))
    second = prepare(config, task(who, at, partition=1), rows("b"))
    with committing(config, who) as committer:
        [first, second] = vote(committer, at, first, second)
        assert commit(committer, at, second) == COMMITTED
        assert committer.participant._markers.of_partition(0, committer.participant._cluster.deadline()) is None
        assert committer.participant._markers.of_partition(1, committer.participant._cluster.deadline()) == 5
        assert commit(committer, at, first) == COMMITTED
    assert read_all(kafka.bootstrap_servers, topic, 2) == ["a", "b"]


def test_a_marker_that_an_open_transaction_may_replace_is_waited_for_and_not_for_ever(config: Kafka) -> None:
    """An open one may belong to another attempt, which is aborted only later."""
    who, at = identity(), epoch(4)
    part = prepare(config, task(who, at), rows("a"))
    with committing(config, who) as committer:
        markers, of, begun = committer.participant._markers, KafkaCommittable.from_json(part), time.monotonic()
        assert markers.settled(4, of, begun + 20) is None
        assert 2 <= time.monotonic() - begun < 10
        assert commit(committer, at, part) == COMMITTED
        assert markers.settled(4, of, time.monotonic() + 5) == 4


def test_two_parts_of_one_slot_are_refused_before_anything_is_recorded(config: Kafka) -> None:
    """The marker of a slot proves the commit of whatever is in it: after one commit the other part would be lost."""
    who, at = identity(), epoch(5)
    parts = [prepare(config, task(who, at, partition=3), rows(name)) for name in "ab"]
    with committing(config, who) as committer:
        with pytest.raises(PrepareFailed, match=r"Spark partition\(s\) 3,") as refused:
            vote(committer, at, *parts)
        assert not refused.value.may_pass
        assert committer.newest() is None
        for part in parts:
            abort(committer, part)


def test_many_transactions_are_decided_side_by_side_and_what_is_lost_is_left_to_who_asks_for_it(
    kafka: KafkaService, topic: str, config: Kafka
) -> None:
    """Of many, one was aborted by somebody; none that is decided is left unwritten."""
    who, at = identity(), epoch(5)
    parts = [prepare(config, task(who, at, partition), rows(str(partition))) for partition in range(9)]
    with committing(config, who) as committer:
        assert committed(committer, at, parts[:2]) == {0, 1}
        abort(committer, parts[3])
        kept = set(range(9)) - {3}
        assert committed(committer, at, parts) == kept
        assert committer.commit(at, parts[3], NO_ROWS).outcome is Outcome.ABORTED
        assert committed(committer, at, parts) == kept, "it may be repeated"
        whole = [parts[index] for index in sorted(kept)]
        await_visible(committer, at, whole)
        ids = [part["transactional_id"] for part in whole]
        transactions, deadline = committer.participant._transactions, committer.participant._cluster.deadline()

        def states() -> set[TransactionState]:
            return {found.state for found in transactions.describe(ids, deadline).values()}

        # readers may have all rows a little before the coordinator has written that it is done
        wait_until(lambda: states() == {TransactionState.COMPLETE_COMMIT}, "all transactions have ended")
        assert committer.newest() == 5
    assert read_all(kafka.bootstrap_servers, topic, 8) == [str(partition) for partition in sorted(kept)]


def test_what_a_losing_attempt_has_open_is_ended_before_its_epoch_is_done(
    kafka: KafkaService, topic: str, config: Kafka, tmp_path: Path
) -> None:
    """Readers would get to the epoch's rows only after its end. The attempt at the next epoch goes on."""
    participant = config.participant({"out": config})
    query = Query(tmp_path)
    driver = query.driver(participant=participant)
    query.plan(0)
    driver.settle(0)
    at, who = driver.begin(0), driver.identity("out")
    prepare(config, numbered(who, at, 0), rows("loser", "loser", "loser"))
    counts = numbered(who, at, 1)
    driver.record(at, {"out": [(counts.uuid, prepare(config, counts, rows("a", "b", "c")))]}, {})
    following = prepare(config, numbered(who, epoch(1), 2), rows("x", "y", "z"))
    query.decide(0)
    assert driver.commit_decided()
    with Reader(kafka.bootstrap_servers, topic) as reader:
        reader.poll(2.0)
        assert reader.values() == ["a", "b", "c"], "the epoch is done"
    assert [each.name for each in participant.remnants(([], []))] == [following["transactional_id"]]
    participant.close()


def test_nothing_that_the_ledger_names_is_ended_for_the_sake_of_readers(config: Kafka) -> None:
    """A part of a done epoch that is open is evidence of a cluster that was set back."""
    who, at = identity(), epoch(0)
    before, part = (prepare(config, numbered(who, at, slot), rows("a", "b", "c")) for slot in (0, 1))
    with committing(config, who) as committer:
        [part] = vote(committer, at, part)
        assert committer.commit(at, part, NO_ROWS) == COMMITTED
        assert committer.visible(at, [part], keep=[part, before]) == []
        with pytest.raises(WentBack, match="but the ledger says that its epoch is done"):
            committer.visible(at, [part], keep=[part], done=[before])
        assert committer.leftovers() == [before["transactional_id"]]
        assert len(committer.visible(at, [part], keep=[part])) == 1
        assert committer.leftovers() == []


@pytest.mark.parametrize("late", ["rows", "markers"])
def test_an_epoch_is_not_done_before_the_coordinator_has_written_its_end_to_the_partitions(
    config: Kafka, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    """Neither to those with its rows nor to those of the groups with its markers."""
    who, at = identity(), epoch(0)
    part = prepare(config, task(who, at), rows("a"))
    with committing(dataclasses.replace(config, timeout=4), who) as committer:
        [part] = vote(committer, at, part)
        with monkeypatch.context() as held:
            if late == "rows":
                held.setattr(Transactions, "end", lambda *_, **__: (EndTxnResult.DECIDED, "NONE"))
            else:
                held.setattr(Markers, "read", lambda *_, **__: {})
            held.setattr(Transactions, "describe", still_ending)
            assert committer.commit(at, part, NO_ROWS) == COMMITTED
            with pytest.raises(OutcomeUnknown, match="not written to the partitions yet"):
                await_visible(committer, at, [part])
        assert committer.commit(at, part, NO_ROWS) == COMMITTED
        await_visible(committer, at, [part])


def still_ending(_: Transactions, ids: Sequence[str], deadline: float) -> dict[str, Description]:
    """Answer as a coordinator that has stored its decisions, and has not written them to the partitions."""
    del deadline
    return dict.fromkeys(ids, Description(TransactionState.PREPARE_COMMIT))


def numbered(who: Identity, at: Epoch, number: int) -> Task:
    """Return a task attempt with a transactional id that attempts with other numbers do not take."""
    return task(who, at, name=f"{number:032x}")


def test_neither_dropping_nor_collecting_a_writer_ends_its_transaction_or_keeps_its_threads(config: Kafka) -> None:
    who, at = identity(), epoch(0)
    threads = native_threads()
    parts = []
    for partition in range(3):
        writer = config.writer(task(who, at, partition))
        writer.write(rows("a"))
        parts.append(writer.prepare())
    unprepared = config.writer(task(who, at, 9))
    unprepared.write(rows("never prepared"))
    del writer, unprepared
    gc.collect()
    wait_until(lambda: native_threads() <= threads, "the producers' threads end")
    with committing(config, who) as committer:
        parts = vote(committer, at, *parts)


def test_an_aborted_attempt_is_never_seen_and_holds_no_reader_back(
    kafka: KafkaService, topic: str, config: Kafka
) -> None:
    who, at = identity(), epoch(0)
    part = prepare(config, task(who, at), rows("aborted"))
    later = epoch(1)
    after = prepare(config, task(who, later), rows("after"))
    with committing(config, who) as committer:
        abort(committer, part)
        abort(committer, part)
        assert commit(committer, at, part).outcome is Outcome.ABORTED
        assert commit(committer, later, after) == COMMITTED
        assert read_all(kafka.bootstrap_servers, topic, 1) == ["after"]


def test_a_writer_that_gives_up_aborts_its_rows(kafka: KafkaService, topic: str, config: Kafka) -> None:
    who, at = identity(), epoch(0)
    writer = config.writer(task(who, at))
    writer.write(rows(*["given up"] * 1000))
    writer.abort()
    later = epoch(1)
    part = prepare(config, task(who, later), rows("after"))
    with committing(config, who) as committer:
        assert commit(committer, later, part) == COMMITTED
        # the client may give up while its request to begin is still on the way: then the sweep has to end it
        committer.abort_orphans([])
        assert committer.abort_orphans([]) == []
    assert read_all(kafka.bootstrap_servers, topic, 1) == ["after"]


def test_an_accepted_task_whose_id_another_attempt_has_taken_is_written_again_in_the_vote(
    kafka: KafkaService, topic: str, config: Kafka
) -> None:
    """As one speculative copy in sixteen does, which comes to the same id."""
    who, at = identity(), epoch(0)
    name, batch = uuid.uuid4().hex, rows("winner")
    part = prepare(config, task(who, at, name=name), batch)
    other = prepare(config, task(who, at, partition=1), rows("other"))
    prepare(config, task(who, at, name=name), rows("copy"))
    with committing(config, who) as committer:
        voted = committer.vote(at, [part, other], ListRows({name: [batch]}))
        assert voted[0]["task"] == name
        assert transaction(voted[1]) == transaction(other)
        committer.abort_orphans(voted)
        assert [commit(committer, at, each) for each in voted] == [COMMITTED, COMMITTED]
    assert read_all(kafka.bootstrap_servers, topic, 2) == ["other", "winner"]


def test_a_lost_transaction_without_its_rows_fails_the_vote(config: Kafka) -> None:
    who, at = identity(), epoch(0)
    name = uuid.uuid4().hex
    part = prepare(config, task(who, at, name=name), rows("winner"))
    prepare(config, task(who, at, name=name), rows("copy"))
    with committing(config, who) as committer, pytest.raises(SpoolMissing):
        committer.vote(at, [part], NO_ROWS)


def test_an_attempt_that_is_fenced_while_it_writes_names_nothing_open_and_the_later_one_stands(
    kafka: KafkaService, topic: str, config: Kafka
) -> None:
    who, at = identity(), epoch(0)
    name = uuid.uuid4().hex
    earlier = config.writer(task(who, at, name=name))
    earlier.write(rows("earlier"))
    part = prepare(config, task(who, at, name=name), rows("later"))
    assert earlier.prepare()["producer_id"] == -1
    with committing(config, who) as committer:
        [part] = vote(committer, at, part)
        assert commit(committer, at, part) == COMMITTED
    assert read_all(kafka.bootstrap_servers, topic, 1) == ["later"]


def test_a_zombie_that_uses_a_recorded_id_again_costs_a_replay_and_no_row(
    kafka: KafkaService, topic: str, config: Kafka
) -> None:
    who, at = identity(), epoch(4)
    name = uuid.uuid4().hex
    batches = [rows("a", "b"), rows("c")]
    part = prepare(config, task(who, at, name=name), *batches)
    prepare(config, task(who, epoch(6), name=name), rows("zombie"))
    spool = ListRows({name: batches})
    with committing(config, who) as committer:
        verdict = commit(committer, at, part, spool)
        assert verdict.outcome is Outcome.ABORTED, verdict
        assert part["transactional_id"] in verdict.evidence
        replayed = committer.replay(at, part, spool, uuid.uuid4().hex)
        assert replayed["task"] == part["task"]
        assert replayed["rows"] == 3
        assert commit(committer, at, replayed, spool) == COMMITTED
        assert commit(committer, at, part, spool) == COMMITTED, "the marker tells that its rows are there"
        committer.abort_orphans([])
    assert read_all(kafka.bootstrap_servers, topic, 3) == ["a", "b", "c"]


def test_an_id_that_has_moved_on_after_the_commit_is_known_by_its_marker(
    kafka: KafkaService, topic: str, config: Kafka
) -> None:
    who, at = identity(), epoch(4)
    name = uuid.uuid4().hex
    part = prepare(config, task(who, at, name=name), rows("a"))
    with committing(config, who) as committer:
        assert commit(committer, at, part) == COMMITTED
        later = prepare(config, task(who, epoch(6), name=name), rows("b"))
        assert later["transactional_id"] == part["transactional_id"]
        assert commit(committer, at, part) == COMMITTED
        abort(committer, later)
    assert read_all(kafka.bootstrap_servers, topic, 1) == ["a"]


def test_a_marker_that_may_have_expired_proves_nothing(kafka: KafkaService, config: Kafka) -> None:
    who, at = identity(), epoch(4)
    name = uuid.uuid4().hex
    part = prepare(config, task(who, at, name=name), rows("a"))
    with committing(config, who) as committer:
        assert commit(committer, at, part) == COMMITTED
        later = prepare(config, task(who, epoch(6), name=name), rows("b"))
        abort(committer, later)
        delete_markers(kafka.bootstrap_servers, who)
        verdict = commit(committer, at, part | {"prepared_at": part["prepared_at"] - 8 * 86_400})
        assert verdict.outcome is Outcome.UNKNOWN
        assert "offsets.retention.minutes" in verdict.evidence


def test_an_id_that_the_broker_has_forgotten_is_judged_by_the_marker_alone(config: Kafka) -> None:
    who, at = identity(), epoch(4)
    part = prepare(config, task(who, at), rows("a"))
    forgotten = part | {"transactional_id": f"{part['transactional_id']}9"}
    with committing(config, who) as committer:
        assert commit(committer, at, forgotten).outcome is Outcome.UNKNOWN
        assert commit(committer, at, part) == COMMITTED
        assert commit(committer, at, forgotten) == COMMITTED
        assert commit(committer, epoch(6), forgotten).outcome is Outcome.ABORTED


def test_the_sweep_aborts_orphans_so_that_readers_get_on_and_keeps_what_is_recorded(
    kafka: KafkaService, topic: str, config: Kafka
) -> None:
    who, other, at = identity(generation=2), identity(), epoch(0)
    orphan = prepare(config, task(identity(1, query_id=who.query_id), at), rows("orphan"))
    recorded = prepare(config, task(who, at, partition=1), rows("recorded"))
    newer = prepare(config, task(identity(3, query_id=who.query_id), at, partition=2), rows("of a newer driver"))
    foreign = prepare(config, task(other, at), rows("foreign"))
    with committing(config, who) as committer:
        [line] = committer.abort_orphans([recorded])
        assert orphan["transactional_id"] in line
        assert committer.abort_orphans([recorded]) == []
        [recorded, newer] = vote(committer, at, recorded, newer)
        for part in (recorded, newer):
            assert commit(committer, at, part) == COMMITTED
    with committing(config, other) as committer:
        [foreign] = vote(committer, at, foreign)
        assert commit(committer, at, foreign) == COMMITTED
    assert read_all(kafka.bootstrap_servers, topic, 3) == ["foreign", "of a newer driver", "recorded"]


def test_the_sweep_aborts_a_zombie_under_a_recorded_id(config: Kafka) -> None:
    who, at = identity(), epoch(0)
    name = uuid.uuid4().hex
    recorded = prepare(config, task(who, at, name=name), rows("recorded"))
    prepare(config, task(who, at, name=name), rows("zombie"))
    with committing(config, who) as committer:
        assert len(committer.abort_orphans([recorded])) == 1
        assert commit(committer, at, recorded).outcome is Outcome.ABORTED


def test_the_sweep_leaves_what_belongs_to_a_done_epoch_and_stops(
    kafka: KafkaService, topic: str, config: Kafka
) -> None:
    """As after an unclean election of the coordinator, which has lost the end of a transaction."""
    who, at = identity(), epoch(3)
    part = prepare(config, task(who, at), rows("done"))
    with committing(config, who) as committer:
        for keep in ([], [prepare(config, task(who, epoch(4)), rows("pending"))]):
            with pytest.raises(WentBack, match=f"{part['transactional_id']}.* exists, but the ledger says"):
                committer.abort_orphans(keep, [part])
        assert commit(committer, at, part) == COMMITTED, "it is still there to be finished"
        committer.abort_orphans([])
    assert read_all(kafka.bootstrap_servers, topic, 1) == ["done"]


def test_the_sweep_leaves_a_replay_alone_that_is_not_recorded_yet(config: Kafka) -> None:
    who, at = identity(), epoch(0)
    part = prepare(config, task(who, at, name="ab" * 16), rows("a"))
    spool = ListRows({"ab" * 16: [rows("a")]})
    with committing(config, who) as committer:
        abort(committer, part)
        replayed = committer.replay(at, part, spool, uuid.uuid4().hex)
        assert committer.abort_orphans([]) == []
        assert commit(committer, at, replayed, spool) == COMMITTED
    with committing(config, who) as another:
        assert commit(another, at, replayed, spool) == COMMITTED


def test_a_replay_goes_to_the_topic_that_the_rows_were_written_to(
    kafka: KafkaService, topic: str, config: Kafka, fresh_topic: FreshName
) -> None:
    """The start that prepares them again has another ``topic=``: theirs is recorded."""
    elsewhere = create_topic(kafka.bootstrap_servers, fresh_topic())
    who, at = identity(), epoch(0)
    part = prepare(config, task(who, at), rows("a"))
    moved = Kafka(bootstrap_servers=kafka.bootstrap_servers, topic=elsewhere, timeout=20)
    with committing(moved, who) as committer:
        abort(committer, part)
        spool = ListRows({part["task"]: [rows("a")]})
        replayed = committer.replay(at, part, spool, uuid.uuid4().hex)
        assert commit(committer, at, replayed, spool) == COMMITTED
    assert read_all(kafka.bootstrap_servers, topic, 1) == ["a"]


def test_a_replay_needs_all_rows_in_the_spool(config: Kafka) -> None:
    who, at = identity(), epoch(0)
    part = prepare(config, task(who, at), rows("a", "b"))
    with committing(config, who) as committer:
        abort(committer, part)
        with pytest.raises(SpoolMissing):
            committer.replay(at, part, NO_ROWS, uuid.uuid4().hex)
        with pytest.raises(SpoolMissing, match="holds 1 rows, and 2 were prepared"):
            committer.replay(at, part, ListRows({part["task"]: [rows("a")]}), uuid.uuid4().hex)
        assert committer.abort_orphans([]) == [], "what the failed replay had begun is aborted"


def test_without_a_spool_no_id_is_ever_used_again(config: Kafka) -> None:
    unspooled = dataclasses.replace(config, spool=False)
    who, at = identity(), epoch(0)
    name = uuid.uuid4().hex
    part = prepare(unspooled, task(who, at, name=name), rows("a"))
    assert f".{name}." in part["transactional_id"]
    zombie = prepare(unspooled, task(who, at), rows("zombie"))
    with committing(unspooled, who) as committer:
        [part] = vote(committer, at, part)
        assert committer.abort_orphans([part]) != []
        assert zombie["transactional_id"] != part["transactional_id"]
        assert commit(committer, at, part) == COMMITTED


def test_newest_is_the_largest_epoch_of_all_partitions_ever_used(config: Kafka) -> None:
    who = identity()
    with committing(config, who) as committer:
        for number, partition in ((3, 11), (5, 2), (4, 0)):
            at = epoch(number)
            part = prepare(config, task(who, at, partition), rows("a"))
            assert commit(committer, at, part) == COMMITTED
        pending = prepare(config, task(who, epoch(9), 2), rows("not committed"))
        assert committer.newest() == 5
        abort(committer, pending)
    with committing(config, identity()) as stranger:
        assert stranger.newest() is None


def test_the_next_epoch_may_be_open_while_the_last_one_is_committed(
    kafka: KafkaService, topic: str, config: Kafka
) -> None:
    who, at, then = identity(), epoch(0), epoch(1)
    name = uuid.uuid4().hex
    part = prepare(config, task(who, at, name=name), rows("a"))
    following = prepare(config, task(who, then, name=name), rows("b"))
    with committing(config, who) as committer:
        assert commit(committer, at, part) == COMMITTED
        assert committer.newest() == 0
        assert commit(committer, then, following) == COMMITTED
        assert committer.newest() == 1
    assert read_all(kafka.bootstrap_servers, topic, 2) == ["a", "b"]


def test_found_fixes_the_brokers_cap_of_transaction_timeouts(config: Kafka) -> None:
    with committing(config, identity()) as committer:
        assert committer.join().origin == {"transaction_timeout": 900.0, "largest_batch": 1_048_588}


def test_an_epoch_that_another_copy_of_the_checkpoint_has_written_is_noticed(config: Kafka) -> None:
    """Both copies write epoch 1: the marker says by which attempt, so the other one stops."""
    who = identity()
    with committing(config, who) as committer:
        first = epoch(0)
        done = prepare(config, task(who, first), rows("zero"))
        assert commit(committer, first, done) == COMMITTED
        last = LastDone(0, first.attempt, (done,))
        committer.verify_applied(last, None)
        ours, theirs = epoch(1), epoch(1)
        part = prepare(config, task(who, theirs), rows("theirs"))
        assert commit(committer, theirs, part) == COMMITTED
        with pytest.raises(WentBack, match="already holds epoch 1"):
            committer.verify_applied(last, None)
        with pytest.raises(WentBack, match=f"by attempt {theirs.attempt}.* another copy of this checkpoint"):
            committer.verify_applied(last, LastDone(1, ours.attempt, (part,)))
        with pytest.raises(WentBack, match="another copy of this checkpoint"):
            await_visible(committer, ours, [part])
        with pytest.raises(WentBack, match="epoch 2 is done: the target is the older copy"):
            committer.verify_applied(LastDone(2, first.attempt, (part,)), None)
