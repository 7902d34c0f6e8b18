"""What is kept of done epochs, for how long, and what remains of an interrupted record."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from obstore.store import MemoryStore

from epochsink.protocol import spool as spool_module
from epochsink.protocol.ledger_entries import Prepared, Share
from epochsink.protocol.ledger_history import History
from epochsink.protocol.object_storage import ObjectStorage
from epochsink.protocol.retained import Retention, Term
from epochsink.protocol.spool import Spool
from epochsink.protocol.sweep import Sweep
from epochsink.sink import Epoch, LastDone, SpoolFile

if TYPE_CHECKING:
    from pathlib import Path

    from epochsink.protocol.consistency import AppliedCheck
    from epochsink.protocol.run_state import RunState

QUERY = "5f0c4a50-2f54-4d0e-9a40-6e33d6a1f001"
BEFORE = LastDone(6, "c" * 32, ({"part": 1},))


def prepared(number: int) -> Prepared:
    files = {"t": SpoolFile(2, 500, 7, "AAAA"), "u": SpoolFile(1, 300, 8)}
    return Prepared(number, f"{number:032x}", "digest", {"table": Share(({"part": 2},), ("t", "u"), files)})


@pytest.fixture(params=["a folder", "an object store"])
def spool(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Spool:
    if request.param == "an object store":
        files = ObjectStorage(MemoryStore())
        monkeypatch.setattr(spool_module, "open_spool", lambda root, options: files)  # noqa: ARG005 - its signature
    return Spool(str(tmp_path / "spool"))


def keeping(spool: Spool, seconds: float = 60.0) -> Retention:
    return Retention(spool, QUERY, ["table"], seconds)


def test_an_epoch_is_read_back_with_what_its_target_held_before(spool: Spool) -> None:
    epoch = prepared(7)
    assert keeping(spool).keep(epoch, History(applied={"table": BEFORE, "other": BEFORE}))
    found = Retention(spool, QUERY)
    read = found.read(epoch.at)
    assert read is not None
    assert (read.prepared, read.after) == (epoch, {"table": BEFORE})
    assert (found.newest_seconds(), found.kept().epochs, found.kept().size, found.kept().oldest) == (60.0, 1, 800, 7)
    assert found.read(Epoch(7, "f" * 32)) is None


def test_a_sweep_goes_on_while_the_other_thread_keeps_an_epoch() -> None:
    """Python runs the other thread while it hashes what is kept."""
    terms: dict[Any, Term | None] = {}

    class Meanwhile(Epoch):
        def __hash__(self) -> int:
            if terms:
                terms[Epoch(len(terms), "b" * 32)] = None
            return super().__hash__()

    kept = Meanwhile(7, "a" * 32)
    terms[kept] = None
    dropped: list[Epoch] = []
    run = SimpleNamespace(
        query_id=QUERY,
        spool=SimpleNamespace(
            attempts=lambda _query: [kept, Epoch(9, "c" * 32)],
            drop=lambda _query, epoch: dropped.append(epoch),
        ),
        ledger=SimpleNamespace(verify=lambda: SimpleNamespace(pending=[])),
        retention=SimpleNamespace(expire=lambda: None, terms=lambda: terms),
    )
    Sweep(cast("RunState", run), cast("AppliedCheck", None))._end_in_spool()
    assert dropped == [Epoch(9, "c" * 32)]
    assert len(terms) > 1


def test_nothing_is_kept_without_a_time_or_without_rows_that_can_be_repaired(spool: Spool) -> None:
    assert not keeping(spool, 0.0).keep(prepared(7), History())
    assert not Retention(spool, QUERY, ["topic"], 60.0).keep(prepared(7), History())
    assert not keeping(spool).keep(Prepared(8, "a" * 32, "digest", {}), History())
    assert spool.retained(QUERY) == []
    assert Retention(spool, QUERY).kept().epochs == 0


def test_a_record_that_was_torn_before_the_epoch_was_done_is_written_over(spool: Spool) -> None:
    epoch = prepared(7)
    now = int(time.time() * 1000)
    torn = Term(now, now + 9000, epoch.at, 0)
    spool.note_retained(QUERY, str(torn), b'{"after":')
    assert Retention(spool, QUERY).read(epoch.at) is None
    assert keeping(spool).keep(epoch, History())
    assert spool.retained(QUERY) == [str(torn)]
    assert Retention(spool, QUERY).read(epoch.at) is not None


def test_a_record_that_a_repair_could_not_finish_leaves_the_one_before(spool: Spool) -> None:
    epoch = prepared(7)
    keeping(spool).keep(epoch, History())
    (name,) = spool.retained(QUERY)
    again = keeping(spool).read(epoch.at)
    assert again is not None
    again = again.replaced({"part": 2}, {"part": 3})
    spool.note_retained(QUERY, name, again.to_bytes()[:-20])
    assert keeping(spool).read(epoch.at) == again.replaced({"part": 3}, {"part": 2})
    keeping(spool).rewrite(again)
    assert keeping(spool).read(epoch.at) == again


def test_what_was_kept_for_long_enough_goes_with_its_rows_whoever_sweeps(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (7, 8):
        spool.make(QUERY, prepared(number).at)
        keeping(spool, 60.0 if number == 7 else 600.0).keep(prepared(number), History())
    later = time.time() + 100
    monkeypatch.setattr("epochsink.protocol.retained.time.time", lambda: later)
    # of a query that is started without retain= by now
    Retention(spool, QUERY).expire()
    assert [term.epoch.number for term in Retention(spool, QUERY).terms().values()] == [8]
    assert prepared(7).at not in spool.attempts(QUERY)
    spool.forget_retained(QUERY)
    assert spool.retained(QUERY) == []


@pytest.mark.parametrize("name", ["1-2-3-x-4", "1-2-3", "", f"1-2-3-{'a' * 32}-x"])
def test_what_is_no_term_is_none(name: str) -> None:
    assert Term.parse(name) is None
