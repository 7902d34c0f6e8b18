"""What OpenSearch is asked in another way than Elasticsearch. All other requests and their answers are the same.

- Client: it refuses no other product, so `check` alone compares the version.
- Description of an index: ``filter_path`` leaves the mapping out; there is no ``features``.
- Bulk requests: no ``include_source_on_error``, so the text of an error may quote a document.
- Reads and searches: of the primary shard. With segment replication a replica lags, also behind a refresh.
- Pages of a search: a scroll. A point in time has no ``_shard_doc`` before 3.3, so pages could lose documents.
- Maps: stored and not indexed. ``flat_object`` has no ``ignore_above``, and refuses documents with long values.
- Privileges have other names, see `epochsink.opensearch.connection.HINTS`, and so has the setting of an alias that
  rolls over, see `epochsink.elasticsearch.target_index.ROLLOVERS`.

The same are external versions, ``index.gc_deletes``, conditions on sequence numbers, data streams, the
history of a restored index, ``_meta`` of a mapping, and the types of errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

from epochsink.elasticsearch.client import Json, Reply
from epochsink.elasticsearch.server import ElasticsearchServer, Page, Threads
from epochsink.opensearch.connection import OpenSearchClient

if TYPE_CHECKING:
    import opensearchpy

_DESCRIBED: Final = "*.settings,*.aliases,*.data_stream,error,status"
_BREAKS_TIES: Final = "_shard_doc"


class OpenSearchServer(ElasticsearchServer):
    """A cluster, by the vendor's client."""

    _reads: ClassVar[Json] = {"preference": "_primary"}
    _hides_documents = False

    def __init__(self, client: opensearchpy.OpenSearch) -> None:
        self.threads = Threads()
        self.client = OpenSearchClient(client)

    def _page(self, point_in_time: str, wanted: Json, after: Sequence[Any] | None) -> Page:
        if after is not None:
            answer = self._scroll(point_in_time)
        else:
            order = [each for each in wanted["sort"] or () if _BREAKS_TIES not in each]
            answer = self._begin_scroll(point_in_time, {**wanted, "sort": order})
        return Page(answer["hits"]["hits"], answer["_scroll_id"])

    def open_point_in_time(self, index: str) -> str:
        """Return the index: the first search keeps what it holds then, and its page has the name of that."""
        return index

    def close_point_in_time(self, name: str) -> None:
        self._end_scroll(name)

    def create_index(self, index: str, settings: Json | None, mappings: Json | None) -> bool:
        return super().create_index(index, settings, None if mappings is None else _without_flattened(mappings))

    def add_to_mapping(self, index: str, properties: Json) -> None:
        super().add_to_mapping(index, _without_flattened(properties))

    def _described(self, names: str, **options: Any) -> Reply:
        return self._ask("GET", names, flat_settings=True, filter_path=_DESCRIBED, **options)


def _without_flattened(mapping: Json) -> dict[str, Any]:
    """Return a mapping in which objects that Elasticsearch flattens are stored and not indexed."""
    if mapping.get("type") == "flattened":
        return {"type": "object", "enabled": False}
    return {name: _without_flattened(each) if isinstance(each, Mapping) else each for name, each in mapping.items()}
