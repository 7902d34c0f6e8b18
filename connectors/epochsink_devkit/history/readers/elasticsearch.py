"""Read an Elasticsearch index."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Final

import pyarrow as pa
from elastic_transport import ApiError, TransportError
from elasticsearch import Elasticsearch, NotFoundError

from epochsink_devkit.history.readers.reader import TargetUnreachable, nothing
from epochsink_devkit.history.rows import SCHEMA

_PAGE: Final = 10_000
_KEEP_ALIVE: Final = "2m"


class ElasticsearchReader:
    """Reads an index after a refresh, page by page in one point in time. ``options`` are the client's.

    A server that has just started answers a refresh before it knows its indices, or serves their shards: it calls them
    missing, or refreshes nothing without an error. Such a read would show nothing, or an older state.
    """

    def __init__(self, url: str, index: str, **options: Any) -> None:
        self._url = url
        self._index = index
        self._options = {"request_timeout": 30, **options}
        self._client: Elasticsearch | None = None

    def read(self, fixed: Callable[[], None] = nothing) -> pa.Table:
        """Return every document's proof columns; none while the index does not exist."""
        try:
            documents = list(self._documents(fixed))
        except (TransportError, ApiError) as failure:
            if _has_no_index(failure):
                fixed()
                return SCHEMA.empty_table()
            raise TargetUnreachable(str(failure)) from failure
        columns = {field.name: pa.array([one.get(field.name) for one in documents], field.type) for field in SCHEMA}
        return pa.table(columns, schema=SCHEMA)

    def leftovers(self) -> list[tuple[str, str]]:
        """Return nothing: an index holds nothing that is invisible."""
        return []

    def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def _documents(self, fixed: Callable[[], None]) -> Iterator[dict[str, Any]]:
        client = self._client = self._client or Elasticsearch(self._url, **self._options)
        refreshed = client.indices.refresh(index=self._index, ignore_unavailable=True)["_shards"]
        # unlike a refresh it is refused while the server does not know its indices: 404 says that there is none
        point = client.open_point_in_time(index=self._index, keep_alive=_KEEP_ALIVE)["id"]
        fixed()
        hits: list[dict[str, Any]] = []
        try:
            while True:
                answer = client.search(
                    pit={"id": point, "keep_alive": _KEEP_ALIVE},
                    size=_PAGE,
                    sort=[{"_shard_doc": "asc"}],
                    search_after=hits[-1]["sort"] if hits else None,
                    source_includes=SCHEMA.names,
                    query={"exists": {"field": "src_off"}},
                    track_total_hits=False,
                    allow_partial_search_results=False,
                )
                if refreshed["failed"] or refreshed["successful"] < answer["_shards"]["total"]:
                    raise TargetUnreachable(f"the refresh has not reached every shard: {refreshed}")
                hits = answer["hits"]["hits"]
                yield from (hit["_source"] for hit in hits)
                if len(hits) < _PAGE:
                    return
        finally:
            # A server that was killed meanwhile knows nothing of it: what the search found, or failed with, counts.
            with suppress(TransportError, ApiError):
                client.close_point_in_time(id=point)


def _has_no_index(failure: Exception) -> bool:
    """Tell an index that is not there from a point in time that a killed server has forgotten: both answer 404."""
    return isinstance(failure, NotFoundError) and failure.error == "index_not_found_exception"
