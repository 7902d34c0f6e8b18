"""Two drivers on one checkpoint: the older one, stopped in its tracks, comes back when the newer has gone past it."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING

import psutil
import pytest
from kafka_rig import ROWS_FED, KafkaRig, pipeline_into_kafka

if TYPE_CHECKING:
    from pathlib import Path

    from fix_services import PrivateKafka
    from processes import PipelineProcess

pytestmark = pytest.mark.timeout(1200)


class Zombie:
    """A run that stops at a point until it is let go."""

    def __init__(self, rig: KafkaRig, point: str, stack: contextlib.ExitStack) -> None:
        self._harness = rig.harness
        once = rig.harness.folder / f"stopped-{rig.harness.runs + 1}"
        self._process: PipelineProcess = rig.harness.start(crash=point, once=str(once), stop=True)
        self._output = rig.harness.output
        stack.enter_context(self._process)
        driver = psutil.Process(self._process.driver)
        stopped = rig.harness.wait_for(
            self._process, lambda: once.exists() and driver.status() == psutil.STATUS_STOPPED, f"the stop at {point}"
        )
        assert stopped
        rig.harness.log.write("killed", what=f"stopped at {point}", pid=self._process.driver)
        self.attempt = rig.harness.open_attempt()

    def go_on(self) -> None:
        """Let it go on; it has to find that it is superseded."""
        os.kill(self._process.driver, signal.SIGCONT)
        self._harness.end(self._process)
        assert self._process.exit_code != 0
        assert "Fenced" in self._output.read_text(errors="replace")


def test_a_driver_that_wakes_up_after_another_has_taken_over_changes_nothing_and_stops_with_an_error(
    tmp_path: Path, private_kafka: PrivateKafka
) -> None:
    with pipeline_into_kafka(tmp_path, private_kafka()) as rig, contextlib.ExitStack() as stack:
        rig.harness.feed(2 * ROWS_FED)
        voted = Zombie(rig, "coordinator.record.before:2", stack)
        assert voted.attempt is not None
        rig.harness.log.write("aborted", attempt=voted.attempt)

        rig.harness.feed(ROWS_FED)
        # of two transactions the first is committed
        committing = Zombie(rig, "kafka.commit.between:3", stack)
        voted.go_on()

        rig.harness.feed(ROWS_FED)
        rig.harness.drain()
        committing.go_on()

        rig.was_clean()
