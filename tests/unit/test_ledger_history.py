"""What entries say together, and what a summary keeps of it."""

from __future__ import annotations

from epochsink.protocol.ledger_entries import (
    Abandoned,
    Disputed,
    Done,
    Prepared,
    Replay,
    Resolved,
    Share,
    Skipped,
    Summary,
    Take,
)
from epochsink.protocol.ledger_history import DONE_IN_FULL, LedgerHistory
from epochsink.sink import LastDone

TAKE = Take(1, "d" * 32, "query-1", {}, summary=Summary())


def prepared(number: int) -> Prepared:
    return Prepared(number, "a" * 32, "digest", {"out": Share(({"part": number},), ("t" * 32,))})


def history(*done: int) -> LedgerHistory:
    made = LedgerHistory()
    made.add(TAKE)
    for number in done:
        made.add(prepared(number))
        made.add(Done(number))
    return made


def restarted(before: LedgerHistory, retained: int = 100) -> LedgerHistory:
    """Return what a start knows that begins with a summary."""
    made = LedgerHistory()
    made.add(Take(2, "e" * 32, "query-1", {}, summary=before.summary(retained)))
    return made


def test_what_stands_before_the_first_take_counts_for_nothing() -> None:
    made = LedgerHistory()
    made.add(prepared(1))
    assert made == LedgerHistory()


def test_the_committables_of_the_newest_done_epochs_are_evidence() -> None:
    made = history(*range(20))
    assert made.done_parts("out") == [{"part": number} for number in range(20 - DONE_IN_FULL, 20)]
    assert len(made.epochs) == 20
    assert restarted(made).done_parts("out") == [{"part": 19}], "of those before a start, the newest"
    assert made.done_parts("other") == []


def test_a_summary_says_what_the_entries_said() -> None:
    before = history(0, 1, 2)
    before.add(prepared(3))
    before.add(Replay(3, ("out",), ({"part": "again"},)))
    before.add(Skipped(1))
    before.add(Disputed(3))
    before.add(Abandoned((9,)))
    after = restarted(before)
    assert after.disputed == {3}
    assert (after.done, after.newest, after.skipped, after.abandoned) == ({0, 1, 2}, 3, 1, Abandoned((9,)))
    assert after.pending == before.pending
    assert after.pending[0].parts_of("out") == ({"part": "again"},)
    assert after.applied == before.applied
    assert {(one.epoch, one.attempt, one.offsets) for one in after.epochs.values()} == {
        (one.epoch, one.attempt, one.offsets) for one in before.epochs.values()
    }


def test_a_share_that_an_operator_has_closed_is_pending_no_more_after_a_start() -> None:
    before = history(0)
    before.add(prepared(1))
    before.add(Resolved(1, "out", "committed"))
    after = restarted(before)
    assert after.pending[0].shares == {}
    assert after.applied["out"] == LastDone(1, "", ())


def test_old_epochs_are_forgotten_and_pending_ones_are_not() -> None:
    made = history(1, 2, 3, 4)
    made.add(prepared(0))
    made.forget(2)
    assert (sorted(made.epochs), made.done) == ([0, 3, 4], {3, 4})
    assert [done[0] for done in made.summary(1).done] == [4]


def test_a_copy_grows_on_its_own() -> None:
    made = history(0)
    copied = made.copy()
    copied.add(prepared(1))
    assert sorted(made.epochs) == [0]
