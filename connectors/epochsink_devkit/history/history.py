"""Write and read the history of a test run: JSON lines, each fsynced. Tests write it, never the library.

Several processes append to one history. ``at`` is CLOCK_MONOTONIC in seconds, which all processes of a machine share.
The rows of reads are stored next to it as Arrow files. Events:

    target     name, atomic, keyed, dead_letters, lag          the properties of a sink
    input      run, file                                       all source rows of a run
    started    run, driver                                     a driver process, oldest first
    took       run, driver, generation                         a driver took the ledger; once, after it was "started"
    ended      driver, code             killed  what, pid
    invoked    run, driver, epoch, attempt                     foreachBatch began
    returned   attempt                  raised  attempt, error
    aborted    attempt                                         certainly not recorded (a canary)
    offsets    run, epoch, ends                                offsets/N: end offset of each source partition
    recorded   run, epoch, absent_until                        the ledger holds it; not yet when last looked for
    committed  run, epoch, absent_until                        commits/N seen; not there yet when last looked for
    done       run, epoch                                      the ledger says that every sink has committed
    read       target, began, ended, file, final, between      one read; final: after quiescence
    unreachable  target, began, ended                          every read of that time failed, or took seconds
    leftover   target, kind (orphan or pin), what              found after quiescence
    healed                              drained                faults ended; all input is decided
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

FILE = "history.jsonl"
_COMPRESSED = pa.ipc.IpcWriteOptions(compression="zstd")


@dataclass(frozen=True, slots=True)
class CheckedTarget:
    """A place where rows become visible.

    ``atomic``: readers see all of an epoch or nothing. ``keyed``: it holds only the newest row of each key.
    ``dead_letters`` names the target for rows that this one refused. ``lag`` is the longest time in seconds until
    readers see an acknowledged commit.
    """

    name: str
    atomic: bool = True
    keyed: bool = False
    dead_letters: str | None = None
    lag: float = 0.0


@dataclass(slots=True)
class EpochFacts:
    """One epoch of one run. A time is None if the event was never seen.

    ``recorded_at``, ``committed_at`` and ``done_at`` are when the ledger's record, ``commits/N`` and the ledger's
    ``done`` were first seen; ``unrecorded_until`` and ``absent_until`` are when the record and ``commits/N`` were last
    known not to exist.
    """

    run: str
    number: int
    ends: Mapping[int, int]
    committed_at: float | None = None
    absent_until: float = float("inf")
    done_at: float | None = None
    recorded_at: float | None = None
    unrecorded_until: float = float("-inf")


@dataclass(frozen=True, slots=True)
class TakeFacts:
    """A driver's take of the ledger: its ``generation``, which each take raises, and when the driver had made it."""

    run: str
    generation: int
    at: float


@dataclass(slots=True)
class AttemptFacts:
    """One call of foreachBatch. ``returned_at`` is None if it raised, was killed or never ended."""

    name: str
    run: str
    driver: str
    epoch: int
    returned_at: float | None = None
    aborted: bool = False
    invoked_at: float = 0.0
    raised: bool = False


@dataclass(slots=True)
class Read:
    """One read of one target. ``rows`` are in memory or in a file.

    It holds every row that was visible when it ``began``, and only rows that were visible when it ``ended``.
    ``between`` are the times of reads since the previous one that saw the same rows.
    """

    target: str
    began: float
    ended: float
    source: pa.Table | Path
    final: bool = False
    between: tuple[float, ...] = ()

    def rows(self) -> pa.Table:
        """Return the rows, at least the columns of `epochsink_devkit.history.rows.SCHEMA`."""
        if isinstance(self.source, Path):
            with pa.OSFile(str(self.source)) as file:
                return pa.ipc.open_file(file).read_all()
        return self.source


