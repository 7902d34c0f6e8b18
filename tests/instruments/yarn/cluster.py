"""Run YARN on one machine: a ResourceManager and two NodeManagers with different addresses, beside an HDFS."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
import urllib.request
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import psutil
import pyspark

from epochsink.errors import ServiceError
from epochsink_devkit.services import LocalHdfs, spark_packages, versions
from epochsink_devkit.services.hadoop import daemon, write_site
from epochsink_devkit.services.java import LIGHTLY, java
from epochsink_devkit.services.ports import LOOPBACK, free_port
from epochsink_devkit.services.process import Launch, SupervisedProcess

if TYPE_CHECKING:
    from collections.abc import Mapping

HOSTS: Final = (LOOPBACK, "127.0.0.2")
QUEUE: Final = "streams"
"""The queue of the tests' pipelines. It is guaranteed a fifth of the memory, and may take all that "others" leaves."""
OTHERS: Final = "others"
NODE_MEGABYTES: Final = 2560
LOST_SECONDS: Final = 10
"""After this time without a heartbeat a NodeManager is lost."""
MASTER_SECONDS: Final = 30
"""After this time without one an application master is lost. On a busy machine it needs some 15 to register."""
ATTEMPTS: Final = 8
"""How many attempts at an application the ResourceManager allows."""
START_SECONDS: Final = 90.0
_RESOURCE_MANAGER: Final = "org.apache.hadoop.yarn.server.resourcemanager.ResourceManager"
_NODE_MANAGER: Final = "org.apache.hadoop.yarn.server.nodemanager.NodeManager"
_JVM: Final = f"{LIGHTLY} -XX:+UseSerialGC"
_PYSPARK: Final = Path(pyspark.__file__).parent
_SCHEDULER: Final = {
    "root.queues": f"{QUEUE},{OTHERS}",
    f"root.{QUEUE}.capacity": "20",
    f"root.{QUEUE}.maximum-capacity": "100",
    f"root.{QUEUE}.user-limit-factor": "5",
    f"root.{OTHERS}.capacity": "80",
    f"root.{OTHERS}.maximum-capacity": "100",
    # by default a tenth, which on so small a cluster is no application master at all
    "maximum-am-resource-percent": "1.0",
    "node-locality-delay": "-1",
}


@dataclass(frozen=True)
class Container:
    """The processes of one container on this machine: its shell, its JVM, and the Python processes below."""

    name: str
    processes: tuple[psutil.Process, ...]

    @property
    def attempt(self) -> int:
        """The attempt at its application that it belongs to, from 1 on."""
        return int(self.name.split("_")[-2])

    @property
    def is_master(self) -> bool:
        """Whether it is its attempt's application master: the first container of each."""
        return self.name.endswith("_000001")

    @property
    def jvm(self) -> psutil.Process | None:
        """The executor's or the application master's JVM, None if it does not run."""
        return next((process for process in self.processes if _program(process) == "java"), None)

    def send(self, signum: signal.Signals) -> None:
        """Signal all processes."""
        for process in self.processes:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signum)


