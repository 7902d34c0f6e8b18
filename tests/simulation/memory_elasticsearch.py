"""An Elasticsearch in memory: what a cluster answers to the requests of `ElasticsearchServer`, one by one.

`tests/contract/test_elasticsearch_server.py` holds it to the answers of a real one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, NamedTuple

from epochsink.elasticsearch.errors import RequestRefused
from epochsink.elasticsearch.server import DocumentPlace, Page, StoredDocument

Json = Mapping[str, Any]

_CONFLICT: Final = 409
_RESULTS: Final = {
    (False, False): "created",
    (False, True): "updated",
    (True, False): "not_found",
    (True, True): "deleted",
}
"""What an operation does, by whether it is a delete, and whether there is a document."""
_RANGES: Final = {
    "gt": lambda value, bound: value > bound,
    "gte": lambda value, bound: value >= bound,
    "lt": lambda value, bound: value < bound,
    "lte": lambda value, bound: value <= bound,
}


class Stored(NamedTuple):
    """A document, or (no source) the version that is left of a deleted one."""

    version: int
    place: DocumentPlace
    source: str | None


@dataclass(slots=True)
class Cluster:
    """Indices by name, each with its documents by ``_id``; ``searchable`` is what searches see of them.

    ``incarnation`` stands for the index' history uuid, which every restore changes, and for the primary term.
    No method raises: an answer may be an error of the client.
    """

    indices: dict[str, dict[str, Stored]] = field(default_factory=dict)
    searchable: dict[str, dict[str, Stored]] = field(default_factory=dict)
    settings: dict[str, dict[str, str]] = field(default_factory=dict)
    pipelines: dict[str, dict[str, Any]] = field(default_factory=dict)
    points_in_time: dict[str, dict[str, Stored]] = field(default_factory=dict)
    incarnation: int = 0
    writes: int = 0

    # ---- documents

    def read(self, index: str, name: str) -> StoredDocument | None:
        """Return a document."""
        stored = self.indices.get(index, {}).get(name)
        if stored is None or stored.source is None:
            return None
        return StoredDocument(name, stored.version, stored.place, json.loads(stored.source))

    def write(self, index: str, name: str, source: str, over: DocumentPlace | None) -> DocumentPlace | None:
        """Write a document if it stands where it is said to."""
        documents = self._documents(index)
        stored = documents.get(name)
        exists = stored is not None and stored.source is not None
        if (stored.place if stored is not None and exists else None) != over:
            return None
        return self._store(index, name, stored.version + 1 if stored else 1, source)

    def delete(self, index: str, name: str, over: DocumentPlace) -> None:
        """Delete a document if it stands where it is said to."""
        stored = self.indices.get(index, {}).get(name)
        if stored is not None and stored.place == over:
            self._store(index, name, stored.version + 1, None)

    def find(self, index: str | None, names: Sequence[str | Json]) -> list[StoredDocument]:
        """Return the named documents that exist."""
        places = [
            (index, each) if isinstance(each, str) else (each.get("_index", index), each["_id"]) for each in names
        ]
        stored = [(name, self.indices.get(where or "", {}).get(name)) for where, name in places]
        return [
            StoredDocument(name, each.version, each.place, {})
            for name, each in stored
            if each and each.source is not None
        ]

    def bulk(self, index: str | None, body: bytes, wanted: str, *, refresh: bool, pipeline: str | None) -> Any:
        """Carry out each operation, and return what is wanted of the answers."""
        unknown = pipeline if pipeline not in (None, "_none", *self.pipelines) else None
        lines = iter(body.splitlines())
        items = []
        for line in lines:
            ((action, fields),) = json.loads(line).items()
            source = None if action == "delete" else next(lines).decode()
            to = fields.get("_index", index)
            answer = self._carry_out(action, to, fields, source) if unknown is None else _piped(to, fields, unknown)
            items.append({action: answer})
        if refresh:
            for name in {each["_index"] for item in items for each in item.values()}:
                self.refresh(name)
        errors = any("error" in each for item in items for each in item.values())
        return filtered({"errors": errors, "items": items}, wanted)

    def _carry_out(self, action: str, index: str, fields: Json, source: str | None) -> dict[str, Any]:
        name = fields["_id"]
        at = {"_index": index, "_id": name}
        stored = self._documents(index).get(name)
        if not self.takes(stored, action, fields):
            reason = f"[{name}]: version conflict"
            return {**at, "status": _CONFLICT, "error": {"type": "version_conflict_engine_exception", "reason": reason}}
        if source is not None and (error := self.fault_of(index, source)) is not None:
            return {**at, "status": 400, "error": error}
        exists = stored is not None and stored.source is not None
        version = fields.get("version", stored.version + 1 if stored else 1)
        self._store(index, name, version, source)
        result = _RESULTS[action == "delete", exists]
        status = {"created": 201, "not_found": 404}.get(result, 200)
        return {**at, "_version": version, "result": result, "status": status}

    @staticmethod
    def takes(stored: Stored | None, action: str, fields: Json) -> bool:
        """Whether an operation's condition holds for what is stored."""
        exists = stored is not None and stored.source is not None
        if action == "create":
            return not exists
        if "if_seq_no" in fields:
            given = DocumentPlace(fields["if_seq_no"], fields["if_primary_term"])
            return exists and stored is not None and stored.place == given
        version = -1 if stored is None else stored.version
        kind = fields.get("version_type", "internal")
        return bool(
            kind == "internal" or version < fields["version"] or (version == fields["version"] and "gte" in kind)
        )

    def fault_of(self, index: str, source: str) -> Json | None:
        """Return why an index refuses a document for good; None if it takes it."""
        return None

    def _documents(self, index: str) -> dict[str, Stored]:
        if index not in self.indices:
            self.create_index(index, None, None)
        return self.indices[index]

    def _store(self, index: str, name: str, version: int, source: str | None) -> DocumentPlace:
        self.writes += 1
        place = DocumentPlace(self.writes, self.incarnation + 1)
        self.indices[index][name] = Stored(version, place, source)
        return place

    # ---- searches

    def search(
        self,
        index: str | None,
        query: Json,
        size: int,
        *,
        source: bool,
        sort: Sequence[Json] | None,
        after: Sequence[Any] | None,
        point_in_time: str,
    ) -> Any:
        """Return the documents that a query finds."""
        if not point_in_time and index not in self.indices:
            return missing(str(index))
        documents = self.points_in_time[point_in_time] if point_in_time else self.searchable.get(str(index), {})
        hits = [
            {"_index": index or point_in_time.partition(" ")[0], "_id": name, "_source": fields}
            for name, each in documents.items()
            if each.source is not None and matches(query, name, fields := json.loads(each.source))
        ]
        for at in reversed(sort or ()):
            ((by, how),) = at.items()
            if by != "_shard_doc":
                hits.sort(key=lambda hit: hit["_source"][by], reverse=how == "desc")
        if point_in_time:
            # behind what the last page ended with
            hits = hits[int(after[-1]) + 1 if after else 0 :]
            first = int(after[-1]) + 1 if after else 0
            hits = [{**hit, "sort": [first + number]} for number, hit in enumerate(hits)]
        if not source:
            hits = [{name: value for name, value in hit.items() if name != "_source"} for hit in hits]
        return Page(hits[:size], point_in_time)

    def count(self, index: str, query: Json) -> Any:
        """Return how many documents a query finds."""
        page = self.search(index, query, 10**9, source=True, sort=None, after=None, point_in_time="")
        return len(page.hits) if isinstance(page, Page) else page

    def highest(self, index: str, name: str) -> Any:
        """Return the highest value of a field."""
        if index not in self.indices:
            return missing(index)
        sources = [json.loads(each.source) for each in self.searchable.get(index, {}).values() if each.source]
        return max((each[name] for each in sources if name in each), default=None)

    def versions(self, indices: Sequence[str]) -> list[tuple[str, int]]:
        """Return ``_id`` and version of every document."""
        found = [self.searchable.get(index, {}).items() for index in indices]
        return [(name, each.version) for some in found for name, each in some if each.source is not None]

    def open_point_in_time(self, index: str) -> str:
        """Keep what an index holds now."""
        name = f"{index} {len(self.points_in_time)}"
        self.points_in_time[name] = dict(self.searchable.get(index, {}))
        return name

    def close_point_in_time(self, name: str) -> None:
        """Keep it no longer."""
        self.points_in_time.pop(name, None)

    # ---- indices

    def exists(self, index: str) -> bool:
        """Return whether an index exists."""
        return index in self.indices

    def create_index(self, index: str, settings: Json | None, mappings: Json | None) -> bool:
        """Create an index."""
        del mappings
        if index in self.indices:
            return False
        self.indices[index] = {}
        self.writes += 1
        given = {f"index.{name}": str(value) for name, value in (settings or {}).items()}
        self.settings[index] = {"index.uuid": f"uuid-{self.writes}", "index.number_of_shards": "1", **given}
        return True

    def describe(self, names: Sequence[str]) -> dict[str, Any]:
        """Return settings and aliases of those that exist."""
        return {name: {"aliases": {}, "settings": self.flat_settings(name)} for name in names if name in self.indices}

    def flat_settings(self, index: str) -> dict[str, str]:
        """Return the settings of an index, with its history if it was set back."""
        history = {"index.history.uuid": f"history-{self.incarnation}"} if self.incarnation else {}
        return {**self.settings[index], **history}

    def pipelines_of(self, name: str) -> Json | None:
        """Return the definition of an ingest pipeline."""
        return {name: self.pipelines[name]} if name in self.pipelines else None

    def refresh(self, index: str) -> tuple[int, int]:
        """Let searches see what is stored."""
        if index not in self.indices:
            return 0, 0
        self.searchable[index] = dict(self.indices[index])
        return int(self.settings[index]["index.number_of_shards"]), 0


