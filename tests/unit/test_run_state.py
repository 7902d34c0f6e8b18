"""What the threads of a run share: pending epochs, the first failure, turns; and what they may conclude."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from query_by_hand import Query

from epochsink.errors import Fenced, OutcomeUnknown
from epochsink.protocol.run_state import CommitQueue, CurrentEpoch, Phase

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SECONDS = 10


def beside(work: Callable[[], object]) -> threading.Thread:
    """Start work in a second thread."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def ended(thread: threading.Thread) -> bool:
    thread.join(SECONDS)
    return not thread.is_alive()


def test_epochs_leave_in_the_order_in_which_they_came() -> None:
    queue = CommitQueue()
    queue.add(3)
    queue.add(4)
    assert list(queue.pending) == [3, 4]
    queue.remove_first()
    assert list(queue.pending) == [4]


def test_settled_is_waited_for() -> None:
    queue = CommitQueue()
    queue.add(3)
    waiting = beside(queue.wait_settled)
    assert waiting.is_alive()
    queue.remove_first()
    assert ended(waiting)


def test_a_failure_wakes_who_waits_and_the_first_one_counts() -> None:
    queue = CommitQueue()
    queue.add(3)
    seen: list[str] = []

    def wait() -> None:
        try:
            queue.wait_settled()
        except OSError as failure:
            seen.append(str(failure))

    waiting = beside(wait)
    queue.fail(OSError("first"))
    queue.fail(OSError("second"))
    assert ended(waiting)
    assert seen == ["first"]
    assert queue.failed
    with pytest.raises(OSError, match="first"):
        queue.raise_failure()


def test_who_waits_for_work_is_woken_by_it() -> None:
    queue = CommitQueue()
    waiting = beside(lambda: queue.wait_pending(SECONDS))
    queue.add(1)
    assert ended(waiting)


def test_an_attempt_begins_only_when_nobody_aborts_or_replays() -> None:
    queue = CommitQueue()
    with queue.alone():
        attempt = beside(queue.begin_attempt)
        assert attempt.is_alive()
    assert ended(attempt)
    with queue.alone_if_idle() as idle:
        assert not idle, "an attempt is under way"
    queue.end_attempt()
    with queue.alone_if_idle() as idle:
        assert idle


def test_two_do_not_abort_at_once() -> None:
    queue = CommitQueue()

    def take_a_turn() -> None:
        with queue.alone():
            pass

    with queue.alone():
        second = beside(take_a_turn)
        assert second.is_alive()
    assert ended(second)


def test_a_replay_overtakes_the_attempt_under_way_and_no_later_one() -> None:
    queue = CommitQueue()
    queue.begin_attempt()
    assert not queue.overtaken
    with queue.replaying():
        pass
    assert queue.overtaken
    queue.end_attempt()
    queue.begin_attempt()
    assert not queue.overtaken


@pytest.mark.parametrize("what", ["pending", "failed"])
def test_a_stream_with_work_or_a_failure_is_not_idle(what: str) -> None:
    queue = CommitQueue()
    if what == "pending":
        queue.add(1)
    else:
        queue.fail(OSError("x"))
    with queue.alone_if_idle() as idle:
        assert not idle


def test_a_participant_can_ask_whether_its_driver_still_has_the_ledger(tmp_path: Path) -> None:
    query = Query(tmp_path)
    (participant,) = query.driver()._run.participants
    participant.require_ours()
    query.driver()
    with pytest.raises(Fenced):
        participant.require_ours()


def test_a_superseded_driver_concludes_nothing(tmp_path: Path) -> None:
    query = Query(tmp_path)
    older = query.driver()
    (participant,) = older._run.participants
    with pytest.raises(OutcomeUnknown), older._run.if_ours(participant):
        raise OutcomeUnknown("the target does not say")
    query.driver()
    with pytest.raises(Fenced), older._run.if_ours(participant):
        raise OutcomeUnknown("the target does not say")


def test_an_epoch_that_is_owed_stays_the_current_one() -> None:
    """Until it is prepared: whoever catches its error may catch that of the next call too."""
    failed = CurrentEpoch(3, Phase.FAILED)
    assert failed.followed_by(4) == failed
    assert (failed.is_owed, failed.compared) == (True, 3)
    given = CurrentEpoch(3).followed_by(4)
    assert (given.number, given.is_owed, given.compared) == (4, True, 3)
    assert not CurrentEpoch(4, Phase.WRITING).is_owed
