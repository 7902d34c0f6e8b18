"""Start the pipeline's processes, kill all of them at once with SIGKILL, or stop them in order."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import psutil

from epochsink.errors import EpochsinkError
from epochsink_devkit.demo.kill_plan import ANY_MOMENT, Kill

STOP_SECONDS: Final = 60.0
GONE_SECONDS: Final = 20.0
_TAIL_LINES: Final = 30


class DemoFailed(EpochsinkError):
    """The demo could not be completed. This says nothing about rows."""


class PipelineProcess:
    """One run of the pipeline: driver, JVM and Python workers, in a process session of their own.

    ``command`` starts the driver, which begins at a line "start" on its standard input and ends at a line "stop".
    ``armed`` is the kill at whose failpoint a process kills itself. As a context manager, it leaves no process behind.
    """

    def __init__(self, command: Sequence[str], log: Path, armed: Kill | None = None) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("EPOCHSINK_FAILPOINT")}
        # The workers use this Python, not the first one on the path.
        environment["PYSPARK_PYTHON"] = environment["PYSPARK_DRIVER_PYTHON"] = sys.executable
        self._log = log
        self._struck = log.with_suffix(".struck")
        self._struck.unlink(missing_ok=True)
        if armed is not None:
            environment |= {
                "EPOCHSINK_FAILPOINT": f"{armed.point}:{armed.count}",
                "EPOCHSINK_FAILPOINT_ONCE": str(self._struck),
            }
        with log.open("ab") as output:
            self._driver = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def has_struck(self) -> bool:
        """Return whether the armed failpoint was reached. Raises `DemoFailed` if the driver ended otherwise."""
        if self._struck.exists():
            return True
        self.expect_alive()
        return False

    def expect_alive(self) -> None:
        """Raise `DemoFailed` if the driver has ended by itself."""
        # In this order: the file is written before the process dies.
        if self._driver.poll() is not None and not self._struck.exists():
            raise DemoFailed(
                f"the pipeline ended by itself, with status {self._driver.returncode}; its log ends:\n{self.tail()}"
            )

    def kill(self) -> None:
        """Send SIGKILL to every process of the session; returns when none is left."""
        deadline = time.monotonic() + GONE_SECONDS
        while processes := self._session():
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            self._driver.poll()
            if time.monotonic() > deadline:
                raise DemoFailed(f"processes {[process.pid for process in processes]} survived SIGKILL")
            time.sleep(0.01)
        self._driver.wait()

    def begin(self) -> None:
        """Tell the pipeline to begin as soon as it is ready."""
        self._tell("start")

    def stop(self) -> None:
        """Stop the pipeline in order and wait until it ends. Raises `DemoFailed` if it fails or takes too long."""
        self._tell("stop")
        try:
            status = self._driver.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired as late:
            raise DemoFailed(f"the pipeline did not stop within {STOP_SECONDS:.0f} s:\n{self.tail()}") from late
        if status != 0:
            raise DemoFailed(f"the pipeline stopped with status {status}; its log ends:\n{self.tail()}")

    def tail(self) -> str:
        """Return the end of the log."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])

    def _tell(self, what: str) -> None:
        assert self._driver.stdin is not None  # noqa: S101 - for the type checker
        # `expect_alive` reports a process that has ended.
        with suppress(BrokenPipeError):
            self._driver.stdin.write(f"{what}\n".encode())
            self._driver.stdin.flush()

    def _session(self) -> list[psutil.Process]:
        """Return the running processes of the session, because Spark's Python workers have their own process group."""
        members = []
        for process in psutil.process_iter():
            with suppress(ProcessLookupError, psutil.NoSuchProcess):
                if os.getsid(process.pid) == self._driver.pid and process.status() != psutil.STATUS_ZOMBIE:
                    members.append(process)
        return members

    def end(self) -> None:
        """Leave no process."""
        self.kill()
        if self._driver.stdin is not None:
            # The process may have ended before it read its last line.
            with suppress(BrokenPipeError):
                self._driver.stdin.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


class SuccessiveRuns:
    """One run for each kill, and one more. While one works, the next one already starts Spark.

    As a context manager, it ends the run that has not begun.
    """

    def __init__(self, command: Sequence[str], folder: Path, kills: Sequence[Kill]) -> None:
        self._command = command
        self._folder = folder
        self._numbers = itertools.count(1)
        self._armed = [None if kill.point == ANY_MOMENT else kill for kill in kills]
        self._armed.append(None)
        self._next: PipelineProcess | None = None

    def begin(self) -> PipelineProcess:
        """Begin the next run. The caller must end it."""
        process = self._next or self._started()
        process.begin()
        self._next = self._started() if self._armed else None
        return process

    def _started(self) -> PipelineProcess:
        log = self._folder / f"run-{next(self._numbers)}.log"
        return PipelineProcess(self._command, log, self._armed.pop(0))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._next is not None:
            self._next.end()
