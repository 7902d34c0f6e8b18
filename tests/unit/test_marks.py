"""What a target's marks and the ledger say of each other, part by part."""

from __future__ import annotations

import pytest

from epochsink.errors import WentBack
from epochsink.sink import LastDone, Mark, Marks, marks_left

BASE = {"": Mark(-1)}


def done(epoch: int, attempt: str = "a") -> LastDone:
    return LastDone(epoch, attempt, ({"part": epoch},))


def accepted(epoch: int) -> LastDone:
    return LastDone(epoch, "", ())


def verify(found: dict[str, Mark], last: LastDone | None, pending: LastDone | None = None) -> None:
    must = marks_left(last) if last else BASE
    Marks("the target", found, must, marks_left(pending)).verify(last, pending)


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
    verify({"": found}, last, pending)


@pytest.mark.parametrize(
    ("found", "last", "pending", "why"),
    [
        (None, None, None, "no marker of this query any more, and the ledger says that it had joined"),
        (None, done(4), None, "no marker of this query any more, and the ledger says that epoch 4 is done"),
        (Mark(5, "a"), done(4), None, "already holds epoch 5"),
        (Mark(6, "a"), done(4), done(5), "already holds epoch 6"),
        (Mark(4, "z"), accepted(3), None, "already holds epoch 4"),
        (Mark(3, "a"), done(4), None, "the rows of epoch 4 are missing"),
        (Mark(4, "z"), done(4), None, "epoch 4 was applied .* by attempt z"),
        (Mark(5, "z"), done(4), done(5), "epoch 5 was applied .* by attempt z"),
    ],
)
def test_a_target_that_holds_anything_else_is_told_apart(
    found: Mark | None, last: LastDone | None, pending: LastDone | None, why: str
) -> None:
    with pytest.raises(WentBack, match=why):
        verify({} if found is None else {"": found}, last, pending)


def test_a_target_that_has_some_marks_of_the_newest_epoch_and_lacks_others_is_told_apart() -> None:
    last = LastDone(4, "a", ({"part": "one"}, {"part": "other"}))
    must = marks_left(last, lambda part: part["part"])
    with pytest.raises(WentBack, match="markers of some parts of epoch 4, which the ledger calls done") as told:
        Marks("the target", {"one": Mark(4, "a")}, must).verify(last, done(5))
    assert told.value.facts["lacks_from"] == 4
    assert "epochsink accept CHECKPOINT 4" in told.value.hint


@pytest.mark.parametrize(
    ("found", "last", "pending"),
    [
        ({"": Mark(2, "z")}, None, done(5)),
        ({"": Mark(2, "z")}, accepted(1), done(5)),
        ({"": Mark(4, "a"), "other": Mark(5, "z")}, done(4), done(6)),
    ],
)
def test_an_epoch_between_the_done_and_the_pending_one_is_another_copys(
    found: dict[str, Mark], last: LastDone | None, pending: LastDone
) -> None:
    """The ledger has no rows in it."""
    with pytest.raises(WentBack, match="by attempt z, and the ledger records no part of it there"):
        Marks("the target", found, marks_left(last), marks_left(pending)).verify(last, pending)


def test_a_part_without_rows_in_the_newest_epochs_has_an_older_mark() -> None:
    verify({"": Mark(4, "a"), "other": Mark(3, "b")}, done(4), done(6))


def test_a_target_whose_rows_tell_what_it_lacks_can_be_repaired_also_if_its_markers_are_gone() -> None:
    for rows_tell in (False, True):
        with pytest.raises(WentBack, match="no marker of this query any more") as told:
            Marks("the target", {}, marks_left(done(4)), rows_tell=rows_tell).verify(done(4), None)
        assert ("lacks_from" in told.value.facts) == rows_tell


def test_a_target_that_is_not_the_one_that_the_epochs_are_in_is_refused_though_its_marks_agree() -> None:
    with pytest.raises(WentBack, match="another table"):
        Marks("the target", BASE, BASE, refusal=WentBack("another table")).verify(None, None)


def test_the_mark_of_joining_is_no_epoch() -> None:
    assert Marks("the target", BASE).newest is None
    assert Marks("the target", {**BASE, "one": Mark(3), "other": Mark(2)}).newest == 3
