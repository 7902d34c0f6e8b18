"""The entries of the ledger: frozen values, and their JSON.

Nothing else is ever written to the ledger. docs/reference/ledger-format.md has the format, and what it promises.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from functools import cache
from typing import Any, Final

from epochsink import __version__
from epochsink.errors import EpochsinkError, without_values
from epochsink.protocol.json_value import from_json
from epochsink.protocol.progress import EpochProgress
from epochsink.sink import Committable, Epoch, LastDone, RowCount, SpoolFile

VERSION: Final = 1
"""The version of the format: the one that is written, and the only one that is read."""

_FAILURE_CHARACTERS: Final = 2000
"""How much of a failure's text the ledger keeps."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """When an entry was written (``at``, seconds since 1970), by which process, and by which version of epochsink."""

    at: float
    host: str
    pid: int
    application: str = ""
    epochsink: str = ""

    @classmethod
    def now(cls, application: str) -> Stamp:
        """Return this process' stamp."""
        return cls(round(time.time(), 3), socket.gethostname(), os.getpid(), application, __version__)

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        spark = f", Spark application {self.application}" if self.application else ""
        return f"{since}, process {self.pid} on host {self.host}{spark}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stamped:
    stamp: Stamp | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Take(_Stamped):
    """A driver takes the checkpoint over: every earlier driver is fenced from here on.

    ``origins`` holds what each sink fixed when it joined. Epochs up to ``joined`` (-1: none) were decided before this
    ledger began. ``purpose`` is the command by which an operator took it, "" for a query. ``left`` has, for each sink
    that is no longer part of the query, the newest epoch that was written with it. ``summary`` is what a start needs to
    know of the entries before this one, so that they can be removed.
    """

    generation: int
    driver: str
    query_id: str
    origins: Mapping[str, Mapping[str, Any]]
    joined: int = -1
    purpose: str = field(default="", compare=False)
    left: Mapping[str, int] = field(default_factory=dict)
    summary: Summary = field(kw_only=True, compare=False)


@dataclass(frozen=True, slots=True)
class Share:
    """What one sink has prepared of an epoch: its parts, and the tasks (uuids, by partition) that had rows.

    ``files`` says, for each task, what its file in the spool holds; it is empty if nothing is spooled. ``counted`` are
    the rows of all tasks.
    """

    parts: tuple[Committable, ...]
    tasks: tuple[str, ...]
    files: Mapping[str, SpoolFile] = field(default_factory=dict)
    counted: RowCount = field(default_factory=RowCount)


@dataclass(frozen=True, slots=True)
class Prepared(_Stamped):
    """An epoch is prepared in every sink. ``shares`` has no entry for a sink without rows.

    ``together`` are the names of sinks that have recorded the same parts: those that commit as one. ``retain`` is for
    how many seconds its rows are kept once it is done, by this driver or by another.
    """

    epoch: int
    attempt: str
    offsets: str
    shares: Mapping[str, Share]
    together: tuple[tuple[str, ...], ...] = ()
    retain: float = 0.0

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

    def share_done(self, sink: str) -> LastDone:
        """Return what the target of a sink with rows holds once this epoch is done. KeyError if it had none."""
        return LastDone(self.epoch, self.attempt, self.shares[sink].parts)


@dataclass(frozen=True, slots=True)
class Replay(_Stamped):
    """A part of a recorded epoch was lost and has been prepared again: these parts replace those of the ``sinks``."""

    epoch: int
    sinks: tuple[str, ...]
    parts: tuple[Committable, ...]


@dataclass(frozen=True, slots=True)
class Done(_Stamped):
    """Every part of an epoch is committed. ``progress`` is its receipt: what was written to each sink, and how long
    that took.
    """

    epoch: int
    progress: EpochProgress | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Resolved(_Stamped):
    """An operator has closed a sink's share of a decided epoch: nothing of it is left to commit.

    ``ruling`` gives the reason in one word. What the target's marker says up to this epoch is void.
    """

    epoch: int
    sink: str
    ruling: str


