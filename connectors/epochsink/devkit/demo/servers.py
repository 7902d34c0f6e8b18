"""The servers of one demo."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING

from epochsink.devkit.demo.index import ElasticsearchIndex
from epochsink.devkit.demo.table import PostgresTable
from epochsink.devkit.demo.topic import KafkaTopic
from epochsink.devkit.services import LocalElasticsearch, LocalKafka, LocalPostgres

if TYPE_CHECKING:
    from collections.abc import Mapping

    from epochsink.devkit.demo.destination import Appendable, Destination


class Servers:
    """A Kafka, a PostgreSQL and an Elasticsearch. `close` ends those that were started."""

    def __init__(self) -> None:
        self.kafka = LocalKafka(short_lived=True)
        self._postgres = LocalPostgres()
        self._elasticsearch = LocalElasticsearch(short_lived=True)
        self._all = (self.kafka, self._postgres, self._elasticsearch)

    def start(self) -> str:
        """Start them all at once; return where they are."""
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda service: service.start(), self._all))
        return ", ".join(f"{service.name} {service.version} on {service.address}" for service in self._all)

    def destinations(self) -> Mapping[str, Destination]:
        """Return where the pipeline with epochsink writes to, in the order of its commits."""
        index = ElasticsearchIndex(self._elasticsearch.url, "orders")
        return {"table": self._table("orders"), "index": index, "topic": self._topic("orders.out")}

    def plain_destinations(self) -> Mapping[str, Appendable]:
        """Return where the plain pipeline writes to, in this order."""
        return {"table": self._table("orders_plain"), "topic": self._topic("orders.plain.out")}

    def _table(self, name: str) -> PostgresTable:
        return PostgresTable(self._postgres.dsn, self._postgres.jdbc_url, self._postgres.jdbc_driver, name)

    def _topic(self, name: str) -> KafkaTopic:
        return KafkaTopic(self.kafka.bootstrap_servers, name)

    def close(self) -> None:
        """Stop them, and remove their data."""
        with ExitStack() as stack:
            for service in self._all:
                stack.callback(service.close)
