"""SIGKILL at random moments to the driver, its JVM, a Python worker and the broker: see `random_kills`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest
from kafka_rig import ROWS_FED, pipeline_into_kafka
from random_kills import CLASSIC, KILLS, Killer, Kills

if TYPE_CHECKING:
    from pathlib import Path

    from fix_services import PrivateKafka

BACKLOG: Final = 6 * ROWS_FED

pytestmark = pytest.mark.timeout(300 + 120 * KILLS)


def test_a_pipeline_whose_processes_and_broker_are_killed_at_random_is_exactly_once(
    tmp_path: Path, private_kafka: PrivateKafka
) -> None:
    kills = Kills("random kills", CLASSIC)
    with pipeline_into_kafka(tmp_path, private_kafka()) as rig:
        Killer(rig.harness, kills.chance, BACKLOG, rig.kill_broker).kill_all([*kills.plan])
        rig.harness.drain()
        report = rig.harness.report()
    kills.keep(report)
    assert report.clean, str(report)
