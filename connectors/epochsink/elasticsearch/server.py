"""What is asked of the server: one method for each kind of request. Nothing here decides.

All methods may raise `errors.CLIENT_ERRORS`, and repeat no request by themselves unless the client does.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import elasticsearch
from elasticsearch import helpers

from epochsink.elasticsearch.errors import CONFLICT, FORBIDDEN, NOT_FOUND, NotServed, error_type

if TYPE_CHECKING:
    from elastic_transport import ObjectApiResponse

Json = Mapping[str, Any]

_FOUND: Final = 200
_HIDES_DOCUMENTS: Final = (8, 18)
"""The first client, and the first server, that can leave documents out of errors."""
_SCANNED: Final = 10_000
_ALIVE: Final = "5m"
_DESCRIBED: Final = ("settings", "aliases")
_MAY_NOT_ASK: Final = (400, 403, 404, 410)
"""Answers about nodes to ignore: the user lacks the privilege, or the server (serverless) lacks the API."""


@dataclass(frozen=True, slots=True)
class DocumentPlace:
    """Where a document stands among all writes: a write can be conditional on it."""

    seq_no: int
    primary_term: int


@dataclass(frozen=True, slots=True)
class StoredDocument:
    """A document as it is stored; ``source`` is empty if it was not asked for."""

    id: str
    version: int
    place: DocumentPlace
    source: Json


@dataclass(frozen=True, slots=True)
class Page:
    """Some of the documents that a search finds. ``point_in_time`` is the one to give with the next search."""

    hits: Sequence[dict[str, Any]]
    point_in_time: str = ""


class Threads:
    """Threads that send requests at once, and what they wait on. A simulation plays them one after another."""

    def pool(self, count: int, name: str) -> Executor:
        """Return a pool of ``count`` threads."""
        return ThreadPoolExecutor(count, thread_name_prefix=name)

    def event(self) -> threading.Event:
        """Return what ends their waiting."""
        return threading.Event()


class ElasticsearchServer:
    """A cluster, by the vendor's client. Its methods may be called from several ``threads``."""

    def __init__(self, client: elasticsearch.Elasticsearch) -> None:
        self.threads = Threads()
        self._client = client
        # The client's own retries would repeat whole requests and hide the reason.
        self._once = client.options(max_retries=0)
        self._asking = client.options(ignore_status=_MAY_NOT_ASK)
        self._hides_documents = elasticsearch.__version__ >= _HIDES_DOCUMENTS

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    # ---- documents

    def read(self, index: str, name: str) -> StoredDocument | None:
        """Return a document, also if it was not refreshed yet; None if it or the index does not exist."""
        try:
            answer = self._client.get(index=index, id=name, realtime=True)
        except elasticsearch.NotFoundError as error:
            # a proxy's 404 says nothing about the document
            if error_type(error) == "index_not_found_exception" or _is_absent(error.body):
                return None
            raise
        return _stored(answer.body)

    def write(self, index: str, name: str, source: Json, *, over: DocumentPlace | None) -> DocumentPlace | None:
        """Write a document if it has not changed since ``over``, or (None) still does not exist.

        Return its new place, None if the condition does not hold.
        """
        condition = {"op_type": "create"} if over is None else _only_over(over)
        answer = self._client.options(ignore_status=CONFLICT).index(index=index, id=name, document=source, **condition)
        return None if answer.meta.status == CONFLICT else _place(answer.body)

    def delete(self, index: str, name: str, *, over: DocumentPlace) -> None:
        """Delete a document if it has not changed since ``over``."""
        self._client.options(ignore_status=(NOT_FOUND, CONFLICT)).delete(index=index, id=name, **_only_over(over))

    def find(self, index: str | None, names: Iterable[str | Json]) -> list[StoredDocument]:
        """Return those of the named documents that exist, without their sources.

        A name is an ``_id``, or a mapping with the document's own ``_index`` or ``routing``, too. Raises `NotServed` if
        a shard is not available.
        """
        names = list(names)
        named: dict[str, Any] = {"ids": names}
        if any(not isinstance(each, str) for each in names):
            named = {"docs": [{"_id": each} if isinstance(each, str) else each for each in names]}
        answers = self._client.mget(index=index or None, source=False, **named)["docs"]
        if failed := [each["error"] for each in answers if "error" in each]:
            # The document is not absent: its shard is not available.
            shown = f"index {index!r}" if index else "an index of index_by="
            raise NotServed(f"{shown}: {len(failed)} document(s) could not be read: {failed[0]['reason']}")
        return [_stored(each) for each in answers if each.get("found")]

    def bulk(
        self, index: str | None, body: bytes, wanted: str, *, refresh: bool = False, pipeline: str | None = None
    ) -> Json:
        """Carry out the operations of a rendered body; return the ``wanted`` fields of the answer.

        Never repeated, unless the server refuses to leave documents out of errors, before it reads the body.
        """
        send = partial(
            self._once.bulk,
            index=index,
            operations=[body],  # type: ignore[list-item]
            filter_path=wanted,
            refresh=refresh or None,
            pipeline=pipeline,
        )
        if not self._hides_documents:
            return dict(send().body)
        try:
            return dict(send(include_source_on_error=False).body)
        except elasticsearch.BadRequestError:
            # The reason is unknown: filter_path removes it. So an older server is one that takes the same without.
            answer = dict(send().body)
        self._hides_documents = False
        return answer

    # ---- searches: each fails if a shard is not available, whose documents would look as if they were not there

    def search(
        self,
        index: str | None,
        query: Json,
        size: int,
        *,
        source: bool = True,
        sort: Sequence[Json] | None = None,
        after: Sequence[Any] | None = None,
        point_in_time: str = "",
    ) -> Page:
        """Return at most ``size`` documents that a query finds, those behind the sort key ``after``.

        In an index, or in what a point in time has kept.
        """
        answer = self._search(
            index=index,
            query=query,
            size=size,
            source=None if source else False,
            sort=sort,
            search_after=after,
            pit={"id": point_in_time, "keep_alive": _ALIVE} if point_in_time else None,
        )
        return Page(answer["hits"]["hits"], str(answer.get("pit_id", "")))

    def count(self, index: str, query: Json) -> int:
        """Return how many documents a query finds."""
        answer = self._search(index=index, query=query, size=0, track_total_hits=True)
        return int(answer["hits"]["total"]["value"])

    def highest(self, index: str, field: str) -> int | None:
        """Return the highest value of a field; None if no document has it."""
        answer = self._search(index=index, size=0, aggs={"highest": {"max": {"field": field}}})
        value = answer["aggregations"]["highest"]["value"]
        return None if value is None else int(value)

    def _search(self, **wanted: Any) -> Json:
        return dict(self._client.search(**wanted, allow_partial_search_results=False).body)

    def versions(self, indices: Sequence[str]) -> Iterator[tuple[str, int]]:
        """Yield ``_id`` and version of every document."""
        query = {"_source": False, "version": True}
        hits = helpers.scan(self._client, index=",".join(indices), query=query, size=_SCANNED, preserve_order=False)
        for hit in hits:
            yield hit["_id"], hit["_version"]

    def open_point_in_time(self, index: str) -> str:
        """Keep what an index holds now, for searches of the next five minutes; return its name."""
        return str(self._client.open_point_in_time(index=index, keep_alive=_ALIVE)["id"])

    def close_point_in_time(self, name: str) -> None:
        """Keep it no longer."""
        self._client.close_point_in_time(id=name)

    # ---- indices

    def exists(self, index: str) -> bool:
        """Return whether an index exists that this user may look at."""
        answer = self._client.options(ignore_status=(FORBIDDEN, NOT_FOUND)).indices.exists(index=index)
        return bool(answer.meta.status == _FOUND)

    def create_index(self, index: str, settings: Json | None, mappings: Json | None) -> bool:
        """Create an index; return False if it exists already."""
        try:
            self._client.indices.create(index=index, settings=settings, mappings=mappings)
        except elasticsearch.BadRequestError as error:
            if error_type(error) != "resource_already_exists_exception":
                raise
            return False
        return True

    def describe(self, names: Sequence[str]) -> dict[str, Any]:
        """Return settings, aliases and data stream of the indices that names stand for, as far as they may be seen."""
        answer = self._client.indices.get(
            index=list(names), flat_settings=True, features=list(_DESCRIBED), ignore_unavailable=True
        )
        return dict(answer.body)

    def describe_existing(self, name: str) -> dict[str, Any]:
        """Return the same for one name; nothing if it does not exist. Raises if this user may not look at it."""
        try:
            return dict(self._client.indices.get(index=name, flat_settings=True, features=list(_DESCRIBED)).body)
        except elasticsearch.NotFoundError:
            return {}

    def backing_indices(self, stream: str) -> list[str]:
        """Return the backing indices of a data stream, oldest first."""
        # not by indices.resolve_index(): since 9.5 the client sends POST, which older servers of 9 do not take
        path, headers = f"/_resolve/index/{quote(stream)}", {"accept": "application/json"}
        body: Any = self._client.perform_request("GET", path, headers=headers).body
        (described,) = body["data_streams"]
        return list(described["backing_indices"])

    def settings(self, index: str) -> list[Mapping[str, str]]:
        """Return the flat settings of each index that a name stands for."""
        answer = self._client.indices.get_settings(index=index, flat_settings=True)
        return [each["settings"] for each in answer.body.values()]

    def primaries(self, index: str) -> list[int]:
        """Return the number of primary shards of each index that a name stands for, 1 where it is not reported."""
        name = "index.number_of_shards"
        answer = self._client.indices.get_settings(index=index, name=name, flat_settings=True, ignore_unavailable=True)
        return [int(each["settings"].get(name, 1)) for each in answer.body.values()]

    def mapping(self, index: str) -> dict[str, Any]:
        """Return the mapping of an index."""
        return dict(self._client.indices.get_mapping(index=index).body[index]["mappings"])

    def add_to_mapping(self, index: str, properties: Json) -> None:
        """Add fields to the mapping of an index."""
        self._client.indices.put_mapping(index=index, properties=properties)

    def refresh(self, index: str) -> tuple[int, int]:
        """Make documents searchable; return in how many shards that was done, and in how many it failed."""
        shards = self._client.indices.refresh(index=index, ignore_unavailable=True)["_shards"]
        return int(shards["successful"]), int(shards["failed"])

    def pipeline(self, name: str) -> Json | None:
        """Return the definition of an ingest pipeline, {} if this user may not read it; None if it does not exist."""
        answer = self._client.options(ignore_status=(FORBIDDEN, NOT_FOUND)).ingest.get_pipeline(id=name)
        if answer.meta.status == NOT_FOUND:
            return None
        return {} if answer.meta.status == FORBIDDEN else dict(answer.body)

    # ---- nodes, about which this user, or a serverless cluster, need not answer: then nothing is returned

    def request_limits(self) -> list[int]:
        """Return the longest request that each node accepts, in bytes."""
        nodes = self._nodes(self._asking.nodes.info(metric="http", filter_path=f"nodes.*.{'.'.join(_REQUESTS)}"))
        return [_at(node, _REQUESTS) for node in nodes]

    def memory_limits(self) -> list[int]:
        """Return how many bytes of operations each node accepts at once. It answers 429 to all larger requests."""
        path = f"nodes.*.{'.'.join(_MEMORY)}"
        nodes = self._nodes(self._asking.nodes.stats(metric="indexing_pressure", filter_path=path))
        return [_at(node, _MEMORY) for node in nodes]

    def clocks(self) -> list[float]:
        """Return the time of each node, in seconds."""
        nodes = self._nodes(self._asking.nodes.stats(metric="process", filter_path="nodes.*.timestamp"))
        return [node["timestamp"] / 1000 for node in nodes]

    def data_nodes(self) -> int | None:
        """Return how many nodes hold data."""
        number: int | None = self._health("number_of_data_nodes")
        return number

    def health(self) -> str | None:
        """Return "green", "yellow" or "red"."""
        status: str | None = self._health("status")
        return status

    def _health(self, field: str) -> Any:
        return self._asking.cluster.health(filter_path=field).body.get(field)

    @staticmethod
    def _nodes(answer: ObjectApiResponse[Any]) -> list[Any]:
        return list(answer.body.get("nodes", {}).values())

    def version(self) -> str | None:
        """Return the server's version, or None if the user lacks the privilege to ask.

        Raises an older server's error for this client.
        """
        try:
            nodes = self._nodes(self._client.nodes.info(node_id="_local", filter_path="nodes.*.version"))
            return next((str(node["version"]) for node in nodes), None)
        except elasticsearch.ApiError as error:
            if error.status_code not in _MAY_NOT_ASK:
                raise
            self._refuse_newer_client()
            return None

    def _refuse_newer_client(self) -> None:
        """Send a new request, because filter_path removes the reason."""
        try:
            self._client.nodes.info(node_id="_local")
        except elasticsearch.ApiError as error:
            if error_type(error) == "media_type_header_exception":
                raise


_REQUESTS: Final = ("http", "max_content_length_in_bytes")
_MEMORY: Final = ("indexing_pressure", "memory", "limit_in_bytes")


def _at(node: Any, path: Iterable[str]) -> int:
    for name in path:
        node = node[name]
    return int(node)


def _is_absent(body: object) -> bool:
    """Return whether the server itself, not a proxy, reports that the document does not exist."""
    return isinstance(body, dict) and body.get("found") is False


def _only_over(place: DocumentPlace) -> dict[str, Any]:
    return {"if_seq_no": place.seq_no, "if_primary_term": place.primary_term}


def _place(answer: Json) -> DocumentPlace:
    return DocumentPlace(answer["_seq_no"], answer["_primary_term"])


def _stored(answer: Json) -> StoredDocument:
    return StoredDocument(answer["_id"], answer["_version"], _place(answer), answer.get("_source", {}))
