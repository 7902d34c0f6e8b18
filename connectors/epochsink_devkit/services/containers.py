"""Run the services in containers, if a Docker engine is available (extra `[docker]`)."""

from __future__ import annotations

import functools
import secrets
import tempfile
import time
import weakref
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from epochsink.errors import ServiceError
from epochsink_devkit.services import versions
from epochsink_devkit.services.kafka import ONE_BROKER
from epochsink_devkit.services.ports import LOOPBACK, answers, free_port
from epochsink_devkit.services.service import ElasticsearchService, KafkaService, PostgresService, Service

_POLL_SECONDS = 0.2


class ContainerService(Service):
    """A service in one container, which keeps its data after stop and kill. close() removes it.

    `settings` override the defaults and cannot change after the first start. Ports are published on loopback, so the
    engine must run on this machine. testcontainers removes the container if this process dies.
    """

    def __init__(
        self,
        settings: Mapping[str, str | int | bool] | None = None,
        *,
        startup_timeout: float = 180,
        stop_timeout: int = 60,
    ) -> None:
        self.settings = dict(settings or {})
        self.startup_timeout = startup_timeout
        self.stop_timeout = stop_timeout
        self._port = free_port()
        self._container: Any = None
        self._starts = 0
        self._stopped = False
        self._log_folder = tempfile.TemporaryDirectory(prefix=f"epochsink-{self.name}-")
        self._cleaner = weakref.finalize(self, self._log_folder.cleanup)

    @abstractmethod
    def _describe(self) -> dict[str, Any]:
        """Image, environment and command for testcontainers' DockerContainer, and `inner_port`."""

    def start(self) -> Self:
        if self.running:
            return self
        if self._container is None:
            self._container = _create(self._port, **self._describe())
        else:
            self._wrapped().start()
        self._starts += 1
        self._wait_until_ready(time.monotonic() + self.startup_timeout, _POLL_SECONDS)
        return self

    def stop(self) -> None:
        if self.running:
            self.resume()
            self._wrapped().stop(timeout=self.stop_timeout)

    def kill(self) -> None:
        if self.running:
            self._wrapped().kill()
            self._wrapped().wait()
        self._stopped = False

    def pause(self) -> None:
        from docker.errors import APIError  # type: ignore[import-not-found, import-untyped, unused-ignore]  # noqa: PLC0415 - optional

        try:
            self._wrapped().pause()
        except APIError:
            # With cgroups version 1, the engine gives up after some tries to freeze a busy server.
            self._stopped = True
            self._signal("STOP")

    def resume(self) -> None:
        if self._status() == "paused":
            self._wrapped().unpause()
        if self._stopped:
            self._signal("CONT")
            self._stopped = False

    def close(self) -> None:
        if self._container is not None:
            self._container.stop()
            self._container = None
        self._cleaner()

    @property
    def port(self) -> int:
        return self._port

    @property
    def pid(self) -> int:
        if not self.running:
            raise ServiceError(f"{self.name} is not running")
        return int(self._wrapped().attrs["State"]["Pid"])

    @property
    def running(self) -> bool:
        return self._status() in {"running", "paused"}

    @property
    def log_path(self) -> Path:
        path = Path(self._log_folder.name, f"{self.name}.log")
        if self._container is not None:
            path.write_bytes(self._wrapped().logs())
        return path

    def _wrapped(self) -> Any:
        if self._container is None:
            raise ServiceError(f"{self.name} is not running")
        return self._container.get_wrapped_container()

    def _status(self) -> str:
        if self._container is None:
            return "absent"
        wrapped = self._wrapped()
        wrapped.reload()
        return str(wrapped.status)

    def _signal(self, name: str) -> None:
        """Send a signal to every process. The engine signals the first one, because no process inside can stop it."""
        self._wrapped().exec_run(["/bin/sh", "-c", f"kill -{name} -1"], user="root")
        self._wrapped().kill(signal=name)

    def _check_alive(self) -> None:
        if not self.running:
            raise ServiceError(f"{self.name} ended while starting; the end of its log:\n{self._tail()}")

    def _text(self, value: str | int | bool) -> str:  # noqa: FBT001 - a setting's value
        text = str(value).lower() if isinstance(value, bool) else str(value)
        return text.replace("{port}", str(self.port))


