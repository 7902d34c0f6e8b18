"""Run a Spark cluster on one machine: a master, and two workers with different host names."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import pyspark

from epochsink.errors import ServiceError
from epochsink_devkit.services import spark_packages
from epochsink_devkit.services.ports import LOOPBACK, answers, free_port
from epochsink_devkit.services.process import Launch, SupervisedProcess

if TYPE_CHECKING:
    import psutil

HOSTS: Final = (LOOPBACK, "127.0.0.2")
"""Different names, because Spark runs the copy of a task only on another host, and goes by the name."""

START_SECONDS: Final = 60.0
_HOME: Final = Path(pyspark.__file__).parent
_DEPLOY: Final = "org.apache.spark.deploy"
_EXECUTOR: Final = "CoarseGrainedExecutorBackend"


class SparkCluster:
    """One executor with one core on each worker. As a context manager it ends all processes, by their ids."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = free_port()
        self._stack = ExitStack()
        self._workers: list[SupervisedProcess] = []

    @property
    def settings(self) -> Mapping[str, str]:
        """The settings that a driver needs to run on this cluster."""
        return {
            "spark.master": f"spark://{LOOPBACK}:{self._port}",
            "spark.executor.memory": "512m",
            "spark.executor.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
            "spark.executor.extraClassPath": ":".join(map(str, spark_packages())),
        }

    def __enter__(self) -> Self:
        with ExitStack() as starting:
            self._start(starting, "master", f"{_DEPLOY}.master.Master", LOOPBACK, self._port)
            deadline = time.monotonic() + START_SECONDS
            while not answers(self._port):
                if time.monotonic() > deadline:
                    raise ServiceError(f"Spark's master did not start within {START_SECONDS:.0f} s: see {self._folder}")
                time.sleep(0.05)
            for host in HOSTS:
                size = ("--cores", "1", "--memory", "1g", "--work-dir", str(self._folder / "work"))
                main = f"{_DEPLOY}.worker.Worker"
                worker = f"worker-{host}"
                started = self._start(starting, worker, main, host, free_port(), *size, self.settings["spark.master"])
                self._workers.append(started)
            self._stack = starting.pop_all()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()

    def executors(self) -> list[psutil.Process]:
        """Return the executors' running processes."""
        below = (process for worker in self._workers for process in worker.tree())
        return [process for process in below if _EXECUTOR in " ".join(process.cmdline())]

    def _start(self, starting: ExitStack, name: str, main: str, host: str, port: int, *more: str) -> SupervisedProcess:
        where = ("--host", host, "--port", str(port), "--webui-port", "0")
        environment = {"SPARK_HOME": str(_HOME), "SPARK_LOCAL_IP": host, "PYSPARK_PYTHON": sys.executable}
        launch = Launch(
            command=[str(_HOME / "bin" / "spark-class"), main, *where, *more],
            log=self._folder / f"{name}.log",
            cwd=self._folder,
            env={**os.environ, **environment, "SPARK_DAEMON_MEMORY": "256m"},
        )
        process = SupervisedProcess(launch)
        starting.callback(process.kill)
        return process
