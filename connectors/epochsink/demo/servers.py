"""The servers of one demo."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING

from epochsink.demo.index import ElasticsearchIndex
from epochsink.demo.table import PostgresTable
from epochsink.demo.topic import KafkaTopic
from epochsink.services import LocalElasticsearch, LocalKafka, LocalPostgres

if TYPE_CHECKING:
    from collections.abc import Mapping

    from epochsink.demo.destination import Destination


class Servers:
    """A Kafka, a PostgreSQL and an Elasticsearch. `close` ends those that were started."""

    def __init__(self) -> None:
        self.kafka = LocalKafka()
        self._postgres = LocalPostgres()
        self._elasticsearch = LocalElasticsearch()
        self._all = (self.kafka, self._postgres, self._elasticsearch)

    def start(self) -> str:
        """Start them all at once; return where they are."""
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda service: service.start(), self._all))
        return ", ".join(f"{service.name} {service.version} on {service.address}" for service in self._all)

    def destinations(self, pipeline: str) -> Mapping[str, Destination]:
        """Return the places that a pipeline writes to, in the order of their commits."""
        postgres = self._postgres
        return {
            "table": PostgresTable(postgres.dsn, postgres.jdbc_url, postgres.jdbc_driver, f"orders_{pipeline}"),
            "index": ElasticsearchIndex(self._elasticsearch.url, f"orders-{pipeline}"),
            "topic": KafkaTopic(self.kafka.bootstrap_servers, f"orders.{pipeline}.out"),
        }

    def close(self) -> None:
        """Stop them, and remove their data."""
        with ExitStack() as stack:
            for service in self._all:
                stack.callback(service.close)
