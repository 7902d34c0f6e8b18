"""The ledger: one owner, nothing overwritten, no hole, whoever comes in between."""

from __future__ import annotations

import itertools
import json
import shutil
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epochsink.errors import ConfigurationError, Fenced, LedgerCorrupt, WentBack
from epochsink.protocol import ledger as ledger_module
from epochsink.protocol.ledger import FOLDER, Ledger, begun_query
from epochsink.protocol.ledger_entries import (
    Abandoned,
    Disputed,
    Done,
    Entry,
    Prepared,
    Replay,
    Resolved,
    Share,
    Skipped,
    Stamp,
    Summary,
    Take,
    Withdrawn,
    decode,
    encode,
)
from epochsink.protocol.storage import LocalStorage
from epochsink.sink import LastDone, SpoolFile

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from epochsink.protocol.ledger_history import LedgerHistory

QUERY = "query-1"


class Interrupted:
    """Files in memory that let somebody else act just before the n-th call of a kind."""

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}
        self._acts: list[tuple[str, int, Callable[[], object]]] = []

    def before(self, call: str, nth: int, act: Callable[[], object]) -> None:
        self._acts.append((call, nth, act))

    def _reach(self, call: str) -> None:
        for act in list(self._acts):
            self._acts.remove(act)
            kind, nth, does = act
            if kind != call or nth > 1:
                self._acts.append((kind, nth - (kind == call), does))
            else:
                does()

    def create(self, name: str, data: bytes) -> bool:
        self._reach("create")
        if name in self.content:
            return False
        self.content[name] = data
        return True

    def read(self, name: str) -> bytes | None:
        self._reach("read")
        return self.content.get(name)

    def remove_many(self, names: Sequence[str]) -> None:
        for name in names:
            self.remove(name)

    def read_many(self, names: Sequence[str]) -> list[bytes | None]:
        return [self.read(name) for name in names]

    def exists(self, name: str) -> bool:
        self._reach("exists")
        return name in self.content

    def names(self, folder: str) -> list[str]:
        self._reach("names")
        return [name.rpartition("/")[2] for name in self.content if name.startswith(folder + "/")]

    def remove(self, name: str) -> None:
        self._reach("remove")
        self.content.pop(name, None)

    def make_durable(self, name: str) -> None:
        self._reach(f"make_durable {name}")

    def numbers(self) -> list[int]:
        return sorted(int(name) for name in self.names(FOLDER))


def spooled(epoch: int) -> dict[str, SpoolFile]:
    """Return what is recorded of one task's file, which the record carries."""
    return {"task": SpoolFile(3, 99, epoch, "cm93cw==")}


def prepared(epoch: int, attempt: str = "a") -> Prepared:
    return Prepared(epoch, attempt, "digest", {"sink": Share(({"part": epoch},), ("task",), spooled(epoch))})


def taken(files: Interrupted, driver: str, **options: Any) -> Ledger:
    ledger = Ledger(files, driver, **options)
    ledger.take(QUERY, {}, -1)
    return ledger


def run_epochs(ledger: Ledger, first: int, last: int) -> None:
    for epoch in range(first, last + 1):
        ledger.append(prepared(epoch))
        ledger.append(Done(epoch))
        ledger.trim()


def summed(history: LedgerHistory) -> tuple[object, ...]:
    """Return what a summary keeps of a history."""
    done = {number: (history.epochs[number].attempt, history.epochs[number].offsets) for number in history.done}
    return history.owner, done, history.pending, history.applied, history.skipped, history.abandoned


@pytest.fixture
def files() -> Interrupted:
    return Interrupted()


def test_a_ledger_without_the_checkpoints_metadata_is_refused_by_name(tmp_path: Path) -> None:
    files = LocalStorage(tmp_path)
    assert begun_query(files) is None
    Ledger(files, "a driver").take(QUERY, {}, 0)
    with pytest.raises(WentBack, match=f"belongs to query id {QUERY}, and the checkpoint has no file 'metadata'"):
        begun_query(files)
    files.create("metadata", json.dumps({"id": QUERY}).encode())
    assert begun_query(files) == QUERY


