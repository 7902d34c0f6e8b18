"""The coordinator's steps, one after another, on a plain folder; what strikes between them: tests/simulation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from query_by_hand import Query

from epochsink import Kafka
from epochsink.errors import ConfigurationError, Fenced, PrepareFailed, UnsupportedQuery, WentBack
from epochsink.protocol.coordinator import Plan
from epochsink.protocol.ledger import Ledger
from epochsink.protocol.ledger_entries import Entry, Skipped
from epochsink.protocol.sweep import SPOOL_SWEPT_AFTER
from epochsink.sink import Epoch
from epochsink.testing.local_sink import LocalParticipant

if TYPE_CHECKING:
    from pathlib import Path

    from epochsink.sink import Marks


@pytest.fixture
def query(tmp_path: Path) -> Query:
    return Query(tmp_path)


def test_an_epoch_is_visible_after_its_decision_and_not_before(query: Query) -> None:
    driver = query.driver()
    query.prepare(driver, 0, 1, 2)
    assert not driver.commit_decided()
    assert query.visible() == []
    query.decide(0)
    assert driver.commit_decided()
    assert query.visible() == [1, 2]


def test_a_recorded_epoch_is_adopted_by_the_next_driver(query: Query) -> None:
    query.prepare(query.driver(), 0, 1)
    later = query.driver()
    assert later.settle(0) is Plan.RUN_FOR_STATE
    query.decide(0)
    assert later.commit_decided()
    assert query.visible() == [1]


def test_a_superseded_driver_records_nothing(query: Query) -> None:
    older = query.driver()
    epoch, accepted = query.attempt(older, 0, 1)
    query.driver()
    with pytest.raises(Fenced):
        older.record(epoch, {"out": [accepted]}, {})
    assert query.visible() == []


def test_a_checkpoint_in_an_unknown_version_is_refused_before_the_ledger_is_taken(query: Query) -> None:
    """A driver that cannot compare the input of epochs must not fence one that can."""
    older = query.driver()
    query.prepare(older, 0, 1)
    offsets = query.folder / "offsets" / "0"
    known = offsets.read_text()
    offsets.write_text(known.replace("v1", "v3", 1))
    with pytest.raises(UnsupportedQuery, match="offsets/0 of the checkpoint has version 3"):
        query.driver()
    offsets.write_text(known)
    query.decide(0)
    assert older.commit_decided()
    assert query.visible() == [1]


def test_a_disputed_record_is_withdrawn_when_spark_runs_the_epoch_again(query: Query) -> None:
    driver = query.driver()
    query.prepare(driver, 0, 1)
    driver.dispute(0)
    driver.dispute(7)
    later = query.driver()
    assert list(later.queue.pending) == []
    assert len(query.sink.prepared()) == 1  # until Spark runs the epoch again, it may still be decided
    query.prepare(later, 0, 1, 2)
    query.decide(0)
    assert later.commit_decided()
    assert query.visible() == [1, 2]


def test_a_disputed_record_that_is_decided_stands(query: Query) -> None:
    driver = query.driver()
    query.prepare(driver, 0, 1)
    driver.dispute(0)
    later = query.driver()
    query.decide(0)
    query.plan(1)
    assert later.settle(1) is Plan.WRITE
    assert later.commit_decided()
    assert query.visible() == [1]
    driver = query.driver()
    assert query.visible() == [1]


def test_an_epoch_that_was_decided_without_a_call_is_named(query: Query) -> None:
    driver = query.driver()
    query.prepare(driver, 0, 1)
    for epoch in (0, 1):
        query.plan(epoch)
        query.decide(epoch)
    driver.commit_decided()
    query.plan(2)
    with pytest.raises(WentBack, match="epoch 1 was decided without ExactlyOnce"):
        driver.settle(2)


def test_a_decision_that_is_gone_while_spark_goes_on_stops_the_query(query: Query) -> None:
    """Spark writes commits/N before it runs N+1, so settle need not ask for it; that it is not there is noticed."""
    driver = query.driver()
    query.prepare(driver, 0, 1)
    query.plan(1)
    assert driver.settle(1) is Plan.WRITE
    with pytest.raises(WentBack, match="epoch 0 before it is recorded but not decided"):
        driver.commit_decided()


def test_the_next_vote_does_not_wait_for_old_entries_to_go(query: Query) -> None:
    driver = query.driver()
    waited: list[tuple[int, ...]] = []
    driver._run.ledger.trim = lambda: waited.append(tuple(driver.queue.pending))  # type: ignore[method-assign]
    query.prepare(driver, 0, 1)
    query.decide(0)
    assert driver.commit_decided()
    assert waited == [()]


def test_the_spool_is_looked_through_now_and_then(query: Query) -> None:
    """On an object store a late task may leave a file of an attempt that is over, and nothing else would find it."""
    driver = query.driver()
    query.spool.make("query-1", Epoch(0, "f" * 32))
    for number in range(SPOOL_SWEPT_AFTER + 1):
        query.prepare(driver, number, number)
        query.decide(number)
        assert driver.commit_decided()
    assert query.spool.attempts("query-1") == []


def test_decided_epochs_without_a_ledger_are_refused(query: Query) -> None:
    query.plan(0)
    query.decide(0)
    with pytest.raises(WentBack, match="holds no record of them"):
        query.driver()


def test_a_sink_of_another_kind_under_an_old_name_is_refused_before_anything_is_taken(query: Query) -> None:
    """It could read nothing of what the old one has recorded."""
    query.prepare(query.driver(), 0, 1)
    query.decide(0)
    taken = query.history().owner
    topic = Kafka(bootstrap_servers="broker:9092", topic="orders")
    with pytest.raises(ConfigurationError, match=r"'out' was of the kind 'testing' .* and is of the kind 'kafka' now"):
        query.driver(participant=topic.participant({"out": topic}))
    assert query.history().owner == taken


def test_the_kind_of_a_sink_that_joined_under_an_older_version_is_not_asked(query: Query) -> None:
    Ledger(query.files, "older").take("query-1", {"out": {}}, -1)
    query.prepare(query.driver(), 0, 1)
    assert query.history().newest == 0


def test_a_start_compares_before_it_fences_and_fences_before_it_sweeps(
    query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep would end what a target that was set back still has. After it, a fenced driver may have committed."""
    query.prepare(query.driver(), 0, 1)
    taken: list[str] = []

    def note(step: str) -> None:
        call = getattr(LocalParticipant, step)

        def noted(participant: LocalParticipant, *arguments: object) -> object:
            taken.append(step)
            return call(participant, *arguments)

        monkeypatch.setattr(LocalParticipant, step, noted)

    for step in ("marks", "fence", "remnants"):
        note(step)
    query.driver()
    assert taken == ["marks", "fence", "remnants", "marks"]


