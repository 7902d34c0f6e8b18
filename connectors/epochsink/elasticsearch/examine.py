"""Examine the cluster of a sink before a start: version, clock, health, and a write that never succeeds."""

from __future__ import annotations

import time
from collections.abc import Iterator

from epochsink.elasticsearch import preflight, target_index
from epochsink.elasticsearch.config import ElasticsearchConfig
from epochsink.elasticsearch.errors import CLIENT_ERRORS, describe
from epochsink.elasticsearch.server import ElasticsearchServer
from epochsink.sink import Finding


def examine(server: ElasticsearchServer, config: ElasticsearchConfig) -> Iterator[Finding]:
    """Yield what was found. Creates what `check` creates without knowing the columns."""
    try:
        findings = preflight.findings(server, config, None)
        yield from (Finding("cluster", each, is_fatal=True) for each in findings)
        if findings:
            return
        version = server.version() or "whose version is not told to this user"
        health = server.health()
        hint = "shards are missing: GET _cluster/allocation/explain says why" if health == "red" else ""
        yield Finding(
            "cluster", f"{config.product} {version} at {config.shown_hosts}, health {health or 'not told'}", hint
        )
        yield from _clocks(server)
        if config.index and target_index.find(server, config) is None:
            yield Finding("index", f"{config.index} does not exist; the first start creates it")
        elif config.index:
            yield Finding("trial write", f"{config.index} would have accepted it; no document was written")
    except CLIENT_ERRORS as error:
        said, hint = describe(error)
        yield Finding("cluster", f"{config.product} at {config.shown_hosts}: {said}", hint, is_fatal=True)


def _clocks(server: ElasticsearchServer) -> Iterator[Finding]:
    before = time.time()
    clocks = server.clocks()
    middle = (before + time.time()) / 2
    apart = [each - middle for each in clocks]
    if apart:
        yield Finding.of_clock("the node that is farthest off", max(apart, key=abs))
