"""A target is set back to what it held then, whatever has changed in it since."""

from __future__ import annotations

from functools import partial

from simulation.kafka_brokers import TOPIC, Batch
from simulation.readers import Row
from simulation.steps import at_once
from simulation.world import World

ROWS = [Row("query-1", 0, at, "a" * 32) for at in range(2)]
AT = (TOPIC, 0)


def test_a_partition_has_again_what_it_had_before_it_lost_a_row() -> None:
    world = World("K")
    world.keeps_copies = lambda: True
    brokers, step = world.brokers, world.copying("K", at_once)
    _, producer, epoch = brokers.initialise("id")
    brokers.add("id", producer, epoch, [AT])
    for number, row in enumerate(ROWS):
        step("send", partial(brokers.append, AT, "id", Batch(0, producer, epoch, number, (row,))))
    step("fence", lambda: brokers.initialise("fence"))

    def held() -> list[Row]:
        return [row for batch in world.brokers.logs[AT].batches for row in batch.rows]

    assert world.brokers.lose_at_partition("lost")
    assert held() == ROWS[:1]
    assert world.fail_over("K", 1)
    assert held() == ROWS
    assert world.fail_over("K", 1)
    assert held() == ROWS[:1]
