"""The cluster in memory, over which the simulation runs, gives the answers of a real one, request by request."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from epochsink.elasticsearch import Elasticsearch
from epochsink.elasticsearch.connection import connect
from epochsink.elasticsearch.errors import RequestRefused, error_type
from epochsink.elasticsearch.server import DocumentPlace, ElasticsearchServer, Page, StoredDocument
from simulation.memory_elasticsearch import Cluster
from simulation.search_server import MemoryServer
from simulation.steps import at_once

if TYPE_CHECKING:
    from fix_services import FreshName

    from epochsink_devkit.services import ElasticsearchService

SETTINGS = {"number_of_shards": 1, "number_of_replicas": 0, "refresh_interval": "-1"}
MAPPING = {"dynamic": False, "properties": {"n": {"type": "long"}, "k": {"type": "keyword"}}}
ITEMS = "errors,items.*.status,items.*.error.type,items.*._index,items.*._id,items.*._version,items.*.result"
GTE, EXTERNAL = {"version_type": "external_gte"}, {"version_type": "external"}
NEVER = {"if_seq_no": 2**62, "if_primary_term": 1}


@dataclass
class Asked:
    """One of the two servers. What differs between any two (names, places, uuids) is told by the order of its first
    appearance.
    """

    server: ElasticsearchServer
    index: str
    _seen: dict[Any, str] = field(default_factory=dict)
    places: list[DocumentPlace | None] = field(default_factory=list)

    def answer(self, request: Callable[[Asked], Any]) -> Any:
        """Return the answer to a request, or the error."""
        try:
            return self._plain(request(self))
        except RequestRefused as error:
            return error.name, error.status_code, error_type(error)

    def write(self, name: str, source: Mapping[str, Any], over: int | None = None) -> DocumentPlace | None:
        """Write a document over the place that the write of that number has returned."""
        place = self.server.write(self.index, name, source, over=None if over is None else self.places[over])
        self.places.append(place)
        return place

    def place(self, number: int) -> DocumentPlace:
        """Return the place that a write has returned."""
        place = self.places[number]
        assert place is not None
        return place

    def bulk(self, *operations: tuple[str, str, Mapping[str, Any], Any], wanted: str = ITEMS, **options: Any) -> Any:
        """Post operations: action, id, further fields, source."""
        lines = []
        for action, name, fields, source in operations:
            lines.append(json.dumps({action: {**fields, "_id": name}}))
            lines += [] if source is None else [json.dumps(source)]
        return self.server.bulk(self.index, "".join(f"{line}\n" for line in lines).encode(), wanted, **options)

    def _plain(self, answer: Any) -> Any:
        if isinstance(answer, DocumentPlace):
            return self._seen.setdefault(answer, f"place {len(self._seen)}")
        if isinstance(answer, StoredDocument):
            return answer.id, answer.version, self._plain(answer.place), dict(answer.source)
        if isinstance(answer, Page):
            names = ("_index", "_id", "_source")
            return self._plain([{name: hit[name] for name in names if name in hit} for hit in answer.hits])
        if isinstance(answer, Mapping):
            return {self._plain(name): self._plain(value) for name, value in answer.items()}
        if isinstance(answer, (list, tuple)):
            return [self._plain(each) for each in answer]
        return answer.replace(self.index, "INDEX") if isinstance(answer, str) else answer


@pytest.fixture
def both(elasticsearch: ElasticsearchService, fresh_index: FreshName) -> Iterator[tuple[Asked, Asked]]:
    index = fresh_index()
    with contextlib.closing(connect(Elasticsearch(elasticsearch.url, index=index))) as client:
        yield Asked(ElasticsearchServer(client), index), Asked(MemoryServer(Cluster(), at_once), index)


def expect_the_same(both: tuple[Asked, Asked], *requests: Callable[[Asked], Any]) -> None:
    """Send each request to both; fail with the first one to which their answers differ."""
    real, memory = both
    for number, request in enumerate(requests):
        expected = real.answer(request)
        assert memory.answer(request) == expected, f"request {number}"


def made(asked: Asked) -> bool:
    return asked.server.create_index(asked.index, SETTINGS, MAPPING)


def refreshed(asked: Asked) -> tuple[int, int]:
    return asked.server.refresh(asked.index)


def test_an_index(both: tuple[Asked, Asked]) -> None:
    def described(asked: Asked) -> Any:
        (settings,) = asked.server.settings(asked.index)
        (alone,) = (each["settings"] for each in asked.server.describe_existing(asked.index).values())
        (together,) = (each["settings"] for each in asked.server.describe([asked.index, "missing"]).values())
        assert settings == alone == together
        return {name: settings.get(name) for name in ("index.number_of_shards", "index.history.uuid")}

    def uuid_of_another(asked: Asked) -> bool:
        asked.server.create_index(f"{asked.index}-2", SETTINGS, MAPPING)
        names = [asked.index, f"{asked.index}-2"]
        return len({each["settings"]["index.uuid"] for each in asked.server.describe(names).values()}) == len(names)

    expect_the_same(
        both,
        lambda asked: asked.server.exists(asked.index),
        lambda asked: asked.server.read(asked.index, "a"),
        lambda asked: asked.server.search(asked.index, {"match_all": {}}, 10),
        lambda asked: asked.server.highest(asked.index, "n"),
        lambda asked: asked.server.describe_existing(asked.index),
        lambda asked: asked.server.describe([asked.index]),
        refreshed,
        made,
        made,
        lambda asked: asked.server.exists(asked.index),
        lambda asked: asked.server.primaries(asked.index),
        described,
        uuid_of_another,
        refreshed,
        lambda asked: asked.server.pipeline("missing"),
    )


def test_a_document_that_is_written_on_a_condition(both: tuple[Asked, Asked]) -> None:
    def read(asked: Asked) -> StoredDocument | None:
        return asked.server.read(asked.index, "a")

    expect_the_same(
        both,
        made,
        lambda asked: asked.write("a", {"n": 1}),
        read,
        lambda asked: asked.write("a", {"n": 2}),
        lambda asked: asked.write("a", {"n": 3}, over=0),
        lambda asked: asked.write("a", {"n": 4}, over=0),
        read,
        lambda asked: asked.server.read(asked.index, "b"),
        lambda asked: asked.write("b", {"n": 5}, over=0),
        lambda asked: asked.server.delete(asked.index, "a", over=asked.place(0)),
        read,
        lambda asked: asked.server.delete(asked.index, "a", over=asked.place(2)),
        read,
        lambda asked: asked.server.delete(asked.index, "a", over=asked.place(2)),
        lambda asked: asked.write("a", {"n": 6}, over=2),
        lambda asked: asked.write("a", {"n": 7}),
        read,
    )


def test_versions_in_bulk_requests(both: tuple[Asked, Asked]) -> None:
    def stored(asked: Asked) -> list[StoredDocument]:
        return asked.server.find(asked.index, ["a", "b", "c", "d", "e"])

    expect_the_same(
        both,
        made,
        lambda asked: asked.bulk(("index", "a", {"version": 10, **GTE}, {"n": 1})),
        lambda asked: asked.bulk(("index", "a", {"version": 10, **GTE}, {"n": 2}), wanted="errors"),
        lambda asked: asked.bulk(
            ("index", "a", {"version": 9, **GTE}, {"n": 3}), ("index", "b", {"version": 9, **GTE}, {"n": 3})
        ),
        lambda asked: asked.bulk(("index", "a", {"version": 9, **GTE}, {"n": 3}), wanted="errors"),
        stored,
        lambda asked: asked.bulk(
            ("index", "a", {"version": 10, **EXTERNAL}, {"n": 4}), ("index", "b", {"version": 10, **EXTERNAL}, {"n": 4})
        ),
        lambda asked: asked.bulk(
            ("delete", "a", {"version": 12, **GTE}, None), ("delete", "c", {"version": 5, **GTE}, None)
        ),
        lambda asked: asked.bulk(
            ("index", "a", {"version": 11, **GTE}, {"n": 5}), ("index", "c", {"version": 4, **GTE}, {"n": 5})
        ),
        stored,
        lambda asked: asked.bulk(("index", "a", {"version": 12, **GTE}, {"n": 6})),
        lambda asked: asked.bulk(("index", "d", {}, {"n": 7}), ("index", "d", {}, {"n": 8})),
        lambda asked: asked.bulk(("create", "d", {}, {"n": 9}), ("create", "e", {}, {"n": 9})),
        lambda asked: asked.bulk(("index", "d", NEVER, {"n": 10}), ("index", "new", NEVER, {"n": 10})),
        lambda asked: asked.bulk(("index", "d", {}, {"n": 11}), wanted="errors", pipeline="_none"),
        stored,
        lambda asked: asked.bulk(("index", "d", {}, {"n": 11}), pipeline="missing"),
        lambda asked: asked.server.find(
            None, [{"_id": "a", "_index": asked.index}, {"_id": "z", "_index": asked.index}]
        ),
    )


def test_searches_see_what_was_refreshed(both: tuple[Asked, Asked]) -> None:
    def found(query: Mapping[str, Any], **options: Any) -> Callable[[Asked], Any]:
        def ask(asked: Asked) -> Any:
            page = asked.server.search(asked.index, query, 10, **options)
            return sorted(hit["_id"] for hit in page.hits), asked.server.count(asked.index, query)

        return ask

    def pages(asked: Asked) -> Any:
        point, after, names = asked.server.open_point_in_time(asked.index), None, []
        order = [{"n": "asc"}, {"_shard_doc": "asc"}]
        while hits := (
            page := asked.server.search(None, {"match_all": {}}, 2, sort=order, after=after, point_in_time=point)
        ).hits:
            if after is None:
                # from the first page on, at the latest, it is kept as it was
                asked.server.bulk(asked.index, b'{"index":{"_id":"later"}}\n{"n":9}\n', "errors", refresh=True)
            point, after = page.point_in_time, hits[-1]["sort"]
            names += [(hit["_id"], hit["_index"]) for hit in hits]
        asked.server.close_point_in_time(point)
        return names

    documents: list[Any] = [("index", name, {}, {"n": number, "k": name}) for number, name in enumerate("abcde")]
    expect_the_same(
        both,
        made,
        lambda asked: asked.bulk(*documents, wanted="errors"),
        found({"match_all": {}}),
        lambda asked: asked.server.highest(asked.index, "n"),
        refreshed,
        found({"match_all": {}}),
        lambda asked: asked.server.highest(asked.index, "n"),
        found({"match_none": {}}),
        found({"term": {"k": "b"}}),
        found({"ids": {"values": ["a", "e", "z"]}}),
        found({"exists": {"field": "k"}}, source=False),
        found({"range": {"n": {"gt": 1, "lte": 3}}}),
        found({"bool": {"filter": [{"range": {"n": {"gte": 1}}}], "must_not": [{"term": {"k": "c"}}]}}),
        found({"bool": {"should": [{"term": {"k": "c"}}, {"term": {"k": "a"}}], "minimum_should_match": 1}}),
        lambda asked: asked.server.search(asked.index, {"match_all": {}}, 3, sort=[{"n": "desc"}]),
        lambda asked: sorted(asked.server.versions([asked.index])),
        pages,
        found({"match_all": {}}),
    )


def test_each_request_is_answered_in_memory() -> None:
    """Whatever committers and letters ask; `check` alone asks more."""
    of_check = {"backing_indices", "mapping", "add_to_mapping", "request_limits", "memory_limits", "clocks", "health"}
    requests = {name for name in vars(ElasticsearchServer) if not name.startswith("_")}
    assert requests - set(vars(MemoryServer)) == of_check | {"version"}
