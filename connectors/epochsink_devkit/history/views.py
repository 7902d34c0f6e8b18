"""Compare each read of a target, epoch by epoch, with the source rows."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from epochsink_devkit.history.history import CheckedTarget, History, Read
from epochsink_devkit.history.rows import SCHEMA, checksums
from epochsink_devkit.history.timeline import UNKNOWN, Timeline

if TYPE_CHECKING:
    Ints = npt.NDArray[np.int64]
    Flags = npt.NDArray[np.bool_]


EXAMPLES: Final = 3


@dataclass(slots=True)
class Findings:
    """The number of rows with a flaw, and the first few of them."""

    count: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, indices: Ints, describe: Callable[[int], str]) -> None:
        """Count rows, and describe some."""
        self.count += len(indices)
        room = EXAMPLES - len(self.examples)
        self.examples.extend(describe(int(index)) for index in indices[: max(room, 0)])


@dataclass(slots=True)
class View:
    """One read, compared with the source rows.

    By position of the epoch: ``seen`` is the number of its rows, ``expected`` that of its effects (rows; in a keyed
    target: keys whose newest row, or delete, is of that epoch), ``effects`` that of the effects seen. ``gone`` is the
    number of missing effects of epochs that an earlier read showed completely. ``newest`` is the newest position seen.
    ``attempts`` are those that no earlier view has.
    Up to ``firm`` nothing may be missing. ``acknowledged`` flags epochs that the ledger called done before the read.
    """

    read: Read
    newest: int
    firm: int
    acknowledged: Flags
    seen: Ints
    expected: Ints
    effects: Ints
    gone: Ints
    attempts: set[tuple[int, str]]
    duplicate: Findings
    corrupt: Findings
    stale: Findings
    disorder: Findings

    @property
    def missing(self) -> Ints:
        """The number of missing effects of each epoch."""
        return self.expected - self.effects


class Scan:
    """Turns the reads of one target into views. ``pardoned`` flags source rows found in its dead letters."""

    def __init__(self, history: History, timeline: Timeline, target: CheckedTarget, pardoned: Flags) -> None:
        self._history = history
        self._timeline = timeline
        self._target = target
        self._pardoned = pardoned
        self._committed = np.array([epoch.committed_at is not None for epoch in timeline.epochs], dtype=bool)
        self._absent_until = np.array([epoch.absent_until for epoch in timeline.epochs], dtype=float)
        self._done_at = np.array(
            [np.inf if epoch.done_at is None else epoch.done_at for epoch in timeline.epochs], dtype=float
        )
        self._floor = np.full(timeline.key_count, -1, dtype=np.int64)
        self._ended: list[tuple[float, int, View]] = []
        self._prior = -1
        self._shown = np.zeros(len(timeline), dtype=bool)
        self._attempts: set[tuple[int, str]] = set()

    def views(self) -> list[View]:
        """Compare every read of the target."""
        reads = [read for read in self._history.reads if read.target == self._target.name]
        in_order = sorted(reads, key=lambda read: read.began)
        return [self._view(number, read) for number, read in enumerate(in_order)]

    def _view(self, number: int, read: Read) -> View:
        self._end_reads_before(read)
        rows = read.rows()
        corrupt = Findings()
        identified = identify(rows, self._timeline, self._target.name, corrupt)
        present = np.bincount(identified[identified != UNKNOWN], minlength=self._timeline.source.num_rows)
        held = np.flatnonzero(present)
        seen = np.bincount(self._timeline.position[held], minlength=len(self._timeline) + 1)[:-1]
        highest = _last(seen > 0)
        acknowledged = self._done_at + self._target.lag <= read.began
        bound = max(highest, _last(acknowledged), _last(self._committed) if read.final else -1)
        # what was not decided yet explains nothing: its deletes must not be visible, and leave no row to be seen early
        explains = (np.arange(len(seen)) <= bound) | (self._absent_until <= read.ended)
        live = (self._committed & explains) | (seen > 0)
        newest, expected, effects = self._effects(live, highest, bound, held)
        view = View(
            read=read,
            newest=newest,
            # A target that is not atomic may lack parts of an epoch that no earlier read showed completely.
            firm=newest if self._target.atomic or read.final else self._prior - 1,
            acknowledged=acknowledged,
            seen=seen,
            expected=expected,
            effects=effects,
            gone=self._gone(live, bound, expected - effects, held),
            attempts=self._new_attempts(rows),
            duplicate=self._duplicates(present, held),
            corrupt=corrupt,
            stale=self._stale_keys(held) if self._target.keyed else Findings(),
            disorder=self._disorder(rows, identified),
        )
        heapq.heappush(self._ended, (read.ended, number, view))
        return view

    def _new_attempts(self, rows: pa.Table) -> set[tuple[int, str]]:
        # with all of them in each view, those of a long history would not fit into memory
        new = attempts_in(rows, self._timeline) - self._attempts
        self._attempts |= new
        return new

    def _end_reads_before(self, read: Read) -> None:
        """Include the reads that had ended when this one began."""
        while self._ended and self._ended[0][0] <= read.began:
            _, _, view = heapq.heappop(self._ended)
            self._prior = max(self._prior, view.newest)
            self._shown |= (view.missing == 0) & (np.arange(len(self._shown)) <= view.newest)

    def _gone(self, live: Flags, bound: int, missing: Ints, held: Ints) -> Ints:
        """Return how much is missing of each epoch that an earlier read showed completely."""
        top = _last(self._shown)
        if top > bound:
            _, expected, effects = self._effects(live | self._shown, top, top, held)
            missing = expected - effects
        return np.where(self._shown, missing, 0)

    def _effects(self, live: Flags, highest: int, bound: int, held: Ints) -> tuple[int, Ints, Ints]:
        """Return the newest visible epoch and, for each epoch up to a bound, how much of it is expected and found."""
        if not self._target.keyed:
            return (highest, *self._appended(live, bound, held))
        expected, effects = self._upserted(live, bound, held)
        # An epoch of deletes leaves no row, so check whether the read fits with that epoch applied.
        further = bound
        epochs = len(self._timeline)
        while (expected > effects).any() and further + 1 < epochs and not self._timeline.shows(further + 1):
            further += 1
            attempt = self._upserted(live, further, held)
            if not (attempt[0] > attempt[1]).any():
                return (further if bound == highest else highest, *attempt)
        return highest, expected, effects

    def _appended(self, live: Flags, bound: int, held: Ints) -> tuple[Ints, Ints]:
        rows = self._required(live, bound)
        there = np.zeros(len(rows), dtype=bool)
        there[held] = True
        return self._by_epoch(np.flatnonzero(rows)), self._by_epoch(np.flatnonzero(rows & there))

    def _upserted(self, live: Flags, bound: int, held: Ints) -> tuple[Ints, Ints]:
        timeline = self._timeline
        wanted = timeline.newest_of_keys(self._required(live, bound))
        shown = np.full(timeline.key_count, -1, dtype=np.int64)
        np.maximum.at(shown, timeline.key_code[held], timeline.rank[held])
        shown = shown[timeline.key_code[wanted]]
        gone = timeline.deletes[wanted] & (shown < 0)
        applied = (shown >= timeline.rank[wanted]) | gone
        if not self._target.atomic:
            applied |= (shown < 0) & self._deleted_by(live, bound + 1)[timeline.key_code[wanted]]
        return self._by_epoch(wanted), self._by_epoch(wanted[applied])

    def _deleted_by(self, live: Flags, bound: int) -> Flags:
        """Flag the keys that an epoch deletes which may currently be applied."""
        timeline = self._timeline
        newest = timeline.newest_of_keys(self._required(live, bound))
        flags = np.zeros(timeline.key_count, dtype=bool)
        flags[timeline.key_code[newest[timeline.deletes[newest]]]] = True
        return flags

    def _required(self, live: Flags, bound: int) -> Flags:
        wanted = np.zeros(len(self._timeline) + 1, dtype=bool)
        wanted[:-1] = live & (np.arange(len(live)) <= bound)
        result: Flags = wanted[self._timeline.position] & ~self._pardoned
        return result

    def _by_epoch(self, rows: Ints) -> Ints:
        return np.bincount(self._timeline.position[rows], minlength=len(self._timeline) + 1)[:-1]

    def _duplicates(self, present: Ints, held: Ints) -> Findings:
        findings = Findings()
        findings.add(np.flatnonzero(present > 1), self._timeline.describe)
        if self._target.keyed:
            rows_of_key = np.bincount(self._timeline.key_code[held], minlength=self._timeline.key_count)
            twice = held[rows_of_key[self._timeline.key_code[held]] > 1]
            findings.add(twice, self._timeline.describe)
        return findings

    def _stale_keys(self, held: Ints) -> Findings:
        """Find keys with an older row than in an earlier read, or with a row that an earlier read saw deleted."""
        timeline, findings = self._timeline, Findings()
        shown = np.full(timeline.key_count, -1, dtype=np.int64)
        np.maximum.at(shown, timeline.key_code[held], timeline.rank[held])
        down = held[(timeline.rank[held] < self._floor[timeline.key_code[held]])]
        findings.add(down, timeline.describe)
        vanished = (shown < 0) & (self._floor >= 0)
        self._floor = np.maximum(self._floor, shown)
        # At least one more row has taken effect. Nothing more is known about a key whose floor is already a delete.
        self._floor[vanished] += ~timeline.deletes[timeline.in_key_order(self._floor[vanished])]
        return findings

    def _disorder(self, rows: pa.Table, index: Ints) -> Findings:
        """Find rows of a log that come after a row of a later epoch, or after a newer row of their key."""
        findings = Findings()
        if "log_off" not in rows.column_names:
            return findings
        known = np.flatnonzero(index != UNKNOWN)
        timeline, index = self._timeline, index[known]
        part, off = (np.asarray(rows[name].to_numpy())[known] for name in ("log_part", "log_off"))
        key = timeline.key_code[index]
        by_epoch = _behind(timeline.position[index], np.lexsort((off, part)), part)
        by_key = _behind(timeline.rank[index], np.lexsort((off, part, key)), part, key)
        findings.add(index[np.union1d(by_epoch, by_key)], timeline.describe)
        return findings


def identify(rows: pa.Table, timeline: Timeline, target: str, corrupt: Findings) -> Ints:
    """Return the source index of each row that an epoch delivers, else `UNKNOWN`. Other rows are findings."""
    index = timeline.locate(rows)
    known = index != UNKNOWN
    wrong = ~known | (np.asarray(rows["crc"].fill_null(-1).to_numpy()) != checksums(rows))
    at = np.where(known, index, 0)
    if known.any():
        for name in ("key", "kver", "op"):
            wrong |= known & (rows[name].to_numpy() != timeline.source[name].to_numpy()[at])
        wrong |= known & (rows["epoch"].to_numpy() != timeline.number[timeline.position[at]])
        known &= timeline.position[at] < len(timeline)
    if "sink" in rows.column_names:
        wrong |= rows["sink"].to_numpy() != target
    corrupt.add(np.flatnonzero(wrong), lambda row: str(_plain(rows, row)))
    return np.where(known, index, UNKNOWN)


def attempts_in(rows: pa.Table, timeline: Timeline) -> set[tuple[int, str]]:
    """Return the position of each epoch that has rows, with each of its attempts."""
    groups = rows.select(["run", "epoch", "attempt"]).group_by(["run", "epoch", "attempt"]).aggregate([])
    positions = timeline.positions
    return {
        (positions[row["run"], row["epoch"]], row["attempt"])
        for row in groups.to_pylist()
        if (row["run"], row["epoch"]) in positions
    }


def _behind(value: Ints, order: Ints, *groups: Ints) -> Ints:
    """Return which values are smaller than their predecessor in an order, within each group."""
    falls = np.diff(value[order]) < 0
    for group in groups:
        falls &= np.diff(group[order]) == 0
    return order[1:][falls]


def _last(flags: Flags) -> int:
    return int(np.flatnonzero(flags).max(initial=-1))


def scan(history: History, timeline: Timeline) -> dict[str, list[View]]:
    """Return the views of every target, except dead letters. Raises `ValueError` if a final read is missing."""
    dead_letters = {target.dead_letters for target in history.targets.values()}
    result: dict[str, list[View]] = {}
    for target in history.targets.values():
        if target.name in dead_letters:
            continue
        pardoned = _pardoned(history, timeline, target)
        result[target.name] = Scan(history, timeline, target, pardoned).views()
        if not any(view.read.final for view in result[target.name]):
            raise ValueError(f"the history has no final read of target '{target.name}', so it proves nothing")
    return result


def _pardoned(history: History, timeline: Timeline, target: CheckedTarget) -> Flags:
    flags = np.zeros(timeline.source.num_rows, dtype=bool)
    for read in history.reads:
        if read.final and read.target == target.dead_letters:
            index = timeline.locate(read.rows())
            flags[index[index != UNKNOWN]] = True
    return flags


def _plain(rows: pa.Table, row: int) -> dict[str, object]:
    names = [name for name in (*SCHEMA.names, "sink") if name in rows.column_names]
    return {name: rows[name][row].as_py() for name in names}


@dataclass(frozen=True, slots=True)
class Anomaly:
    """A violation. ``name`` is a key of `ANOMALIES`. ``count`` is in the unit of the message."""

    name: str
    target: str
    message: str
    count: int = 1

    def __str__(self) -> str:
        return f"{self.name}: {self.target}: {self.message}" if self.target else f"{self.name}: {self.message}"


@dataclass(slots=True)
class Evidence:
    """A history whose reads are compared with the source rows."""

    history: History
    timeline: Timeline
    progress_within: float
    views: dict[str, list[View]] = field(default_factory=dict)

    @classmethod
    def of(cls, history: History, progress_within: float) -> Evidence:
        """Compare every read. Raises `ValueError` if a final read is missing or offsets are not dense."""
        timeline = Timeline(history)
        return cls(history, timeline, progress_within, scan(history, timeline))

    def targets(self) -> Iterator[tuple[CheckedTarget, list[View]]]:
        """Yield each target with its views, oldest first."""
        for name, views in self.views.items():
            yield self.history.targets[name], views

    def finals(self) -> Iterator[tuple[CheckedTarget, View]]:
        """Yield each target with its final read."""
        for target, views in self.targets():
            yield target, [view for view in views if view.read.final][-1]

    def first_seen(self) -> Iterator[tuple[CheckedTarget, list[View], dict[tuple[int, str], int]]]:
        """Yield each target with its views and, for each epoch's position and attempt, the first view that shows it."""
        for target, views in self.targets():
            first: dict[tuple[int, str], int] = {}
            for place, view in enumerate(views):
                for pair in view.attempts:
                    first.setdefault(pair, place)
            yield target, views, dict(sorted(first.items()))

    def name(self, position: int | np.integer[Any]) -> str:
        """Return a readable name of an epoch."""
        return self.timeline.name(int(position))
