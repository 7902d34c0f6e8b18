"""Connect the vendor's client; make and refresh indices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import elasticsearch
from elastic_transport import NdjsonSerializer

from epochsink.elasticsearch.errors import NotServed, error_type

if TYPE_CHECKING:
    from collections.abc import Mapping

    from epochsink.elasticsearch.config import ElasticsearchConfig


_FOUND = 200


def connect(config: ElasticsearchConfig) -> elasticsearch.Elasticsearch:
    """Make a client; nothing is sent yet."""
    return elasticsearch.Elasticsearch(
        list(config.hosts),
        # One more than bulk requests at once: markers are read while they run.
        connections_per_node=config.threads + 1,
        serializers={_AsRendered.mimetype: _AsRendered()},
        **config.client_options,
    )


class _AsRendered(NdjsonSerializer):
    """Passes on a body that is rendered already: the client's own copies it twice, which takes as long as sending."""

    def dumps(self, data: Any) -> bytes:
        match data:
            case [bytes(body)]:
                return body
        return super().dumps(data)


def ensure_index(
    client: elasticsearch.Elasticsearch, index: str, *, mappings: Mapping[str, Any], settings: Mapping[str, Any]
) -> None:
    """Create an index of our own if it is missing, without the settings where the server (serverless) takes none."""
    # Asked first: a user who may not create an index can use one that exists.
    if client.options(ignore_status=(403, 404)).indices.exists(index=index).meta.status == _FOUND:
        return
    try:
        client.indices.create(index=index, settings=settings, mappings=mappings)
    except elasticsearch.BadRequestError as error:
        if error_type(error) == "resource_already_exists_exception":
            return
        if not settings:
            raise
        ensure_index(client, index, mappings=mappings, settings={})


def refresh(client: elasticsearch.Elasticsearch, index: str, primaries: int = 1) -> None:
    """Make all that an index of so many primary shards holds searchable.

    Raises `NotServed`, which is passing, while the server has just started: it then knows no index yet, and would call
    it missing, or leaves out shards that it has not recovered, without an error.
    """
    shards = client.indices.refresh(index=index, ignore_unavailable=True)["_shards"]
    if shards["failed"] or shards["successful"] < primaries:
        raise NotServed(f"index {index!r}: {shards['successful']} of {primaries} primary shards were refreshed")