def test_a_driver_that_is_superseded_while_it_compares_takes_no_fence(
    query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would end its successor, which runs."""
    query.prepare(query.driver(), 0, 1)
    read = LocalParticipant.marks
    fenced: list[LocalParticipant] = []

    def fence(participant: LocalParticipant) -> None:
        fenced.append(participant)

    def take_over(participant: LocalParticipant, *arguments: Any) -> Marks:
        monkeypatch.setattr(LocalParticipant, "marks", read)
        query.driver()
        monkeypatch.setattr(LocalParticipant, "fence", fence)
        return read(participant, *arguments)

    monkeypatch.setattr(LocalParticipant, "marks", take_over)
    with pytest.raises(Fenced):
        query.driver()
    assert fenced == []


def test_an_epoch_that_an_operator_has_accepted_is_not_written(query: Query) -> None:
    driver = query.driver()
    driver._run.ledger.append(Skipped(5))
    for number in (4, 5):
        query.plan(number)
        with pytest.raises(WentBack, match=f"Spark runs epoch {number}, and the ledger has only later ones"):
            driver.settle(number)


def test_a_recorded_epoch_that_spark_runs_with_other_input_stops_the_query(query: Query) -> None:
    query.prepare(query.driver(), 0, 1)
    later = query.driver()
    (query.folder / "offsets" / "0").write_text('v1\n{"batchWatermarkMs":0}\n{"offset":99}')
    with pytest.raises(WentBack, match="epoch 0 is recorded with other offsets"):
        later.settle(0)


def test_a_record_without_an_answer_may_stand_so_nothing_of_it_is_ended(
    query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = query.driver()
    append = driver._run.ledger.append

    def lose_the_answer(entry: Entry) -> None:
        append(entry)
        raise OSError("the store does not answer")

    monkeypatch.setattr(driver._run.ledger, "append", lose_the_answer)
    with pytest.raises(OSError, match="does not answer"):
        query.prepare(driver, 0, 1)
    driver.tidy()
    query.decide(0)
    query.driver()
    assert query.visible() == [1]


def test_a_record_that_arrives_after_its_error_finds_its_rows(query: Query, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that did not answer in time may carry the append out later: until then the ledger does not name them."""
    driver = query.driver()
    append = driver._run.ledger.append
    late: list[Entry] = []

    def keep_waiting(entry: Entry) -> None:
        late.append(entry)
        raise OSError("the store does not answer")

    monkeypatch.setattr(driver._run.ledger, "append", keep_waiting)
    with pytest.raises(OSError, match="does not answer"):
        query.prepare(driver, 0, 1)
    append(late[0])
    query.decide(0)
    query.driver()
    assert query.visible() == [1]


def test_an_epoch_that_was_written_before_an_earlier_one_was_prepared_again_is_not_recorded(query: Query) -> None:
    """In a log its rows would come first."""
    driver = query.driver()
    epoch, accepted = query.attempt(driver, 0, 1)
    with driver.queue.replaying():
        pass
    with pytest.raises(PrepareFailed, match="would be ordered before those of the earlier epoch"):
        driver.record(epoch, {"out": [accepted]}, {})
    assert query.sink.prepared() == []


def test_a_start_without_a_sink_that_has_a_recorded_epoch_names_the_sink_and_the_way_out(query: Query) -> None:
    query.prepare(query.driver(), 0, 1)
    with pytest.raises(ConfigurationError, match="epoch 0 is recorded and not yet committed in sink 'out'"):
        query.driver(participant=query.sink.participant({"other": query.sink}))


def test_no_epoch_is_recorded_while_the_one_before_cannot_be_committed(query: Query) -> None:
    driver = query.driver()
    query.prepare(driver, 0, 1)
    query.decide(0)
    epoch, accepted = query.attempt(driver, 1, 2)
    driver.fail(WentBack("the target was set back"))
    with pytest.raises(WentBack, match="set back"):
        driver.record(epoch, {"out": [accepted]}, {})
    assert query.history().newest == 0


@pytest.mark.parametrize("reads", [False, True])
def test_an_attempt_whose_tasks_read_the_target_begins_when_no_epoch_is_pending(
    query: Query,
    monkeypatch: pytest.MonkeyPatch,
    reads: bool,  # noqa: FBT001 - pytest's way
) -> None:
    """Else a task that deletes a key would not see the row that the epoch before is about to show."""
    monkeypatch.setattr(type(query.sink), "writers_read", reads)
    driver = query.driver()
    query.prepare(driver, 0, 1)
    query.decide(0)
    query.plan(1)
    assert driver.settle(1) is Plan.WRITE
    waited: list[tuple[int, ...]] = []
    monkeypatch.setattr(driver.queue, "wait_settled", lambda: waited.append(driver.queue.pending))
    driver.begin(1)
    assert waited == ([(0,)] if reads else [])
