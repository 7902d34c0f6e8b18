"""What Spark has decided is committed: at the next start, and at the end of the stream."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from folder_sink import FolderParticipant, FolderSink
from query_by_hand import Query

from epochsink.errors import Fenced, OutcomeUnknown, PrepareFailed, RowsRejected, WentBack
from epochsink.protocol import commit_engine
from epochsink.protocol.ledger import Ledger
from epochsink.sink import Outcome, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from epochsink.protocol.coordinator import Coordinator
    from epochsink.sink import Ballots, Committable, Epoch


@pytest.fixture
def query(tmp_path: Path) -> Query:
    return Query(tmp_path)


def test_a_decided_epoch_is_committed_at_the_next_start(query: Query) -> None:
    query.prepare(query.driver(), 0, 1)
    query.decide(0)
    query.driver()
    assert query.visible() == [1]


def test_draining_commits_what_is_decided_and_leaves_the_rest(query: Query) -> None:
    driver = query.driver()
    query.prepare(driver, 0, 1)
    driver.drain()
    assert query.visible() == []
    query.decide(0)
    driver.drain()
    assert query.visible() == [1]


def test_a_refusal_after_the_decision_names_the_source_of_its_epoch(
    query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RowsRejected("a constraint refuses a row")

    participant = query.sink.participant({"out": query.sink})
    monkeypatch.setattr(participant, "commit", refuse)
    driver = query.driver(participant=participant)
    query.prepare(driver, 0, 1)
    query.decide(0)
    with pytest.raises(RowsRejected, match="a constraint") as refused:
        driver.commit_decided()
    assert refused.value.message.startswith("sink 'out': ")
    assert refused.value.message.endswith('; source of epoch 0: the beginning to {"offset":0}')


class OfTasks(FolderParticipant):
    """Each task is a part, some of which are lost; notes what it is asked to commit."""

    def __init__(self, members: Mapping[str, FolderSink]) -> None:
        super().__init__(members)
        self.asked: list[list[Committable]] = []
        self.lost: list[Committable] = []
        self.went_back = False
        self.unknown = False
        self.replayed: list[Committable] = []
        self.meanwhile: Callable[[], object] = lambda: None

    def commit(self, epoch: Epoch, ballots: Ballots) -> Mapping[str, Sequence[Verdict]]:
        if self.went_back:
            raise WentBack("the target was set back")
        parts = ballots["out"].parts
        self.meanwhile()
        self.asked.append(list(parts))
        if self.unknown:
            return {"out": [Verdict(Outcome.UNKNOWN, "no answer")] * len(parts)}
        left = replace(ballots["out"], parts=[part for part in parts if part not in self.lost])
        committed = iter(super().commit(epoch, {"out": left})["out"])
        return {"out": [Verdict(Outcome.ABORTED) if part in self.lost else next(committed) for part in parts]}

    def replay(self, epoch: Epoch, part: Committable, ballots: Ballots, attempt: str) -> Committable:
        del ballots
        self.replayed.append(part)
        again = f"{epoch.number}-{attempt}-{part['file'].rpartition('-')[2]}"
        (self._place("prepared") / part["file"]).rename(self._place("prepared") / again)
        return {**part, "file": again}


def three_tasks(tmp_path: Path) -> tuple[Query, Coordinator, OfTasks, list[Committable]]:
    """Decide an epoch of three tasks, each of them a part."""
    query = Query(tmp_path)
    folder: Any = FolderSink(str(tmp_path / "sink"))
    query.sink = folder
    participant = OfTasks({"out": folder})
    driver = query.driver(participant=participant)
    query.plan(0)
    driver.settle(0)
    epoch = driver.begin(0)
    tasks = [query.task(driver, epoch, (number,)) for number in range(3)]
    driver.record(epoch, {"out": tasks}, {})
    query.decide(0)
    return query, driver, participant, [part for _, part in tasks]


def test_only_what_the_target_has_lost_is_prepared_again_and_committed_again(tmp_path: Path) -> None:
    query, driver, participant, parts = three_tasks(tmp_path)
    participant.lost = parts[1:2]
    assert driver.commit_decided()
    first, second = participant.asked
    assert first == parts
    assert len(second) == 1
    assert second[0]["file"] not in [part["file"] for part in parts]
    assert query.visible() == [0, 1, 2]


def test_the_dead_letters_of_a_part_that_was_prepared_again_are_added_to_those_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, driver, participant, parts = three_tasks(tmp_path)
    participant.lost = parts[1:2]
    commit = participant.commit

    def with_letters(epoch: Epoch, ballots: Ballots) -> Mapping[str, Sequence[Verdict]]:
        return {
            "out": [
                replace(verdict, set_aside=2) if verdict.outcome is Outcome.COMMITTED else verdict
                for verdict in commit(epoch, ballots)["out"]
            ]
        }

    monkeypatch.setattr(participant, "commit", with_letters)
    assert driver.commit_decided()
    assert len(participant.asked) == 2
    told = query.history().receipts[0].sinks["out"]
    assert told.set_aside == 6


def test_what_readers_see_is_awaited_before_the_epoch_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All parts at once, as last prepared."""
    query, driver, participant, parts = three_tasks(tmp_path)
    participant.lost = parts[1:2]
    awaited: list[tuple[list[Committable], list[int], set[int]]] = []

    def visible(epoch: Epoch, ballots: Ballots, _: object) -> list[str]:
        assert epoch.number == 0
        awaited.append((list(ballots["out"].parts), query.visible(), query.history().done))
        return []

    monkeypatch.setattr(participant, "visible", visible)
    assert driver.commit_decided()
    again = participant.asked[1]
    assert awaited == [([parts[0], *again, parts[2]], [0, 1, 2], set())]
    assert query.history().done == {0}


