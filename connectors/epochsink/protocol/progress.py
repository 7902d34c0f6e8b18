"""The progress of a query, as values: rows and seconds of each epoch and sink, what is late, and the last failure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields


@dataclass(frozen=True, slots=True)
class SinkProgress:
    """What one epoch did in one sink.

    ``rows`` were written, ``deleted`` of them delete a key; ``bytes`` is their size in memory, as Arrow data.
    ``set_aside`` rows became dead letters; None if an earlier driver applied the epoch, and the number is not known.
    The target commits ``parts`` one by one; ``replays`` of them were lost and prepared again. Sinks that commit as one
    each have the seconds of all of them.
    """

    rows: int = 0
    deleted: int = 0
    bytes: int = 0
    set_aside: int | None = 0
    parts: int = 0
    replays: int = 0
    vote_seconds: float = 0.0
    commit_seconds: float = 0.0

    def __add__(self, other: SinkProgress) -> SinkProgress:
        """Return the sums of both; dead letters of an unknown number are left out."""
        sums = {each.name: (getattr(self, each.name) or 0) + (getattr(other, each.name) or 0) for each in fields(self)}
        return SinkProgress(**sums)


@dataclass(frozen=True, slots=True)
class EpochProgress:
    """How one epoch became visible. ``sinks`` has no entry for a sink without rows.

    Seconds of its steps, in this order: ``write_seconds`` from Spark's call on until the write job has ended, failed
    attempts included, ``record_seconds`` of the votes and the ledger's entry, ``decision_seconds`` until Spark's commit
    was seen, ``commit_seconds`` until readers saw all rows. A step that an earlier driver did is 0.
    ``done_at`` is in seconds since 1970.
    """

    epoch: int
    done_at: float = 0.0
    write_seconds: float = 0.0
    record_seconds: float = 0.0
    decision_seconds: float = 0.0
    commit_seconds: float = 0.0
    sinks: Mapping[str, SinkProgress] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """The rows of all sinks."""
        return sum(sink.rows for sink in self.sinks.values())


@dataclass(frozen=True, slots=True)
class QueryProgress:
    """The state of a running query's commits.

    ``pending`` epochs are recorded and not visible yet. ``late_seconds`` is the age of the oldest of them that Spark
    has decided: readers wait for it; 0 if there is none. ``open_seconds`` is how long the oldest epoch that has begun
    and is not visible has been under way, in an earlier run too: it rises if a target does not answer. ``epochs`` of
    this run are done; ``totals`` are what they did in each sink, together. ``retries`` counts repeated attempts of this
    run, ``leftovers`` what its sweeps ended, ``spooled_bytes`` the rows that pending epochs keep. ``recent`` are the
    newest done epochs, oldest first. ``failure`` is why the query stopped, "" while it runs.
    """

    pending: tuple[int, ...] = ()
    late_seconds: float = 0.0
    open_seconds: float = 0.0
    epochs: int = 0
    totals: Mapping[str, SinkProgress] = field(default_factory=dict)
    retries: int = 0
    leftovers: int = 0
    spooled_bytes: int = 0
    recent: tuple[EpochProgress, ...] = ()
    failure: str = ""

    @property
    def json(self) -> str:
        """Everything as one line of JSON."""
        return json.dumps(asdict(self))
