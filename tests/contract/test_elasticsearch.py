"""The contract, held by Elasticsearch, without keys, so that a row that comes twice is seen twice."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from elasticsearch_rig import keyless

from epochsink.elasticsearch import Elasticsearch
from epochsink.elasticsearch.connection import connect
from epochsink.testing.sink_contract import SinkContract
from epochsink.testing.sink_rig import SinkRig

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fix_services import FreshName

    from epochsink.devkit.services import ElasticsearchService


class ElasticsearchRig(SinkRig):
    """Append-only documents. What is prepared is the spool, which the coordinator keeps, not the target."""

    loses = False

    def __init__(self, sink: Elasticsearch, folder: Path) -> None:
        super().__init__(sink, folder)
        self._sink = sink

    def batch(self, rows: list[int]) -> pa.RecordBatch:
        return keyless([{"n": number} for number in rows])

    def schema(self) -> pa.Schema:
        return pa.schema([("n", pa.int64())])

    def visible(self) -> list[int]:
        with contextlib.closing(connect(self._sink)) as client:
            if not client.indices.exists(index=self._sink.index):
                return []
            client.indices.refresh(index=self._sink.index)
            found = client.search(index=self._sink.index, size=10_000)
            return sorted(hit["_source"]["n"] for hit in found["hits"]["hits"])

    def leftovers(self) -> list[str]:
        return []


class TestElasticsearch(SinkContract):
    """Without keys."""

    @pytest.fixture
    def rig(
        self, elasticsearch: ElasticsearchService, fresh_index: FreshName, tmp_path: Path
    ) -> Iterator[ElasticsearchRig]:
        settings = {"number_of_shards": 1, "number_of_replicas": 0}
        sink = Elasticsearch(hosts=elasticsearch.url, index=fresh_index(), create=settings, timeout=20.0)
        rig = ElasticsearchRig(sink, tmp_path)
        yield rig
        rig.close()
