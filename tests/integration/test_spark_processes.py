"""Drivers that are killed, that end without a word, that lose tasks, and two drivers on one checkpoint."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import folder_pipeline
import pytest
from waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from streams import Stream

SECONDS = 120


class Driver:
    """A pipeline's process and its group: the JVM and the Python workers."""

    def __init__(self, stream: Stream, end: str, master: str = "local[2]", **environment: str) -> None:
        tests = str(Path(folder_pipeline.__file__).parent)
        self._log = stream.folder / "driver.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, folder_pipeline.__file__, str(stream.folder), end, master],
                env={**os.environ, "PYTHONPATH": tests, **environment},
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def wait(self) -> int:
        """Wait for the end; return the exit code, negative for a signal."""
        return self._process.wait(SECONDS)

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def log(self) -> str:
        return self._log.read_text()

    def end(self) -> None:
        """Kill what is left of the process group, which is this driver's alone."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        finally:
            self._process.wait(SECONDS)


@pytest.fixture
def drivers() -> Iterator[list[Driver]]:
    """Drivers to be ended with the test."""
    started: list[Driver] = []
    yield started
    for driver in started:
        driver.end()


def put_three(stream: Stream) -> None:
    for first in (0, 10, 20):
        stream.put(range(first, first + 10))


@pytest.mark.parametrize(
    "point", ["coordinator.record.after:2", "coordinator.commit.before:2", "coordinator.vote.before:2"]
)
def test_a_driver_killed_at_a_step_is_made_good_by_the_next(stream: Stream, drivers: list[Driver], point: str) -> None:
    """Recorded and undecided, decided and uncommitted, or prepared only: every row comes once."""
    put_three(stream)
    drivers.append(Driver(stream, "await", EPOCHSINK_FAILPOINT=point))
    assert drivers[0].wait() == -signal.SIGKILL, drivers[0].log()
    drivers[0].end()
    assert len(stream.sink.values()) < 30
    stream.run()
    assert stream.sink.values() == list(range(30))
    assert stream.sink.prepared() == []
    assert stream.committed() == stream.done() == [0, 1, 2]


def test_what_a_killed_task_prepared_is_ended_and_its_retry_stands(stream: Stream, drivers: list[Driver]) -> None:
    """Spark runs the task again (maxFailures 3): only what the accepted attempt prepared becomes visible."""
    put_three(stream)
    once = str(stream.folder / "crashed")
    drivers.append(
        Driver(stream, "await", "local[2,3]", EPOCHSINK_FAILPOINT="task.prepared:1", EPOCHSINK_FAILPOINT_ONCE=once)
    )
    assert drivers[0].wait() == 0, drivers[0].log()
    assert Path(once).exists()
    assert stream.sink.values() == list(range(30))
    assert len(stream.sink.calls("swept")) == 1
    assert stream.sink.prepared() == []
    assert stream.committed() == stream.done() == [0, 1, 2]


@pytest.mark.parametrize("end", ["stop", "leave"])
def test_a_program_that_ends_at_once_leaves_nothing_undone_that_the_next_start_does_not_do(
    stream: Stream, drivers: list[Driver], end: str
) -> None:
    """The interpreter's exit waits for decided epochs; what is recorded later is adopted or committed at the start."""
    for first in range(0, 60, 10):
        stream.put(range(first, first + 10))
    drivers.append(Driver(stream, end))
    assert drivers[0].wait() == 0, drivers[0].log()
    drivers[0].end()
    if end == "stop":
        assert stream.committed() == stream.done()
    assert len(stream.done()) > 0
    stream.run()
    assert stream.sink.values() == list(range(60))
    assert stream.committed() == stream.done()


def test_the_older_of_two_processes_is_fenced(stream: Stream, drivers: list[Driver]) -> None:
    put_three(stream)
    drivers.append(Driver(stream, "never"))
    wait_until(lambda: len(stream.done()) > 2, "three epochs are done", 180)
    newer = stream.exactly_once()
    newer.recover(stream.spark)
    stream.put(range(30, 40))
    assert drivers[0].wait() == 1
    assert "Fenced" in drivers[0].log()
    assert stream.sink.values() == list(range(30))
    stream.run(newer)
    assert stream.sink.values() == list(range(40))
