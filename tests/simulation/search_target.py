"""Elasticsearch's cluster with what the simulation's readers see of it, and what others do to it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from epochsink.elasticsearch.applied_epochs import INDEX
from epochsink.elasticsearch.server import DocumentPlace
from epochsink.identity import marker_document
from simulation.memory_elasticsearch import Cluster, Stored
from simulation.readers import OUTSIDER, Readers, Row

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from epochsink.sink import Mark


@lru_cache(4096)
def row_of(source: str) -> Row:
    """Return the row that a document was made of."""
    fields = json.loads(source)
    return Row(*(fields[name] for name in Row._fields))


@lru_cache(4096)
def source_of(row: Row) -> str:
    """Return the document of a row."""
    return json.dumps(row._asdict())


@dataclass(slots=True)
class SearchTarget(Cluster):
    """A cluster with the index of one sink. Whatever is written there is looked at by the readers.

    While ``durable`` is False (index.translog.durability=async), what is written is not ``on_disk``, and a crash of the
    node loses it. ``applied`` hears which row is written through which ingest pipeline.
    """

    readers: Readers = field(default_factory=Readers)
    sink: str = ""
    keyed: bool = False
    applied: Callable[[Row, str | None], None] = lambda _row, _pipeline: None
    durable: bool = True
    on_disk: dict[str, Stored] = field(default_factory=dict)
    refuses: bool = False
    """Whether the index refuses every fifth row for good."""
    mended: bool = False
    """Whether its mapping was corrected since."""
    busy: int = 0
    """How many operations are answered 429."""

    def __post_init__(self) -> None:
        self.create_index(self.index, None, None)

    @property
    def index(self) -> str:
        """The name of the sink's index."""
        return f"index-{self.sink.lower()}"

    @property
    def documents(self) -> dict[str, tuple[int, Row]]:
        """Version and row of each document."""
        stored = self.indices[self.index].items()
        return {name: (each.version, row_of(each.source)) for name, each in stored if each.source is not None}

    @property
    def aside(self) -> str:
        """The name of the index of dead letters."""
        return f"letters-{self.sink.lower()}"

    @property
    def rows(self) -> list[Row]:
        """What readers see: the rows of documents, and those of dead letters that count."""
        runs: dict[str, int] = {}
        for marker in self.markers.values():
            runs |= json.loads(marker.source or "").get("letters", {})
        letters = [json.loads(each.source) for each in self.indices.get(self.aside, {}).values() if each.source]
        counting = [each for each in letters if each["epoch"] <= runs.get(each["run"], -1)]
        return [row for _, row in self.documents.values()] + [row_of(each["source"]) for each in counting]

    @property
    def markers(self) -> dict[str, Stored]:
        """The marker documents."""
        return {
            name: each for name, each in self.indices.get(INDEX, {}).items() if name.startswith(marker_document(""))
        }

    # ---- what readers see

    def bulk(self, index: str | None, body: bytes, wanted: str, *, refresh: bool, pipeline: str | None) -> Any:
        """Carry out each operation, before the readers' eyes."""
        self.readers.before_commit(self.sink)
        if pipeline is not None:
            self.pipelines.setdefault(pipeline, {})
        lines = body.splitlines()
        for line in lines:
            if line.startswith(b'{"query"'):
                self.applied(row_of(line.decode()), pipeline)
        return Cluster.bulk(self, index, body, wanted, refresh=refresh, pipeline=pipeline)

    def _carry_out(self, action: str, index: str, fields: Mapping[str, Any], source: str | None) -> dict[str, Any]:
        if self.busy and source is not None:
            self.busy -= 1
            error = {"type": "es_rejected_execution_exception", "reason": "busy"}
            return {"_index": index, "_id": fields["_id"], "status": 429, "error": error}
        stored = self._documents(index).get(fields["_id"])
        before = None if index != self.index or stored is None or stored.source is None else row_of(stored.source)
        answer = Cluster._carry_out(self, action, index, fields, source)
        if index == self.index and source is not None and source != "{}":
            self._look(row_of(source), before, stands="error" not in answer)
        return answer

    def _look(self, row: Row, before: Row | None, *, stands: bool) -> None:
        if (row.query, row.epoch) not in self.readers.decided:
            self.readers.flag(f"EARLY {self.sink}")
        if before is None:
            return
        if not self.keyed and before.query != row.query:
            self.readers.flag(f"OVERWRITTEN {self.sink}")
        if stands and self.keyed and before.query == row.query and row.source < before.source:
            self.readers.flag(f"STALE {self.sink}")
        if not stands and row.query > before.query:
            # the queries are numbered: a newer one's row stands behind an older one's
            self.readers.flag(f"SWALLOWED {self.sink}")

    def _store(self, index: str, name: str, version: int, source: str | None) -> DocumentPlace:
        place = Cluster._store(self, index, name, version, source)
        if self.durable and index == self.index:
            self.on_disk[name] = self.indices[index][name]
        return place

    def fault_of(self, index: str, source: str) -> Mapping[str, Any] | None:
        """Return why the index refuses a row."""
        if not self.refuses or index != self.index or row_of(source).source % 5 != 1:
            return None
        return {"type": "document_parsing_exception", "reason": "failed to parse field [n]"}

    # ---- what others do

    def flat_settings(self, index: str) -> dict[str, str]:
        """Return the settings of an index."""
        durability = {} if self.durable or index != self.index else {"index.translog.durability": "async"}
        return {**Cluster.flat_settings(self, index), **durability}

    def acknowledge_early(self) -> None:
        """Acknowledge documents, from now on, before they are on disk."""
        self.durable = False

    def crash(self) -> str:
        """Lose what is not on disk."""
        stored = self.indices[self.index]
        lost = sum(self.on_disk.get(name) != kept for name, kept in stored.items())
        self.indices[self.index] = dict(self.on_disk)
        return f"{lost} documents lost"

    def change_documents(self) -> bool:
        """Change every document, as two `_update` of another program do; return whether there was any."""
        for name, (version, row) in self.documents.items():
            source = source_of(row._replace(query=OUTSIDER))
            self._store(self.index, name, version + 2, source)
            self.on_disk[name] = self.indices[self.index][name]
        return bool(self.documents)

    def forget_markers(self) -> bool:
        """Delete the marker documents; return whether there were any."""
        found = self.markers
        for name in found:
            del self.indices[INDEX][name]
        return bool(found)

    def alter_marker(self, by: Mark) -> bool:
        """Overwrite the newest marker document, its epoch counted on; return whether there was one."""
        for name, stored in list(self.markers.items())[-1:]:
            kept = json.loads(stored.source or "")
            kept |= {"epoch": kept["epoch"] + by.epoch, "attempt": by.attempt}
            self._store(INDEX, name, stored.version + 1, json.dumps(kept))
        return bool(self.markers)
