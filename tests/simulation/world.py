"""Everything outside the drivers' processes: the checkpoint, the targets, and what happens to them from outside."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Final

from epochsink.protocol.ledger import FOLDER
from epochsink.sink import Mark
from simulation.kafka_brokers import Brokers
from simulation.postgres_server import PostgresServer
from simulation.readers import Readers, Row
from simulation.search_target import SearchTarget

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
OTHER = {"A": "B", "C": "D"}
"""The sink that has its tables in the same database."""
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
        self.brokers = Brokers(self.readers, is_fenced_off=self.ended)
        self.postgres = postgres_of(self.readers, sinks)
        self.steps: Callable[[], int] = lambda: 0
        self.apart = 0.0
        """The seconds that have passed between one checkpoint and the next, in which no step is made."""
        self.search = {name: self._index(name) for name in sinks if name in "EF"}
        self.keeps_copies: Callable[[], bool] = lambda: False
        """Whether a target may still be set back."""
        self.readers.before_commit = self._note_commit
        self.copies: dict[str, list[Copy]] = {name: [] for name in sinks if home(name) == name}
        self.options = 0
        """The number of the options with which a driver that starts now is configured."""
        self._written_with: dict[str, int] = {}

    def _index(self, sink: str) -> SearchTarget:
        def applied(row: Row, pipeline: str | None) -> None:
            self.apply_with(sink, row.attempt, int(pipeline.rpartition("-")[2]) if pipeline else 0)

        return SearchTarget(readers=self.readers, sink=sink, keyed=sink == "F", applied=applied)

    def target(self, sink: str) -> Any:
        """Return a sink's target."""
        return {"K": self.brokers, **self.postgres, **self.search}[sink]

    def knows(self, sink: str) -> bool:
        """Return whether a target holds anything of any query."""
        target = self.target(sink)
        held = [getattr(target, name, None) for name in ("markers", "prepared", "staging")]
        return any(held) or (sink == "K" and bool(self.brokers.open_ids()))

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
        if any(named(part) == (name, producer) for part in ours):
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
        incarnation = getattr(target, "incarnation", 0)
        for name, value in state.items():
            setattr(target, name, value)
        if sink in self.postgres:
            target.end_clients()
        if sink in "EF":
            target.incarnation = incarnation + 1
        if sink == "K":
            target.restored()
        for name in [name for name in self.readers.visible if home(name) == sink]:
            self.readers.visible[name] = visible.get(name, {})
        return True

    # ---- what others do to a target

    def forget_markers(self, sink: str) -> bool:
        """Delete a target's markers, as somebody who tidies up does; return whether there were any."""
        target = self.target(sink)
        if sink in self.search:
            return self.search[sink].forget_markers()
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
        return target is not None and target.keyed and target.change_documents()


def named(part: dict[str, Any]) -> tuple[str, int | None]:
    """Return by what name, and producer epoch, a target knows a part."""
    if "transactional_id" in part:
        return part["transactional_id"], part["producer_epoch"]
    return part["gid"], None


@lru_cache(1024)
def entry_of(data: bytes) -> Mapping[str, Any]:
    """Return an entry of the ledger, which is looked at again and again."""
    entry: Mapping[str, Any] = json.loads(data)
    return entry


def postgres_of(readers: Readers, sinks: str) -> dict[str, PostgresServer]:
    """Return the database of each PostgreSQL sink."""
    shared = {first: PostgresServer(readers, first + other) for first, other in OTHER.items()}
    made = {name: shared.get(home(name)) or PostgresServer(readers, name) for name in "PSTABCD"}
    return {name: made[name] for name in sinks if name in made}


@cache
def home(sink: str) -> str:
    """Return the sink by whose letter a target is known: some have a database in common."""
    return next((first for first, other in OTHER.items() if other == sink), sink)


_OF_THE_WORLD: Final = ("readers", "is_fenced_off", "set_backs", "applied")


@cache
def state_of(kind: Any) -> tuple[str, ...]:
    """Return the names of what a kind of target is made of."""
    return tuple(each.name for each in fields(kind) if each.name not in _OF_THE_WORLD)


def copied(value: Any) -> Any:
    """Return a copy of what a target is made of: far faster than `copy.deepcopy`, which knows nothing of it.

    What two levels of dicts, lists and sets hold are values: transactions, rows, marks, and lists that never change.
    """
    if isinstance(value, dict):
        return {key: each.copy() if isinstance(each, (dict, list)) else each for key, each in value.items()}
    return value.copy() if isinstance(value, (list, set)) else value
