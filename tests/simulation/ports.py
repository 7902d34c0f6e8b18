"""The port of each sink by its letter.

K Kafka; P and S PostgreSQL prepared and staged, A and B, C and D likewise two PostgreSQL sinks of one database, T one
whose tasks prepare each for itself; E and F Elasticsearch without keys and with them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulation.by_task_port import ByTaskPort
from simulation.kafka_port import KafkaPort
from simulation.postgres_port import PreparedPort, StagedPort
from simulation.search_port import KeyedSearchPort, SearchPort
from simulation.shared_port import OtherSharedPort, OtherSharedStagedPort, SharedPort, SharedStagedPort

if TYPE_CHECKING:
    from simulation.port import PortBase

PORTS: dict[str, type[PortBase]] = {
    port.letter: port
    for port in (
        KafkaPort,
        PreparedPort,
        StagedPort,
        SharedPort,
        OtherSharedPort,
        SharedStagedPort,
        OtherSharedStagedPort,
        ByTaskPort,
        SearchPort,
        KeyedSearchPort,
    )
}