def _piped(index: str, fields: Json, pipeline: str) -> dict[str, Any]:
    error = {"type": "illegal_argument_exception", "reason": f"pipeline with id [{pipeline}] does not exist"}
    return {"_index": index, "_id": fields["_id"], "status": 400, "error": error}


def refused(status: int, kind: str, reason: str) -> RequestRefused:
    """Return the error for a request that the server refuses."""
    body = {"error": {"type": kind, "reason": reason, "root_cause": []}, "status": status}
    return RequestRefused(status, body, {400: "BadRequestError", 404: "NotFoundError"}.get(status, "ApiError"))


def missing(index: str) -> RequestRefused:
    """Return the error for an index that does not exist."""
    return refused(404, "index_not_found_exception", f"no such index [{index}]")


def matches(query: Json, name: str, source: Json) -> bool:
    """Return whether a query finds a document."""
    ((kind, asked),) = query.items()
    return _KINDS[kind](asked, name, source)


def _is_in_range(asked: Json, _: str, source: Json) -> bool:
    ((by, bounds),) = asked.items()
    return by in source and all(_RANGES[how](source[by], bound) for how, bound in bounds.items())


def _combines(asked: Json, name: str, source: Json) -> bool:
    some, all_of, none_of = (
        [matches(each, name, source) for each in asked.get(part, ())] for part in ("should", "filter", "must_not")
    )
    return all(all_of) and not any(none_of) and sum(some) >= asked.get("minimum_should_match", 0)


