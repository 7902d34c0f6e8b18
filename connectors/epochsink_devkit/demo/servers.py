"""Provide the servers of one demo: started for it, or already running."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from urllib.parse import unquote, urlencode, urlsplit

from epochsink_devkit.demo.destination import Appendable, Destination
from epochsink_devkit.demo.index import ElasticsearchIndex
from epochsink_devkit.demo.table import PostgresTable, UpsertedTable
from epochsink_devkit.demo.topic import KafkaTopic
from epochsink_devkit.services import LocalElasticsearch, LocalKafka, LocalPostgres
from epochsink_devkit.services.kinds import SINKS, ServiceKind, prefetch

JDBC_DRIVER = "org.postgresql.Driver"


@dataclass(frozen=True, slots=True)
class ServerAddresses:
    """The addresses of Kafka, PostgreSQL and Elasticsearch."""

    kafka: str
    dsn: str
    elasticsearch: str

    def __str__(self) -> str:
        # without the password
        postgres = urlsplit(self.dsn).hostname
        return f"kafka on {self.kafka}, postgres on {postgres}, elasticsearch on {self.elasticsearch}"

    @property
    def jdbc_url(self) -> str:
        """The DSN in the form of Java's drivers. It must be a URL."""
        parts = urlsplit(self.dsn)
        account = urlencode({"user": unquote(parts.username or ""), "password": unquote(parts.password or "")})
        return f"jdbc:postgresql://{parts.hostname}:{parts.port or 5432}{parts.path}?{account}"


class Servers(ABC):
    """The servers that the demo's pipelines write to. Names of tables, topics and indices end with ``mark``.

    With ``quick`` the pipelines write to PostgreSQL only.
    """

    mark = ""
    quick = False

    @abstractmethod
    def start(self) -> str:
        """Make them ready; return their addresses as text."""

    @abstractmethod
    def close(self) -> None:
        """Stop those that were started here, and remove their data."""

    @property
    @abstractmethod
    def addresses(self) -> ServerAddresses:
        """Where they are, once they are ready."""

    def destinations(self, name: str = "orders") -> Mapping[str, Destination]:
        """Return the destinations of a pipeline with epochsink, in the order of its commits."""
        if self.quick:
            return {"table": self._table(name)}
        index = ElasticsearchIndex(self.addresses.elasticsearch, f"{name}{self.mark}")
        return {"table": self._table(name), "index": index, "topic": self._topic(f"{name}.out")}

    def plain_destinations(self) -> Mapping[str, Appendable]:
        """Return the destinations of the plain pipeline, in the order of its writes."""
        table = self._table("orders_plain")
        return {"table": table} if self.quick else {"table": table, "topic": self._topic("orders.plain.out")}

    def upserted_destinations(self) -> Mapping[str, Appendable]:
        """Return the destination of the pipeline that upserts, which a database alone can do."""
        return {"table": self._table("orders_upserted", UpsertedTable)}

    def _table(self, name: str, kind: type[PostgresTable] = PostgresTable) -> PostgresTable:
        where = self.addresses
        return kind(where.dsn, where.jdbc_url, JDBC_DRIVER, f"{name}{self.mark}")

    def _topic(self, name: str) -> KafkaTopic:
        return KafkaTopic(self.addresses.kafka, f"{name}{self.mark}")


class OwnServers(Servers):
    """Servers that the demo starts, as plain processes."""

    def __init__(self, *, quick: bool = False) -> None:
        self.quick = quick
        prefetch([ServiceKind.KAFKA, ServiceKind.POSTGRES] if quick else list(SINKS))
        self._kafka = LocalKafka(short_lived=True)
        self._postgres = LocalPostgres()
        self._elasticsearch = None if quick else LocalElasticsearch(short_lived=True)
        self._all = [one for one in (self._kafka, self._postgres, self._elasticsearch) if one is not None]

    def start(self) -> str:
        """Start all of them at once; return their addresses as text."""
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda service: service.start(), self._all))
        return ", ".join(f"{service.name} {service.version} on {service.address}" for service in self._all)

    @property
    def addresses(self) -> ServerAddresses:
        """Where they are, once they are ready."""
        elasticsearch = "" if self._elasticsearch is None else self._elasticsearch.url
        return ServerAddresses(self._kafka.bootstrap_servers, self._postgres.dsn, elasticsearch)

    def close(self) -> None:
        """Stop them and remove their data."""
        with ExitStack() as stack:
            for service in self._all:
                stack.callback(service.close)


class RunningServers(Servers):
    """Servers that already run, for example from docker/compose.yaml. What the demo creates in them is kept."""

    def __init__(self, addresses: ServerAddresses, *, quick: bool = False) -> None:
        self._addresses = addresses
        self.quick = quick
        # A second demo on the same servers must not use the first one's table, index and topics.
        self.mark = f"_{secrets.token_hex(3)}"

    def start(self) -> str:
        """Return where they are."""
        return str(self._addresses)

    @property
    def addresses(self) -> ServerAddresses:
        """Where they are."""
        return self._addresses

    def close(self) -> None:
        """Leave them running."""
