"""What a task returns to the driver, and what the ledger records of an epoch: values and their JSON, in version 1.

The record of an epoch names its index: other options in a later start must not change how the epoch is applied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

from epochsink.errors import LedgerCorrupt

if TYPE_CHECKING:
    from collections.abc import Mapping

    from epochsink.sink import Committable

VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class WrittenTask:
    """What one task spooled: its uuid, its rows, and the bytes of its largest document.

    ``by_task``: Spark has brought all rows of an id into one task.
    """

    task: str
    rows: int
    largest: int
    by_task: bool = False

    def to_json(self) -> Committable:
        """Return the committable of `SinkWriter.prepare`."""
        told = {"task": self.task, "rows": self.rows, "largest": self.largest}
        return {"version": VERSION, **told, "by_task": self.by_task}

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Self:
        """Read what `to_json` has written. Raises `LedgerCorrupt`."""
        _check_version(given)
        return cls(str(given["task"]), int(given["rows"]), int(given["largest"]), bool(given["by_task"]))


@dataclass(frozen=True, slots=True)
class PreparedEpoch:
    """One epoch in the spool: its tasks in order, its rows, and how many of them a later row of their id replaces.

    ``index`` is the configured name, and ``index_uuid`` the index that it stood for at the vote. With ``by_task`` each
    task has all rows of its ids, and which of them are replaced is found task by task, when the epoch is applied;
    ``replaced`` is 0 then.
    """

    tasks: tuple[str, ...]
    rows: int
    replaced: int
    index: str
    index_uuid: str
    by_task: bool = False

    def to_json(self) -> Committable:
        """Return the part for the ledger."""
        return {
            "version": VERSION,
            "tasks": list(self.tasks),
            "rows": self.rows,
            "replaced": self.replaced,
            "index": self.index,
            "index_uuid": self.index_uuid,
            "by_task": self.by_task,
        }

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Self:
        """Read what `to_json` has written. Raises `LedgerCorrupt`."""
        _check_version(given)
        tasks = tuple(map(str, given["tasks"]))
        index, uuid = str(given["index"]), str(given["index_uuid"])
        return cls(tasks, int(given["rows"]), int(given["replaced"]), index, uuid, bool(given["by_task"]))


def _check_version(given: Mapping[str, Any]) -> None:
    version = given.get("version")
    if version != VERSION:
        raise LedgerCorrupt(
            f"a committable of Elasticsearch has version {version!r}, and this epochsink reads version {VERSION} only",
            hint="run the epochsink version that wrote it",
        )
