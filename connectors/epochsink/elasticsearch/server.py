"""What is asked of the server: one method for each kind of request. Nothing here decides.

Elasticsearch and OpenSearch take the same requests but for a few, which `epochsink.opensearch.server` has. A method may
raise `errors.CLIENT_ERRORS`, and repeats no request by itself unless the client does.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final
from urllib.parse import quote

from epochsink.elasticsearch.client import Client, Json, Reply
from epochsink.elasticsearch.errors import (
    BAD_REQUEST,
    CLIENT_ERRORS,
    CONFLICT,
    FORBIDDEN,
    NOT_FOUND,
    NotServed,
    RequestRefused,
    error_type,
)

if TYPE_CHECKING:
    import elasticsearch

_FOUND: Final = 200
_SCANNED: Final = 10_000
_ALIVE: Final = "5m"
_MAY_NOT_ASK: Final = (BAD_REQUEST, FORBIDDEN, NOT_FOUND, 410)
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

    _reads: ClassVar[Json] = {}
    """Parameters of each request that reads documents."""
    _hides_documents: bool = True
    """Whether the server can leave documents out of errors, as Elasticsearch can since 8.18."""

    def __init__(self, client: elasticsearch.Elasticsearch) -> None:
        from epochsink.elasticsearch.connection import ElasticsearchClient  # noqa: PLC0415 - OpenSearch has another one

        self.threads = Threads()
        self.client: Client = ElasticsearchClient(client)

    def close(self) -> None:
        """Close the connections."""
        self.client.close()

    def _ask(
        self,
        method: str,
        *path: str | None,
        body: Json | bytes | None = None,
        accept: Sequence[int] = (),
        once: bool = False,
        **parameters: Any,
    ) -> Reply:
        """Send a request. Statuses to ``accept`` are answers like those of success."""
        try:
            return self.client.request(method, _target(path, parameters), body, once=once)
        except RequestRefused as error:
            if error.status_code not in accept:
                raise
            return Reply(error.status_code, error.body)

    # ---- documents

    def read(self, index: str, name: str) -> StoredDocument | None:
        """Return a document, also if it was not refreshed yet; None if it or the index does not exist."""
        try:
            answer = self._ask("GET", index, "_doc", name, realtime=True, **self._reads)
        except RequestRefused as error:
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
        answer = self._ask("PUT", index, "_doc", name, body=source, accept=[CONFLICT], **condition)
        return None if answer.status == CONFLICT else _place(answer.body)

    def delete(self, index: str, name: str, *, over: DocumentPlace) -> None:
        """Delete a document if it has not changed since ``over``."""
        self._ask("DELETE", index, "_doc", name, accept=[NOT_FOUND, CONFLICT], **_only_over(over))

    def find(self, index: str | None, names: Iterable[str | Json]) -> list[StoredDocument]:
        """Return those of the named documents that exist, without their sources.

        A name is an ``_id``, or a mapping with the document's own ``_index`` or ``routing``, too. Raises `NotServed` if
        a shard is not available.
        """
        names = list(names)
        named: dict[str, Any] = {"ids": names}
        if any(not isinstance(each, str) for each in names):
            named = {"docs": [{"_id": each} if isinstance(each, str) else each for each in names]}
        answers = self._ask("POST", index, "_mget", body=named, _source=False, **self._reads).body["docs"]
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
        wishes: dict[str, Any] = {"filter_path": wanted, "refresh": refresh or None, "pipeline": pipeline}
        send = partial(self._ask, "PUT", index, "_bulk", body=body, once=True, **wishes)
        if not self._hides_documents:
            return dict(send().body)
        try:
            return dict(send(include_source_on_error=False).body)
        except RequestRefused as error:
            if error.status_code != BAD_REQUEST:
                raise
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
        wanted = {"query": query, "size": size, "_source": None if source else False, "sort": sort}
        if point_in_time:
            return self._page(point_in_time, wanted, after)
        return Page(self._search(index, **wanted, search_after=after)["hits"]["hits"])

    def _page(self, point_in_time: str, wanted: Json, after: Sequence[Any] | None) -> Page:
        kept = {"id": point_in_time, "keep_alive": _ALIVE}
        answer = self._search(None, **wanted, search_after=after, pit=kept)
        return Page(answer["hits"]["hits"], str(answer.get("pit_id", "")))

    def count(self, index: str, query: Json) -> int:
        """Return how many documents a query finds."""
        answer = self._search(index, query=query, size=0, track_total_hits=True)
        return int(answer["hits"]["total"]["value"])

    def highest(self, index: str, field: str) -> int | None:
        """Return the highest value of a field; None if no document has it."""
        answer = self._search(index, size=0, aggs={"highest": {"max": {"field": field}}})
        value = answer["aggregations"]["highest"]["value"]
        return None if value is None else int(value)

    def _search(self, index: str | None, **wanted: Any) -> Json:
        options = {"allow_partial_search_results": False, **self._reads}
        return dict(self._ask("POST", index, "_search", body=_given(wanted), **options).body)

    def versions(self, indices: Sequence[str]) -> Iterator[tuple[str, int]]:
        """Yield ``_id`` and version of every document."""
        body = {"_source": False, "version": True, "sort": ["_doc"], "size": _SCANNED}
        answer = self._begin_scroll(",".join(indices), body)
        try:
            while hits := answer["hits"]["hits"]:
                for hit in hits:
                    yield hit["_id"], hit["_version"]
                answer = self._scroll(answer["_scroll_id"])
        finally:
            # it ends by itself; in OpenSearch, a user who may search may lack the right to end a search
            with suppress(*CLIENT_ERRORS):
                self._end_scroll(answer["_scroll_id"])

    def _begin_scroll(self, index: str, body: Json) -> Json:
        """Search what an index holds now, and keep it for the next five minutes."""
        options = {"allow_partial_search_results": False, "scroll": _ALIVE, **self._reads}
        return _whole(self._ask("POST", index, "_search", body=_given(body), **options))

    def _scroll(self, name: str) -> Json:
        """Return the next hits of a search."""
        return _whole(self._ask("POST", "_search", "scroll", body={"scroll": _ALIVE, "scroll_id": name}))

    def _end_scroll(self, name: str) -> None:
        self._ask("DELETE", "_search", "scroll", body={"scroll_id": [name]}, accept=[NOT_FOUND])

    def open_point_in_time(self, index: str) -> str:
        """Keep what an index holds now, for searches of the next five minutes; return its name."""
        return str(self._ask("POST", index, "_pit", keep_alive=_ALIVE).body["id"])

    def close_point_in_time(self, name: str) -> None:
        """Keep it no longer."""
        self._ask("DELETE", "_pit", body={"id": name})

    # ---- indices

    def exists(self, index: str) -> bool:
        """Return whether an index exists that this user may look at."""
        return self._ask("HEAD", index, accept=[FORBIDDEN, NOT_FOUND]).status == _FOUND

    def create_index(self, index: str, settings: Json | None, mappings: Json | None) -> bool:
        """Create an index; return False if it exists already."""
        body = _given({"settings": settings, "mappings": mappings})
        try:
            self._ask("PUT", index, body=body or None)
        except RequestRefused as error:
            if error_type(error) != "resource_already_exists_exception":
                raise
            return False
        return True

    def describe(self, names: Sequence[str]) -> dict[str, Any]:
        """Return settings, aliases and data stream of the indices behind some names, as far as they may be seen."""
        return dict(self._described(",".join(names), ignore_unavailable=True).body)

    def describe_existing(self, name: str) -> dict[str, Any]:
        """Return the same for one name; nothing if it does not exist. Raises if this user may not look at it."""
        answer = self._described(name, accept=[NOT_FOUND])
        return {} if answer.status == NOT_FOUND else dict(answer.body)

    def _described(self, names: str, **options: Any) -> Reply:
        return self._ask("GET", names, flat_settings=True, features="settings,aliases", **options)

    def backing_indices(self, stream: str) -> list[str]:
        """Return the backing indices of a data stream, oldest first."""
        (described,) = self._ask("GET", "_resolve", "index", stream).body["data_streams"]
        return list(described["backing_indices"])

    def settings(self, index: str) -> list[Mapping[str, str]]:
        """Return the flat settings of each index behind a name."""
        return [each["settings"] for each in self._ask("GET", index, "_settings", flat_settings=True).body.values()]

    def primaries(self, index: str) -> list[int]:
        """Return the number of primary shards of each index behind a name, 1 where it is not reported."""
        name = "index.number_of_shards"
        answer = self._ask("GET", index, "_settings", name, flat_settings=True, ignore_unavailable=True)
        return [int(each["settings"].get(name, 1)) for each in answer.body.values()]

    def mapping(self, index: str) -> dict[str, Any]:
        """Return the mapping of an index."""
        return dict(self._ask("GET", index, "_mapping").body[index]["mappings"])

    def add_to_mapping(self, index: str, properties: Json) -> None:
        """Add fields to the mapping of an index."""
        self._ask("PUT", index, "_mapping", body={"properties": properties})

    def refresh(self, index: str) -> tuple[int, int]:
        """Make documents searchable; return in how many shards that was done, and in how many it failed."""
        shards = self._ask("POST", index, "_refresh", ignore_unavailable=True).body["_shards"]
        return int(shards["successful"]), int(shards["failed"])

    def pipeline(self, name: str) -> Json | None:
        """Return the definition of an ingest pipeline, {} if this user may not read it; None if it does not exist."""
        answer = self._ask("GET", "_ingest", "pipeline", name, accept=[FORBIDDEN, NOT_FOUND])
        if answer.status == NOT_FOUND:
            return None
        return {} if answer.status == FORBIDDEN else dict(answer.body)

    # ---- nodes, about which this user, or a serverless cluster, need not answer: then nothing is returned

    def request_limits(self) -> list[int]:
        """Return the longest request that each node accepts, in bytes."""
        nodes = self._nodes("http", filter_path=f"nodes.*.{'.'.join(_REQUESTS)}")
        return [_at(node, _REQUESTS) for node in nodes]

    def memory_limits(self) -> list[int]:
        """Return how many bytes of operations each node accepts at once. It answers 429 to all larger requests."""
        nodes = self._nodes("stats", "indexing_pressure", filter_path=f"nodes.*.{'.'.join(_MEMORY)}")
        return [_at(node, _MEMORY) for node in nodes]

    def clocks(self) -> list[float]:
        """Return the time of each node, in seconds."""
        nodes = self._nodes("stats", "process", filter_path="nodes.*.timestamp")
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
        return _fields(self._ask("GET", "_cluster", "health", accept=_MAY_NOT_ASK, filter_path=field)).get(field)

    def _nodes(self, *path: str, accept: Sequence[int] = _MAY_NOT_ASK, **parameters: Any) -> list[Any]:
        answer = self._ask("GET", "_nodes", *path, accept=accept, **parameters)
        return list(_fields(answer).get("nodes", {}).values())

    def version(self) -> str | None:
        """Return the server's version, or None if the user lacks the privilege to ask.

        Raises an older server's error for this client.
        """
        try:
            nodes = self._nodes("_local", accept=(), filter_path="nodes.*.version")
            return next((str(node["version"]) for node in nodes), None)
        except RequestRefused as error:
            if error.status_code not in _MAY_NOT_ASK:
                raise
            self._refuse_newer_client()
            return None

    def _refuse_newer_client(self) -> None:
        """Send a new request, because filter_path removes the reason."""
        try:
            self._ask("GET", "_nodes", "_local")
        except RequestRefused as error:
            if error_type(error) == "media_type_header_exception":
                raise


_REQUESTS: Final = ("http", "max_content_length_in_bytes")
_MEMORY: Final = ("indexing_pressure", "memory", "limit_in_bytes")


def _target(path: Iterable[str | None], parameters: Json) -> str:
    """Return a path of the parts that are given, with parameters."""
    joined = "".join(f"/{quote(part, safe=',*')}" for part in path if part)
    query = "&".join(f"{name}={_parameter(value)}" for name, value in parameters.items() if value is not None)
    return f"{joined}?{query}" if query else joined


def _parameter(value: object) -> str:
    return quote(str(value).lower() if isinstance(value, bool) else str(value), safe=",*")


def _given(fields: Json) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _fields(answer: Reply) -> Json:
    """Return the fields of an answer, none if it is a proxy's text."""
    return answer.body if isinstance(answer.body, Mapping) else {}


def _whole(answer: Reply) -> Json:
    """Return the answer to a scroll. Raises `NotServed` if a shard did not answer: no parameter makes that an error."""
    shards = answer.body["_shards"]
    if shards["failed"] or shards["successful"] + shards.get("skipped", 0) < shards["total"]:
        raise NotServed(f"{shards['successful']} of {shards['total']} shards have answered")
    return dict(answer.body)


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
