"""Executors in processes of their own, and a task that hangs: its speculative copy is what counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from kafka_rig import ROWS_FED, pipeline_into_kafka

from epochsink.devkit.services.spark_cluster import SparkCluster

if TYPE_CHECKING:
    from pathlib import Path

    from fix_services import PrivateKafka

SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.minTaskRuntime": "1s",
}

pytestmark = pytest.mark.timeout(600)


def test_a_task_that_hangs_with_its_rows_prepared_is_overtaken_by_its_copy_and_leaves_nothing(
    tmp_path: Path, private_kafka: PrivateKafka
) -> None:
    hangs = tmp_path / "hangs"
    armed = {
        "EPOCHSINK_FAILPOINT": "task.prepared",
        "EPOCHSINK_FAILPOINT_ONCE": str(hangs),
        "EPOCHSINK_FAILPOINT_SIGNAL": "STOP",
    }
    in_executors = {f"spark.executorEnv.{name}": value for name, value in armed.items()}
    home = tmp_path / "cluster"
    home.mkdir()
    with (
        SparkCluster(home) as cluster,
        pipeline_into_kafka(tmp_path, private_kafka(), {**cluster.settings, **SPECULATION, **in_executors}) as rig,
    ):
        rig.harness.feed(2 * ROWS_FED)
        rig.harness.drain(starts=1)
        assert hangs.exists(), "no task has hung"
        rig.was_clean()