class ContainerKafka(ContainerService, KafkaService):
    """One Kafka broker in a container; `settings` are server properties."""

    version = versions.KAFKA

    def _describe(self) -> dict[str, Any]:
        # The same port inside and outside, so that one advertised listener works for both.
        properties: dict[str, str | int | bool] = {
            "process.roles": "broker,controller",
            "node.id": 1,
            "controller.quorum.voters": "1@localhost:29093",
            "listeners": "PLAINTEXT://0.0.0.0:{port},CONTROLLER://localhost:29093",
            "advertised.listeners": f"PLAINTEXT://{LOOPBACK}:{{port}}",
            **ONE_BROKER,
            **self.settings,
        }
        env = {kafka_variable(name): self._text(value) for name, value in properties.items()}
        return {"image": str(versions.KAFKA_IMAGE), "env": env, "inner_port": self.port}

    def _is_ready(self) -> bool:
        return self.logs().count("Kafka Server started") >= self._starts and answers(self.port)


class ContainerPostgres(ContainerService, PostgresService):
    """A PostgreSQL server in a container; `settings` are configuration parameters."""

    version = versions.POSTGRES

    @functools.cached_property
    def password(self) -> str:
        return secrets.token_hex(16)

    def _describe(self) -> dict[str, Any]:
        settings = {"max_prepared_transactions": 64, "max_connections": 200, **self.settings}
        options = [f"--{name}={self._text(value)}" for name, value in settings.items()]
        return {
            "image": str(versions.POSTGRES_IMAGE),
            "env": {"POSTGRES_PASSWORD": self.password},
            "command": ["postgres", *options],
            "inner_port": 5432,
        }

    def _is_ready(self) -> bool:
        # Over TCP: while the image initialises its data, a temporary server listens on the socket file only.
        status, _ = self._wrapped().exec_run(["pg_isready", "-h", LOOPBACK, "-U", "postgres"])
        return bool(status == 0) and answers(self.port)


class ContainerElasticsearch(ContainerService, ElasticsearchService):
    """One Elasticsearch node of the installed client's major version, in a container; `settings` are node settings."""

    @property
    def version(self) -> str:
        return versions.elasticsearch().version

    def _describe(self) -> dict[str, Any]:
        settings: dict[str, str | int | bool] = {
            "discovery.type": "single-node",
            "xpack.security.enabled": False,
            "cluster.routing.allocation.disk.threshold_enabled": False,
            "ES_JAVA_OPTS": "-Xms512m -Xmx1g",
            **self.settings,
        }
        env = {name: self._text(value) for name, value in settings.items()}
        return {"image": str(versions.elasticsearch().image), "env": env, "inner_port": 9200}

    def _is_ready(self) -> bool:
        return self.is_healthy()


def kafka_variable(name: str) -> str:
    """Return the environment variable that sets a server property in the Kafka image."""
    return "KAFKA_" + "".join({"-": "___", "_": "__", ".": "_"}.get(letter, letter) for letter in name).upper()


def _create(port: int, *, inner_port: int, **description: Any) -> Any:
    """Start a new container that publishes `inner_port` as `port` on loopback."""
    try:
        from docker.errors import DockerException  # type: ignore[import-not-found, import-untyped, unused-ignore]  # noqa: PLC0415
        from testcontainers.core.container import DockerContainer  # noqa: PLC0415 - optional, as the line above
    except ImportError as error:
        raise ServiceError("testcontainers is not installed", hint="pip install 'epochsink[docker]'") from error
    try:
        container: Any = DockerContainer(**description)
        container.ports[f"{inner_port}/tcp"] = (LOOPBACK, port)
        return container.start()
    except DockerException as error:
        raise ServiceError(
            f"no Docker engine could run {description['image']}: {error}",
            hint="start Docker, or leave --docker out: plain processes need none",
        ) from error
