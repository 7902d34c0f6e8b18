"""Everything outside the drivers' processes: the checkpoint, the targets, and what happens to them from outside."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from epochsink.protocol.ledger import FOLDER
from epochsink.sink import Mark
from simulation.by_task_port import ByTaskPostgres
from simulation.readers import OUTSIDER, Readers, Row
from simulation.search_target import Elasticsearch
from simulation.shared_port import OTHER, SharedPostgres
from simulation.targets import Kafka, Postgres

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from simulation.steps import Answer, Stepper

Folders = dict[str, dict[str, bytes]]


class Spooled(dict[tuple[str, int, str], dict[str, list[Row]]]):
    """The folders of attempts, by query, epoch and attempt, and the ``records`` of retained epochs, by name."""

    def __init__(self, *folders: Any) -> None:
        super().__init__(*folders)
        self.records: dict[str, bytes] = {}


ROLLED_BACK = "ROLLED BACK {}: what belongs to a done epoch"
STRANGER = "f" * 32
"""The attempt in a marker that nobody of ours has written."""


@dataclass(slots=True)
class Copy:
    """A target's state before one request that changes it; ``commits`` if that request shows rows."""

    state: dict[str, Any]
    commits: bool = False


class World:
    """Survives every crash of a driver."""

    def __init__(self, sinks: str) -> None:
        self.readers = Readers()
        self.files: Folders = {}
        self.spool = Spooled()
        self.kafka = Kafka(self.readers)
        self.postgres = postgres_of(self.readers, sinks)
        self.search = {name: Elasticsearch(self.readers, name, name == "F") for name in sinks if name in "EF"}
        self.keeps_copies: Callable[[], bool] = lambda: False
        """Whether a target may still be set back."""
        self.readers.before_commit = self._note_commit
        self.copies: dict[str, list[Copy]] = {name: [] for name in sinks if home(name) == name}
        self.reopened: set[tuple[str, int]] = set()
        """Kafka's transactions, as (id, producer epoch), that a restore or a failover has opened again."""
        self.options = 0
        """The number of the options with which a driver that starts now is configured."""
        self._written_with: dict[str, int] = {}

    def target(self, sink: str) -> Any:
        """Return a sink's target."""
        return self.kafka if sink == "K" else {**self.postgres, **self.search}[sink]

    def knows(self, sink: str) -> bool:
        """Return whether a target holds anything of any query."""
        target = self.target(sink)
        held = [getattr(target, name, None) for name in ("markers", "prepared", "staging")]
        held += [one.state == "Ongoing" for one in getattr(target, "transactions", {}).values()]
        return any(held)

    def ended(self, sink: str, name: str, producer: int | None = None) -> None:
        """Flag the rollback of a transaction whose epoch the ledger calls done: it may be all that is left of it."""
        entries = [entry_of(data) for _, data in sorted(self.files.get(FOLDER, {}).items())]
        done = {entry["epoch"] for entry in entries if entry["entry"] == "done"}
        parts: dict[int, list[dict[str, Any]]] = {}
        for entry in entries:
            if entry["entry"] == "prepared":
                parts[entry["epoch"]] = entry["shares"].get(sink, {}).get("parts", [])
            elif entry["entry"] == "replay" and sink in entry["sinks"]:
                # what a replay has taken the place of is nobody's any more
                parts[entry["epoch"]] = entry["parts"]
        ours = [part for epoch in done for part in parts.get(epoch, [])]
        if any((part.get("gid") or part["id"], part.get("epoch")) == (name, producer) for part in ours):
            self.readers.flag(ROLLED_BACK.format(sink))

    # ---- the options under which an epoch was prepared, and those under which it is applied

    def write_with(self, attempt: str, options: int) -> None:
        """Remember the options of the driver that prepares an attempt."""
        self._written_with.setdefault(attempt, options)

    def apply_with(self, sink: str, attempt: str, options: int) -> None:
        """Flag an attempt that is applied under other options than those that it was prepared under."""
        if self._written_with.get(attempt, options) != options:
            self.readers.flag(f"OTHER OPTIONS {sink}")

    # ---- a target's state before each request that changes it, to which a restore or a failover sets it back

    def copying(self, sink: str, step: Stepper) -> Stepper:
        """Return a stepper that keeps the target's state before each request that changes it, if anything needs it."""
        if not self.keeps_copies():
            return step
        first = home(sink)
        target = self.target(first)

        def stepping(name: str, apply: Any, *, reads: bool = False) -> Answer:  # type: ignore[type-var]
            def keep_and_apply() -> Any:
                if self.keeps_copies():
                    self._keep_copy(first, target)
                return apply()

            return step(name, apply if reads else keep_and_apply, reads=reads)  # type: ignore[no-any-return]

        return stepping

    def _keep_copy(self, sink: str, target: Any) -> None:
        kept = state_of(type(target))  # type: ignore[arg-type] # a class can be hashed
        state = {name: copied(getattr(target, name)) for name in kept}
        state["visible"] = {name: dict(shown) for name, shown in self.readers.visible.items() if home(name) == sink}
        self.copies[sink].append(Copy(state))

    def _note_commit(self, sink: str) -> None:
        if kept := self.copies.get(sink):
            kept[-1].commits = True

    def set_back(self, sink: str, commits: int) -> bool:
        """Set a target back to before its last commits (1: the newest); return whether there were so many."""
        places = [at for at, kept in enumerate(self.copies.get(sink, [])) if kept.commits]
        return len(places) >= commits and self._restore(sink, places[-commits])

    def fail_over(self, sink: str, requests: int) -> bool:
        """Lose the last requests that changed a target; return whether there were so many."""
        kept = len(self.copies.get(sink, []))
        return kept >= requests and self._restore(sink, kept - requests)

    def _restore(self, sink: str, place: int) -> bool:
        state: dict[str, Any] = self.copies[sink][place].state
        del self.copies[sink][place:]
        target, visible = self.target(sink), state.pop("visible")
        open_before = self._open_in_kafka()
        incarnation = getattr(target, "incarnation", 0)
        for name, value in state.items():
            setattr(target, name, value)
        if sink in "EF":
            target.incarnation = incarnation + 1
        for name in [name for name in self.readers.visible if home(name) == sink]:
            self.readers.visible[name] = visible.get(name, {})
        self.reopened |= self._open_in_kafka() - open_before
        return True

    def _open_in_kafka(self) -> set[tuple[str, int]]:
        return {(name, one.epoch) for name, one in self.kafka.transactions.items() if one.state == "Ongoing"}

    # ---- what others do to a target

    def forget_markers(self, sink: str) -> bool:
        """Delete a target's markers, as somebody who tidies up does; return whether there were any."""
        target = self.target(sink)
        found = bool(target.markers)
        target.markers.clear()
        return found

    def alter_marker(self, sink: str, how: str) -> bool:
        """Change the newest marker: "newer" (by an epoch) or "other" (attempt); return whether there was one."""
        return bool(self.target(sink).alter_marker(Mark(1 if how == "newer" else 0, STRANGER)))

    def alter_table(self, sink: str) -> bool:
        """Give a column of a table another type; return whether it was possible."""
        return self.postgres[sink].alter()

    def write_from_outside(self, sink: str) -> bool:
        """Change every document of an index, as `_update` does; return whether there was any."""
        target = self.search.get(sink)
        if target is None or not target.keyed:
            return False
        for name, (version, row) in target.documents.items():
            target.documents[name] = target.on_disk[name] = version + 2, row._replace(query=OUTSIDER)
        return bool(target.documents)


