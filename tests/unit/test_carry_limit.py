"""How much of an epoch's spooled rows the ledger carries."""

from __future__ import annotations

import pytest

from epochsink.sink import Epoch, Identity, Keeping, WriterContext
from epochsink.spark.epoch_writer import CARRIED_BY_EPOCH, CarryLimit
from epochsink.spark.write_task import CARRIED_BY_FIRST_TASK, WriteOrder


def limit(told: int, partition: int) -> int:
    order = WriteOrder(Epoch(0, "a" * 32), {"out": WriterContext(Keeping.IN_SPOOL)}, told)
    return order.task(Identity("query", "out"), partition, "b" * 32).carried


@pytest.mark.parametrize("answers", [0, 1, 3, 200, 10_000])
def test_an_epoch_with_as_many_tasks_again_stays_below_the_limit_of_an_entry(answers: int) -> None:
    carry = CarryLimit()
    carry.learn(answers)
    assert 0 < carry.bytes <= CARRIED_BY_FIRST_TASK
    assert carry.bytes * answers <= CARRIED_BY_EPOCH


def test_nothing_is_carried_while_the_number_of_tasks_is_unknown_or_may_have_been_too_much() -> None:
    carry = CarryLimit()
    assert carry.bytes == 0
    carry.learn(2)
    carry.forget()
    assert carry.bytes == 0


def test_an_epoch_with_far_more_tasks_than_the_one_before_makes_an_entry_of_a_few_megabytes() -> None:
    carry = CarryLimit()
    carry.learn(1)
    mebibyte = 1 << 20
    assert sum(limit(carry.bytes, partition) for partition in range(1_000)) < 4.2 * mebibyte
    assert sum(limit(carry.bytes, partition) for partition in range(10_000)) < 6.5 * mebibyte


@pytest.mark.parametrize("answers", [1, 8, 50, 200])
def test_as_many_tasks_as_in_the_epoch_before_carry_what_each_may(answers: int) -> None:
    carry = CarryLimit()
    carry.learn(answers)
    assert limit(carry.bytes, answers - 1) >= 0.9 * carry.bytes
