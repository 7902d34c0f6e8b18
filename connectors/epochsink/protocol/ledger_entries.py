"""The entries of the ledger: frozen values, each with its JSON and the version of that JSON.

Nothing else is ever written to the ledger. An entry of another version is refused, because what it means is not known.
docs/reference/ledger-format.md has the format.
"""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from epochsink.sink import Epoch, LastDone, SpoolFile

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from epochsink.sink import Committable

VERSION: Final = 1
"""What is written and read."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """When an entry was written, and by which process. ``at`` is in seconds since 1970."""

    at: float
    host: str
    pid: int
    application: str = ""

    @classmethod
    def now(cls, application: str) -> Stamp:
        """Return this process' stamp."""
        return cls(round(time.time(), 3), socket.gethostname(), os.getpid(), application)

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        spark = f", Spark application {self.application}" if self.application else ""
        return f"{since}, process {self.pid} on host {self.host}{spark}"


@dataclass(frozen=True, slots=True)
class Take:
    """A driver takes the checkpoint over: every earlier driver is fenced from here on.

    ``origins`` holds what each sink fixed when it joined; epochs up to ``joined`` (-1: none) were
    decided before this ledger began. ``applied`` has, for each sink, the newest done epoch with rows as known then, so
    that removing old entries never loses it. ``purpose`` is the command by which an operator took it, "" for a query.
    ``summary`` has what else a start needs of the entries before this one.
    """

    generation: int
    driver: str
    query_id: str
    origins: Mapping[str, Mapping[str, Any]]
    joined: int = -1
    applied: Mapping[str, LastDone] = field(default_factory=dict, compare=False)
    stamp: Stamp | None = field(default=None, compare=False)
    summary: Summary | None = field(default=None, compare=False)
    purpose: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Share:
    """What one sink has prepared of an epoch: its parts, and the tasks (uuids, by partition) that had rows.

    ``files`` tells by task what its file in the spool holds: none where nothing is spooled.
    """

    parts: tuple[Committable, ...]
    tasks: tuple[str, ...]
    files: Mapping[str, SpoolFile] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Prepared:
    """An epoch is prepared in every sink. ``shares`` has no entry for a sink without rows.

    ``together`` are the names of sinks that have recorded the same parts: those that commit as one.
    """

    epoch: int
    attempt: str
    offsets: str
    shares: Mapping[str, Share]
    together: tuple[tuple[str, ...], ...] = ()
    stamp: Stamp | None = field(default=None, compare=False)

    @property
    def at(self) -> Epoch:
        """The attempt at the epoch that is recorded."""
        return Epoch(self.epoch, self.attempt)

    def sharers(self, sink: str) -> tuple[str, ...]:
        """Return the sinks whose parts are those of one sink, itself included; mostly that one alone."""
        return next((names for names in self.together if sink in names), (sink,))

    def parts_of(self, sink: str) -> tuple[Committable, ...]:
        """Return the parts of a sink, none if it had no rows."""
        return self.shares[sink].parts if sink in self.shares else ()

    def share_done(self, sink: str) -> LastDone | None:
        """Return what the target holds once this epoch is done, None if the sink had no rows."""
        return LastDone(self.epoch, self.attempt, self.shares[sink].parts) if sink in self.shares else None