class _Daemon:
    """The ResourceManager or a NodeManager. What it has started goes on when it is killed, as on a host."""

    def __init__(self, name: str, main: str, folder: Path, ready: str) -> None:
        self.folder = folder / name
        self.settings = self.folder / "conf"
        self.settings.mkdir(parents=True)
        self._name = name
        self._main = main
        self._ready = ready
        self._log = self.folder / "daemon.log"
        self._processes: list[SupervisedProcess] = []

    def start(self) -> None:
        """Start it, and wait until it can be used."""
        begin = self._log.stat().st_size if self._log.exists() else 0
        command = daemon(self._main, self.settings, versions.hdfs_bundle(), versions.YARN_BUNDLE)
        # the shell remains when the daemon is killed, and with it the containers
        keeper = ["/bin/bash", "-c", '"$@"; exec sleep infinity', self._name, *command]
        home = Path(java()).resolve().parents[1]
        environment = {**os.environ, "JAVA_HOME": str(home), "USER": "root"}
        launch = Launch(command=keeper, log=self._log, cwd=self.folder, env=environment)
        self._processes.append(SupervisedProcess(launch))
        deadline = time.monotonic() + START_SECONDS
        while self._ready not in self._log.read_text(errors="replace")[begin:]:
            ended = any(one.name() == "sleep" for one in self._processes[-1].tree()[:1])
            if ended or time.monotonic() > deadline:
                tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-30:])
                raise ServiceError(f"YARN's {self._name} did not start within {START_SECONDS:.0f} s:\n{tail}")
            time.sleep(0.1)

    @property
    def process(self) -> psutil.Process | None:
        """The daemon itself, None if it does not run."""
        return next((one for one in self.tree() if _program(one) == "java" and one.cmdline()[-1] == self._main), None)

    def send(self, signum: signal.Signals) -> None:
        """Signal the daemon, and none of its containers."""
        if (process := self.process) is not None:
            process.send_signal(signum)

    def tree(self) -> list[psutil.Process]:
        """Return all running processes: the daemon and what it has started, in this life and in earlier ones."""
        return [process for one in self._processes for process in one.tree()]

    def close(self) -> None:
        """End the daemon and all containers."""
        for process in self._processes:
            process.kill()


class NodeManager(_Daemon):
    """One NodeManager. If it is killed, its containers go on."""

    def containers(self) -> list[Container]:
        """Return the containers that run on the node, oldest first."""
        found: dict[str, list[psutil.Process]] = {}
        for process in self.tree():
            with suppress(psutil.NoSuchProcess):
                name = process.environ().get("CONTAINER_ID")
                if name:
                    found.setdefault(name, []).append(process)
        return [Container(name, tuple(processes)) for name, processes in sorted(found.items())]

    def output(self, container: str) -> str:
        """Return what a container has written to its standard output and error."""
        files = sorted(self.folder.glob(f"logs/*/{container}/std*"))
        return "".join(file.read_text(errors="replace") for file in files)