@dataclass(frozen=True, slots=True)
class Skipped(_Stamped):
    """An operator has accepted that Spark decided the epochs up to this one without this package."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Disputed(_Stamped):
    """The query was called again in a recorded epoch, so that its record has only some of the rows.

    The record is kept if Spark decides the epoch all the same; if Spark runs the epoch again, it is withdrawn.
    """

    epoch: int


@dataclass(frozen=True, slots=True)
class Withdrawn(_Stamped):
    """Spark runs a disputed epoch again: its record is void."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Abandoned(_Stamped):
    """An operator has closed the ledger: this checkpoint never runs again. ``ended`` are recorded epochs given up.

    ``uncertain`` says how ledger, checkpoint and targets disagreed then, "" if they did not.
    """

    ended: tuple[int, ...]
    uncertain: str = ""


@dataclass(frozen=True, slots=True)
class Stopped(_Stamped):
    """The query has stopped with a failure, in words without values of rows. For people: nothing follows from it.

    ``hint`` says what to do, ``command`` what mends it, each "" if that is not known.
    """

    failure: str
    hint: str = ""
    command: str = ""

    @classmethod
    def of(cls, failure: BaseException) -> Stopped:
        """Return the entry for a failure whose commands are complete."""
        hint, command = (failure.hint, failure.command) if isinstance(failure, EpochsinkError) else ("", "")
        return cls(without_values(failure)[:_FAILURE_CHARACTERS], hint[:_FAILURE_CHARACTERS], command)

    @property
    def kind(self) -> str:
        """The class of the error."""
        return self.failure.partition(":")[0]


@dataclass(frozen=True, slots=True)
class Summary:
    """What a take says of the entries before it, so that a start need not read them. Not an entry of its own.

    ``pending`` epochs are complete, as last replayed; ``done`` ones are (epoch, attempt, digest of offsets).
    ``applied`` has, for each sink, the newest done epoch with rows, however old. ``takes`` are the numbers of entries
    that are never removed (see `epochsink.protocol.ledger.Ledger.trim`). ``receipts`` are those of the newest done
    epochs, ``stopped`` is the last failure.
    """

    pending: tuple[Prepared, ...] = ()
    done: tuple[tuple[int, str, str], ...] = ()
    applied: Mapping[str, LastDone] = field(default_factory=dict)
    skipped: int = -1
    disputed: tuple[int, ...] = ()
    abandoned: Abandoned | None = None
    takes: tuple[int, ...] = ()
    receipts: tuple[EpochProgress, ...] = ()
    stopped: Stopped | None = None


Entry = Take | Prepared | Replay | Resolved | Done | Skipped | Disputed | Withdrawn | Abandoned | Stopped
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
    "stopped": Stopped,
}


def stamped(entry: Entry, application: str) -> Entry:
    """Return an entry with this process' stamp; a take that is repeated keeps the time at which its driver began."""
    return entry if entry.stamp is not None else replace(entry, stamp=Stamp.now(application))


def encode(entry: Entry) -> bytes:
    """Return an entry as one line of JSON."""
    kind = next(name for name, of in _KINDS.items() if type(entry) is of)
    content = {"entry": kind, "version": VERSION, **_to_json(entry)}
    return _ENCODER.encode(content).encode() + b"\n"


def _to_json(value: Any) -> dict[str, Any]:
    # `asdict` would copy every committable deeply
    return {name: getattr(value, name) for name in _names(type(value))}  # type: ignore[arg-type] # a class can be hashed


# `json.dumps` would make one for each entry
_ENCODER: Final = json.JSONEncoder(default=_to_json)


@cache
def _names(kind: type) -> tuple[str, ...]:
    # keyword-only ones last, so that an entry that was torn still names its epoch
    return tuple(each.name for each in sorted(fields(kind), key=lambda each: each.kw_only is True))


def decode(data: bytes) -> Entry:
    """Return the entry that a line of JSON holds. Raises ValueError, KeyError, TypeError.

    If the version or the kind of the entry is unknown, the error names the version of epochsink that wrote it.
    """
    content = json.loads(data)
    kind, version = content["entry"], content["version"]
    # all versions keep these three where they are
    writer = f"epochsink {(content.get('stamp') or {}).get('epochsink', 'of an unknown version')} wrote it"
    if version != VERSION:
        raise ValueError(f"format version {version}; {writer}, and epochsink {__version__} reads {VERSION} only")
    if kind not in _KINDS:
        raise ValueError(f"unknown kind of entry {kind!r}; {writer}, and this is epochsink {__version__}")
    return from_json(_KINDS[kind], content)