def test_a_replay_keeps_what_is_recorded_of_the_spool(files: Interrupted) -> None:
    ledger = taken(files, "one")
    ledger.append(prepared(7))
    ledger.append(Replay(7, ("sink",), ({"part": "again"},)))
    assert ledger.read().epochs[7].shares["sink"].files == spooled(7)


@pytest.mark.usefixtures("begins_with_1")
def test_history_is_what_was_appended(files: Interrupted) -> None:
    ledger = Ledger(files, "one")
    take = ledger.take(QUERY, {"sink": {"base": 7}}, -1)
    ledger.append(prepared(0))
    ledger.append(Done(0))
    ledger.append(prepared(1))
    ledger.append(Replay(1, ("sink",), ({"part": "again"},)))
    history = Ledger(files, "another").read()
    assert history.owner == take == Take(1, "one", QUERY, {"sink": {"base": 7}}, -1, summary=Summary())
    assert [one.epoch for one in history.pending] == [1]
    assert history.newest == 1
    assert history.epochs[1].parts_of("sink") == ({"part": "again"},)
    assert history.epochs[1].parts_of("other") == ()


@pytest.fixture
def begins_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "_clock", lambda: 0)


@pytest.mark.parametrize("back", [0, 1])
def test_generations_rise(files: Interrupted, back: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(1_000_000, -back)
    monkeypatch.setattr(ledger_module, "_clock", lambda: next(clock))
    taken = [Ledger(files, name).take(QUERY, {}, -1).generation for name in "abc"]
    assert taken == [1_000_001, 1_000_002, 1_000_003]


def test_an_older_copy_of_a_ledger_goes_on_above_every_generation_that_it_does_not_know(tmp_path: Path) -> None:
    store, copy = tmp_path / "store", tmp_path / "copy"
    Ledger(LocalStorage(store), "a").take(QUERY, {}, -1)
    shutil.copytree(store, copy)
    unknown = [Ledger(LocalStorage(store), name).take(QUERY, {}, -1).generation for name in "bcd"]
    while int(time.time() * 1000) < unknown[-1]:
        time.sleep(0.001)
    assert Ledger(LocalStorage(copy), "e").take(QUERY, {}, -1).generation > unknown[-1]


def test_a_ledger_begins_above_every_generation_of_one_that_was_lost(tmp_path: Path) -> None:
    before = int(time.time() * 1000)
    lost = [Ledger(LocalStorage(tmp_path / "lost"), name).take(QUERY, {}, -1).generation for name in "abc"]
    assert lost[0] > before
    while int(time.time() * 1000) < lost[-1]:
        time.sleep(0.001)
    assert Ledger(LocalStorage(tmp_path / "new"), "d").take(QUERY, {}, -1).generation > lost[-1]


@pytest.mark.usefixtures("begins_with_1")
def test_a_take_goes_above_what_the_targets_hold(files: Interrupted) -> None:
    """A clock that was set back would begin below; so would the owner's, with a sink that left it and joins again."""
    assert Ledger(files, "a").take(QUERY, {}, -1, above=7).generation == 8
    assert Ledger(files, "b").take(QUERY, {}, -1, above=70).generation == 71
    assert Ledger(files, "c").take(QUERY, {}, -1).generation == 72


def test_a_superseded_driver_records_nothing(files: Interrupted) -> None:
    """Another driver takes the ledger just before the append: its entry is refused, without a gap between."""
    old = taken(files, "old")
    files.before("create", 1, lambda: taken(files, "new"))
    with pytest.raises(Fenced):
        old.append(prepared(0))
    assert Ledger(files, "reader").read().epochs == {}
    with pytest.raises(Fenced):
        old.verify()


def test_a_driver_that_has_read_its_successors_take_records_nothing(files: Interrupted) -> None:
    """One of its threads has read it, and the number after that is free when the other thread appends."""
    old, new = taken(files, "old"), taken(files, "new")
    new.append(prepared(0, "new"))
    with pytest.raises(Fenced):
        old.verify()
    with pytest.raises(Fenced):
        old.own()
    before = dict(files.content)
    for entry in (prepared(0, "old"), Done(0), Replay(0, ("sink",), ({"part": "old"},))):
        with pytest.raises(Fenced, match="another driver has taken over"):
            old.append(entry)
    assert files.content == before


@pytest.mark.usefixtures("begins_with_1")
def test_two_take_at_once(files: Interrupted) -> None:
    """Both read the same end; the one whose file comes second reads on and takes after it."""
    files.before("create", 1, lambda: taken(files, "second"))
    first = taken(files, "first")
    assert first.verify().owner == Take(2, "first", QUERY, {}, -1, summary=Summary())
    assert files.numbers() == [0, 1]


def test_what_a_sink_fixed_first_stands(files: Interrupted) -> None:
    """A driver that asked its sinks before another took the ledger must not change the other's answer."""
    files.before("create", 1, lambda: Ledger(files, "second").take(QUERY, {"sink": {"base": 200}}, -1))
    take = Ledger(files, "first").take(QUERY, {"sink": {"base": 100}, "new": {"base": 300}}, -1)
    assert take.origins == {"sink": {"base": 200}, "new": {"base": 300}}


def test_joined_is_never_forgotten(files: Interrupted) -> None:
    Ledger(files, "first").take(QUERY, {}, 41)
    assert Ledger(files, "second").take(QUERY, {}, -1).joined == 41
    assert Ledger(files, "reader").read().newest == 41


def test_another_query_id_went_back(files: Interrupted) -> None:
    taken(files, "one")
    with pytest.raises(WentBack, match="query-2"):
        Ledger(files, "two").take("query-2", {}, -1)


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b'{"entry": "prepared", "version": 1}', b'{"entry": "cake", "version": 1}', b"\xff"]
)
def test_an_entry_that_cannot_be_read_is_named(files: Interrupted, data: bytes) -> None:
    taken(files, "one")
    files.content[f"{FOLDER}/{1:020d}"] = data
    with pytest.raises(LedgerCorrupt, match=f"{1:020d}"):
        Ledger(files, "two").read()


