"""The values of the protocol: identities, epochs, tasks, outcomes, and what the ledger records of them."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, lru_cache
from types import MappingProxyType
from typing import Any, Final, Self, TypeVar

Given = TypeVar("Given")

APART_SECONDS: Final = 5.0
"""From here on, the difference of two clocks is worth an operator's look."""

Committable = dict[str, Any]
"""A JSON object that names something prepared. Never holds a secret: it is written to the ledger."""
Committables = Sequence[Committable]
Members = Mapping[str, Any]
"""The sinks of one participant, or their configurations, by name."""
Recorded = tuple[Committables, Committables]
"""The parts of recorded epochs: of those that are not done, and of those that are."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What tells a sink from all others in its target: the checkpoint's query id and the sink's name in the query.

    ``origin`` is what `Participant.open` returned when this sink first joined the ledger; it never changes.
    ``generation`` is the number of this driver's `take` of the ledger, larger than that of every driver before it.
    ``pipeline`` is a name for people (the checkpoint folder's), which may change between runs.
    """

    query_id: str
    sink: str
    generation: int = 0
    origin: Mapping[str, Any] = field(default_factory=dict)
    pipeline: str = ""


def identity_key(identity: Identity) -> str:
    """Return 20 hex digits that stand for (query id, sink name) in names that a sink gives in its target."""
    return _key_of(identity.query_id, identity.sink)


@lru_cache(1024)
def _key_of(query_id: str, sink: str) -> str:
    return hashlib.sha256(f"{query_id}\x00{sink}".encode()).hexdigest()[:20]


def fields_of(value: Any) -> dict[str, Any]:
    """Return the fields of a frozen dataclass by name: `dataclasses.asdict` would copy what they hold, at any depth."""
    names = _field_names(type(value))  # type: ignore[arg-type] # a class can be hashed
    return {name: getattr(value, name) for name in names}


@cache
def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(each.name for each in fields(kind))


@dataclass(frozen=True, slots=True)
class Joining:
    """What a sink brings into a ledger: its `Identity.origin`, and the highest generation that it has left, or 0."""

    origin: Mapping[str, Any] = field(default_factory=dict)
    generation: int = 0


@dataclass(frozen=True, slots=True)
class Epoch:
    """One attempt at one micro-batch.

    ``number`` is Spark's batch id, ``attempt`` a fresh uuid (32 hex) for each call of ``foreachBatch``, so
    that two attempts at one epoch never share a name.
    """

    number: int
    attempt: str


@dataclass(frozen=True, slots=True)
class Finding:
    """What an examination of a target has found: ``what`` was looked at, and what to do if ``hint`` is not empty.

    ``is_fatal``: as it is, no epoch can be written.
    """

    what: str
    found: str
    hint: str = ""
    is_fatal: bool = False

    @classmethod
    def of_clock(cls, whose: str, ahead: float) -> Self:
        """Return how far the clock of ``whose`` is ahead of this machine's, in seconds."""
        hint = "" if abs(ahead) < APART_SECONDS else "let both machines follow one time server: ages are wrong by this"
        return cls("clock", f"that of {whose} is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} ours", hint)


class Keeping(enum.Enum):
    """Where the rows of an attempt are kept until its epoch is done."""

    NOT = "nowhere: an epoch that the target loses stops the query"
    IN_TARGET = "in the target, from which `Participant.replay` takes them"
    IN_SPOOL = "in the spool, beside what the writers prepare"
    IN_SPOOL_ALONE = "in the spool, from which `Participant.vote` takes them: the writers prepare nothing"

    @property
    def is_spooled(self) -> bool:
        """Whether the rows are written to the spool."""
        return self in {Keeping.IN_SPOOL, Keeping.IN_SPOOL_ALONE}


@dataclass(frozen=True, slots=True)
class WriterContext:
    """What one sink's writers are told in one attempt: where rows are kept, and JSON that the sink's kind defines."""

    keeping: Keeping
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Task:
    """One invocation of one Spark task, for one sink.

    ``partition`` is the partition's index, ``uuid`` (32 hex) is fresh for every invocation, because (stage,
    partition, attempt number) is not unique in Spark. ``keeping`` says where the rows are kept. Up to ``carried``
    bytes that are spooled are not a file: they are sent to the driver with the task's answer. ``settings`` is what
    `Participant.begin` returned for this attempt.
    """

    identity: Identity
    epoch: Epoch
    partition: int
    uuid: str
    keeping: Keeping = Keeping.IN_SPOOL
    carried: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)


class Outcome(enum.Enum):
    """What became of something prepared. A time-out is UNKNOWN, never ABORTED."""

    COMMITTED = "committed"
    ABORTED = "aborted"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Verdict:
    """An outcome and the evidence for it, in words for the operator.

    ``set_aside`` rows of a committed part became dead letters; None if that is not known.
    """

    outcome: Outcome
    evidence: str = ""
    set_aside: int | None = 0


COMMITTED = Verdict(Outcome.COMMITTED)


def one_by_one(
    parts: Sequence[Given], commit: Callable[[Given], Verdict], committed: Collection[int] = ()
) -> list[Verdict]:
    """Commit parts in order, except those at the indices ``committed``; return a verdict for each.

    After an unknown outcome no further part is tried: the parts after it get the same verdict.
    """
    verdicts: list[Verdict] = []
    for index, part in enumerate(parts):
        if verdicts and verdicts[-1].outcome is Outcome.UNKNOWN:
            verdicts.append(verdicts[-1])
        else:
            verdicts.append(COMMITTED if index in committed else commit(part))
    return verdicts


@dataclass(frozen=True, slots=True)
class LastDone:
    """The newest epoch with rows that is done in a sink according to the ledger: what its target must hold.

    ``attempt`` and ``parts`` are as recorded, so that an epoch of the same number by another writer is found. Without
    parts, an operator has accepted the epochs up to this one: the target may hold any of them.
    """

    epoch: int
    attempt: str
    parts: tuple[Committable, ...]


@dataclass(frozen=True, slots=True)
class SpoolFile:
    """What one task's file in the spool of one sink held when it was closed. It is recorded, and compared at each read.

    ``carried`` is the content in base64 if it is so small that the ledger's entry carries it; then there is no file.
    """

    rows: int
    size: int
    crc32: int
    carried: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class RowCount:
    """The rows that a sink got in an epoch, how many of them delete a key, and their bytes as Arrow data."""

    rows: int = 0
    deleted: int = 0
    bytes: int = 0

    def __add__(self, other: RowCount) -> RowCount:
        """Return the count of both."""
        return RowCount(self.rows + other.rows, self.deleted + other.deleted, self.bytes + other.bytes)


Counts = Mapping[str, RowCount]
"""What the accepted tasks of an epoch counted, by sink."""
NOTHING_COUNTED: Counts = MappingProxyType({})
Written = Mapping[str, Sequence[tuple[str, Committable]]]
"""For each sink with rows, the (task uuid, committable) of every task that Spark accepted, by partition."""
Spooled = Mapping[str, Mapping[str, SpoolFile]]
"""What the accepted tasks of an epoch have spooled: by sink, and by the task's uuid."""
NOTHING_SPOOLED: Spooled = MappingProxyType({})
