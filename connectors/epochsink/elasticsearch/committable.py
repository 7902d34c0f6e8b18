"""Define what a task returns to the driver and what the ledger records of an epoch, and their JSON form.

The record of an epoch names its index, because a restart with other options must not change how it is applied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from epochsink.errors import LedgerCorrupt
from epochsink.sink import Committable
from epochsink.sink.values import fields_of

VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class WrittenTask:
    """What one task spooled: its uuid, its number of rows, and the size of its largest document in bytes.

    ``by_task`` means that Spark brought all rows of an id into one task. ``indices`` are those that rows name.
    ``unfit`` rows fit into no request, and become dead letters.
    """

    task: str
    rows: int
    largest: int
    by_task: bool = False
    indices: tuple[str, ...] = ()
    unfit: int = 0

    def to_json(self) -> Committable:
        """Return the committable of `SinkWriter.prepare`."""
        return {"version": VERSION, **fields_of(self), "indices": list(self.indices)}

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Self:
        """Read what `to_json` has written. Raises `LedgerCorrupt`."""
        _check_version(given)
        task, indices = str(given["task"]), tuple(map(str, given.get("indices", ())))
        rows, largest, unfit = int(given["rows"]), int(given["largest"]), int(given.get("unfit", 0))
        return cls(task, rows, largest, bool(given["by_task"]), indices, unfit)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpooledEpoch:
    """One epoch in the spool: its tasks in order, its rows, and how many of them a later row of the same id replaces.

    ``index`` is the configured name, and ``index_uuid`` the index that it resolved to at the vote. With ``by_task``
    each task has all rows of its ids: replaced rows are found task by task when the epoch is applied, and ``replaced``
    is 0. ``placed_by`` and ``pipeline`` as in `ElasticsearchConfig`. If rows name their index, ``indices`` has those
    names with uuid and history at the vote, and ``index`` is only shown; else it is None. For a data stream, ``stream``
    has the backing index that was written to at the vote, with uuid and history; else it is None.
    """

    tasks: tuple[str, ...]
    rows: int
    replaced: int
    index: str
    index_uuid: str
    by_task: bool = False
    placed_by: str = ""
    pipeline: str | None = None
    indices: Mapping[str, tuple[str, str]] | None = None
    stream: Mapping[str, tuple[str, str]] | None = None

    def to_json(self) -> Committable:
        """Return the part for the ledger."""
        lists = {"tasks": list(self.tasks), "indices": _listed(self.indices), "stream": _listed(self.stream)}
        return {"version": VERSION, **fields_of(self), **lists}

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Self:
        """Read what `to_json` has written. Raises `LedgerCorrupt`."""
        _check_version(given)
        return cls(
            tasks=tuple(map(str, given["tasks"])),
            rows=int(given["rows"]),
            replaced=int(given["replaced"]),
            index=str(given["index"]),
            index_uuid=str(given["index_uuid"]),
            by_task=bool(given["by_task"]),
            placed_by=str(given["placed_by"]),
            pipeline=given["pipeline"],
            indices=incarnations(given["indices"]),
            stream=incarnations(given["stream"]),
        )


def _listed(indices: Mapping[str, tuple[str, str]] | None) -> list[list[str]] | None:
    return None if indices is None else [[name, *each] for name, each in indices.items()]


def incarnations(listed: Sequence[Sequence[str]] | None) -> dict[str, tuple[str, str]] | None:
    """Return uuid and history of indices by their names, from lists of all three; None for None."""
    return None if listed is None else {name: (uuid, history) for name, uuid, history in listed}


def _check_version(given: Mapping[str, Any]) -> None:
    version = given.get("version")
    if version != VERSION:
        raise LedgerCorrupt(
            f"a committable of Elasticsearch has version {version!r}, but this epochsink reads only version {VERSION}",
            hint="run the epochsink version that wrote it",
        )
