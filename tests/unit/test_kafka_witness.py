"""What the leaders' logs show of committed transactions: their ends, aborts before them, and rows that are lost."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import pytest
from kafka.errors import RetriableError
from kafka.protocol.admin.transactions import DescribeProducersRequest
from kafka.protocol.consumer import FetchRequest, ListOffsetsRequest
from record_batches import ABORT, COMMIT, batch, end

from epochsink.kafka.cluster import Cluster
from epochsink.kafka.committable import KafkaCommittable, Producer, Transaction, WrittenPartition
from epochsink.kafka.server import End, Topic
from epochsink.kafka.witness import Loss, Seen, Witness

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from epochsink.kafka.server import LeaderRequest, Partition

ID: Final = "f" * 32
FIRST: Final = Transaction("epochsink.x", 7, 3)
SECOND: Final = Transaction("epochsink.y", 8, 3)
AT: Final = ("orders", 0)
OFFSET_OUT_OF_RANGE: Final = 1


class Brokers(Cluster):
    """A cluster of one partition, which holds ``log`` from ``first`` on; leader epoch 1 has ended at ``epoch_end``."""

    def __init__(self, *log: bytes, epoch_end: int = 1000, topic_id: str = ID, first: int = 0) -> None:
        super().__init__("broker:9092", {}, 1.0)
        self.log = log
        self.epoch_end = epoch_end
        self.topic_id = topic_id
        self.first = first
        self.positions: list[int] = []

    def until(self, deadline: float, attempt: Callable[[], Any]) -> Any:
        del deadline
        return attempt()

    def topics_known(self, names: Iterable[str]) -> dict[str, Topic]:
        return {name: Topic(self.topic_id, {0: 1}) for name in names}

    def topics_and(
        self, names: Iterable[str], requests: Sequence[LeaderRequest]
    ) -> tuple[dict[str, Topic], list[dict[Partition, Any]]]:
        return self.topics_known(names), self.ask_leaders(requests)

    def ask_all(self, requests: Sequence[tuple[int | None, Any]]) -> list[Any]:
        return [self._answer(request) for _, request in requests]

    def _answer(self, request: Any) -> Any:
        [topic] = request.topics
        [asked] = topic.partitions
        told = SimpleNamespace(error_code=0)
        if isinstance(request, ListOffsetsRequest):
            told.partition_index, told.offset, told.leader_epoch = asked.partition_index, self.first, 1
            return SimpleNamespace(topics=[SimpleNamespace(name=topic.name, partitions=[told])])
        if not isinstance(request, FetchRequest):
            told.partition, told.end_offset = asked.partition, self.epoch_end
            return SimpleNamespace(topics=[SimpleNamespace(topic=topic.topic, partitions=[told])])
        self.positions.append(asked.fetch_offset)
        diverged = asked.last_fetched_epoch >= 0 and self.epoch_end < asked.fetch_offset
        told.partition_index, told.high_watermark = asked.partition, max(map(after, self.log), default=0)
        told.diverging_epoch = SimpleNamespace(epoch=1, end_offset=self.epoch_end) if diverged else None
        told.error_code = OFFSET_OUT_OF_RANGE if asked.fetch_offset < self.first else 0
        told.log_start_offset = -1 if told.error_code else self.first
        told.records = b"" if diverged else b"".join(one for one in self.log if after(one) > asked.fetch_offset)
        answered = SimpleNamespace(topic=topic.topic, partitions=[told])
        return SimpleNamespace(error_code=0, responses=[answered])


def after(kept: bytes) -> int:
    return int.from_bytes(kept[:8], "big") + int.from_bytes(kept[23:27], "big") + 1


def part(transaction: Transaction = FIRST, voted_end: int = 10) -> KafkaCommittable:
    return KafkaCommittable(
        transaction=transaction,
        partition=0,
        task="b" * 32,
        rows=3,
        prepared_at=0,
        topics={"orders": ID},
        places=(WrittenPartition("orders", 0, 5, voted_end, 1),),
    )


def look(
    brokers: Any, *parts: KafkaCommittable, ended: bool = True, seen: dict[Transaction, int] | None = None
) -> Loss:
    """Look for losses; ``seen`` is where the partition ended when a transaction was seen whole."""
    ends = {transaction: {AT: End(offset, 1)} for transaction, offset in (seen or {}).items()}
    return Witness(brokers).lost(parts or [part()], ends, time.monotonic() + 10, ended=ended)


@pytest.mark.parametrize("ended", [False, True])
def test_the_end_of_a_transaction_proves_that_its_rows_are_there(*, ended: bool) -> None:
    assert look(Brokers(end(COMMIT, offset=12)), ended=ended) == Loss(None, [])


def test_an_operators_abort_before_the_end_is_a_loss() -> None:
    loss = look(Brokers(end(ABORT, offset=12), end(COMMIT, offset=13)))
    assert loss.words == "orders-0 had aborted epochsink.x before"


def test_an_abort_of_a_later_transaction_takes_rows_whose_end_was_left_out() -> None:
    """If the coordinator has said that it commits; else another driver has prepared the rows again."""
    log = batch(b"late", offset=10, producer_epoch=4), end(ABORT, offset=12, producer_epoch=4)
    for decided, words in (((), None), ([FIRST], "orders-0 had aborted epochsink.x before")):
        found = Witness(Brokers(*log)).lost([part()], {}, time.monotonic() + 10, ended=True, decided=decided)
        assert found.words == words
    earlier = Brokers(end(ABORT, offset=11, producer_epoch=2), end(COMMIT, offset=12))
    assert look(earlier) == Loss(None, [])


def test_an_end_that_is_not_there_yet_is_no_loss_and_no_proof() -> None:
    brokers = Brokers(batch(b"of the next epoch", offset=10, producer_id=9))
    assert look(brokers, ended=False) == Loss(None, [FIRST])
    assert len(brokers.positions) > 1, "it was waited for"


def test_an_end_that_was_deleted_stops_no_commit() -> None:
    """The coordinator has written it, and retention or compaction has removed it."""
    assert look(Brokers(batch(b"later", offset=40, producer_id=9))) == Loss(None, [FIRST])


@pytest.mark.parametrize("first", [6, 10, 12])
def test_rows_that_were_deleted_before_their_end_are_a_loss(first: int) -> None:
    """The first of them, all, and all that was there when the end was written."""
    words = f"orders-0 begins at offset {first} now, and rows of epochsink.x, from offset 5 on, were deleted"
    assert look(Brokers(end(COMMIT, offset=12), first=first)).words == words
    assert look(Brokers(end(COMMIT, offset=12), first=first), seen={FIRST: 11}).words == words


def test_rows_that_were_deleted_with_their_end_are_no_loss() -> None:
    """Readers could read them, and retention or an operator has deleted them since."""
    assert look(Brokers(batch(b"later", offset=40, producer_id=9), first=13)) == Loss(None, [FIRST])


def test_a_log_that_was_cut_before_the_rows_ended_is_a_loss() -> None:
    assert look(Brokers(epoch_end=8)).words == "orders-0 has lost its records from offset 8 on"


def test_a_log_that_was_cut_behind_the_rows_is_read_from_where_they_ended() -> None:
    """Rows of others were lost, and what follows is where they were: an abort there must not be passed over."""
    brokers = Brokers(end(ABORT, offset=12), end(COMMIT, offset=13), epoch_end=12)
    assert look(brokers, seen={FIRST: 20}).words == "orders-0 had aborted epochsink.x before"
    assert brokers.positions == [20, 10]
    whole = Brokers(end(COMMIT, offset=12), epoch_end=12)
    assert look(whole, seen={FIRST: 20}) == Loss(None, [])


def test_of_transactions_that_ended_at_several_offsets_none_is_lost_unnoticed() -> None:
    """The log was cut between the ends of the first and of the second, which was prepared again later."""
    brokers = Brokers(end(COMMIT, offset=12), epoch_end=15)
    loss = look(brokers, part(), part(SECOND, voted_end=30))
    assert loss.words == "orders-0 has lost its records from offset 15 on"


def test_a_topic_that_was_created_again_has_lost_the_rows() -> None:
    loss = look(Brokers(end(COMMIT, offset=12), topic_id="e" * 32))
    assert loss.words == "topic(s) orders were deleted, and perhaps created again"


# ---- the look before the vote and before the commit


WHOLE: Final = batch(b"a", b"b", b"c", offset=5)


class Leader(Brokers):
    """Has a partition from ``first`` to 10, in which producers have open transactions.

    ``open_now`` has their ids, epochs, first offsets and last sequence numbers. ``log`` is what it holds of them.
    """

    def __init__(
        self,
        *open_now: tuple[int, int, int, int],
        first: int = 0,
        topic_id: str = ID,
        log: tuple[bytes, ...] = (WHOLE,),
        leader_epoch: int = 1,
    ) -> None:
        super().__init__(*log, topic_id=topic_id, first=first)
        self.open_now = open_now
        self.leader_epoch = leader_epoch

    def _answer(self, request: Any) -> Any:
        if isinstance(request, FetchRequest):
            return super()._answer(request)
        [topic] = request.topics
        told = SimpleNamespace(error_code=0, partition_index=0)
        if isinstance(request, ListOffsetsRequest):
            told.offset = self.first if topic.partitions[0].timestamp == -2 else 10
            told.leader_epoch = self.leader_epoch
        else:
            told.active_producers = [
                SimpleNamespace(
                    producer_id=producer,
                    producer_epoch=epoch,
                    current_txn_start_offset=start,
                    last_sequence=sequence,
                    coordinator_epoch=-1,
                )
                for producer, epoch, start, sequence in self.open_now
            ]
        return SimpleNamespace(topics=[SimpleNamespace(name=topic.name, partitions=[told])])


UNVOTED: Final = replace(part(), places=())


def before_commit(leader: Any, of: KafkaCommittable, before: Seen | None = None) -> Seen:
    return Witness(leader).look([of], (), time.monotonic() + 10, before)


def test_a_transaction_that_is_open_with_all_of_its_rows_is_whole() -> None:
    seen = before_commit(Leader((7, 3, 5, 2)), part())
    assert seen.whole == {0: part()}
    assert seen.missing == {}


@pytest.mark.parametrize(
    ("open_now", "first", "why"),
    [
        ((7, 3, 5, 1), 0, "they hold 2 of its 3 row"),
        ((7, 3, 5, 3), 0, "they hold 4 of its 3 row"),
        ((7, 2, 5, 2), 0, "it is not open any more in orders-0"),
        ((8, 3, 5, 2), 0, "it is not open any more in orders-0"),
        ((7, 3, -1, 2), 0, "it is not open any more in orders-0"),
        ((7, 3, 8, 2), 0, "it is not open any more in orders-0"),
        ((7, 3, 5, 2), 6, "its first rows were deleted from orders-0"),
    ],
    ids=["fewer rows", "more rows", "an earlier use", "another producer", "ended", "begun again", "deleted"],
)
def test_a_transaction_that_a_partition_does_not_hold_whole_is_not_committed(
    open_now: tuple[int, int, int, int], first: int, why: str
) -> None:
    seen = before_commit(Leader(open_now, first=first), part())
    assert seen.whole == {}
    assert why in seen.missing[0]


def test_rows_are_counted_in_the_vote_too() -> None:
    """Before it, nothing says where the rows begin."""
    assert before_commit(Leader((7, 3, 5, 2)), UNVOTED).whole == {0: part()}
    assert "they hold 2 of its 3 row" in before_commit(Leader((7, 3, 5, 1)), UNVOTED).missing[0]
    assert "they hold 0 of its 3 row" in before_commit(Leader(), UNVOTED).missing[0]
    assert "its first rows were deleted" in before_commit(Leader((7, 3, 5, 2), first=6), UNVOTED).missing[0]


def test_rows_that_begin_before_the_last_look_belong_to_an_earlier_transaction_that_is_still_open() -> None:
    """Its producer has begun the next one, which would commit them too."""
    whole = before_commit(Leader((7, 3, 5, 2)), UNVOTED)
    aborted = Leader((7, 3, 4, 2), log=(batch(b"aborted", offset=4, producer_epoch=2), WHOLE))
    seen = before_commit(aborted, UNVOTED, whole)
    assert "its first rows were lost from orders-0" in seen.missing[0]


@pytest.mark.parametrize(
    "log",
    [
        [batch(b"c", offset=5, sequence=2)],
        [batch(b"a", b"b", b"c", offset=5, producer_epoch=2)],
        [batch(b"a", b"b", b"c", offset=5, producer_id=9)],
    ],
    ids=["a later row", "an earlier use", "another producer"],
)
def test_rows_that_do_not_begin_with_the_first_one_are_not_recorded(log: list[bytes]) -> None:
    """The last sequence number gives the right count: a partition without state accepts any first number."""
    seen = before_commit(Leader((7, 3, 5, 2), log=tuple(log)), UNVOTED)
    assert seen.whole == {}
    assert "its first rows were lost from orders-0" in seen.missing[0]


def test_a_first_row_that_is_not_shown_yet_is_waited_for() -> None:
    """A new leader shows records when its replicas have them."""
    with pytest.raises(RetriableError, match="orders-0 does not show its records from offset 5 on yet"):
        before_commit(Leader((7, 3, 5, 2), log=()), UNVOTED)


def test_first_rows_are_read_only_where_the_leader_has_changed_since_the_last_vote() -> None:
    earlier = before_commit(Leader((7, 3, 5, 2)), UNVOTED)
    later = (batch(b"a", b"b", b"c", offset=10),)
    leader, other = Leader((7, 3, 10, 2), log=later), Leader((7, 3, 10, 2), log=later, leader_epoch=2)
    for each in (leader, other):
        assert before_commit(each, UNVOTED, earlier).whole
    assert leader.positions == []
    assert other.positions == [10]


def test_another_topic_of_the_name_proves_nothing() -> None:
    earlier = before_commit(Leader((7, 3, 5, 2), topic_id="e" * 32), replace(UNVOTED, topics={"orders": "e" * 32}))
    leader = Leader((7, 3, 5, 2))
    assert before_commit(leader, UNVOTED, earlier).whole
    assert leader.positions == [5]


def test_a_partition_that_was_added_and_that_a_broker_does_not_know_yet_is_waited_for() -> None:
    """Partitions were added under the running query, and the broker that names them lags."""
    added = replace(part(), places=(*part().places, WrittenPartition("orders", 1, 0, 3, 1)))
    leader: Any = Leader((7, 3, 5, 2))
    with pytest.raises(RetriableError, match="the brokers do not show orders-1 yet"):
        before_commit(leader, added)
    with pytest.raises(RetriableError, match="the brokers do not show orders-1 yet"):
        Witness(leader).open_before([added], time.monotonic() + 10)


def test_a_part_whose_topic_was_created_again_is_neither_whole_nor_missing() -> None:
    seen = before_commit(Leader((7, 3, 5, 2), topic_id="e" * 32), part())
    assert (seen.whole, seen.missing) == ({}, {})


def test_others_that_are_open_before_the_rows_are_told() -> None:
    leader = Leader((7, 3, 5, 2), (8, 0, 4, 0), (9, 0, 10, 0))
    assert before_commit(leader, part()).before == {Producer(8, 0): AT}


class Forgetful(Leader):
    """Leaves partitions out of the answers to one question."""

    def __init__(self, left_out: type) -> None:
        super().__init__()
        self.left_out = left_out

    def _answer(self, request: Any) -> Any:
        return SimpleNamespace(topics=[]) if isinstance(request, self.left_out) else super()._answer(request)


@pytest.mark.parametrize("left_out", [ListOffsetsRequest, DescribeProducersRequest])
def test_what_a_leader_leaves_out_is_asked_again(left_out: type) -> None:
    """It would look like a partition without open transactions, or without rows."""
    with pytest.raises(RetriableError, match="leave out"):
        before_commit(Forgetful(left_out), UNVOTED)