def test_what_was_prepared_again_is_what_is_cleared_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, driver, participant, parts = three_tasks(tmp_path)
    participant.lost = parts[1:2]
    finished: list[list[Committable]] = []
    monkeypatch.setattr(participant, "finish", lambda _, ballots: finished.append(list(ballots["out"].parts)))
    assert driver.commit_decided()
    assert finished == [[parts[0], *participant.asked[1], parts[2]]]


def test_an_epoch_that_readers_do_not_see_is_not_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    query, driver, participant, _ = three_tasks(tmp_path)

    def visible(*_: object) -> None:
        raise OutcomeUnknown("the target does not say")

    with monkeypatch.context() as patched:
        patched.setattr(participant, "visible", visible)
        with pytest.raises(OutcomeUnknown, match="sink 'out': the target does not say"):
            driver.commit_decided()
    assert [one.epoch for one in query.history().pending] == [0]
    query.driver(participant=participant)
    assert query.history().done == {0}


def test_a_target_that_went_back_stops_all_parts_of_an_epoch(tmp_path: Path) -> None:
    query, driver, participant, _ = three_tasks(tmp_path)
    participant.went_back = True
    with pytest.raises(WentBack, match="sink 'out': the target was set back"):
        driver.commit_decided()
    assert participant.asked == []
    assert query.visible() == []


def test_what_may_have_been_committed_is_not_prepared_again(tmp_path: Path) -> None:
    _, driver, participant, _ = three_tasks(tmp_path)
    participant.unknown = True
    with pytest.raises(OutcomeUnknown, match="whether sink 'out' committed it is unknown: no answer"):
        driver.commit_decided()
    assert participant.replayed == []


def test_a_superseded_driver_concludes_nothing_from_a_targets_answer(tmp_path: Path) -> None:
    query, driver, participant, _ = three_tasks(tmp_path)
    participant.unknown = True
    participant.meanwhile = lambda: Ledger(query.files, "other").take("query-1", {}, -1)
    with pytest.raises(Fenced):
        driver.commit_decided()


def test_a_superseded_driver_prepares_nothing_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its successor may have committed these rows since, or be about to."""
    query, driver, participant, parts = three_tasks(tmp_path)
    participant.lost = parts[1:2]

    def supersede(point: str) -> None:
        if point == "coordinator.replay.before":
            Ledger(query.files, "other").take("query-1", {}, -1)

    monkeypatch.setattr(commit_engine, "reach", supersede)
    with pytest.raises(Fenced):
        driver.commit_decided()
    assert participant.replayed == []


def test_a_part_is_not_prepared_again_in_a_target_that_was_set_back(tmp_path: Path) -> None:
    """What is missing there proves nothing: the rows before it are missing too."""
    query, driver, participant, _ = three_tasks(tmp_path)
    assert driver.commit_decided()
    query.prepare(driver, 1, 3)
    query.decide(1)
    (part,) = query.history().pending[0].parts_of("out")
    participant.lost = [part]

    def set_back() -> None:
        for visible in participant._place("visible").iterdir():
            visible.unlink()

    participant.meanwhile = set_back
    with pytest.raises(WentBack, match="no marker of this query"):
        driver.commit_decided()
    assert participant.replayed == []


def test_an_attempt_that_a_replay_has_overtaken_is_not_recorded(tmp_path: Path) -> None:
    """In a log its rows would stand before those of the epoch before it. The next attempt is recorded."""
    query, driver, participant, parts = three_tasks(tmp_path)
    query.plan(1)
    driver.settle(1)
    epoch = driver.begin(1)
    accepted = query.task(driver, epoch, (3,))
    participant.lost = parts[1:2]
    assert driver.commit_decided()
    with pytest.raises(PrepareFailed, match="epoch 1 was being written when the epoch before it"):
        driver.record(epoch, {"out": [accepted]}, {})
    assert query.history().newest == 0


def test_other_input_under_a_decided_epoch_stops_its_commit(query: Query) -> None:
    query.prepare(query.driver(), 0, 1)
    (query.folder / "offsets" / "0").write_text('v1\n{"batchWatermarkMs":0}\n{"offset":99}')
    query.decide(0)
    with pytest.raises(WentBack, match="epoch 0 is recorded with other offsets"):
        query.driver()
    assert query.visible() == []


def test_an_epoch_that_spark_decided_without_a_record_is_named_as_the_stream_ends(query: Query) -> None:
    driver = query.driver()
    query.plan(0)
    query.decide(0)
    with pytest.raises(WentBack, match="epoch 0 was decided without ExactlyOnce"):
        driver.drain()
