"""Executors in processes of their own: a task that hangs is overtaken by its copy, and executors leave and come."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

import pytest
from harness import RUN_SECONDS
from kafka_rig import ROWS_FED, pipeline_into_kafka

from epochsink_devkit.services.spark_cluster import SparkCluster

if TYPE_CHECKING:
    from pathlib import Path

    from fix_services import PrivateKafka
    from kafka_rig import KafkaRig
    from processes import PipelineProcess

SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.minTaskRuntime": "1s",
}
ALLOCATION = {
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.shuffleTracking.enabled": "true",
    "spark.dynamicAllocation.minExecutors": "0",
    "spark.dynamicAllocation.initialExecutors": "2",
    "spark.dynamicAllocation.maxExecutors": "2",
    "spark.decommission.enabled": "true",
    "spark.storage.decommission.enabled": "true",
    # a task that takes longer is killed with its executor
    "spark.executor.decommission.forceKillTimeout": "1s",
    "spark.executor.cores": "1",
}

pytestmark = pytest.mark.timeout(1800)


def test_a_task_that_hangs_and_executors_that_are_decommissioned_lose_and_double_nothing(
    tmp_path: Path, private_kafka: PrivateKafka
) -> None:
    """First a task hangs with its rows prepared: its speculative copy counts. Then all executors leave, twice.

    They are told to in the middle of an epoch, as by a host that is taken away; dynamic allocation gives others.
    """
    hangs = tmp_path / "hangs"
    armed = {
        "EPOCHSINK_FAILPOINT": "task.prepared",
        "EPOCHSINK_FAILPOINT_ONCE": str(hangs),
        "EPOCHSINK_FAILPOINT_SIGNAL": "STOP",
    }
    in_executors = {f"spark.executorEnv.{name}": value for name, value in armed.items()}
    home = tmp_path / "cluster"
    home.mkdir()
    with SparkCluster(home) as cluster, pipeline_into_kafka(tmp_path, private_kafka(), cluster.settings) as rig:
        rig.harness.feed(2 * ROWS_FED)
        with rig.harness.start(settings={**SPECULATION, **in_executors}) as process:
            assert process.wait(time.monotonic() + RUN_SECONDS, rig.harness.watch.look) == 0, rig.harness.tail()
        assert hangs.exists(), "no task has hung"
        rig.harness.feed(3 * ROWS_FED)
        with rig.harness.start(settings=ALLOCATION) as process:
            for _ in range(2):
                decommission_all(rig, cluster, process)
            assert process.wait(time.monotonic() + RUN_SECONDS, rig.harness.watch.look) == 0, rig.harness.tail()
        rig.harness.drain(starts=1)
        rig.was_clean()


def decommission_all(rig: KafkaRig, cluster: SparkCluster, process: PipelineProcess) -> None:
    """Tell every executor to leave while an epoch is being written, and wait until they have left."""
    rig.harness.wait_for_epochs(process, 1)
    rig.harness.wait_for(process, rig.harness.open_attempt, "an epoch under way")
    leaving = cluster.executors()
    assert leaving, "no executor is there"
    for executor in leaving:
        executor.send_signal(signal.SIGPWR)
        rig.harness.log.write("killed", what="executor, decommissioned", pid=executor.pid)
    rig.harness.wait_for(process, lambda: not any(each.is_running() for each in leaving), "executors that leave")
