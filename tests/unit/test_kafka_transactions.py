"""The table of the coordinator's answers, and the verdict where the answer is ambiguous."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import pytest
from kafka import admin
from kafka.errors import for_code

from epochsink.kafka.cluster import Cluster
from epochsink.kafka.committable import Transaction
from epochsink.kafka.errors import Refused, Unreachable
from epochsink.kafka.server import Description, TransactionState
from epochsink.kafka.transactions import END_TRANSACTION, ENDING, EndTxnResult, Transactions, answer_to, verdict_on
from epochsink.sink import COMMITTED, Outcome, Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping

MINE = Transaction("epochsink.0123456789abcdef0123.g1.s0.p0.a0", 7, 3)


def judged(
    state: TransactionState, *, producer: int = 7, epoch: int = 3, marker: int | None = None, gone: bool = False
) -> Verdict | None:
    now = Description(state, producer, epoch)
    return verdict_on(MINE, now, epoch=10, marker=marker, marker_may_be_gone=gone)


def test_only_success_is_taken_for_a_decision() -> None:
    assert [code for code, (answer, _) in END_TRANSACTION.items() if answer is EndTxnResult.DECIDED] == [0]


@pytest.mark.parametrize("code", [7, 14, 15, 16, 51, -1])
def test_an_answer_that_may_pass_is_asked_for_again(code: int) -> None:
    assert answer_to(code)[0] is EndTxnResult.AGAIN


@pytest.mark.parametrize("code", [47, 48, 49, 90])
def test_an_answer_about_epochs_and_states_proves_nothing_by_itself(code: int) -> None:
    assert answer_to(code)[0] is EndTxnResult.ASK


def test_an_answer_that_nobody_has_thought_of_needs_an_operator() -> None:
    assert answer_to(999) == (EndTxnResult.REFUSED, "error code 999")


@pytest.mark.parametrize("code", sorted(END_TRANSACTION.keys() - {-1, 0}))
def test_the_names_are_those_of_kafkas_protocol(code: int) -> None:
    assert answer_to(code)[1] == for_code(code).message


def test_the_states_are_those_that_the_client_knows() -> None:
    known = {state.value for state in admin.TransactionState} - {"Unknown"}
    assert known == {state.value for state in TransactionState} - {TransactionState.NOT_FOUND.value}


@pytest.mark.parametrize(
    "state", [TransactionState.PREPARE_COMMIT, TransactionState.PREPARE_ABORT, TransactionState.PREPARE_EPOCH_FENCE]
)
@pytest.mark.parametrize("epoch", [3, 4])
def test_while_a_decision_is_written_nothing_is_concluded(state: TransactionState, epoch: int) -> None:
    assert judged(state, epoch=epoch, marker=None) is None
    assert judged(state, epoch=epoch, marker=10) is None


def test_an_open_transaction_of_ours_is_asked_to_commit_again() -> None:
    assert judged(TransactionState.ONGOING) is None


@pytest.mark.parametrize("state", [state for state in TransactionState if state not in ENDING])
@pytest.mark.parametrize("marker", [10, 11])
def test_the_marker_of_the_epoch_or_a_later_one_is_proof(state: TransactionState, marker: int) -> None:
    assert judged(state, epoch=9, marker=marker) == COMMITTED


def test_the_coordinators_word_under_our_own_epoch_is_proof() -> None:
    assert judged(TransactionState.COMPLETE_COMMIT) == COMMITTED


@pytest.mark.parametrize(
    "state", [TransactionState.COMPLETE_ABORT, TransactionState.EMPTY, TransactionState.ONGOING, TransactionState.DEAD]
)
@pytest.mark.parametrize("marker", [None, 9])
def test_moved_on_without_the_marker_is_aborted(state: TransactionState, marker: int | None) -> None:
    found = judged(state, epoch=4, marker=marker)
    assert found is not None
    assert found.outcome is Outcome.ABORTED
    assert MINE.transactional_id in found.evidence


def test_another_commit_under_the_id_never_means_aborted() -> None:
    assert judged(TransactionState.COMPLETE_COMMIT, epoch=4, marker=9) is None
    assert judged(TransactionState.COMPLETE_COMMIT, producer=8, epoch=0, marker=None) is None


def test_a_marker_that_may_be_gone_proves_nothing() -> None:
    found = judged(TransactionState.COMPLETE_ABORT, epoch=4, marker=None, gone=True)
    assert found is not None
    assert found.outcome is Outcome.UNKNOWN


def test_a_forgotten_id_is_aborted_only_if_an_older_marker_is_still_there() -> None:
    without, older = judged(TransactionState.NOT_FOUND, marker=None), judged(TransactionState.NOT_FOUND, marker=9)
    assert without is not None
    assert without.outcome is Outcome.UNKNOWN
    assert older is not None
    assert older.outcome is Outcome.ABORTED


OTHER: Final = Transaction("epochsink.0123456789abcdef0123.g1.s0.p0.a1", 8, 5)


class Coordinator:
    """Answers InitProducerId, round by round (None: the answer is lost), and describes the ids as told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *rounds: tuple[int | None, Description]) -> None:
        self._rounds = list(rounds)
        self.asked: list[dict[str, tuple[int, int]]] = []
        monkeypatch.setattr(Cluster, "ask_each", lambda *told: self._initialise(told[2]))
        monkeypatch.setattr(Cluster, "ask_coordinators", lambda *told: self._describe(told[2]))

    def _initialise(self, requests: Mapping[str, Any]) -> dict[str, Any]:
        self.asked.append({name: (each.producer_id, each.producer_epoch) for name, each in requests.items()})
        code, self._now = self._rounds.pop(0)
        return {} if code is None else {name: SimpleNamespace(error_code=code) for name in requests}

    def _describe(self, ids: list[str]) -> list[Any]:
        now = self._now
        told = [
            SimpleNamespace(
                transactional_id=name,
                error_code=0,
                transaction_state=now.state.value,
                producer_id=now.producer_id,
                producer_epoch=now.producer_epoch,
                transaction_start_time_ms=0,
                transaction_timeout_ms=0,
                topics=[],
            )
            for name in ids
        ]
        return [SimpleNamespace(transaction_states=told)]


