"""What a task hands to the driver, and what the ledger keeps of an epoch: values, their JSON and its versions.

Version 2 added what an epoch is applied to, and whether its rows have a key and an order: a later start with other
options must not change how it is applied. What has no version is version 1, which left that to the options.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

from epochsink.errors import LedgerCorrupt

if TYPE_CHECKING:
    from collections.abc import Mapping

    from epochsink.sink import Committable

VERSION: Final = 2


@dataclass(frozen=True, slots=True)
class WrittenTask:
    """What one task has spooled: its uuid, its rows, and the bytes of its largest document."""

    task: str
    rows: int
    largest: int

    def to_json(self) -> Committable:
        """Return the committable of `SinkWriter.prepare`."""
        return {"version": VERSION, "task": self.task, "rows": self.rows, "largest": self.largest}

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Self:
        """Read what `to_json` has written. Raises `LedgerCorrupt`."""
        _check_version(given)
        return cls(str(given["task"]), int(given["rows"]), int(given["largest"]))


@dataclass(frozen=True, slots=True)
class PreparedEpoch:
    """One epoch in the spool: its tasks in order, its rows, and how many of them a later row of their id replaces.

    ``index`` is the configured name and ``index_uuid`` the index it stood for at the vote; None in version 1.
    """

    tasks: tuple[str, ...]
    rows: int
    replaced: int
    index: str | None = None
    index_uuid: str | None = None

    def to_json(self) -> Committable:
        """Return the part for the ledger."""
        return {
            "version": VERSION,
            "tasks": list(self.tasks),
            "rows": self.rows,
            "replaced": self.replaced,
            "index": self.index,
            "index_uuid": self.index_uuid,
        }

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Self:
        """Read what `to_json` has written, in this version or the one before. Raises `LedgerCorrupt`."""
        _check_version(given)
        tasks = tuple(map(str, given["tasks"]))
        return cls(tasks, int(given["rows"]), int(given["replaced"]), given.get("index"), given.get("index_uuid"))


def _check_version(given: Mapping[str, Any]) -> None:
    version = given.get("version", 1)
    if version not in (1, VERSION):
        raise LedgerCorrupt(
            f"a committable of Elasticsearch has version {version!r}; this epochsink reads 1 and {VERSION}",
            hint="run the epochsink version that wrote it, or a newer one",
        )
