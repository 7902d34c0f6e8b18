"""The table of the coordinator's answers, and the verdict where the answer is ambiguous."""

from __future__ import annotations

import pytest
from kafka.admin import TransactionState
from kafka.errors import for_code

from epochsink.kafka.committable import Transaction
from epochsink.kafka.transactions import END_TRANSACTION, ENDING, Answer, Description, State, answer_to, verdict_on
from epochsink.sink import COMMITTED, Outcome, Verdict

MINE = Transaction("epochsink.0123456789abcdef0123.g1.s0.p0.a0", 7, 3)


def judged(
    state: State, *, producer: int = 7, epoch: int = 3, marker: int | None = None, gone: bool = False
) -> Verdict | None:
    now = Description(state, producer, epoch)
    return verdict_on(MINE, now, epoch=10, marker=marker, marker_may_be_gone=gone)


def test_only_success_is_taken_for_a_decision() -> None:
    assert [code for code, (answer, _) in END_TRANSACTION.items() if answer is Answer.DECIDED] == [0]


@pytest.mark.parametrize("code", [7, 14, 15, 16, 51, -1])
def test_an_answer_that_may_pass_is_asked_for_again(code: int) -> None:
    assert answer_to(code)[0] is Answer.AGAIN


@pytest.mark.parametrize("code", [47, 48, 49, 90])
def test_an_answer_about_epochs_and_states_proves_nothing_by_itself(code: int) -> None:
    assert answer_to(code)[0] is Answer.ASK


def test_an_answer_that_nobody_has_thought_of_needs_an_operator() -> None:
    assert answer_to(999) == (Answer.REFUSED, "error code 999")


@pytest.mark.parametrize("code", sorted(END_TRANSACTION.keys() - {-1, 0}))
def test_the_names_are_those_of_kafkas_protocol(code: int) -> None:
    assert answer_to(code)[1] == for_code(code).message


def test_the_states_are_those_that_the_client_knows() -> None:
    known = {state.value for state in TransactionState} - {"Unknown"}
    assert known == {state.value for state in State} - {State.NOT_FOUND.value}


@pytest.mark.parametrize("state", [State.PREPARE_COMMIT, State.PREPARE_ABORT, State.PREPARE_EPOCH_FENCE])
@pytest.mark.parametrize("epoch", [3, 4])
def test_while_a_decision_is_written_nothing_is_concluded(state: State, epoch: int) -> None:
    assert judged(state, epoch=epoch, marker=None) is None
    assert judged(state, epoch=epoch, marker=10) is None


def test_an_open_transaction_of_ours_is_asked_to_commit_again() -> None:
    assert judged(State.ONGOING) is None


@pytest.mark.parametrize("state", [state for state in State if state not in ENDING])
@pytest.mark.parametrize("marker", [10, 11])
def test_the_marker_of_the_epoch_or_a_later_one_is_proof(state: State, marker: int) -> None:
    assert judged(state, epoch=9, marker=marker) == COMMITTED


def test_the_coordinators_word_under_our_own_epoch_is_proof() -> None:
    assert judged(State.COMPLETE_COMMIT) == COMMITTED


@pytest.mark.parametrize("state", [State.COMPLETE_ABORT, State.EMPTY, State.ONGOING, State.DEAD])
@pytest.mark.parametrize("marker", [None, 9])
def test_moved_on_without_the_marker_is_aborted(state: State, marker: int | None) -> None:
    found = judged(state, epoch=4, marker=marker)
    assert found is not None
    assert found.outcome is Outcome.ABORTED
    assert MINE.transactional_id in found.evidence


def test_another_commit_under_the_id_never_means_aborted() -> None:
    assert judged(State.COMPLETE_COMMIT, epoch=4, marker=9) is None
    assert judged(State.COMPLETE_COMMIT, producer=8, epoch=0, marker=None) is None


def test_a_marker_that_may_be_gone_proves_nothing() -> None:
    found = judged(State.COMPLETE_ABORT, epoch=4, marker=None, gone=True)
    assert found is not None
    assert found.outcome is Outcome.UNKNOWN


def test_a_forgotten_id_is_aborted_only_if_an_older_marker_is_still_there() -> None:
    without, older = judged(State.NOT_FOUND, marker=None), judged(State.NOT_FOUND, marker=9)
    assert without is not None
    assert without.outcome is Outcome.UNKNOWN
    assert older is not None
    assert older.outcome is Outcome.ABORTED
