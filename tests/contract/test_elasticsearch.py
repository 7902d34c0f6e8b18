"""The contract, held by Elasticsearch, without keys, so that a row that comes twice is seen twice."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from elasticsearch_rig import WithLedger, keyless

from epochsink.elasticsearch import Elasticsearch
from epochsink.elasticsearch.connection import connect
from epochsink.testing.sink_contract import SinkContract
from epochsink.testing.sink_rig import OneSink, SinkRig

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fix_services import FreshName

    from epochsink_devkit.services import ElasticsearchService


class ElasticsearchRig(SinkRig):
    """Append-only documents. What is prepared is the spool, which the coordinator keeps, not the target."""

    loses = False

    def __init__(self, sink: Elasticsearch, folder: Path) -> None:
        super().__init__(sink, folder)
        self._sink = sink

    def open(self, query: str, generation: int) -> OneSink:
        opened = WithLedger.of(self._sink, self.name)
        opened.open(self.identity(query, generation))
        self._opened.append(opened)
        return opened

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


class DataStreamRig(ElasticsearchRig):
    """A data stream, which rolls over at each look: what is committed again meets another backing index."""

    def batch(self, rows: list[int]) -> pa.RecordBatch:
        return keyless([{"n": number, "@timestamp": "2026-11-22T06:30:00Z"} for number in rows])

    def schema(self) -> pa.Schema:
        return pa.schema([("n", pa.int64()), ("@timestamp", pa.timestamp("us", tz="UTC"))])

    def make(self) -> None:
        """Make the stream by a document that it refuses, as the development server has no API for that."""
        with contextlib.closing(connect(self._sink)) as client:
            name = self._sink.index
            template = {"settings": {"number_of_replicas": 0}, "mappings": {"properties": {"n": {"type": "long"}}}}
            client.indices.put_index_template(name=name, index_patterns=[name], data_stream={}, template=template)
            client.bulk(index=name, operations=[{"create": {}}, {"n": "no number"}])

    def visible(self) -> list[int]:
        with contextlib.closing(connect(self._sink)) as client:
            client.indices.rollover(alias=self._sink.index)
        return super().visible()


class TestDataStream(SinkContract):
    """Appended to a stream that rolls over."""

    @pytest.fixture
    def rig(
        self, elasticsearch: ElasticsearchService, fresh_index: FreshName, tmp_path: Path
    ) -> Iterator[DataStreamRig]:
        rig = DataStreamRig(Elasticsearch(hosts=elasticsearch.url, index=fresh_index("ds"), timeout=20.0), tmp_path)
        rig.make()
        yield rig
        rig.close()
