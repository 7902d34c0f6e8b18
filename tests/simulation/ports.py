"""The port of each sink by its letter: K Kafka, P and S PostgreSQL prepared and staged, E and F Elasticsearch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulation.kafka_port import KafkaPort
from simulation.postgres_port import PreparedPort, StagedPort
from simulation.search_port import KeyedSearchPort, SearchPort

if TYPE_CHECKING:
    from simulation.port import PortBase

PORTS: dict[str, type[PortBase]] = {
    port.letter: port for port in (KafkaPort, PreparedPort, StagedPort, SearchPort, KeyedSearchPort)
}
