"""A pipeline into Kafka is killed wherever its transactions make a difference, and so is the broker.

One growing pipeline on one broker: each start recovers what the crash before it left, does at least one epoch, and dies
at its own point. A reader looks on all the while.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from kafka_rig import pipeline_into_kafka

if TYPE_CHECKING:
    from pathlib import Path

    from fix_services import PrivateKafka

pytestmark = pytest.mark.timeout(1800)


def test_a_pipeline_killed_at_every_point_of_its_transactions_is_exactly_once(
    tmp_path: Path, private_kafka: PrivateKafka
) -> None:
    """Killed in tasks, tried again or not; between record and commit; and between the transactions of one epoch."""
    with pipeline_into_kafka(tmp_path, private_kafka()) as rig:
        rig.restart_with("task.written:2")
        rig.restart_with("kafka.produced:2")
        # Spark tries it again: what the first attempt has prepared is an orphan beside the second's
        rig.restart_with("task.prepared:2", attempts=2)

        rig.restart_with("coordinator.record.after:2")
        assert len(rig.reader.leftovers()) >= 2, "the recorded epoch's transactions are open"
        rig.kill_broker()

        # with fewer tasks than the recorded epoch had, which is adopted
        rig.restart_with("coordinator.commit.before:2", tasks=1)

        # the first transaction of the recovered epoch, which has one, is followed by the first of an epoch with two
        rig.restart_with("kafka.commit.between:2")
        rig.kill_broker()

        # those two, and the first one of the next epoch, whose second one is lost then
        rig.restart_with("kafka.commit.between:3")
        assert rig.lose_open(), "the second transaction of the epoch is open"
        rig.restart_with("coordinator.replay.before")
        rig.restart_with("coordinator.replay.prepared")
        rig.restart_with("coordinator.replay.after")

        rig.is_clean()
