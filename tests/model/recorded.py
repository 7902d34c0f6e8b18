"""What a run on real services leaves in its checkpoint, as observations of `model.traces`.

The ledger's entries have an order. When an epoch was decided is known by the times of the files: Spark writes
``commits/N`` before anybody can see it, and a driver writes ``done`` after it has seen it. Nothing else is known of a
run, so a history stands for every one that leaves these files: processes that die at any moment, replies that are lost,
transactions that are aborted. Each transaction that is prepared again is followed in a replay of its own.

A history begins, and begins anew, with a driver that takes a ledger in which every epoch is done: all that came before
it is one state. An entry that the specification does not have ends what is replayed up to the next such driver, and so
does an operator's command that takes the ledger.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from epochsink.errors import EpochsinkError
from epochsink.protocol.checkpoint import Checkpoint
from epochsink.protocol.ledger import FOLDER, name_of
from epochsink.protocol.storage import Storage
from epochsink_devkit.history import HistoryLog
from epochsink_devkit.history.checkpoint_watch import CheckpointWatch
from model.state import ACCEPTED, Generation, Ledger, Part
from model.traces import LONGEST, Event, Refused, Stored, Traces

NOTED: Final = {"stopped"}
"""Entries from which nothing follows."""
Followed = tuple[str, int]
"""A sink, and the number of one of its transactions in each epoch."""


class Entry(NamedTuple):
    """An entry of the ledger. ``same_input``: whether the checkpoint has the recorded input for its epoch."""

    content: Mapping[str, Any]
    same_input: bool = True
    written: int = 0
    """When, in nanoseconds; 0 if it is not known."""

    @property
    def process(self) -> tuple[Any, ...]:
        """Which process has written it."""
        stamp = self.content.get("stamp") or {}
        return stamp.get("host"), stamp.get("pid")


@dataclass
class Recorded:
    """The entries of a ledger by number, and when each epoch was decided.

    ``ends`` counts the entries after which a history was not followed any more, by their kind.
    """

    entries: dict[int, Entry] = field(default_factory=dict)
    decided: dict[int, int] = field(default_factory=dict)
    ends: Counter[str] = field(default_factory=Counter)

    def replay(self) -> str:
        """Replay everything; return what was replayed, in words. Raises `Refused`."""
        traces = Traces(Stored())
        self.ends.clear()
        for followed in self._replaced() or [("", 0)]:
            for events in _Follower(self, followed).histories():
                traces.replay(events, transactions=False, documents=False)
        ends = ", ".join(f"{count:,} end at '{kind}'" for kind, count in self.ends.items())
        return f"{len(self.entries):,} entries, {traces}" + (f"; {ends}" if ends else "")

    def refusals(self) -> list[str]:
        """Return why the specification does not allow this; nothing if it does."""
        try:
            self.replay()
        except Refused as refused:
            return [f"the specification does not allow the ledger: {refused}"]
        return []

    def _replaced(self) -> list[Followed]:
        """Return which transactions were prepared again in any epoch."""
        names: dict[tuple[int, str], list[Any]] = {}
        found: set[Followed] = set()
        for _, entry in sorted(self.entries.items()):
            content = entry.content
            if content["entry"] == "prepared":
                names |= {(content["epoch"], sink): share["parts"] for sink, share in content["shares"].items()}
            for sink in content["sinks"] if content["entry"] == "replay" else ():
                before = names.get((content["epoch"], sink), [])
                changed = enumerate(zip(before, content["parts"], strict=False))
                found |= {(sink, at) for at, (old, new) in changed if old != new}
                names[content["epoch"], sink] = content["parts"]
        return sorted(found)

    def bounds(self, written: int) -> tuple[int, int]:
        """Return how many epochs were decided at a time, at least and at most: times may be equal, or unknown."""
        if not written:
            return 0, LONGEST
        earlier = (epoch for epoch, at in self.decided.items() if 0 < at < written)
        later = (epoch for epoch, at in self.decided.items() if at > written)
        # what is not decided in the end was not decided before
        return 1 + max(earlier, default=-1), min(later, default=self.count)

    @property
    def count(self) -> int:
        """How many epochs are decided in the end."""
        return 1 + max(self.decided, default=-1)


class _Follower:
    """Makes the observations of one ledger, with one transaction of each epoch."""

    def __init__(self, recorded: Recorded, followed: Followed) -> None:
        self._recorded = recorded
        self._sink, self._at = followed
        self._events: list[Event] = []
        self._begun = False
        self._base = 0
        """The epoch that the specification calls 0."""
        self._ledger = Ledger()
        self._names: list[Any] = []
        self._drivers: list[tuple[Any, ...]] = []
        self._generation = -1

    def histories(self) -> Iterator[list[Event]]:
        """Yield the observations of one history after another."""
        previous = -1
        for number, entry in sorted(self._recorded.entries.items()):
            kind = entry.content["entry"]
            if self._begun and number != previous + 1:
                self._end("a gap")
            previous = number
            if kind == "take":
                yield from self._taken(entry)
            elif self._begun and kind not in NOTED:
                self._add(kind, entry)
        if self._begun:
            count = max(0, self._recorded.count - self._base)
            self._events.append(("decided_within", count, count))
        yield from self._ended()

    def _taken(self, entry: Entry) -> Iterator[list[Event]]:
        if command := entry.content.get("purpose"):
            # it may apply again what is done, and the specification has no commands
            if self._begun:
                self._end(f"a take by '{command}'")
            return
        # another one of the same driver sums up what came before
        if not self._begun or entry.content["generation"] != self._generation:
            if not self._begun or not self._ledger.pending:
                yield from self._ended()
                self._begin(entry.content)
            if self._begun:
                self._take(entry)

    def _ended(self) -> Iterator[list[Event]]:
        if self._events:
            yield self._events
        self._events = []

    def _end(self, why: str) -> None:
        self._recorded.ends[why] += 1
        self._begun = False

    def _take(self, entry: Entry) -> None:
        number = len(self._drivers)
        if number:
            self._events.append(("superseded", number - 1))
        self._events.append(("starts", number))
        self._drivers.append(entry.process)
        self._generation = entry.content["generation"]
        self._append(number, entry, self._ledger._replace(owner=Generation(1 + number)))

    def _begin(self, take: Mapping[str, Any]) -> None:
        """Begin a history, if nothing is pending."""
        summary = take["summary"]
        known = [take["joined"], summary["skipped"], *(number for number, *_ in summary["done"])]
        self._begun = not summary["pending"] and not summary["abandoned"]
        self._base = 1 + max(known)
        self._ledger, self._names, self._drivers = Ledger(), [], []

    def _add(self, kind: str, entry: Entry) -> None:
        epoch = entry.content.get("epoch", 0) - self._base
        # the newest driver of its process: one process may start a query again, or never have taken the ledger
        number = max((at for at, process in enumerate(self._drivers) if process == entry.process), default=-1)
        owner, records, done = self._ledger
        if epoch < 0:
            self._end(f"an entry '{kind}' of an epoch that is done")
        elif kind == "prepared":
            name = self._name(entry.content["shares"].get(self._sink, {}).get("parts", []))
            writer = Generation(1 + number)
            part = Part(epoch, writer, writer, ACCEPTED, "a" if entry.same_input else "b")
            self._names[epoch:] = [name]
            self._append(number, entry, Ledger(owner, (*records[:epoch], part), done))
        elif kind == "replay":
            name = self._name(entry.content["parts"])
            if self._sink in entry.content["sinks"] and name != self._names[epoch]:
                self._names[epoch] = name
                part = records[epoch]
                copy = 1 + (part.generation == owner and part.copy)
                again = part._replace(generation=owner, copy=copy)
                self._events.append(("may_be_lost",))
                self._append(number, entry, Ledger(owner, (*records[:epoch], again, *records[epoch + 1 :]), done))
        elif kind == "done":
            self._append(number, entry, self._ledger._replace(done=epoch + 1))
        else:
            self._end(f"an entry '{kind}'")

    def _name(self, parts: list[Any]) -> Any:
        return parts[self._at] if self._at < len(parts) else None

    def _append(self, number: int, entry: Entry, ledger: Ledger) -> None:
        fewest, most = self._recorded.bounds(entry.written)
        self._events.append(("entry_is", number, ledger, max(0, fewest - self._base), max(0, most - self._base)))
        self._ledger = ledger


class RecordedCheckpoint(CheckpointWatch):
    """A watch that keeps what a ledger's owner and Spark remove later."""

    def __init__(self, checkpoint: Path | Storage, run: str, log: HistoryLog) -> None:
        super().__init__(checkpoint, run, log)
        self._folder = checkpoint if isinstance(checkpoint, Path) else None
        self._checkpoint = Checkpoint(self._files)
        self._keeping = threading.Lock()
        self.recorded = Recorded()

    def look(self) -> None:
        """Keep all that is new since the last look, too."""
        super().look()
        with self._keeping:
            for epoch in self._committed - self.recorded.decided.keys():
                self.recorded.decided[epoch] = self._written(f"commits/{epoch}")
            names = self._files.names(FOLDER)
            for number in sorted({int(name) for name in names if name.isdigit()} - self.recorded.entries.keys()):
                self._keep(number)

    def _keep(self, number: int) -> None:
        name = name_of(number)
        written, data = self._written(name), self._files.read(name)
        if data is not None:
            content = json.loads(data)
            self.recorded.entries[number] = Entry(content, self._has_same_input(content), written)

    def _has_same_input(self, entry: Mapping[str, Any]) -> bool:
        if entry["entry"] != "prepared":
            return True
        try:
            return str(entry["offsets"]) == self._checkpoint.offsets_digest(entry["epoch"])
        except EpochsinkError:
            # it is purged
            return True

    def _written(self, name: str) -> int:
        """Return when a file was written; on a store, whose clock is not this machine's, it is not known."""
        try:
            return (self._folder / name).stat().st_mtime_ns if self._folder else 0
        except FileNotFoundError:
            return 0
