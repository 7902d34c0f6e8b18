"""What a target's marks and the ledger say of each other, part by part."""

from __future__ import annotations

import pytest

from epochsink.errors import WentBack
from epochsink.sink import LastDone, Mark, verify_marks

BASE = {"all": Mark(-1)}


def done(epoch: int, attempt: str = "a") -> LastDone:
    return LastDone(epoch, attempt, ({"part": epoch},))


def accepted(epoch: int) -> LastDone:
    return LastDone(epoch, "", ())


def marks_of(last: LastDone) -> dict[str, Mark]:
    return {"all": Mark(last.epoch, last.attempt)}


def verify(found: Mark | None, last: LastDone | None, pending: LastDone | None = None) -> None:
    verify_marks("the target", {} if found is None else {"all": found}, last, pending, marks_of, base=BASE)


@pytest.mark.parametrize(
    ("found", "last", "pending"),
    [
        (Mark(-1), None, None),
        (Mark(-1), None, done(0)),
        (Mark(0, "a"), None, done(0)),
        (Mark(4, "a"), done(4), done(5)),
        (Mark(5, "a"), done(4), done(5)),
        (Mark(4), done(4), None),
        (Mark(2, "z"), accepted(3), None),
        (Mark(3, "z"), accepted(3), None),
    ],
)
def test_a_target_may_hold_the_newest_done_epoch_or_the_pending_one(
    found: Mark, last: LastDone | None, pending: LastDone | None
) -> None:
    verify(found, last, pending)


@pytest.mark.parametrize(
    ("found", "last", "pending", "why"),
    [
        (None, None, None, "no marker of this query any more, and the ledger says that it had joined"),
        (None, done(4), None, "no marker of this query any more, and the ledger says that epoch 4 is done"),
        (Mark(5, "a"), done(4), None, "already holds epoch 5"),
        (Mark(6, "a"), done(4), done(5), "already holds epoch 6"),
        (Mark(4, "z"), accepted(3), None, "already holds epoch 4"),
        (Mark(3, "a"), done(4), None, "the rows of epochs 4 to 4 are missing"),
        (Mark(4, "z"), done(4), None, "epoch 4 was applied .* by attempt z"),
        (Mark(5, "z"), done(4), done(5), "epoch 5 was applied .* by attempt z"),
    ],
)
def test_a_target_that_holds_anything_else_is_told_apart(
    found: Mark | None, last: LastDone | None, pending: LastDone | None, why: str
) -> None:
    with pytest.raises(WentBack, match=why):
        verify(found, last, pending)


def test_a_target_that_has_some_marks_of_the_newest_epoch_and_lacks_others_is_told_apart() -> None:
    def two(last: LastDone) -> dict[str, Mark]:
        return dict.fromkeys(("one", "other"), Mark(last.epoch, last.attempt))

    with pytest.raises(WentBack, match="markers of some parts of epoch 4, which the ledger calls done") as told:
        verify_marks("the target", {"one": Mark(4, "a")}, done(4), done(5), two)
    assert told.value.facts["lacks_from"] == 4
    assert "epochsink accept CHECKPOINT 4" in told.value.hint


@pytest.mark.parametrize(
    ("found", "last", "pending"),
    [
        ({"all": Mark(2, "z")}, None, done(5)),
        ({"all": Mark(2, "z")}, accepted(1), done(5)),
        ({"all": Mark(4, "a"), "other": Mark(5, "z")}, done(4), done(6)),
    ],
)
def test_an_epoch_between_the_done_and_the_pending_one_is_another_copys(
    found: dict[str, Mark], last: LastDone | None, pending: LastDone
) -> None:
    """The ledger has no rows in it."""
    with pytest.raises(WentBack, match="by attempt z, and the ledger records no part of it there"):
        verify_marks("the target", found, last, pending, marks_of)


def test_a_part_without_rows_in_the_newest_epochs_has_an_older_mark() -> None:
    verify_marks("the target", {"all": Mark(4, "a"), "other": Mark(3, "b")}, done(4), done(6), marks_of)
