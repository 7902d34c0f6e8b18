"""Which servers the installed client goes with: those of its own major version, and newer ones."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import elasticsearch as vendor
import pytest
from elasticsearch_rig import SCHEMA, Rig, rendered

from epochsink.elasticsearch import Elasticsearch
from epochsink.testing.sink_rig import OneSink
from epochsink_devkit.services import LocalElasticsearch, versions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from epochsink_devkit.services import ElasticsearchService

CLIENT = vendor.__version__[0]


@pytest.fixture(params=versions.ELASTICSEARCH)
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ElasticsearchService]:
    """Return a node of each version that is pinned, with Java as it needs it."""
    monkeypatch.setattr(versions, "elasticsearch", lambda: versions.ELASTICSEARCH[request.param])
    with LocalElasticsearch(short_lived=True) as service:
        yield service


def test_an_older_server_is_refused_and_others_take_an_epoch(server: ElasticsearchService) -> None:
    sink = Elasticsearch(server.url, index="orders", key="id")
    if int(server.version.partition(".")[0]) < CLIENT:
        with closing(OneSink.of(sink)) as committer:
            (finding,) = committer.check(SCHEMA)
        assert f"client {'.'.join(map(str, vendor.__version__))} and server" in finding
        assert "install the client of the server's" in finding
        return
    with closing(Rig.joining(sink)) as rig:
        rig.apply(0, [rendered([("a", {"n": 1}), ("b", {"n": 2})])])
        rig.apply(1, [rendered([("a", None)])])
        assert rig.stored() == {"b": {"n": 2}}
