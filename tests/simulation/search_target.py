"""Elasticsearch with the semantics that matter for exactly-once (see `simulation.targets`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from epochsink.sink import Mark

if TYPE_CHECKING:
    from simulation.readers import Readers, Row


@dataclass(slots=True)
class Elasticsearch:
    """Documents by ``_id`` with external versions (external_gte), and marker documents by identity key.

    ``incarnation`` stands for the index' history uuid, which every restore changes. While ``durable`` is False
    (index.translog.durability=async), what is written is not ``on_disk``, and a crash of the node loses it.
    """

    readers: Readers
    sink: str
    keyed: bool
    documents: dict[str, tuple[int, Row]] = field(default_factory=dict)
    markers: dict[str, tuple[Mark, int]] = field(default_factory=dict)
    claims: dict[str, Mark] = field(default_factory=dict)
    bases: int = 0
    incarnation: int = 0
    durable: bool = True
    on_disk: dict[str, tuple[int, Row]] = field(default_factory=dict)

    def acknowledge_early(self) -> None:
        """Acknowledge documents, from now on, before they are on disk."""
        self.durable = False

    def crash(self) -> str:
        """Lose what is not on disk."""
        lost = sum(self.on_disk.get(name) != kept for name, kept in self.documents.items())
        self.documents = dict(self.on_disk)
        return f"{lost} documents lost"

    def _store(self, name: str, version: int, row: Row) -> None:
        self.documents[name] = version, row
        if self.durable:
            self.on_disk[name] = version, row

    def bulk(self, version: int, documents: list[tuple[str, Row]]) -> list[str]:
        """Index whole documents; return those whose stored version is newer, which stay as they are (409)."""
        self.readers.before_commit(self.sink)
        conflicts = []
        for name, row in documents:
            if (row.query, row.epoch) not in self.readers.decided:
                self.readers.flag(f"EARLY {self.sink}")
            old = self.documents.get(name)
            if old and not self.keyed and old[1].query != row.query:
                self.readers.flag(f"OVERWRITTEN {self.sink}")
            if old is None or version >= old[0]:
                if old and self.keyed and old[1].query == row.query and row.source < old[1].source:
                    self.readers.flag(f"STALE {self.sink}")
                self._store(name, version, row)
                continue
            conflicts.append(name)
            if row.query > old[1].query:
                # the queries are numbered: a newer one's row stands behind an older one's
                self.readers.flag(f"SWALLOWED {self.sink}")
        return conflicts

    def version(self, name: str) -> int:
        """Return the stored version of a document, 0 if there is none."""
        return self.documents[name][0] if name in self.documents else 0

    def write_newer(self, version: int, name: str, row: Row) -> bool:
        """Write over a document of an older version (version type "external"); return whether it was one."""
        if version <= self.version(name):
            return False
        self.readers.before_commit(self.sink)
        old = self.documents[name][1] if name in self.documents else row
        if old.query == row.query and row.source < old.source:
            self.readers.flag(f"STALE {self.sink}")
        self._store(name, version, row)
        return True

    def claim(self, key: str, mark: Mark, seen: Mark | None) -> str:
        """Write the document that says which attempt may be applied, on the condition of the one that was read."""
        if self.claims.get(key) != seen:
            return "409"
        self.claims[key] = mark
        return "OK"

    def mark(self, key: str, mark: Mark, incarnation: int, seen: Mark | None) -> str:
        """Write the marker document, which names the index' incarnation, on the condition of the one that was read."""
        if self.marker(key) != seen:
            return "409"
        self.markers[key] = mark, incarnation
        return "OK"

    def marker(self, key: str) -> Mark | None:
        """Return the marker document."""
        return self.markers[key][0] if key in self.markers else None

    def alter_marker(self, by: Mark) -> bool:
        """Overwrite a marker document, its epoch counted on; return whether there was one."""
        for key, (mark, incarnation) in list(self.markers.items())[-1:]:
            self.markers[key] = Mark(mark.epoch + by.epoch, by.attempt), incarnation
        return bool(self.markers)

    def newest(self, key: str) -> int:
        """Return the epoch in the marker document, -1 if there is none."""
        mark = self.marker(key)
        return -1 if mark is None else mark.epoch

    def new_base(self) -> int:
        """Return a base for versions above whatever the index holds, like a clock: each one above all before it."""
        highest = max((version for version, _ in self.documents.values()), default=0)
        self.bases = max(self.bases, highest // 100) + 1
        return 100 * self.bases
