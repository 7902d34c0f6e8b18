"""The vendor's client, as a configuration describes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import elasticsearch

if TYPE_CHECKING:
    from epochsink.elasticsearch.config import ElasticsearchConfig


def connect(config: ElasticsearchConfig) -> elasticsearch.Elasticsearch:
    """Make a client; nothing is sent yet."""
    # One connection more than bulk requests at once: markers are read while they run.
    return elasticsearch.Elasticsearch(
        list(config.hosts), connections_per_node=config.threads + 1, **config.client_options
    )
