"""What a task hands to the driver, and what the ledger keeps of an epoch: values, their JSON and its versions.

Version 2 added what an epoch is applied to, and whether its rows have a key and an order: a later start with other
options must not change how it is applied. What has no version is version 1, which left that to the options. Version 3
says that no two tasks have rows of one id; only such epochs have it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

from epochsink.errors import LedgerCorrupt

if TYPE_CHECKING:
    from collections.abc import Mapping

    from epochsink.sink import Committable

VERSION: Final = 2
BY_TASK_VERSION: Final = 3


@dataclass(frozen=True, slots=True)
class WrittenTask:
    """What one task has spooled: its uuid, its rows, and the bytes of its largest document.

    ``by_task``: Spark has brought all rows of an id into one task.
    """

    task: str
    rows: int
    largest: int
    by_task: bool = False

    def to_json(self) -> Committable:
        """Return the committable of `SinkWriter.prepare`."""
        told = {"task": self.task, "rows": self.rows, "largest": self.largest}
        return {"version": VERSION, **told, **({"by_task": True} if self.by_task else {})}

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Self:
        """Read what `to_json` has written. Raises `LedgerCorrupt`."""
        _check_version(given)
        by_task = bool(given.get("by_task", False))
        return cls(str(given["task"]), int(given["rows"]), int(given["largest"]), by_task)


@dataclass(frozen=True, slots=True)
class PreparedEpoch:
    """One epoch in the spool: its tasks in order, its rows, and how many of them a later row of their id replaces.

    With ``by_task`` each task has all rows of its ids, and which of them are replaced is found task by task, when the
    epoch is applied; ``replaced`` is 0 then. ``index`` is the configured name and ``index_uuid`` the index it stood for
    at the vote; None in version 1.
    """

    tasks: tuple[str, ...]
    rows: int
    replaced: int
    index: str | None = None
    index_uuid: str | None = None
    by_task: bool = False

    def to_json(self) -> Committable:
        """Return the part for the ledger."""
        return {
            "version": BY_TASK_VERSION if self.by_task else VERSION,
            "tasks": list(self.tasks),
            "rows": self.rows,
            "replaced": self.replaced,
            "index": self.index,
            "index_uuid": self.index_uuid,
            **({"by_task": True} if self.by_task else {}),
        }

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Self:
        """Read what `to_json` has written, in this version or the one before. Raises `LedgerCorrupt`."""
        _check_version(given)
        tasks = tuple(map(str, given["tasks"]))
        index = given.get("index"), given.get("index_uuid")
        return cls(tasks, int(given["rows"]), int(given["replaced"]), *index, bool(given.get("by_task", False)))


def _check_version(given: Mapping[str, Any]) -> None:
    version = given.get("version", 1)
    if version not in range(1, BY_TASK_VERSION + 1):
        raise LedgerCorrupt(
            f"a committable of Elasticsearch has version {version!r}; this epochsink reads 1 to {BY_TASK_VERSION}",
            hint="run the epochsink version that wrote it, or a newer one",
        )
