"""Examine the cluster of a sink before a start: version, clock, health, and a write that never succeeds."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from epochsink.elasticsearch import preflight, target_index
from epochsink.elasticsearch.errors import CLIENT_ERRORS, describe
from epochsink.sink import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    import elasticsearch

    from epochsink.elasticsearch.config import ElasticsearchConfig


def examine(client: elasticsearch.Elasticsearch, config: ElasticsearchConfig) -> Iterator[Finding]:
    """Yield what was found. Creates the markers' index, and that of dead letters, if they are missing."""
    try:
        found = preflight.findings(client, config, None)
        yield from (Finding("cluster", each, is_fatal=True) for each in found)
        if found:
            return
        asking = preflight.asking(client)
        version = preflight.version_of(client) or "whose version is not told to this user"
        health = asking.cluster.health(filter_path="status").body.get("status")
        hint = "shards are missing: GET _cluster/allocation/explain says why" if health == "red" else ""
        yield Finding(
            "cluster", f"Elasticsearch {version} at {config.shown_hosts}, health {health or 'not told'}", hint
        )
        yield from _clocks(asking)
        if config.index and target_index.find(client, config, "mappings") is None:
            yield Finding("index", f"{config.index} does not exist; the first start creates it")
        elif config.index:
            yield Finding("trial write", f"{config.index} would have accepted it; no document was written")
    except CLIENT_ERRORS as error:
        said, hint = describe(error)
        yield Finding("cluster", f"Elasticsearch at {config.shown_hosts}: {said}", hint, is_fatal=True)


def _clocks(asking: elasticsearch.Elasticsearch) -> Iterator[Finding]:
    before = time.time()
    told = asking.nodes.stats(metric="process", filter_path="nodes.*.timestamp").body.get("nodes", {})
    middle = (before + time.time()) / 2
    apart = [node["timestamp"] / 1000 - middle for node in told.values()]
    if apart:
        yield Finding.of_clock("the node that is farthest off", max(apart, key=abs))