def test_a_newer_format_stops_a_start_which_says_what_to_install(files: Interrupted) -> None:
    taken(files, "one")
    newer = {**json.loads(files.content[f"{FOLDER}/{0:020d}"]), "version": 2}
    newer["stamp"]["epochsink"] = "2.3.0"
    files.content[f"{FOLDER}/{1:020d}"] = json.dumps(newer).encode()
    before = dict(files.content)
    with pytest.raises(LedgerCorrupt, match=r"version 2; epochsink 2\.3\.0 wrote it.*\n.*start with that version"):
        taken(files, "two")
    assert files.content == before


def test_entries_without_a_take_are_refused(files: Interrupted) -> None:
    """A ledger whose beginning is lost says nothing about who may write: better stop than begin anew."""
    files.content[f"{FOLDER}/{5:020d}"] = encode(prepared(3))
    with pytest.raises(LedgerCorrupt, match="take"):
        Ledger(files, "one").take(QUERY, {}, -1)


def test_other_files_are_ignored(files: Interrupted) -> None:
    taken(files, "one")
    files.content[f"{FOLDER}/.{1:020d}.0a.tmp"] = b"half"
    assert Ledger(files, "two").read().owner is not None


# ---- two threads of one driver


def test_one_thread_appends_while_the_other_reads(files: Interrupted) -> None:
    """The commit thread appends between the stream thread's reading of a file and its taking note of it."""
    ledger = taken(files, "one")
    ledger.append(prepared(0))
    other = Ledger(files, "one")
    other.read()
    ledger.append(prepared(1))

    def read_then_append() -> None:
        other.append(Done(0))

    # `other` has yet to read entry 2 while it appends entry 3
    files.before("read", 2, read_then_append)
    other.read()
    other.append(Done(1))
    history = Ledger(files, "reader").read()
    assert files.numbers() == [0, 1, 2, 3, 4]
    assert history.done == {0, 1}
    assert sorted(history.epochs) == [0, 1]
    assert other.read() == history


