"""A ledger that the production engine wrote is one that the specification allows; a forged one is not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from query_by_hand import Query

from epochsink.protocol.coordinator import Coordinator, Plan
from epochsink.protocol.ledger import Ledger
from epochsink_devkit.history import HistoryLog
from model.recorded import Recorded, RecordedCheckpoint
from model.test_state_table import prepare
from model.traces import Refused

Forge = Callable[[Recorded], None]


class Watched(Query):
    """A query whose checkpoint is watched."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.watch = RecordedCheckpoint(self.folder, "run", HistoryLog(folder / "history"))

    def plan(self, epoch: int) -> None:
        """Write offsets/N as those of a topic, which the watch can read."""
        self.files.create(f"offsets/{epoch}", f'v1\n{{"batchWatermarkMs":0}}\n{{"topic":{{"0":{epoch}}}}}'.encode())

    def writes(self, driver: Coordinator, number: int) -> None:
        """Write an epoch, and record it."""
        self.plan(number)
        assert driver.settle(number) is Plan.WRITE
        prepare(self, driver, number)

    def commits(self, driver: Coordinator, number: int) -> None:
        """Decide an epoch, and commit it."""
        self.decide(number)
        assert driver.commit_decided()
        self.watch.look()

    def recorded(self) -> Recorded:
        """Return what was recorded, as if each driver had been a process of its own."""
        self.watch.look()
        drivers, recorded = set[str](), self.watch.recorded
        for number, entry in sorted(recorded.entries.items()):
            drivers |= {entry.content["driver"]} if entry.content["entry"] == "take" else set()
            change(recorded, number, stamp={"host": "", "pid": len(drivers)})
        return recorded


