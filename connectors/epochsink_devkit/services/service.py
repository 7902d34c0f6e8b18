"""Define what every service can do, as plain processes or in a container."""

from __future__ import annotations

import contextlib
import http.client
import time
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Final, Self

from epochsink.errors import ServiceError
from epochsink_devkit.services.ports import LOOPBACK

_TAIL_LINES: Final = 40


class Service(ABC):
    """One server for development and tests, on a loopback port that is the same across restarts.

    As a context manager it starts the server, and at the end stops it and removes its data.
    """

    name: ClassVar[str]
    startup_timeout: float
    """Longest time of a start in seconds."""

    @property
    @abstractmethod
    def version(self) -> str:
        """The server's version."""

    @abstractmethod
    def start(self) -> Self:
        """Start on the existing data, if any; return when clients can use the service.

        Raises `ServiceError`, with the end of the log, if that takes longer than `startup_timeout`.
        """

    @abstractmethod
    def stop(self) -> None:
        """Shut down in order and keep the data. Does nothing if it does not run."""

    @abstractmethod
    def kill(self) -> None:
        """Send SIGKILL to all processes at once and keep the data; return when they have ended."""

    @abstractmethod
    def pause(self) -> None:
        """Freeze all processes (SIGSTOP): connections stay open, but nothing answers."""

    @abstractmethod
    def resume(self) -> None:
        """Resume frozen processes."""

    @abstractmethod
    def close(self) -> None:
        """Stop, and remove the data unless the caller chose its folder. May be called twice."""

    @property
    @abstractmethod
    def port(self) -> int:
        """The loopback port that clients use."""

    @property
    @abstractmethod
    def pid(self) -> int:
        """Process id of the server's main process. Raises `ServiceError` if it does not run."""

    @property
    @abstractmethod
    def running(self) -> bool:
        """Whether the main process exists, frozen or not."""

    @property
    @abstractmethod
    def log_path(self) -> Path:
        """The file with the server's output of all starts."""

    @property
    @abstractmethod
    def address(self) -> str:
        """The address, in the form that clients of this service use."""

    def _answers_well(self, path: str) -> bool:
        """Whether the service answers a GET over HTTP with 200 within 5 s. May raise OSError."""
        connection = http.client.HTTPConnection(LOOPBACK, self.port, timeout=5)
        try:
            connection.request("GET", path)
            return connection.getresponse().status == http.HTTPStatus.OK
        except http.client.HTTPException:
            return False
        finally:
            connection.close()

    @abstractmethod
    def _is_ready(self) -> bool:
        """Whether clients can use the service now. May raise OSError, which means not yet."""

    @abstractmethod
    def _check_alive(self) -> None:
        """Raise ServiceError if the server has ended while starting."""

    def _tail(self) -> str:
        return self.logs(_TAIL_LINES)

    def _wait_until_ready(self, deadline: float, poll_seconds: float) -> None:
        """Wait until clients can use the service. Raises `ServiceError` at the deadline (monotonic seconds)."""
        while True:
            self._check_alive()
            with contextlib.suppress(OSError):
                if self._is_ready():
                    return
            if time.monotonic() > deadline:
                raise ServiceError(
                    f"{self.name} was not ready within {self.startup_timeout:.0f} s; "
                    f"the end of its log:\n{self._tail()}"
                )
            time.sleep(poll_seconds)

    def restart(self) -> Self:
        """Stop if it runs, then start on the same port and data."""
        self.stop()
        return self.start()

    def logs(self, lines: int | None = None) -> str:
        """Return the log, or its last lines."""
        text = self.log_path.read_text(errors="replace") if self.log_path.exists() else ""
        return text if lines is None else "\n".join(text.splitlines()[-lines:])

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class KafkaService(Service):
    """A single Kafka broker."""

    name = "kafka"

    @property
    def bootstrap_servers(self) -> str:
        """For Kafka clients."""
        return f"{LOOPBACK}:{self.port}"

    @property
    def address(self) -> str:
        """The bootstrap servers."""
        return self.bootstrap_servers


class PostgresService(Service):
    """A PostgreSQL server with one superuser `postgres` and one database `postgres`.

    Each server has its own password, because other users of this machine can reach its port too.
    """

    name = "postgres"

    @property
    @abstractmethod
    def password(self) -> str:
        """The superuser's password."""

    @property
    def dsn(self) -> str:
        """For libpq, psycopg and ADBC."""
        return f"postgresql://postgres:{self.password}@{LOOPBACK}:{self.port}/postgres"

    @property
    def jdbc_url(self) -> str:
        """For Spark's JDBC source and sink."""
        return f"jdbc:postgresql://{LOOPBACK}:{self.port}/postgres?user=postgres&password={self.password}"

    @property
    def jdbc_driver(self) -> str:
        """For the option `driver` next to the URL, because Spark does not find a driver from `spark.jars` by itself."""
        return "org.postgresql.Driver"

    @property
    def address(self) -> str:
        """The DSN."""
        return self.dsn


class ElasticsearchService(Service):
    """A single node of Elasticsearch or OpenSearch, without security."""

    name = "elasticsearch"

    @property
    def url(self) -> str:
        """For HTTP clients."""
        return f"http://{LOOPBACK}:{self.port}"

    @property
    def address(self) -> str:
        """The URL."""
        return self.url

    def is_healthy(self) -> bool:
        """Whether the node answers with every primary shard assigned; waits up to 4 s for that. May raise OSError."""
        return self._answers_well("/_cluster/health?wait_for_status=yellow&timeout=4s")