@dataclass(frozen=True, slots=True)
class Replay:
    """A part of a recorded epoch was lost and has been prepared again: these parts replace those of the ``sinks``."""

    epoch: int
    sinks: tuple[str, ...]
    parts: tuple[Committable, ...]
    stamp: Stamp | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Done:
    """Every part of an epoch is committed."""

    epoch: int
    stamp: Stamp | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Resolved:
    """An operator has closed a sink's share of a decided epoch: nothing of it is left to commit.

    ``ruling`` says on what ground, in one word. What the target's marker says up to this epoch counts no more.
    """

    epoch: int
    sink: str
    ruling: str
    stamp: Stamp | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Skipped:
    """An operator has declared that the epochs up to this one, decided without this package, were meant to be."""

    epoch: int
    stamp: Stamp | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Disputed:
    """The query was called again in a recorded epoch, so that its record has only some of the rows.

    It stands if Spark decides the epoch all the same; if Spark runs the epoch again, it is withdrawn.
    """

    epoch: int
    stamp: Stamp | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """Spark runs a disputed epoch again: what was recorded of it counts no more."""

    epoch: int
    stamp: Stamp | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Abandoned:
    """An operator has closed the ledger: this checkpoint never runs again. ``ended`` are recorded epochs given up.

    ``uncertain`` says how ledger, checkpoint and targets disagreed then, "" if they did not.
    """

    ended: tuple[int, ...]
    uncertain: str = ""
    stamp: Stamp | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Summary:
    """What a take says of the entries before it, so that a start need not read them. Not an entry of its own.

    ``pending`` epochs are complete, as last replayed; ``done`` ones are (epoch, attempt, digest of offsets). ``takes``
    are the numbers of entries that are never removed (see `epochsink.protocol.ledger.Ledger.trim`).
    """

    pending: tuple[Prepared, ...] = ()
    done: tuple[tuple[int, str, str], ...] = ()
    skipped: int = -1
    disputed: tuple[int, ...] = ()
    abandoned: Abandoned | None = None
    takes: tuple[int, ...] = ()


Entry = Take | Prepared | Replay | Resolved | Done | Skipped | Disputed | Withdrawn | Abandoned
_KINDS: Final[dict[str, type[Entry]]] = {
    "take": Take,
    "prepared": Prepared,
    "replay": Replay,
    "resolved": Resolved,
    "done": Done,
    "skipped": Skipped,
    "disputed": Disputed,
    "withdrawn": Withdrawn,
    "abandoned": Abandoned,
}


def stamped(entry: Entry, application: str) -> Entry:
    """Return an entry with this process' stamp; a take that is repeated keeps the time at which its driver began."""
    return entry if entry.stamp is not None else replace(entry, stamp=Stamp.now(application))


def encode(entry: Entry) -> bytes:
    """Return an entry as one line of JSON."""
    kind = next(name for name, of in _KINDS.items() if type(entry) is of)
    content = {"entry": kind, "version": VERSION, **_to_json(entry)}
    return json.dumps(content, default=_to_json).encode() + b"\n"


def _to_json(value: Entry | Share | SpoolFile | LastDone | Stamp | Summary) -> dict[str, Any]:
    # `asdict` would copy every committable deeply
    return {name: getattr(value, name) for name in value.__slots__}


def decode(data: bytes) -> Entry:
    """Return the entry that a line of JSON holds. Raises ValueError, KeyError, TypeError."""
    fields = json.loads(data)
    kind, version = fields.pop("entry"), fields.pop("version")
    if version != VERSION:
        raise ValueError(f"version {version}")
    return _KINDS[kind](**_values(fields))


def _values(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _READ[name](value) if name in _READ and value is not None else value for name, value in fields.items()
    }


def _shares(shares: Mapping[str, Any]) -> dict[str, Share]:
    return {sink: _share(share) for sink, share in shares.items()}


def _share(fields: Mapping[str, Any]) -> Share:
    files = {task: SpoolFile(**file) for task, file in fields["files"].items()}
    return Share(tuple(fields["parts"]), tuple(fields["tasks"]), files)


def _applied(newest: Mapping[str, Any]) -> dict[str, LastDone]:
    return {sink: LastDone(last["epoch"], last["attempt"], tuple(last["parts"])) for sink, last in newest.items()}


def _summary(fields: Mapping[str, Any]) -> Summary:
    abandoned = fields["abandoned"]
    return Summary(
        pending=tuple(Prepared(**_values(prepared)) for prepared in fields["pending"]),
        done=tuple((number, attempt, offsets) for number, attempt, offsets in fields["done"]),
        skipped=fields["skipped"],
        disputed=tuple(fields["disputed"]),
        abandoned=None if abandoned is None else Abandoned(**_values(abandoned)),
        takes=tuple(fields["takes"]),
    )


_READ: Final[dict[str, Callable[[Any], Any]]] = {
    "parts": tuple,
    "sinks": tuple,
    "ended": tuple,
    "together": lambda together: tuple(map(tuple, together)),
    "shares": _shares,
    "applied": _applied,
    "summary": _summary,
    "stamp": lambda stamp: Stamp(**stamp),
}
"""How a field becomes what it was, where JSON has no word for it."""