def fence_off(*transactions: Transaction, seconds: float = 5.0) -> None:
    Transactions(Cluster("broker:9092", {}, seconds)).fence_off(transactions, time.monotonic() + seconds)


ENDED: Final = Description(TransactionState.PREPARE_ABORT, 7, 4)


@pytest.mark.parametrize(
    "first",
    [
        (51, Description(TransactionState.ONGOING, 7, 3)),  # a partition was just being added
        (
            51,
            Description(TransactionState.ONGOING, 7, 4),
        ),  # the coordinator has raised the epoch, and could not store the abort
        (16, ENDED),
        (None, ENDED),
    ],
    ids=str,
)
def test_a_transaction_that_may_still_be_open_is_fenced_off_again(
    first: tuple[int | None, Description], monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = Coordinator(monkeypatch, first, (51, ENDED))
    fence_off(MINE)
    assert coordinator.asked == [{MINE.transactional_id: (7, 3)}] * 2


@pytest.mark.parametrize(
    "only",
    [
        (0, ENDED),
        (47, ENDED),
        (90, ENDED),
        (51, ENDED),
        (51, Description(TransactionState.COMPLETE_COMMIT, 7, 3)),
        (51, Description(TransactionState.ONGOING, 7, 5)),
        (51, Description(TransactionState.ONGOING, 9, 3)),
    ],
    ids=str,
)
def test_a_transaction_that_has_ended_is_not_asked_for_again(
    only: tuple[int, Description], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The id may be in use again: that use must not be ended."""
    coordinator = Coordinator(monkeypatch, only)
    fence_off(MINE)
    assert len(coordinator.asked) == 1


def test_all_are_fenced_off_by_one_round_of_requests_and_none_by_none(monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = Coordinator(monkeypatch, (51, ENDED))
    fence_off()
    assert coordinator.asked == []
    fence_off(MINE, OTHER)
    assert coordinator.asked == [{MINE.transactional_id: (7, 3), OTHER.transactional_id: (8, 5)}]


def test_a_missing_right_and_a_transaction_that_stays_open_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    Coordinator(monkeypatch, (53, ENDED))
    with pytest.raises(Refused, match="fencing off"):
        fence_off(MINE)
    Coordinator(monkeypatch, *[(51, Description(TransactionState.ONGOING, 7, 3))] * 20)
    with pytest.raises(Unreachable, match="not fenced off yet"):
        fence_off(MINE, seconds=0.2)