@lru_cache(1024)
def entry_of(data: bytes) -> Mapping[str, Any]:
    """Return an entry of the ledger, which is looked at again and again."""
    entry: Mapping[str, Any] = json.loads(data)
    return entry


def postgres_of(readers: Readers, sinks: str) -> dict[str, Postgres]:
    """Return the database of each PostgreSQL sink."""
    made: dict[str, Postgres] = {"T": ByTaskPostgres(readers, "T")}
    for first, other in OTHER.items():
        made[first] = made[other] = SharedPostgres(readers, first)
    return {name: made.get(name) or Postgres(readers, name) for name in sinks if name in {"P", "S", *made}}


@cache
def home(sink: str) -> str:
    """Return the sink by whose letter a target is known: some have a database in common."""
    return next((first for first, other in OTHER.items() if other == sink), sink)


@cache
def state_of(kind: Any) -> tuple[str, ...]:
    """Return the names of what a kind of target is made of."""
    return tuple(each.name for each in fields(kind) if each.name != "readers")


def copied(value: Any) -> Any:
    """Return a copy of what a target is made of: far faster than `copy.deepcopy`, which knows nothing of it.

    What two levels of dicts, lists and sets hold are values: transactions, rows, marks, and lists that never change.
    """
    if isinstance(value, dict):
        return {key: each.copy() if isinstance(each, (dict, list)) else each for key, each in value.items()}
    return value.copy() if isinstance(value, (list, set)) else value
