"""Exactly-once sinks for PySpark Structured Streaming: the public names, nothing else."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from epochsink.elasticsearch import Elasticsearch
    from epochsink.errors import EpochsinkError
    from epochsink.kafka import Kafka
    from epochsink.postgres import Postgres
    from epochsink.spark import ExactlyOnce

__all__ = ["Elasticsearch", "EpochsinkError", "ExactlyOnce", "Kafka", "Postgres"]

_HOMES = {
    "Elasticsearch": "elasticsearch",
    "EpochsinkError": "errors",
    "ExactlyOnce": "spark",
    "Kafka": "kafka",
    "Postgres": "postgres",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: a destination's client is only needed by who uses it."""
    if name not in _HOMES:
        raise AttributeError(f"module 'epochsink' has no attribute {name!r}")
    return getattr(import_module(f"epochsink.{_HOMES[name]}"), name)
