"""What an epoch's transactions are committed on, and what has to be seen before the epoch is done."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import pytest

from epochsink.errors import OutcomeUnknown, WentBack
from epochsink.kafka import Kafka
from epochsink.kafka.applied_epochs import Markers
from epochsink.kafka.cluster import Cluster
from epochsink.kafka.commit import TransactionCommits
from epochsink.kafka.committable import KafkaCommittable, Transaction
from epochsink.kafka.errors import Refused
from epochsink.kafka.server import Description, End, ProducerState, TransactionState
from epochsink.kafka.transactions import EndTxnResult
from epochsink.kafka.witness import Loss, Seen, Witness
from epochsink.sink import Ballot, Epoch, LastDone, Mark, Outcome
from epochsink.testing.sink_rig import NO_ROWS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

ID: Final = "f" * 32
EPOCH: Final = Epoch(5, "a" * 32)
MANY: Final = 8


class Coordinator:
    """Decides each commit; ``states`` are those of any id, look by look, the last one for ever."""

    def __init__(self, *states: TransactionState) -> None:
        self.states = list(states or (TransactionState.COMPLETE_COMMIT,))
        self.committed: list[Transaction] = []

    def end(self, transaction: Transaction, deadline: float, *, commit: bool) -> tuple[EndTxnResult, str]:
        del deadline
        assert commit
        self.committed.append(transaction)
        return EndTxnResult.DECIDED, "NONE"

    def commit_many(self, transactions: Sequence[Transaction], deadline: float) -> set[Transaction]:
        del deadline
        self.committed += transactions
        return set(transactions)

    def describe(self, ids: Iterable[str], deadline: float) -> dict[str, Description]:
        del deadline
        now = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        return {name: Description(now, 7, 3) for name in ids}


def part(partition: int, topic_id: str = ID) -> KafkaCommittable:
    return KafkaCommittable(
        transaction=Transaction(f"epochsink.x{partition}", 7, 3),
        partition=partition,
        task="b" * 32,
        rows=3,
        prepared_at=int(time.time()),
        topics={"orders": topic_id},
    )


def commits(coordinator: Any, timeout: float = 10.0) -> TransactionCommits:
    cluster = Cluster("broker:9092", {}, timeout)
    config = Kafka(bootstrap_servers="broker:9092", topic="orders")
    return TransactionCommits("orders", config, cluster, coordinator, Markers(cluster, "0" * 20))


def ballot(*parts: KafkaCommittable) -> Ballot:
    return Ballot([each.to_json() for each in parts], NO_ROWS, None)


def looks(monkeypatch: pytest.MonkeyPatch, *ends: int) -> None:
    """Let the leaders show each part whole whose topic is still there; the partition ends further with each look."""
    offsets = iter(ends or (10,))

    def look(_: Witness, parts: Sequence[KafkaCommittable], others: object, deadline: float) -> Seen:
        del others, deadline
        whole = {index: each for index, each in enumerate(parts) if not each.recreated({"orders": ID})}
        return Seen({"orders": ID}, whole, {}, {("orders", 0): End(next(offsets), 1)}, {})

    monkeypatch.setattr(Witness, "look", look)


def marked(monkeypatch: pytest.MonkeyPatch, attempt: str, number: int = EPOCH.number) -> None:
    """Let every group have the marker of an attempt at the epoch, or at another one."""

    def read(_: Markers, groups: Iterable[str], deadline: float) -> dict[str, Mark]:
        del deadline
        return dict.fromkeys(groups, Mark(number, attempt))

    monkeypatch.setattr(Markers, "read", read)


def test_of_many_transactions_one_whose_topic_was_created_again_is_not_committed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are committed side by side, without a look at each of them."""
    looks(monkeypatch)
    monkeypatch.setattr(Markers, "of_partition", lambda *_: None)
    coordinator = Coordinator(TransactionState.ONGOING)
    parts = [*(part(number) for number in range(MANY)), part(MANY, "e" * 32)]
    verdicts = commits(coordinator).commit(EPOCH, parts, None)
    assert [verdict.outcome for verdict in verdicts] == [Outcome.COMMITTED] * MANY + [Outcome.ABORTED]
    assert coordinator.committed == [each.transaction for each in parts[:MANY]]


