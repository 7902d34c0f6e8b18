"""Create the vendor's client, and create and refresh indices."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import elasticsearch
from elastic_transport import NdjsonSerializer

from epochsink.elasticsearch.errors import NotServed, error_type

if TYPE_CHECKING:
    from collections.abc import Mapping

    from epochsink.elasticsearch.config import ElasticsearchConfig


_FOUND = 200


def connect(config: ElasticsearchConfig) -> elasticsearch.Elasticsearch:
    """Create a client. Sends nothing yet. It logs warnings only, unless its logger has been given a level."""
    log = logging.getLogger("elastic_transport")
    if log.level == logging.NOTSET:
        # its INFO is a line for each request
        log.setLevel(logging.WARNING)
    return elasticsearch.Elasticsearch(
        list(config.hosts),
        # One more than the bulk requests at once, because markers are read while those run.
        connections_per_node=config.threads + 1,
        serializers={_AsRendered.mimetype: _AsRendered()},
        **config.client_options,
    )


class _AsRendered(NdjsonSerializer):
    """Passes on a rendered body. The client's own serializer copies it twice, which takes as long as sending it."""

    def dumps(self, data: Any) -> bytes:
        match data:
            case [bytes(body)]:
                return body
        return super().dumps(data)


def ensure_index(
    client: elasticsearch.Elasticsearch, index: str, *, mappings: Mapping[str, Any], settings: Mapping[str, Any]
) -> None:
    """Create an index if it is missing, without the settings if the server (serverless) does not support them."""
    # Check first: a user without the privilege to create an index can use an existing one.
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


def refresh_all(client: elasticsearch.Elasticsearch, index: str) -> None:
    """Make all documents of an index or alias searchable, however many primary shards it has. Raises as `refresh`."""
    name = "index.number_of_shards"
    found = client.indices.get_settings(index=index, name=name, flat_settings=True, ignore_unavailable=True).body
    # A server may not report the number.
    refresh(client, index, max(1, sum(int(each["settings"].get(name, 1)) for each in found.values())))


def refresh(client: elasticsearch.Elasticsearch, index: str, primaries: int = 1) -> None:
    """Make all documents of an index with ``primaries`` primary shards searchable.

    Raises `NotServed`, a temporary failure, if a shard was left out. A server that has just started does not report
    this as an error: it skips shards that it has not recovered yet, or reports the index as missing.
    """
    shards = client.indices.refresh(index=index, ignore_unavailable=True)["_shards"]
    if shards["failed"] or shards["successful"] < primaries:
        raise NotServed(f"index {index!r}: {shards['successful']} of {primaries} primary shards were refreshed")
