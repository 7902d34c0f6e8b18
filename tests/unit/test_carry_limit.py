"""How much of an epoch's spooled rows the ledger carries."""

from __future__ import annotations

import pytest

from epochsink.spark.carry_limit import EPOCH_BYTES, TASK_BYTES, CarryLimit


@pytest.mark.parametrize("answers", [0, 1, 3, 200, 10_000])
def test_an_epoch_with_as_many_tasks_again_stays_below_the_limit_of_an_entry(answers: int) -> None:
    limit = CarryLimit()
    limit.learn(answers)
    assert 0 < limit.bytes <= TASK_BYTES
    assert limit.bytes * answers <= EPOCH_BYTES


def test_nothing_is_carried_while_the_number_of_tasks_is_unknown_or_may_have_been_too_much() -> None:
    limit = CarryLimit()
    assert limit.bytes == 0
    limit.learn(2)
    limit.forget()
    assert limit.bytes == 0
