"""What is kept of done epochs, for how long, and what remains of an interrupted record."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import Mock

import pytest
from obstore.store import MemoryStore

from epochsink.protocol import spool as spool_module
from epochsink.protocol.ledger_entries import Prepared, Share
from epochsink.protocol.ledger_history import LedgerHistory
from epochsink.protocol.object_storage import ObjectStorage
from epochsink.protocol.repair import lacking
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


def prepared(number: int, retain: float = 60.0) -> Prepared:
    files = {"t": SpoolFile(2, 500, 7, "AAAA"), "u": SpoolFile(1, 300, 8)}
    shares = {"table": Share(({"part": 2},), ("t", "u"), files)}
    return Prepared(number, f"{number:032x}", "digest", shares, retain=retain)


@pytest.fixture(params=["a folder", "an object store"])
def spool(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Spool:
    if request.param == "an object store":
        files = ObjectStorage(MemoryStore())
        monkeypatch.setattr(spool_module, "open_spool", lambda root, options: files)  # noqa: ARG005 - its signature
    return Spool(str(tmp_path / "spool"))


def keeping(spool: Spool) -> Retention:
    return Retention(spool, QUERY, ["table"])


def test_an_epoch_is_read_back_with_what_its_target_held_before(spool: Spool) -> None:
    epoch = prepared(7)
    assert keeping(spool).keep(epoch, LedgerHistory(applied={"table": BEFORE, "other": BEFORE}))
    found = Retention(spool, QUERY)
    read = found.read(epoch.at)
    assert read is not None
    assert (read.prepared, read.after) == (epoch, {"table": BEFORE})
    assert (found.kept().epochs, found.kept().size, found.kept().oldest) == (1, 800, 7)
    (term,) = found.terms().values()
    assert term.until - term.done == 60_000
    assert found.read(Epoch(7, "f" * 32)) is None


def test_what_was_prepared_again_of_several_sinks_is_lacking_in_each(spool: Spool) -> None:
    """The record beside the rows has what was first prepared: a repair died before it wrote it again."""
    epoch = prepared(7)
    epoch = replace(epoch, shares={**epoch.shares, "other": epoch.shares["table"]})
    retention = Retention(spool, QUERY, ["table", "other"])
    assert retention.keep(epoch, LedgerHistory())
    again = {name: LastDone(7, epoch.attempt, ({"part": name},)) for name in ("table", "other")}
    participant: Any = SimpleNamespace(members=again, operator=Mock())
    participant.operator().losses().lacking = lambda _, done: done.parts
    (lack,) = lacking(participant, LedgerHistory(applied=again), retention)
    assert lack.parts == {"table": [0], "other": [0]}
    assert {name: lack.retained.prepared.parts_of(name) for name in again} == {
        name: last.parts for name, last in again.items()
    }


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
        retention=SimpleNamespace(expire=lambda _pending: None, terms=lambda: terms),
    )
    Sweep(cast("RunState", run), cast("AppliedCheck", None))._end_in_spool()
    assert dropped == [Epoch(9, "c" * 32)]
    assert len(terms) > 1


def test_nothing_is_kept_without_a_time_or_without_rows_that_can_be_repaired(spool: Spool) -> None:
    assert not keeping(spool).keep(prepared(7, 0.0), LedgerHistory())
    assert not Retention(spool, QUERY, ["topic"]).keep(prepared(7), LedgerHistory())
    assert not keeping(spool).keep(Prepared(8, "a" * 32, "digest", {}), LedgerHistory())
    assert spool.retained(QUERY) == []
    assert Retention(spool, QUERY).kept().epochs == 0


def test_a_record_that_was_torn_before_the_epoch_was_done_is_written_over(spool: Spool) -> None:
    epoch = prepared(7)
    now = int(time.time() * 1000)
    torn = Term(now, now + 9000, epoch.at, 0)
    spool.note_retained(QUERY, str(torn), b'{"after":')
    assert Retention(spool, QUERY).read(epoch.at) is None
    assert keeping(spool).keep(epoch, LedgerHistory())
    assert spool.retained(QUERY) == [str(torn)]
    assert Retention(spool, QUERY).read(epoch.at) is not None


def test_a_record_that_a_repair_could_not_finish_leaves_the_one_before(spool: Spool) -> None:
    epoch = prepared(7)
    keeping(spool).keep(epoch, LedgerHistory())
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
        keeping(spool).keep(prepared(number, 60.0 if number == 7 else 600.0), LedgerHistory())
    later = time.time() + 100
    monkeypatch.setattr("epochsink.protocol.retained.time.time", lambda: later)
    # of a query that is started without retain= by now
    Retention(spool, QUERY).expire([])
    assert [term.epoch.number for term in Retention(spool, QUERY).terms().values()] == [8]
    assert prepared(7).at not in spool.attempts(QUERY)
    spool.forget_retained(QUERY)
    assert spool.retained(QUERY) == []


def test_the_rows_of_an_epoch_that_is_pending_stay_when_the_time_of_its_record_is_over(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its driver died between the record and "done"; once it is done, its rows are kept for the whole time again."""
    epoch = prepared(7)
    spool.make(QUERY, epoch.at)
    file = spool._open().write(f"{QUERY}/7-{epoch.attempt}/x.arrow")
    file.write(b"rows")
    file.close()
    assert keeping(spool).keep(epoch, LedgerHistory())
    later = time.time() + 100
    monkeypatch.setattr("epochsink.protocol.retained.time.time", lambda: later)
    retention = keeping(spool)
    retention.expire([epoch.at])
    assert spool.size(QUERY, epoch.at) == 4
    assert retention.keep(epoch, LedgerHistory())
    retention.expire([])
    assert spool.size(QUERY, epoch.at) == 4
    (name,) = spool.retained(QUERY)
    assert Term.parse(name) == Term(int(later * 1000), int((later + 60) * 1000), epoch.at, 800)


@pytest.mark.parametrize("name", ["1-2-3-x-4", "1-2-3", "", f"1-2-3-{'a' * 32}-x"])
def test_what_is_no_term_is_none(name: str) -> None:
    assert Term.parse(name) is None
