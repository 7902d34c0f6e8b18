"""Elasticsearch: epochs applied idempotently from a durable redo log."""

from epochsink.elasticsearch.sink import Elasticsearch

__all__ = ["Elasticsearch"]