@pytest.mark.parametrize(
    ("settled", "outcome"), [(5, Outcome.COMMITTED), (3, Outcome.ABORTED), (None, Outcome.ABORTED)]
)
def test_a_commit_whose_marker_is_shown_late_is_not_written_again(
    settled: int | None, outcome: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its id is in use again, and the answer to the commit was lost: the marker decides, when it can be read."""
    monkeypatch.setattr(Markers, "of_partition", lambda *_: 4)
    monkeypatch.setattr(Markers, "settled", lambda *_: settled)
    monkeypatch.setattr(Witness, "look", lambda *_: Seen({"orders": ID}, {}, {0: "not open"}, {}, {}))
    again = replace(part(0), transaction=Transaction("epochsink.x0", 7, 2))
    [verdict] = commits(Coordinator(TransactionState.EMPTY)).commit(EPOCH, [again], None)
    assert verdict.outcome is outcome


def test_ends_that_are_still_being_written_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then, a partition without an end may still turn out to have aborted the transaction before."""
    asked: list[bool] = []

    def lost(_: Witness, parts: Sequence[KafkaCommittable], *_more: object, ended: bool, **_named: object) -> Loss:
        asked.append(ended)
        return Loss(None, [each.transaction for each in parts])

    monkeypatch.setattr(Witness, "lost", lost)
    monkeypatch.setattr(Witness, "left_open", lambda *_: {})
    marked(monkeypatch, EPOCH.attempt)
    commits(Coordinator(TransactionState.PREPARE_COMMIT, TransactionState.COMPLETE_COMMIT)).await_visible(
        EPOCH, ballot(part(0))
    )
    assert asked == [False, False, True]


def test_ends_that_are_never_written_leave_the_epoch_in_the_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(_: Witness, parts: Sequence[KafkaCommittable], *_more: object, ended: bool, **_named: object) -> Loss:
        return Loss(None, [] if ended else [each.transaction for each in parts])

    monkeypatch.setattr(Witness, "lost", lost)
    marked(monkeypatch, EPOCH.attempt)
    with pytest.raises(OutcomeUnknown, match="not written to the partitions yet"):
        commits(Coordinator(TransactionState.PREPARE_COMMIT), timeout=0.05).await_visible(EPOCH, ballot(part(0)))


LEFT_OUT: Final = ProducerState(7, 3, 2, 5)


@pytest.mark.parametrize(
    ("state", "producer_epoch", "refused", "why"),
    [
        (TransactionState.COMPLETE_COMMIT, 3, True, "this user may not write the ends"),
        (TransactionState.COMPLETE_COMMIT, 4, False, "another attempt at its task has written there since"),
        (TransactionState.ONGOING, 3, False, "orders-0 had no leader when the ends of its transactions were written"),
    ],
    ids=["without the right", "taken since", "open"],
)
def test_an_end_that_was_left_out_and_cannot_be_written_stops_the_query(
    monkeypatch: pytest.MonkeyPatch, state: TransactionState, producer_epoch: int, *, refused: bool, why: str
) -> None:
    written = []

    def write(_: Witness, opened: Any, deadline: float) -> None:
        del deadline
        written.append(opened)
        if refused:
            raise Refused("this user may not write the ends", hint="")

    opened = {("orders", 0): [LEFT_OUT._replace(producer_epoch=producer_epoch)]}
    monkeypatch.setattr(Witness, "lost", lambda _, parts, *__, **___: Loss(None, [one.transaction for one in parts]))
    monkeypatch.setattr(Witness, "left_open", lambda *_: opened)
    monkeypatch.setattr(Witness, "write_ends", write)
    marked(monkeypatch, EPOCH.attempt)
    with pytest.raises(OutcomeUnknown, match=why):
        commits(Coordinator(state)).await_visible(EPOCH, ballot(part(0)))
    assert written == ([opened] if refused else [])


def test_rows_that_a_partition_has_lost_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Witness, "lost", lambda *_, **__: Loss("orders-0 has lost its records"))
    marked(monkeypatch, EPOCH.attempt)
    with pytest.raises(OutcomeUnknown, match="orders-0 has lost its records"):
        commits(Coordinator()).await_visible(EPOCH, ballot(part(0)))


