"""The contract, held by Elasticsearch, without keys, so that a row that comes twice is seen twice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from elasticsearch_rig import DataStreamRig, SearchRig

from epochsink.elasticsearch import Elasticsearch
from epochsink.testing.sink_contract import SinkContract

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fix_services import FreshName

    from epochsink_devkit.services import ElasticsearchService


class TestElasticsearch(SinkContract):
    """Without keys."""

    @pytest.fixture
    def rig(self, elasticsearch: ElasticsearchService, fresh_index: FreshName, tmp_path: Path) -> Iterator[SearchRig]:
        settings = {"number_of_shards": 1, "number_of_replicas": 0}
        rig = SearchRig(Elasticsearch(elasticsearch.url, index=fresh_index(), create=settings, timeout=20.0), tmp_path)
        yield rig
        rig.close()


class TestDataStream(SinkContract):
    """Appended to a stream that rolls over."""

    @pytest.fixture
    def rig(
        self, elasticsearch: ElasticsearchService, fresh_index: FreshName, tmp_path: Path
    ) -> Iterator[DataStreamRig]:
        rig = DataStreamRig(Elasticsearch(elasticsearch.url, index=fresh_index("ds"), timeout=20.0), tmp_path)
        rig.make()
        yield rig
        rig.close()