@dataclass(slots=True)
class History:
    """The input of the checker. Times are in seconds, on one clock.

    ``drivers`` has the start time of each driver, ``takes`` its take of the ledger if it came so far, ``kills`` the
    times with the name of what was killed or failed, ``unreachable`` the targets with the times when they could not be
    read, or a read took seconds.
    """

    targets: dict[str, CheckedTarget] = field(default_factory=dict)
    inputs: dict[str, pa.Table] = field(default_factory=dict)
    drivers: dict[str, float] = field(default_factory=dict)
    takes: dict[str, TakeFacts] = field(default_factory=dict)
    attempts: dict[str, AttemptFacts] = field(default_factory=dict)
    epochs: dict[tuple[str, int], EpochFacts] = field(default_factory=dict)
    reads: list[Read] = field(default_factory=list)
    unreachable: list[tuple[str, float, float]] = field(default_factory=list)
    kills: list[tuple[float, str]] = field(default_factory=list)
    leftovers: list[tuple[str, str, str]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    healed_at: float | None = None
    drained_at: float | None = None
    ended_at: float = 0.0

    @classmethod
    def load(cls, folder: Path) -> History:
        """Read a history. Raises `OSError`, and `ValueError` for an unknown line."""
        history = cls()
        for line in (folder / FILE).read_text().splitlines():
            history.add(json.loads(line), folder)
        return history

    def add(self, event: Mapping[str, Any], folder: Path | None = None) -> None:
        """Add one event. Raises `ValueError` for an unknown kind."""
        facts = dict(event)
        kind, at = str(facts.pop("event")), float(facts.pop("at"))
        self.counts[kind] = self.counts.get(kind, 0) + 1
        self.ended_at = max(self.ended_at, at)
        handler = getattr(self, f"_on_{kind}", None)
        if handler is None:
            raise ValueError(f"the history holds an event of unknown kind {kind!r}")
        handler(at, folder or Path(), **facts)

    def _on_target(self, _at: float, _folder: Path, **facts: Any) -> None:
        self.targets[facts["name"]] = CheckedTarget(**facts)

    def _on_input(self, _at: float, folder: Path, *, run: str, file: str) -> None:
        self.inputs[run] = Read("", 0, 0, folder / file).rows()

    def _on_started(self, at: float, _folder: Path, *, driver: str, **_facts: Any) -> None:
        self.drivers[driver] = at

    def _on_took(self, at: float, _folder: Path, *, run: str, driver: str, generation: int) -> None:
        if driver in self.takes:
            raise ValueError(f"driver {driver} took the ledger twice: a second start needs a driver's name of its own")
        self.takes[driver] = TakeFacts(run, generation, at)

    def _on_ended(self, at: float, _folder: Path, *, driver: object, code: int | None) -> None:
        if code != 0:
            self.kills.append((at, f"driver {driver}"))

    def _on_killed(self, at: float, _folder: Path, *, what: str, **_facts: Any) -> None:
        self.kills.append((at, what))

    def _on_raised(self, _at: float, _folder: Path, *, attempt: str, **_facts: Any) -> None:
        self.attempts[attempt].raised = True

    def _on_invoked(self, at: float, _folder: Path, *, run: str, driver: str, epoch: int, attempt: str) -> None:
        self.attempts[attempt] = AttemptFacts(attempt, run, driver, epoch, invoked_at=at)

    def _on_returned(self, at: float, _folder: Path, *, attempt: str) -> None:
        self.attempts[attempt].returned_at = at

    def _on_aborted(self, _at: float, _folder: Path, *, attempt: str) -> None:
        self.attempts[attempt].aborted = True

    def _on_offsets(self, _at: float, _folder: Path, *, run: str, epoch: int, ends: Mapping[str, int]) -> None:
        self.epochs[run, epoch] = EpochFacts(run, epoch, {int(part): end for part, end in ends.items()})

    def _on_recorded(self, at: float, _folder: Path, *, run: str, epoch: int, absent_until: float) -> None:
        facts = self.epochs[run, epoch]
        facts.recorded_at, facts.unrecorded_until = at, absent_until

    def _on_committed(self, at: float, _folder: Path, *, run: str, epoch: int, absent_until: float) -> None:
        facts = self.epochs[run, epoch]
        facts.committed_at, facts.absent_until = at, absent_until

    def _on_done(self, at: float, _folder: Path, *, run: str, epoch: int) -> None:
        self.epochs[run, epoch].done_at = at

    def _on_read(self, _at: float, folder: Path, *, file: str, between: list[float], **facts: Any) -> None:
        self.reads.append(Read(source=folder / file, between=tuple(between), **facts))

    def _on_unreachable(self, _at: float, _folder: Path, *, target: str, began: float, ended: float) -> None:
        self.unreachable.append((target, began, ended))

    def _on_leftover(self, _at: float, _folder: Path, *, target: str, kind: str, what: str) -> None:
        self.leftovers.append((target, kind, what))

    def _on_healed(self, at: float, _folder: Path) -> None:
        self.healed_at = at

    def _on_drained(self, at: float, _folder: Path) -> None:
        self.drained_at = at


class HistoryLog:
    """Appends to the history in ``folder``. Several processes may do so at the same time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, event: str, **facts: Any) -> None:
        """Append one event. It is durable when this returns."""
        line = json.dumps({"at": time.monotonic(), "event": event, **facts}) + "\n"
        descriptor = os.open(self.folder / FILE, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
        try:
            # One write call, so that lines of several processes never mix.
            os.write(descriptor, line.encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def write_input(self, run: str, source: pa.Table) -> None:
        """Record the source rows that a run must deliver (`epochsink_devkit.history.rows.SOURCE_SCHEMA`)."""
        self.write("input", run=run, file=self.keep(source))

    def write_read(
        self,
        target: str,
        began: float,
        ended: float,
        file: str,
        *,
        final: bool = False,
        between: Sequence[float] = (),
    ) -> None:
        """Record a read between two times, with the rows that `keep` stored under a name."""
        self.write("read", target=target, began=began, ended=ended, file=file, final=final, between=list(between))

    def keep(self, rows: pa.Table) -> str:
        """Store rows next to the history; return the name of their file."""
        name = f"{uuid.uuid4().hex}.arrow"
        # a long run keeps thousands of reads, each of which has most rows of the one before
        with pa.ipc.new_file(str(self.folder / name), rows.schema, options=_COMPRESSED) as file:
            file.write_table(rows)
        return name
