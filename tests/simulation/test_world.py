"""A target is set back to what it held then, whatever has changed in it since."""

from __future__ import annotations

import pytest

from simulation.readers import Row
from simulation.steps import at_once
from simulation.world import World

ROWS = [Row("query-1", 0, at, "a" * 32) for at in range(2)]


@pytest.fixture
def world() -> World:
    world = World("K")
    world.keeps_copies = lambda: True
    return world


def test_a_partition_has_again_what_it_had_before_it_lost_a_row(world: World) -> None:
    kafka, step = world.kafka, world.copying("K", at_once)
    producer = kafka.initialise("id")
    kafka.send("id", producer, ROWS[:1], None)
    step("send", lambda: kafka.send("id", producer, ROWS[1:], None))
    step("fence", lambda: kafka.fence("key"))
    assert kafka.lose_at_partition("lost")
    assert not kafka.holds("id", producer, 2)
    assert world.fail_over("K", 1)
    assert kafka.holds("id", producer, 2)
    assert world.fail_over("K", 1)
    assert kafka.holds("id", producer, 1)


def test_a_transaction_that_is_open_again_is_not_among_those_that_were_committed_torn(world: World) -> None:
    kafka, step = world.kafka, world.copying("K", at_once)
    producer = kafka.initialise("id")
    kafka.send("id", producer, ROWS, None)
    assert kafka.lose_at_partition("lost")
    step("commit", lambda: kafka.end("id", producer, commit=True))
    assert kafka.torn == {("id", producer)}
    assert world.fail_over("K", 1)
    assert kafka.torn == set()
