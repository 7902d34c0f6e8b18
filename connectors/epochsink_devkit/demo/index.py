"""Use an Elasticsearch index as a destination, without ids made of the orders, which would hide duplicates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from elasticsearch import Elasticsearch as Client

from epochsink.elasticsearch import Elasticsearch
from epochsink_devkit.demo.destination import Copies, Offsets
from epochsink_devkit.demo.kill_plan import Step
from epochsink_devkit.history.readers.elasticsearch import ElasticsearchReader

_PAGE: Final = 10_000
_KEEP_ALIVE: Final = "1m"
_SETTINGS: Final = {"number_of_shards": 1, "number_of_replicas": 0}
_MAPPING: Final = {
    "properties": {
        "order_id": {"type": "long"},
        "customer": {"type": "keyword"},
        "amount": {"type": "double"},
        "placed_at": {"type": "date"},
        "source_partition": {"type": "integer"},
        "source_offset": {"type": "long"},
    }
}


class _InSmallRequests(Elasticsearch):
    """Small requests, so that an epoch takes several of them and a kill can come between two."""

    bulk_bytes = 250_000


@dataclass(frozen=True, slots=True)
class ElasticsearchIndex:
    """An index of orders."""

    label: ClassVar[str] = "Elasticsearch"
    steps: ClassVar[Sequence[Step]] = (
        Step("elasticsearch.bulk.between", "in the middle of applying an epoch to Elasticsearch", always=True),
        Step("elasticsearch.marker.before", "applied to Elasticsearch, before its marker"),
    )

    url: str
    index: str

    def create(self) -> None:
        """Make the index, empty."""
        with closing(Client(self.url)) as client:
            client.indices.create(index=self.index, settings=_SETTINGS, mappings=_MAPPING)

    def sink(self) -> Elasticsearch:
        """Return the sink for `ExactlyOnce`."""
        return _InSmallRequests(self.url, index=self.index)

    def eye(self) -> _PointsInTime:
        """Connect a reader that refreshes, so that it sees every stored document."""
        return _PointsInTime(Client(self.url), self.index)

    def copies(self) -> Copies:
        """Read everything."""
        with closing(self.eye()) as eye:
            eye.look()
            return Counter(eye.orders({"match_all": {}}))

    def reader(self) -> ElasticsearchReader:
        """Return a reader that finds nothing, because all stored documents are visible."""
        return ElasticsearchReader(self.url, self.index)


class _PointsInTime:
    def __init__(self, client: Client, index: str) -> None:
        self._client = client
        self._index = index
        self._point: str | None = None

    def look(self) -> int:
        self._let_go()
        self._client.indices.refresh(index=self._index)
        self._point = self._client.open_point_in_time(index=self._index, keep_alive=_KEEP_ALIVE)["id"]
        return int(self._search({"match_all": {}}, size=0, track_total_hits=True)["total"]["value"])

    def beyond(self, decided: Offsets) -> set[int]:
        within = [
            {"bool": {"filter": [{"term": {"source_partition": part}}, {"range": {"source_offset": {"lt": end}}}]}}
            for part, end in decided.items()
        ]
        return set(self.orders({"bool": {"must_not": within}}))

    def orders(self, query: Mapping[str, Any]) -> Iterator[int]:
        """Yield the ids of the orders that a query finds at this point in time, once for each document."""
        last: list[Any] | None = None
        while hits := self._search(query, size=_PAGE, search_after=last, docvalue_fields=["order_id"])["hits"]:
            yield from (hit["fields"]["order_id"][0] for hit in hits)
            last = hits[-1]["sort"]

    def close(self) -> None:
        self._let_go()
        self._client.close()

    def _search(self, query: Mapping[str, Any], *, track_total_hits: bool = False, **options: Any) -> dict[str, Any]:
        answer = self._client.search(
            pit={"id": self._point, "keep_alive": _KEEP_ALIVE},
            query=query,
            sort=[{"_shard_doc": "asc"}],
            source=False,
            track_total_hits=track_total_hits,
            **options,
        )
        hits: dict[str, Any] = answer["hits"]
        return hits

    def _let_go(self) -> None:
        if self._point is not None:
            self._client.close_point_in_time(id=self._point)
            self._point = None