def test_threads_share_a_ledger(tmp_path: Path) -> None:
    """Two threads append and read for real, and no entry is lost, doubled or misnumbered."""
    files = LocalStorage(tmp_path)
    ledger = Ledger(files, "one")
    ledger.take(QUERY, {}, -1)
    failures: list[BaseException] = []

    def append(epochs: range) -> None:
        try:
            for epoch in epochs:
                ledger.append(prepared(epoch))
                assert epoch in ledger.verify().epochs
        except BaseException as failure:  # noqa: BLE001 - shown below
            failures.append(failure)

    threads = [threading.Thread(target=append, args=(range(first, 120, 2),)) for first in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert sorted(int(name) for name in files.names(FOLDER)) == list(range(121))
    assert sorted(Ledger(files, "reader").read().epochs) == list(range(120))


def test_reading_while_the_other_thread_trims(files: Interrupted) -> None:
    ledger = taken(files, "one", retained_epochs=2, summarised_after=2)
    run_epochs(ledger, 0, 9)
    ledger.append(prepared(10))
    for removed in range(1, 4):
        files.before("remove", removed, ledger.verify)
    ledger.append(Done(10))
    ledger.trim()
    assert ledger.verify().newest == 10


def test_an_entry_that_the_other_thread_has_read_meanwhile_counts_once(files: Interrupted) -> None:
    """It reads an epoch's record and appends a replay of it, before the first thread takes note of the record."""
    ledger = taken(files, "one")
    create = files.create

    def let_the_other_go_on(name: str, data: bytes) -> bool:
        files.create = create  # type: ignore[method-assign]
        made = create(name, data)
        ledger.append(Replay(0, ("sink",), ({"part": "again"},)))
        return made

    files.create = let_the_other_go_on  # type: ignore[method-assign]
    ledger.append(prepared(0))
    assert ledger.known().pending[0].parts_of("sink") == ({"part": "again"},)


# ---- trimming


def test_what_a_later_take_sums_up_is_removed(files: Interrupted) -> None:
    ledger = taken(files, "one", retained_epochs=3, summarised_after=4)
    run_epochs(ledger, 0, 40)
    numbers = files.numbers()
    assert numbers[1] > 80
    assert numbers == [0, *range(numbers[1], numbers[-1] + 1)], "the take by which the driver began stays"
    history = Ledger(files, "reader", retained_epochs=3).read()
    assert summed(history) == summed(ledger.known())
    assert history.done == {38, 39, 40}
    assert decode(files.content[f"{FOLDER}/{numbers[1]:020d}"]) == history.owner


def test_files_go_by_one_call_now_and_then(files: Interrupted) -> None:
    ledger = taken(files, "one")
    calls: list[int] = []
    remove = files.remove_many
    files.remove_many = lambda names: calls.append(len(names)) or remove(names)  # type: ignore[method-assign,func-returns-value]
    most = 0
    for epoch in range(200):
        run_epochs(ledger, epoch, epoch)
        most = max(most, len(files.content))
    assert len(calls) <= 200 / 16
    assert most < 80


def test_a_start_reads_the_newest_summary_and_what_came_after(files: Interrupted) -> None:
    """Not the entries of all epochs that it knows then: sixteen at once, as far back as the summary stands."""
    ledger = taken(files, "one")
    run_epochs(ledger, 0, 400)
    asked: list[int] = []
    files.read_many = lambda names: asked.append(len(names)) or [files.content.get(name) for name in names]  # type: ignore[method-assign,func-returns-value]
    history = Ledger(files, "reader").read()
    assert sum(asked) <= 48
    assert len(history.done) == 128
    assert summed(history) == summed(ledger.known())


def test_the_owner_looks_once_and_appends_by_one_call(files: Interrupted) -> None:
    """However far away the store: one read says whose the ledger is, and an append that succeeds was allowed."""
    ledger = taken(files, "one")
    run_epochs(ledger, 0, 3)
    calls: list[str] = []
    files._reach = calls.append  # type: ignore[method-assign,assignment]
    ledger.verify()
    ledger.append(prepared(4))
    assert calls == ["read", "create"]


def test_what_is_pending_is_in_every_summary(files: Interrupted) -> None:
    ledger = taken(files, "one", retained_epochs=1, summarised_after=1)
    ledger.append(prepared(0))
    ledger.append(Replay(0, ("sink",), ({"part": "again"},)))
    run_epochs(ledger, 1, 30)
    assert len(files.content) < 10
    [pending] = Ledger(files, "reader").read().pending
    assert pending.epoch == 0
    assert pending.shares["sink"] == Share(({"part": "again"},), ("task",), spooled(0))


def test_no_summary_misses_what_the_other_thread_appends_meanwhile(files: Interrupted) -> None:
    """The stream thread records an epoch just before the commit thread says the take again at the same number."""
    ledger = taken(files, "one", summarised_after=1)
    ledger.append(prepared(0))
    ledger.append(Done(0))
    files.before("create", 1, lambda: ledger.append(prepared(1)))
    ledger.trim()
    assert isinstance(decode(files.content[f"{FOLDER}/{files.numbers()[-1]:020d}"]), Take)
    assert [one.epoch for one in Ledger(files, "reader").read().pending] == [1]


def test_a_driver_that_is_superseded_while_it_trims_records_nothing(files: Interrupted) -> None:
    """The commit thread trims while the stream thread's vote is under way; the successor has swept that attempt."""
    old = taken(files, "old", summarised_after=1)
    for entry in (prepared(0), Done(0), prepared(1)):
        old.append(entry)

    def take_over() -> None:
        taken(files, "new").append(prepared(2, "new"))

    files.before("create", 1, take_over)
    with pytest.raises(Fenced):
        old.trim()
    with pytest.raises(Fenced):
        old.append(prepared(2, "old"))
    history = Ledger(files, "reader").read()
    assert history.epochs[2].attempt == "new"
    assert history.owner is not None
    assert history.owner.driver == "new"


def test_a_driver_that_has_read_its_successors_entries_does_not_sum_them_up(files: Interrupted) -> None:
    """A take that it wrote behind them would make it the owner again, or a summary of its own view the newest."""
    old, new = taken(files, "old", summarised_after=1), taken(files, "new")
    for entry in (prepared(0), Done(0), prepared(1)):
        new.append(entry)
    old.read()
    before = dict(files.content)
    with pytest.raises(Fenced):
        old.trim()
    assert files.content == before
    new.append(Done(1))


def test_what_an_operator_said_is_in_every_summary(files: Interrupted) -> None:
    ledger = taken(files, "one", retained_epochs=1, summarised_after=1)
    ledger.append(Skipped(7))
    ledger.append(Abandoned((3,)))
    run_epochs(ledger, 8, 30)
    history = Ledger(files, "reader").read()
    assert (history.skipped, history.abandoned) == (7, Abandoned((3,)))


def test_a_done_epoch_is_known_by_a_summary(files: Interrupted) -> None:
    """What its sinks had prepared is known of the newest few alone: 128 epochs of 200 tasks each are 70 MB."""
    ledger = taken(files, "one")
    run_epochs(ledger, 0, 99)
    epochs = ledger.known().epochs
    assert len(epochs) == 100
    assert [number for number, one in epochs.items() if one.shares] == list(range(92, 100))
    assert ledger.known().done_parts("sink") == [{"part": number} for number in range(92, 100)]
    assert Ledger(files, "reader").read().applied["sink"].parts == ({"part": 99},)


def test_trimming_goes_on_after_a_crash_in_the_middle(files: Interrupted) -> None:
    ledger = taken(files, "one", retained_epochs=2, summarised_after=6)

    def crash() -> None:
        raise KeyboardInterrupt

    run_epochs(ledger, 0, 20)
    files.before("remove", 3, crash)
    with pytest.raises(KeyboardInterrupt):
        run_epochs(ledger, 100, 140)
    newer = taken(files, "two", retained_epochs=2, summarised_after=6)
    run_epochs(newer, 200, 230)
    assert newer.verify().done == {229, 230}
    numbers = files.numbers()
    assert numbers[2] > 60
    assert len(numbers) < 20


@pytest.mark.parametrize("known", [0, 1, 5])
def test_a_driver_that_slept_across_a_trim_writes_nothing(files: Interrupted, known: int) -> None:
    """What stood after its successor's take has been removed; that take has not."""
    old = Ledger(files, "old")
    if known:
        old.take(QUERY, {}, -1)
    for epoch in range(known - 1):
        old.append(prepared(epoch))
    newer = taken(files, "new", retained_epochs=1, summarised_after=1)
    for epoch in range(known - 1):
        newer.append(Done(epoch))
    run_epochs(newer, known, known + 30)
    assert files.numbers()[2 if known else 1] > 30
    before = newer.verify()
    if known:
        with pytest.raises(Fenced):
            old.verify()
        with pytest.raises(Fenced):
            old.append(prepared(99, "stale"))
    else:
        # it has never read anything: its take goes to the end, not to number 0
        assert old.take(QUERY, {}, -1).generation > newer.known().owner.generation  # type: ignore[union-attr]
    assert Ledger(files, "reader", retained_epochs=1).read().applied == before.applied


def test_a_driver_that_slept_before_its_take_takes_at_the_end(files: Interrupted) -> None:
    """It has read the ledger; the number after that is free again when it wakes and creates its take there."""
    first = taken(files, "first", retained_epochs=1, summarised_after=1)
    files.before("create", 1, lambda: run_epochs(first, 0, 20))
    second = taken(files, "second", retained_epochs=1, summarised_after=1)
    assert second.verify().done == {20}
    with pytest.raises(Fenced):
        first.append(prepared(21))
    owner = Ledger(files, "reader").read().owner
    assert owner is not None
    assert owner.driver == "second"


def test_an_append_of_unknown_outcome_is_found_although_its_entry_is_gone(files: Interrupted) -> None:
    """A driver does not know of its own last entry, so the next number does not tell it of its successor."""
    old = taken(files, "old")
    create = files.create

    def created_and_lost(name: str, data: bytes) -> bool:
        create(name, data)
        raise OSError("no reply")

    files.create = created_and_lost  # type: ignore[method-assign]
    with pytest.raises(OSError, match="no reply"):
        old.append(prepared(0))
    files.create = create  # type: ignore[method-assign]
    run_epochs(taken(files, "new", retained_epochs=1, summarised_after=1), 1, 30)
    assert 1 not in files.numbers()
    with pytest.raises(Fenced):
        old.verify()


def test_a_ledger_is_read_whole_while_its_owner_removes_what_was_listed(files: Interrupted) -> None:
    owner = taken(files, "one", retained_epochs=3, summarised_after=4)
    run_epochs(owner, 0, 20)
    for call in range(1, 4):
        files.before("read", call, lambda: run_epochs(owner, owner.known().newest + 1, owner.known().newest + 10))
    reader = Ledger(files, "reader", retained_epochs=3).read()
    assert summed(reader) == summed(owner.known())


@pytest.mark.parametrize("adjacent", [False, True])
def test_a_remnant_below_a_trimmed_ledger_counts_for_nothing(files: Interrupted, *, adjacent: bool) -> None:
    """A superseded driver wrote where entries had been removed, and died before it could take that back."""
    ledger = taken(files, "one", retained_epochs=1, summarised_after=1)
    run_epochs(ledger, 0, 30)
    first = files.numbers()[1]
    before = Ledger(files, "reader").read()
    number = first - 1 if adjacent else first - 2
    files.content[f"{FOLDER}/{number:020d}"] = encode(prepared(3, "stale"))
    assert Ledger(files, "reader").read() == before
    newer = taken(files, "two", retained_epochs=1, summarised_after=1)
    run_epochs(newer, 31, 60)
    assert newer.verify().pending == []
    assert number not in files.numbers()


def test_a_listing_that_misses_an_entry_leaves_no_hole(files: Interrupted) -> None:
    """A folder that grows while it is listed may be shown without a file that is there."""
    ledger = taken(files, "one")
    for epoch in range(5):
        ledger.append(prepared(epoch))

    class Incomplete(Interrupted):
        def names(self, folder: str) -> list[str]:
            return [name for name in super().names(folder) if int(name) != 4]

    incomplete = Incomplete()
    incomplete.content = files.content
    assert sorted(Ledger(incomplete, "reader").read().epochs) == [0, 1, 2, 3, 4]


# ---- the format

TEXT = st.text(max_size=20)
PARTS = st.lists(st.dictionaries(TEXT, st.integers() | TEXT | st.none(), max_size=3), max_size=3).map(tuple)
SHARES = st.builds(Share, PARTS, st.lists(TEXT, max_size=3).map(tuple))
NUMBERS = st.integers(min_value=0, max_value=2**62)
LAST = st.builds(LastDone, NUMBERS, TEXT, PARTS)
STAMPS = st.none() | st.builds(Stamp, st.floats(0, 1e10), TEXT, NUMBERS, TEXT, TEXT)
ORIGINS = st.dictionaries(TEXT, st.dictionaries(TEXT, st.integers()))
TOGETHER = st.lists(st.lists(TEXT).map(tuple)).map(tuple)
PREPARED = st.builds(Prepared, NUMBERS, TEXT, TEXT, st.dictionaries(TEXT, SHARES, max_size=3), TOGETHER, stamp=STAMPS)
ABANDONED = st.builds(Abandoned, st.lists(NUMBERS).map(tuple), TEXT, stamp=STAMPS)
SUMMARIES = st.builds(
    Summary,
    st.lists(PREPARED, max_size=2).map(tuple),
    st.lists(st.tuples(NUMBERS, TEXT, TEXT), max_size=3).map(tuple),
    st.dictionaries(TEXT, LAST, max_size=2),
    st.integers(-1),
    st.lists(NUMBERS, max_size=3).map(tuple),
    st.none() | ABANDONED,
    st.lists(NUMBERS, max_size=3).map(tuple),
)
ENTRIES = st.one_of(
    st.builds(Take, NUMBERS, TEXT, TEXT, ORIGINS, st.integers(-1), TEXT, summary=SUMMARIES, stamp=STAMPS),
    PREPARED,
    ABANDONED,
    st.builds(Replay, NUMBERS, st.lists(TEXT).map(tuple), PARTS, stamp=STAMPS),
    st.builds(Resolved, NUMBERS, TEXT, TEXT, stamp=STAMPS),
    *(st.builds(kind, NUMBERS, stamp=STAMPS) for kind in (Done, Skipped, Disputed, Withdrawn)),
)


@settings(max_examples=150, deadline=None)
@given(ENTRIES)
def test_entries_survive_the_round_trip(entry: Entry) -> None:
    data = encode(entry)
    again = decode(data)
    assert again == entry
    assert again.stamp == entry.stamp
    if isinstance(entry, Take) and isinstance(again, Take):
        assert again.summary == entry.summary
    assert json.loads(data)["version"] == 1
    assert data.count(b"\n") == 1


# ---- the newest done epoch of each sink


def test_the_newest_done_epoch_of_a_sink_outlives_its_entries(files: Interrupted) -> None:
    """A sink without rows for long must not forget what its target holds."""
    ledger = taken(files, "one", retained_epochs=2, summarised_after=2)
    rare = Prepared(0, "a", "digest", {"rare": Share(({"part": 0},), ("task",))})
    ledger.append(rare)
    ledger.append(Done(0))
    run_epochs(ledger, 1, 40)
    history = Ledger(files, "reader").read()
    assert 0 not in history.epochs
    assert history.applied["rare"] == rare.share_done("rare")
    assert history.applied["sink"].epoch == 40
    assert taken(files, "two").known().applied == history.applied


def test_an_operators_word_stands_for_the_newest_done_epoch(files: Interrupted) -> None:
    ledger = taken(files, "one")
    run_epochs(ledger, 0, 3)
    ledger.append(Resolved(3, "sink", "committed"))
    assert ledger.read().applied["sink"] == LastDone(3, "", ())
    run_epochs(ledger, 4, 4)
    assert ledger.read().applied["sink"].parts == ({"part": 4},)


def test_a_superseded_driver_is_told_by_whom_and_since_when(files: Interrupted) -> None:
    old = taken(files, "old")
    Ledger(files, "new", application="app-1").take(QUERY, {}, -1)
    with pytest.raises(Fenced, match=r"since 20\d\d-.* UTC, process \d+ on host \S+, Spark application app-1"):
        old.verify()


def test_nobody_takes_a_ledger_that_an_operator_has_closed(files: Interrupted) -> None:
    ledger = taken(files, "one")
    ledger.append(Abandoned((3,)))
    with pytest.raises(ConfigurationError, match="abandon"):
        taken(files, "two")
    assert ledger.verify().abandoned is not None
    again = taken(files, "three", even_abandoned=True)
    assert again.verify().abandoned is not None
