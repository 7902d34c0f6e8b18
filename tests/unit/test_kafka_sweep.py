"""Which open transactions a sweep aborts, and which it leaves alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest

from epochsink.errors import WentBack
from epochsink.kafka.cluster import Cluster
from epochsink.kafka.committable import KafkaCommittable, Producer, Transaction, transactional_id
from epochsink.kafka.fence import Fence
from epochsink.kafka.server import Description, TransactionState
from epochsink.kafka.sweep import TransactionSweep
from epochsink.sink import Epoch, Identity, Task, orphans

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

IDENTITY: Final = Identity("query", "orders", 2)
FENCE: Final = Producer(70, 3)


def opened(partition: int, generation: int = 2) -> Transaction:
    task = Task(Identity("query", "orders", generation), Epoch(5, "a" * 32), partition, "b" * 32)
    return Transaction(str(transactional_id(task, bounded=True)), partition + 1, 0)


class Coordinator:
    """Has open transactions; ``fence`` is the producer that has the fence's id now."""

    def __init__(self, *open_now: Transaction, fence: Producer = FENCE) -> None:
        self.open_now = {each.transactional_id: each for each in open_now}
        self.fence = fence
        self.aborted: list[Transaction] = []
        self.partitions: Sequence[tuple[str, int]] = ()

    def initialise(self, name: str, deadline: float) -> Producer:
        del name, deadline
        return FENCE

    def open_ids(self, prefix: str, deadline: float) -> list[str]:
        return self.ids(prefix, (TransactionState.ONGOING,), deadline)

    def ids(self, prefix: str, states: Sequence[TransactionState], deadline: float) -> list[str]:
        del deadline
        return [name for name in self.open_now if name.startswith(prefix)] if TransactionState.ONGOING in states else []

    def describe(self, ids: Iterable[str], deadline: float) -> dict[str, Description]:
        del deadline
        return {
            name: Description(TransactionState.ONGOING, *self.open_now[name].producer, partitions=self.partitions)
            if name in self.open_now
            else Description(TransactionState.EMPTY, *self.fence)
            for name in ids
        }

    def fence_off(self, transactions: Sequence[Transaction], deadline: float) -> None:
        del deadline
        self.aborted += transactions


def sweep(coordinator: Any) -> TransactionSweep:
    fence = Fence(Cluster("broker:9092", {}, 1.0), coordinator, IDENTITY)
    newer, coordinator.open_now = coordinator.open_now, {}
    fence.take(0.0)
    coordinator.open_now = newer
    return TransactionSweep(Cluster("broker:9092", {}, 1.0), coordinator, fence, IDENTITY)


def end_all(sweeping: TransactionSweep, keep: list[Any], done: list[Any]) -> list[str]:
    """Sweep as the engine does."""
    left = orphans(sweeping.remnants((keep, done)), IDENTITY.generation, (keep, done))
    return sweeping.end(left) if left else []


def part(transaction: Transaction) -> Any:
    return KafkaCommittable(
        transaction=transaction, partition=0, task="b" * 32, rows=1, prepared_at=0, topics={"orders": "1" * 32}
    ).to_json()


def test_what_no_recorded_epoch_names_is_aborted_and_the_rest_stays() -> None:
    coordinator = Coordinator(opened(0), opened(1), opened(2, generation=1))
    assert len(end_all(sweep(coordinator), [part(opened(0))], [])) == 2
    assert coordinator.aborted == [opened(1), opened(2, generation=1)]


def test_an_earlier_use_of_a_recorded_id_does_not_keep_a_later_one() -> None:
    """The id of a transaction that is recorded and lost may be in use again."""
    coordinator = Coordinator(opened(0))
    assert end_all(sweep(coordinator), [part(opened(0)._replace(producer_epoch=9))], [])
    assert coordinator.aborted == [opened(0)]


def test_a_replay_under_way_and_a_newer_driver_are_left_alone() -> None:
    coordinator = Coordinator(opened(0), opened(1, generation=3))
    sweeping = sweep(coordinator)
    sweeping.busy.add(opened(0).transactional_id)
    assert end_all(sweeping, [], []) == []
    assert coordinator.aborted == []


def test_a_driver_that_has_lost_the_fence_aborts_nothing() -> None:
    """The driver that has it may have recorded what is open."""
    coordinator = Coordinator(opened(0), fence=FENCE._replace(producer_epoch=4))
    assert end_all(sweep(coordinator), [], []) == []
    assert coordinator.aborted == []


MARKERS: Final = ("__consumer_offsets", 7)


@pytest.mark.parametrize("partitions", [[], [("orders", 0)], [MARKERS, ("orders", 0)]])
def test_an_open_transaction_of_a_done_epoch_is_left_open(partitions: list[tuple[str, int]]) -> None:
    """The cluster has lost its commit: an abort would take away the only copy of its rows."""
    coordinator = Coordinator(opened(0))
    coordinator.partitions = partitions
    with pytest.raises(WentBack, match="the target has lost the commit"):
        end_all(sweep(coordinator), [], [part(opened(0))])
    assert coordinator.aborted == []


def test_a_transaction_of_a_done_epoch_that_a_late_request_has_opened_again_is_aborted() -> None:
    """It has the marker's partition only: a coordinator that has lost the commit lists those of the rows too."""
    coordinator = Coordinator(opened(0))
    coordinator.partitions = [MARKERS]
    assert end_all(sweep(coordinator), [part(opened(0))], []) == []
    assert len(end_all(sweep(coordinator), [], [part(opened(0))])) == 1
    assert coordinator.aborted == [opened(0)]
