"""Exactly-once sinks for PySpark Structured Streaming: the public names, nothing else."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from epochsink.elasticsearch import Elasticsearch
    from epochsink.errors import (
        CheckFailed,
        ConfigurationError,
        EpochsinkError,
        Fenced,
        LedgerCorrupt,
        LogIncomplete,
        OutcomeUnknown,
        PrepareFailed,
        RowsRejected,
        SpoolDamaged,
        SpoolMissing,
        UnsupportedQuery,
        WentBack,
    )
    from epochsink.kafka import Avro, Kafka, NewTopic
    from epochsink.opensearch import OpenSearch
    from epochsink.postgres import Postgres
    from epochsink.protocol.progress import EpochProgress, QueryProgress, SinkProgress
    from epochsink.sink import Sink
    from epochsink.spark.exactly_once import ExactlyOnce

__version__ = "0.9.0"

__all__ = [
    "Avro",
    "CheckFailed",
    "ConfigurationError",
    "Elasticsearch",
    "EpochProgress",
    "EpochsinkError",
    "ExactlyOnce",
    "Fenced",
    "Kafka",
    "LedgerCorrupt",
    "LogIncomplete",
    "NewTopic",
    "OpenSearch",
    "OutcomeUnknown",
    "Postgres",
    "PrepareFailed",
    "QueryProgress",
    "RowsRejected",
    "Sink",
    "SinkProgress",
    "SpoolDamaged",
    "SpoolMissing",
    "UnsupportedQuery",
    "WentBack",
    "__version__",
]

_HOMES = {
    "Avro": "kafka",
    "Elasticsearch": "elasticsearch",
    "EpochProgress": "protocol.progress",
    "ExactlyOnce": "spark.exactly_once",
    "Kafka": "kafka",
    "NewTopic": "kafka",
    "OpenSearch": "opensearch",
    "Postgres": "postgres",
    "QueryProgress": "protocol.progress",
    "Sink": "sink",
    "SinkProgress": "protocol.progress",
}
"""Where a name is defined, if not in `epochsink.errors`."""


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that a target's client is needed only if that target is used."""
    if name not in __all__:
        raise AttributeError(f"module 'epochsink' has no attribute {name!r}")
    return getattr(import_module(f"epochsink.{_HOMES.get(name, 'errors')}"), name)