_KINDS: Final[dict[str, Callable[[Any, str, Json], bool]]] = {
    "match_all": lambda _asked, _name, _source: True,
    "match_none": lambda _asked, _name, _source: False,
    "ids": lambda asked, name, _: name in asked["values"],
    "exists": lambda asked, _, source: source.get(asked["field"]) is not None,
    "term": lambda asked, _, source: all(source.get(by) == value for by, value in asked.items()),
    "range": _is_in_range,
    "bool": _combines,
}


def filtered(answer: Json, wanted: str) -> dict[str, Any]:
    """Return the fields of an answer that a ``filter_path`` names."""
    kept: dict[str, Any] = _filtered(answer, paths_of(wanted))
    return kept


@cache
def paths_of(wanted: str) -> tuple[tuple[str, ...], ...]:
    """Return the paths of a ``filter_path``."""
    return tuple(tuple(path.split(".")) for path in wanted.split(","))


def _filtered(value: Any, paths: Sequence[tuple[str, ...]]) -> Any:
    if any(not path for path in paths):
        return value
    if isinstance(value, list):
        return [kept for each in value if (kept := _filtered(each, paths))]
    if not isinstance(value, Mapping):
        return None
    kept = {}
    for name, each in value.items():
        below = [path[1:] for path in paths if path[0] in (name, "*")]
        if below and (part := _filtered(each, below)) not in (None, {}, []):
            kept[name] = part
    return kept
