"""Flink's version, and the jars that its jobs need beside it."""

from __future__ import annotations

from typing import Final

from epochsink_devkit.services.artifacts import fetch
from epochsink_devkit.services.versions import Artifact, Bundle, postgres_jdbc

FLINK: Final = "2.3.0"
KAFKA_CONNECTOR: Final = Artifact(
    "org.apache.flink",
    "flink-sql-connector-kafka",
    "5.0.0-2.2",
    "5605c691d11a501382c383fecba37a7a552467da5ab7ba904ef5d6f3d62c5616",
)
JDBC_CONNECTOR: Final = Artifact(
    "org.apache.flink",
    "flink-connector-jdbc-core",
    "4.0.0-2.0",
    "ccb9691bf1d0f97574ae768e1bef05a39c06d7f7b13996e9d485fbdd69dcbfec",
)


def kafka_jars() -> list[str]:
    """Return the path of Flink's Kafka connector; the first call fetches it."""
    bundle = Bundle(f"flink-kafka-{KAFKA_CONNECTOR.version}", (KAFKA_CONNECTOR,), locked=False)
    return [str(fetch(bundle) / KAFKA_CONNECTOR.file_name)]


def jdbc_jars() -> list[str]:
    """Return the paths of Flink's JDBC connector, with PostgreSQL's driver; the first call fetches them."""
    bundle = Bundle(f"flink-jdbc-{JDBC_CONNECTOR.version}", (JDBC_CONNECTOR, postgres_jdbc()), locked=False)
    return sorted(map(str, fetch(bundle).glob("*.jar")))
