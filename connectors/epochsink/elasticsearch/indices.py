"""Create and refresh indices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from epochsink.elasticsearch.errors import BAD_REQUEST, NotServed, RequestRefused
from epochsink.elasticsearch.server import ElasticsearchServer
from epochsink.sink import would


def ensure_index(
    server: ElasticsearchServer, index: str, *, mappings: Mapping[str, Any], settings: Mapping[str, Any]
) -> bool:
    """Create an index if it is missing, without the settings if the server (serverless) does not support them.

    Return whether it exists now: a check that only compares does not create it.
    """
    # Check first: a user without the privilege to create an index can use an existing one.
    if server.exists(index):
        return True
    if would(f"create the index {index!r}"):
        return False
    try:
        server.create_index(index, settings, mappings)
    except RequestRefused as error:
        if error.status_code != BAD_REQUEST or not settings:
            raise
        return ensure_index(server, index, mappings=mappings, settings={})
    return True


def refresh_all(server: ElasticsearchServer, index: str) -> None:
    """Make all documents of an index or alias searchable, however many primary shards it has. Raises as `refresh`."""
    refresh(server, index, max(1, sum(server.primaries(index))))


def refresh(server: ElasticsearchServer, index: str, primaries: int = 1) -> None:
    """Make all documents of an index with ``primaries`` primary shards searchable.

    Raises `NotServed`, a temporary failure, if a shard was left out. A server that has just started does not report
    this as an error: it skips shards that it has not recovered yet, or reports the index as missing.
    """
    refreshed, failed = server.refresh(index)
    if failed or refreshed < primaries:
        raise NotServed(f"index {index!r}: {refreshed} of {primaries} primary shards were refreshed")