def test_the_marker_of_another_attempt_stops_the_query(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Witness, "lost", lambda *_, **__: Loss(None))
    marked(monkeypatch, "c" * 32)
    with pytest.raises(WentBack, match="the cluster was set back, or a driver on another copy"):
        commits(Coordinator()).await_visible(EPOCH, ballot(part(0)))


ACCEPT: Final = "epochsink accept CHECKPOINT 5 --sink orders"


@pytest.mark.parametrize("number", [None, 3])
def test_a_marker_that_is_gone_or_older_is_accepted_by_the_command_in_the_message(
    number: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each start compares the marker again: without the command the query never goes on."""
    monkeypatch.setattr(Witness, "lost", lambda *_, **__: Loss(None))
    monkeypatch.setattr(Markers, "retention", lambda _: 60.0)
    if number is None:
        monkeypatch.setattr(Markers, "read", lambda *_: {})
    else:
        marked(monkeypatch, "c" * 32, number)
    with pytest.raises(WentBack, match=ACCEPT):
        commits(Coordinator(), timeout=0.05).await_visible(EPOCH, ballot(part(0)))


@pytest.mark.parametrize(
    ("number", "attempt"), [(5, "c" * 32), (7, "c" * 32)], ids=["another attempt", "a later epoch"]
)
def test_a_marker_that_shows_another_driver_is_not_accepted_lightly(
    number: int, attempt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Witness, "lost", lambda *_, **__: Loss(None))
    marked(monkeypatch, attempt, number)
    with pytest.raises(WentBack) as stopped:
        commits(Coordinator(), timeout=0.05).await_visible(EPOCH, ballot(part(0)))
    assert ACCEPT not in stopped.value.hint


def test_the_marker_of_the_epoch_before_that_is_gone_is_not_accepted_lightly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Witness, "lost", lambda *_, **__: Loss(None))
    monkeypatch.setattr(Markers, "retention", lambda _: 60.0)
    monkeypatch.setattr(Markers, "read", lambda *_: {})
    before = LastDone(EPOCH.number - 1, "d" * 32, (part(0).to_json(),))
    with pytest.raises(WentBack) as stopped:
        commits(Coordinator(), timeout=0.05).await_visible(EPOCH, replace(ballot(part(0)), after=before))
    assert ACCEPT not in stopped.value.hint


def test_an_epoch_that_was_prepared_longer_ago_than_markers_are_kept_is_done_without_its_marker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The driver died between the commit and the record of it, and was down until the marker had expired."""
    monkeypatch.setattr(Witness, "lost", lambda *_, **__: Loss(None))
    monkeypatch.setattr(Markers, "retention", lambda _: 60.0)
    monkeypatch.setattr(Markers, "read", lambda *_: {})
    expired = replace(part(0), prepared_at=int(time.time()) - 61)
    commits(Coordinator()).await_visible(EPOCH, ballot(expired))
    with pytest.raises(WentBack, match="shows None in place of"):
        commits(Coordinator(), timeout=0.05).await_visible(EPOCH, ballot(expired, part(1)))


def test_an_abort_between_two_tries_of_a_commit_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The logs are read from where they ended at the first look, whatever a later one shows."""
    looks(monkeypatch, 10, 20)
    read_from: list[Any] = []

    def lost(_: Witness, parts: object, ends: Any, deadline: float, *, ended: bool, **_named: object) -> Loss:
        del parts, deadline, ended
        read_from.append(ends)
        return Loss(None)

    monkeypatch.setattr(Witness, "lost", lost)
    marked(monkeypatch, EPOCH.attempt)
    committing = commits(Coordinator())
    for _ in range(2):
        committing.commit(EPOCH, [part(0)], None)
    committing.await_visible(EPOCH, ballot(part(0)))
    assert read_from == [{part(0).transaction: {("orders", 0): End(10, 1)}}]
