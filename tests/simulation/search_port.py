"""Elasticsearch over the in-memory index: with keys, or without."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from epochsink.errors import SpoolMissing
from epochsink.sink import COMMITTED, Epoch, Rows, Task, Verdict
from simulation.port import UNKNOWN, PortBase, read_rows, twice

if TYPE_CHECKING:
    from collections.abc import Sequence

    from epochsink.sink import Committable
    from simulation.world import Row


class SearchPort(PortBase):
    """Elasticsearch: the spool is what is prepared; phase 2 applies it. Without keys, ids come from the position."""

    letter = "E"

    @property
    def target(self) -> Any:
        """Return the index."""
        return self._world.search[self.letter]

    def initial_state(self) -> dict[str, Any]:
        """Fix the base of versions above whatever the index holds."""
        return {"base": self._step(f"{self.letter} found", self.target.new_base, reads=True)}

    def begin(self, task: Task, attempt_number: int = 0) -> SearchTask:  # noqa: ARG002 - Kafka's ids need it
        """Write nothing: the spool does."""
        return SearchTask(task)

    def newest(self) -> int | None:
        """Read the marker document."""
        found: int = self._step(f"{self.letter} newest", lambda: self.target.newest(self._key), reads=True)
        return None if found < 0 else found

    def vote(self, epoch: Epoch, written: Sequence[Committable], rows: Rows) -> list[Committable]:  # noqa: ARG002
        """Name the epoch; its rows are in the spool."""
        return [{"attempt": epoch.attempt}]

    def commit(self, epoch: Epoch, part: Committable, rows: Rows) -> Verdict:  # noqa: ARG002 - the protocol's
        """Apply the spool in two bulk requests, the marker document last."""
        try:
            spooled = read_rows(rows)
        except SpoolMissing as gone:
            newest = self.newest()
            done = newest is not None and newest >= epoch.number
            return COMMITTED if done else Verdict(UNKNOWN, f"{gone}, and no marker")
        version = self._identity.origin["base"] + epoch.number
        documents = self.documents(epoch, spooled)
        for some in (documents[:1], documents[1:]):
            twice(partial(self._bulk, version, some))
        key = self._key
        twice(lambda: self._step(f"{self.letter} mark", lambda: self.target.mark(key, epoch.number)))
        return COMMITTED

    def _bulk(self, version: int, some: list[tuple[str, Row]]) -> str:
        answer: str = self._step(f"{self.letter} bulk", lambda: self.target.bulk(version, some))
        return answer

    def documents(self, epoch: Epoch, rows: list[Row]) -> list[tuple[str, Row]]:
        """Return documents under ids that no other query or epoch uses."""
        return [(f"{self._key}-{epoch.number}-{position}", row) for position, row in enumerate(rows)]

    def replay(self, epoch: Epoch, part: Committable, rows: Rows, attempt: str) -> Committable:
        """Never: nothing prepared can be lost but the spool itself."""
        raise NotImplementedError

    def abort_orphans(self, keep: Sequence[Committable]) -> list[str]:  # noqa: ARG002 - the protocol's
        """Sweep nothing: the coordinator sweeps the spool."""
        return []


class SearchTask:
    """A task's share: the spool holds it."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def write(self, rows: list[Row]) -> None:
        """Do nothing."""

    def prepare(self) -> Committable:
        """Name the task."""
        return {"task": self._task.uuid}


class KeyedSearchPort(SearchPort):
    """Elasticsearch with a natural key."""

    letter = "F"

    def documents(self, epoch: Epoch, rows: list[Row]) -> list[tuple[str, Row]]:  # noqa: ARG002 - keyless ids use it
        """Return the newest row of each key: every epoch updates the same documents."""
        return [(f"key-{row.source % 2}", row) for row in newest_of_each_key(rows)]


def newest_of_each_key(rows: list[Row]) -> list[Row]:
    """Return one row for each of the two keys, the one that came last from the source."""
    newest = {row.source % 2: row for row in sorted(rows, key=lambda row: row.source)}
    return list(newest.values())
