"""Run Kafka (KRaft, broker and controller in one) as a plain process."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Final

from epochsink.errors import ServiceError
from epochsink_devkit.services import versions
from epochsink_devkit.services.artifacts import fetch
from epochsink_devkit.services.java import LIGHTLY, JavaService, console_logging
from epochsink_devkit.services.ports import LOOPBACK, answers, free_port
from epochsink_devkit.services.service import KafkaService

CLUSTER = "epochsinkLocalClusterA"
"""One id for all clusters, so that a second broker can join. The voters decide which brokers belong together."""
ONE_BROKER: Final[dict[str, str | int | bool]] = {
    # the last one is for a listener that a caller's settings may add
    "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,SASL_PLAINTEXT:SASL_PLAINTEXT",
    "inter.broker.listener.name": "PLAINTEXT",
    "controller.listener.names": "CONTROLLER",
    "auto.create.topics.enable": False,
    "group.initial.rebalance.delay.ms": 0,
    "offsets.topic.replication.factor": 1,
    "offsets.topic.num.partitions": 5,
    "transaction.state.log.replication.factor": 1,
    "transaction.state.log.min.isr": 1,
    "transaction.state.log.num.partitions": 5,
}
"""The settings of a broker that is a cluster by itself, as a process or in a container."""
_READY = "Kafka Server started"


class LocalKafka(JavaService, KafkaService):
    """One Kafka broker; `settings` are server properties.

    "{port}" and "{controller_port}" in a value are replaced by the ports, so that a listener can be redefined (SASL).
    """

    version = versions.KAFKA
    jvm_options: tuple[str, ...] = ("-Xmx512m",)
    _controller_port: int | None = None

    def _prepare(self) -> None:
        self._choose_port()
        jvm = [self._program(), "-Xmx128m", LIGHTLY, "-XX:+UseSerialGC"]
        if self._short_lived:
            jvm += self._from_archive()
        command = [*jvm, *self._class_path(), "kafka.tools.StorageTool", "format"]
        done = subprocess.run(
            [*command, "--cluster-id", CLUSTER, "--config", str(self._write_properties())],
            capture_output=True,
            text=True,
            check=False,
            env=self._environment(),
        )
        if done.returncode != 0:
            raise ServiceError(f"Kafka could not format {self.data}:\n{done.stdout}{done.stderr}")

    def _command(self) -> list[str]:
        return [*self._jvm(), *self.jvm_options, *self._class_path(), "kafka.Kafka", str(self._write_properties())]

    def _is_ready(self) -> bool:
        # The port accepts connections before the broker serves requests, so wait for the broker's last log line.
        return _READY in self._log_of_this_start() and answers(self.port)

    def properties(self) -> dict[str, str]:
        """Return the server properties of the next start: the defaults, overridden by `settings`."""
        if self._controller_port is None:
            self._controller_port = free_port()
        defaults: dict[str, str | int | bool] = {
            "process.roles": "broker,controller",
            "node.id": 1,
            "controller.quorum.voters": f"1@{LOOPBACK}:{{controller_port}}",
            "listeners": f"PLAINTEXT://{LOOPBACK}:{{port}},CONTROLLER://{LOOPBACK}:{{controller_port}}",
            "advertised.listeners": f"PLAINTEXT://{LOOPBACK}:{{port}}",
            "log.dirs": str(self.data),
            # After a SIGKILL the broker can rejoin only when its old session has expired (9 s by default).
            "broker.session.timeout.ms": 3000,
            "broker.heartbeat.interval.ms": 500,
            **ONE_BROKER,
            "share.coordinator.state.topic.replication.factor": 1,
            "share.coordinator.state.topic.min.isr": 1,
        }
        merged = {**defaults, **self.settings}
        return {name: self._with_port(value) for name, value in merged.items()}

    def _with_port(self, value: str | int | bool) -> str:  # noqa: FBT001 - a setting's value
        return super()._with_port(value).replace("{controller_port}", str(self._controller_port))

    def _write_properties(self) -> Path:
        path = self.home / "server.properties"
        path.touch(mode=0o600)  # it may hold passwords
        path.write_text("".join(f"{name}={value}\n" for name, value in self.properties().items()))
        return path

    def _jars(self) -> list[Path]:
        return list(fetch(versions.KAFKA_BUNDLE).glob("*.jar"))

    def _class_path(self) -> list[str]:
        logging = self.home / "log4j2.properties"
        logging.write_text(console_logging("warn"))
        return [f"-Dlog4j2.configurationFile={logging}", "-cp", f"{fetch(versions.KAFKA_BUNDLE)}/*"]
