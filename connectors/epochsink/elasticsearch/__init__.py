"""Elasticsearch: epochs applied idempotently from a durable redo log."""

from epochsink.elasticsearch.config import Elasticsearch

__all__ = ["Elasticsearch"]
