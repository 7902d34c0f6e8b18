"""One run of the pipeline as processes: the driver's Python, its JVM, and the Python workers, in one session."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Self

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

GONE_SECONDS = 30.0


class PipelineProcess:
    """The processes of one run. As a context manager it ends all of them, by their ids."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        with log.open("ab") as output:
            self._popen = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYSPARK_PYTHON": sys.executable, **environment},
                start_new_session=True,
            )
        self.driver = self._popen.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.kill_all()

    @property
    def exit_code(self) -> int | None:
        """The driver's exit status, -9 after a SIGKILL; None while it runs."""
        return self._popen.poll()

    def wait(self, deadline: float, meanwhile: Callable[[], None]) -> int:
        """Wait for the driver to end. Raises TimeoutError at the deadline (monotonic)."""
        while (code := self.exit_code) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the pipeline (pid {self.driver}) did not end in time")
            meanwhile()
            time.sleep(0.05)
        return code

    def jvm(self) -> int | None:
        """Return the id of the driver's JVM, None if it does not run."""
        return next((process.pid for process in self._members() if process.name() == "java"), None)

    def batch_worker(self) -> int | None:
        """Return the id of the process in which Spark Connect's server calls foreachBatch, None if it does not run."""
        found = (one.pid for one in self._members() if "foreach_batch_worker" in " ".join(one.cmdline()))
        return next(found, None)

    def workers(self) -> list[int]:
        """Return the ids of the Python workers, without the daemon that forks them."""
        daemons = {process.pid for process in self._members() if self._is_daemon(process)}
        return [
            process.pid
            for process in self._members()
            if process.pid in daemons and process.ppid() in daemons and process.status() != psutil.STATUS_ZOMBIE
        ]

    @staticmethod
    def _is_daemon(process: psutil.Process) -> bool:
        return "pyspark.daemon" in process.cmdline()

    def kill_all(self) -> None:
        """SIGKILL to every process of the session; returns when all are gone."""
        deadline = time.monotonic() + GONE_SECONDS
        while members := list(self._members()):
            for process in members:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
            if time.monotonic() > deadline:
                raise TimeoutError(f"processes {[process.pid for process in members]} do not die")
            time.sleep(0.01)
        self._popen.wait(GONE_SECONDS)

    def _members(self) -> Iterator[psutil.Process]:
        """Yield the living processes of the session: Spark's workers leave the group, none leaves the session."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                if os.getsid(process.pid) == self.driver and process.status() != psutil.STATUS_ZOMBIE:
                    yield process