class YarnCluster:
    """A ResourceManager and two NodeManagers. As a context manager it ends all processes, by their ids.

    ``hdfs`` is the default file system, where applications are staged.
    """

    def __init__(self, folder: Path, hdfs: LocalHdfs) -> None:
        self._hdfs = hdfs
        self._ports = {name: free_port() for name in ("", "scheduler.", "resource-tracker.", "admin.", "webapp.")}
        self._stack = ExitStack()
        self.manager = _Daemon("manager", _RESOURCE_MANAGER, folder, "Transitioned to active state")
        self.nodes = [
            NodeManager(f"node-{host}", _NODE_MANAGER, folder, "Registered with ResourceManager as") for host in HOSTS
        ]

    def __enter__(self) -> Self:
        with ExitStack() as starting:
            self._write(self.manager, {})
            scheduler = {f"yarn.scheduler.capacity.{name}": value for name, value in _SCHEDULER.items()}
            write_site(self.manager.settings / "capacity-scheduler.xml", scheduler)
            starting.callback(self.manager.close)
            self.manager.start()
            for host, node in zip(HOSTS, self.nodes, strict=True):
                self._write(node, self._of_node(host, node))
                starting.callback(node.close)
                node.start()
            self._stack = starting.pop_all()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()

    @property
    def configuration(self) -> Path:
        """The folder for HADOOP_CONF_DIR of whoever submits an application."""
        return self.manager.settings

    @property
    def settings(self) -> Mapping[str, str]:
        """The settings of Spark that an application of this size needs."""
        jars = ":".join(map(str, spark_packages()))
        return {
            "spark.master": "yarn",
            "spark.yarn.queue": QUEUE,
            # on this machine the jars are where every container finds them
            "spark.yarn.jars": f"local:{_PYSPARK}/jars/*",
            "spark.pyspark.python": sys.executable,
            "spark.driver.extraClassPath": jars,
            "spark.executor.extraClassPath": jars,
            "spark.executor.extraJavaOptions": _JVM,
            "spark.yarn.am.extraJavaOptions": _JVM,
            "spark.executor.instances": "2",
            "spark.executor.cores": "1",
            "spark.executor.memory": "512m",
            # for the Python workers
            "spark.executor.memoryOverhead": "512m",
            "spark.yarn.am.memory": "256m",
            "spark.driver.memory": "512m",
            "spark.driver.memoryOverhead": "768m",
        }

    def containers(self) -> list[Container]:
        """Return all containers that run, oldest first."""
        return sorted((one for node in self.nodes for one in node.containers()), key=lambda one: one.name)

    def node_of(self, container: str) -> NodeManager:
        """Return the node on which a container runs or ran."""
        return next(node for node in self.nodes if list(node.folder.glob(f"logs/*/{container}")))

    def crowd(self, count: int, megabytes: int, seconds: int) -> None:
        """Submit applications of one container each to the other queue, which is guaranteed more than they ask for.

        Containers of `QUEUE` are preempted for them. They sleep so long.
        """
        for number in range(count):
            # the names are those of Java: the jar with all of Hadoop has other annotations than the ones that it reads
            name = self._ask("apps/new-application")["applicationId"]
            application = {
                "applicationId": name,
                "applicationName": f"crowd-{number}",
                "applicationType": "SHELL",
                "queue": OTHERS,
                "maxAppAttempts": 1,
                "containerLaunchContextInfo": {"commands": [f"sleep {seconds}"]},
                "resource": {"memory": megabytes, "vCores": 1},
            }
            self._ask("apps", application)

    def _ask(self, path: str, body: object = None) -> dict[str, Any]:
        url = f"http://{LOOPBACK}:{self._ports['webapp.']}/ws/v1/cluster/{path}?user.name=root"
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        data = b"" if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, headers)
        with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310 - our own address
            text = answer.read()
        return json.loads(text) if text else {}

    def _write(self, one: _Daemon, more: Mapping[str, str]) -> None:
        shutil.copy(self._hdfs.settings_folder / "hdfs-site.xml", one.settings)
        shutil.copy(self._hdfs.settings_folder / "core-site.xml", one.settings)
        properties = {
            "yarn.resourcemanager.hostname": LOOPBACK,
            **{f"yarn.resourcemanager.{name}address": f"{LOOPBACK}:{port}" for name, port in self._ports.items()},
            "yarn.resourcemanager.am.max-attempts": str(ATTEMPTS),
            "yarn.resourcemanager.nodemanagers.heartbeat-interval-ms": "250",
            "yarn.nm.liveness-monitor.expiry-interval-ms": str(1000 * LOST_SECONDS),
            "yarn.am.liveness-monitor.expiry-interval-ms": str(1000 * MASTER_SECONDS),
            "yarn.scheduler.minimum-allocation-mb": "128",
            "yarn.resourcemanager.scheduler.monitor.enable": "true",
            "yarn.resourcemanager.monitor.capacity.preemption.monitoring_interval": "1000",
            "yarn.resourcemanager.monitor.capacity.preemption.max_wait_before_kill": "2000",
            "yarn.resourcemanager.monitor.capacity.preemption.total_preemption_per_round": "1.0",
            "yarn.resourcemanager.monitor.capacity.preemption.natural_termination_factor": "1.0",
        }
        write_site(one.settings / "yarn-site.xml", {**properties, **more})

    @staticmethod
    def _of_node(host: str, node: NodeManager) -> dict[str, str]:
        return {
            "yarn.nodemanager.hostname": host,
            "yarn.nodemanager.address": f"{host}:{free_port()}",
            "yarn.nodemanager.localizer.address": f"{host}:{free_port()}",
            "yarn.nodemanager.webapp.address": f"{host}:{free_port()}",
            "yarn.nodemanager.collector-service.address": f"{host}:{free_port()}",
            "yarn.nodemanager.local-dirs": str(node.folder / "local"),
            "yarn.nodemanager.log-dirs": str(node.folder / "logs"),
            "yarn.nodemanager.resource.memory-mb": str(NODE_MEGABYTES),
            "yarn.nodemanager.vmem-check-enabled": "false",
            # the disk of a development machine may be full
            "yarn.nodemanager.disk-health-checker.max-disk-utilization-per-disk-percentage": "100",
        }


def _program(process: psutil.Process) -> str:
    """Return the name of a process's program, nothing if it has ended."""
    with suppress(psutil.NoSuchProcess):
        return str(process.name())
    return ""