@pytest.fixture
def recorded(engines: Recorded) -> Recorded:
    """Return a copy to change."""
    return copy.deepcopy(engines)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Return what three drivers leave: the second takes over an epoch that is not decided, and prepares it again."""
    query = Watched(tmp_path_factory.mktemp("query"))
    first = query.driver()
    for number in (0, 1):
        query.writes(first, number)
        query.commits(first, number)
    query.writes(first, 2)
    second = query.driver()
    assert second.settle(2) is Plan.RUN_FOR_STATE
    query.sink.abort_prepared()
    query.commits(second, 2)
    third = query.driver()
    query.writes(third, 3)
    query.commits(third, 3)
    return query.recorded()


def change(recorded: Recorded, number: int, **content: Any) -> None:
    entry = recorded.entries[number]
    recorded.entries[number] = entry._replace(content={**entry.content, **content})


def place(recorded: Recorded, kind: str, epoch: int | None = None, nth: int = 0) -> int:
    """Return the number of an entry."""
    found = [
        number
        for number, (content, *_) in sorted(recorded.entries.items())
        if (content["entry"], content.get("epoch")) == (kind, epoch)
    ]
    return found[nth]


def moved(recorded: Recorded, number: int, to: int) -> None:
    """Put an entry at another place."""
    entries = [entry for _, entry in sorted(recorded.entries.items())]
    entries.insert(to, entries.pop(number))
    recorded.entries = dict(enumerate(entries))


def repeated(recorded: Recorded, number: int, **content: Any) -> None:
    """Put a changed copy of an entry after it."""
    moved_up = {at + (at > number): entry for at, entry in recorded.entries.items()}
    recorded.entries = {**moved_up, number + 1: recorded.entries[number]}
    change(recorded, number + 1, **content)


def done_without_a_record(recorded: Recorded) -> None:
    moved(recorded, place(recorded, "done", 1), place(recorded, "prepared", 1))


def done_without_a_decision(recorded: Recorded) -> None:
    del recorded.decided[3]


def done_before_the_decision(recorded: Recorded) -> None:
    recorded.decided[1] = recorded.entries[place(recorded, "done", 1)].written + 1


def decided_before_the_record(recorded: Recorded) -> None:
    recorded.decided[1] = recorded.entries[place(recorded, "prepared", 1)].written - 1


def decided_without_a_record(recorded: Recorded) -> None:
    recorded.decided[4] = recorded.decided[3]


def prepared_before_the_epoch_before_it_is_done(recorded: Recorded) -> None:
    moved(recorded, place(recorded, "done", 0), place(recorded, "prepared", 1))


def prepared_twice_in_one_term(recorded: Recorded) -> None:
    repeated(recorded, place(recorded, "prepared", 1), attempt="another")


def prepared_again_by_the_next_driver(recorded: Recorded) -> None:
    takes = place(recorded, "take", nth=1)
    content = dict(recorded.entries[place(recorded, "prepared", 2)].content)
    repeated(recorded, takes, **content | {"stamp": {"host": "", "pid": 2}})


def prepared_from_other_input(recorded: Recorded) -> None:
    number = place(recorded, "prepared", 1)
    recorded.entries[number] = recorded.entries[number]._replace(same_input=False)


def done_twice(recorded: Recorded) -> None:
    repeated(recorded, place(recorded, "done", 1))


def done_by_a_superseded_driver(recorded: Recorded) -> None:
    change(recorded, place(recorded, "done", 3), stamp={"host": "", "pid": 2})


def written_by_nobody_who_took_the_ledger(recorded: Recorded) -> None:
    change(recorded, place(recorded, "prepared", 3), stamp={"host": "", "pid": 9})


def prepared_again_before_the_decision(recorded: Recorded) -> None:
    recorded.decided[2] = recorded.entries[place(recorded, "replay", 2)].written + 1


def prepared_again_when_it_is_done(recorded: Recorded) -> None:
    moved(recorded, place(recorded, "replay", 2), place(recorded, "done", 2))


FORGED: tuple[Forge, ...] = (
    done_without_a_record,
    done_without_a_decision,
    done_before_the_decision,
    decided_before_the_record,
    decided_without_a_record,
    prepared_before_the_epoch_before_it_is_done,
    prepared_twice_in_one_term,
    prepared_again_by_the_next_driver,
    prepared_from_other_input,
    done_twice,
    done_by_a_superseded_driver,
    written_by_nobody_who_took_the_ledger,
    prepared_again_before_the_decision,
    prepared_again_when_it_is_done,
)


def test_what_the_engine_has_recorded_is_allowed(recorded: Recorded) -> None:
    assert recorded.replay().startswith("12 entries, 2 histories replayed, ")
    assert not recorded.ends


@pytest.mark.parametrize("forge", FORGED, ids=lambda forge: forge.__name__)
def test_what_is_forged_is_refused_with_both_sides(recorded: Recorded, forge: Forge) -> None:
    forge(recorded)
    with pytest.raises(
        Refused, match=r"(?s)observed, the last of \d+:.*\^ not allowed.*allowed by the specification:.*in the states:"
    ):
        recorded.replay()
    assert len(recorded.refusals()) == 1


def test_entries_that_are_summed_up_and_removed_were_read_before(tmp_path: Path) -> None:
    query = Watched(tmp_path)
    driver = query.driver()
    driver._run.ledger = Ledger(query.files, driver._run.ledger._driver, summarised_after=4)
    for number in range(8):
        query.writes(driver, number)
        query.commits(driver, number)
        driver.tidy()
    recorded = query.recorded()
    assert len(query.files.names("epochsink/ledger")) < len(recorded.entries)
    assert not recorded.refusals()
    assert not recorded.ends


def test_what_nobody_has_read_before_it_was_removed_is_left_out_and_counted(recorded: Recorded) -> None:
    del recorded.entries[place(recorded, "prepared", 1)]
    assert not recorded.refusals()
    assert recorded.ends == {"a gap": 1}


def test_an_operators_command_ends_a_history_also_when_an_epoch_is_pending(recorded: Recorded) -> None:
    """It prepares again what is done: that a driver does so is refused, see `prepared_again_when_it_is_done`."""
    change(recorded, place(recorded, "take", nth=1), purpose="epochsink repair")
    moved(recorded, place(recorded, "replay", 2), place(recorded, "done", 2))
    assert not recorded.refusals()
    assert recorded.ends == {"a take by 'epochsink repair'": 1}


def test_an_entry_that_the_specification_does_not_have_ends_a_history(recorded: Recorded) -> None:
    repeated(recorded, place(recorded, "done", 1), entry="resolved", sink="out", ruling="resolved")
    assert not recorded.refusals()
    assert recorded.ends == {"an entry 'resolved'": 1}
