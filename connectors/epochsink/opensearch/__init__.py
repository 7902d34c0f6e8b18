"""OpenSearch: the sink of the Elasticsearch family, with this product's client and its other requests."""

from epochsink.opensearch.sink import OpenSearch

__all__ = ["OpenSearch"]
