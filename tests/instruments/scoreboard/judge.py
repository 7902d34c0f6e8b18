"""Judge a history by the rows' places in the source alone: the same for systems that know epochs, and for others.

`epochsink.testing.check` asks more, but needs the stamps of epochs and attempts that a plain sink cannot write. Times
and epochs are those of the checkpoint. Spark's: ``offsets/N`` says which rows an epoch has, ``commits/N`` that it is
decided. Flink's: see `flink_checkpoints`.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from epochsink_devkit.history.timeline import UNKNOWN, Timeline

if TYPE_CHECKING:
    import numpy.typing as npt
    import pyarrow as pa

    from epochsink_devkit.history import History
    from epochsink_devkit.history.history import Read

    Flags = npt.NDArray[np.bool_]
    Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Verdict:
    """What became of the rows.

    ``lost``: rows of decided epochs that the last read lacks; in a keyed target, keys that lack their newest row.
    ``doubled``: rows (in a keyed target keys) that the last read shows more than once. ``early``: rows that a read
    showed before their epoch was decided. ``stuck``: rows that are in no decided epoch at the end, after a run without
    kills. ``unwatched``: kills after which nobody read before the next epoch was decided; they prove less.
    """

    rows: int
    lost: int
    doubled: int
    early: int
    stuck: int
    reads: int
    kills: int
    unwatched: int


def judge(history: History, target: str) -> Verdict:
    """Judge one target. Raises ValueError if the history proves nothing, or the target holds rows that nobody sent."""
    timeline = Timeline(history)
    reads = [read for read in history.reads if read.target == target]
    finals = [read for read in reads if read.final]
    if not finals:
        raise ValueError(f"the history has no final read of '{target}', so it proves nothing")
    decided = _by_row(timeline, [epoch.committed_at is not None for epoch in timeline.epochs], none=False)
    undecided_until = _by_row(timeline, [epoch.absent_until for epoch in timeline.epochs], none=np.inf)
    early = np.zeros(len(decided), dtype=bool)
    for read in reads:
        shown = _copies(timeline, read.rows()) > 0
        early |= shown & (undecided_until > read.ended)
    copies = _copies(timeline, finals[-1].rows())
    keyed = history.targets[target].keyed
    lost, doubled = _of_keys(timeline, decided, copies) if keyed else _of_rows(decided, copies)
    return Verdict(
        rows=len(decided),
        lost=lost,
        doubled=doubled,
        early=int(early.sum()),
        stuck=int((~decided).sum()),
        reads=sum(1 + len(read.between) for read in reads),
        kills=history.counts.get("killed", 0),
        unwatched=_unwatched(history, reads),
    )


def _by_row(timeline: Timeline, of_epochs: list[Any], *, none: object) -> npt.NDArray[Any]:
    """Return for each source row what holds for its epoch, ``none`` for a row that is in no epoch."""
    values: npt.NDArray[Any] = np.array([*of_epochs, none])[timeline.position]
    return values


def _copies(timeline: Timeline, rows: pa.Table) -> Ints:
    """Return how often each source row is there."""
    index = timeline.locate(rows)
    strange = index == UNKNOWN
    for name in ("key", "kver", "op"):
        strange |= rows[name].to_numpy() != timeline.source[name].to_numpy()[np.maximum(index, 0)]
    if strange.any():
        raise ValueError(f"{strange.sum()} rows that nobody sent like this: {rows.filter(strange).slice(0, 3)}")
    return np.bincount(index, minlength=timeline.source.num_rows)


def _of_rows(decided: Flags, copies: Ints) -> tuple[int, int]:
    return int((decided & (copies == 0)).sum()), int((copies > 1).sum())


def _of_keys(timeline: Timeline, decided: Flags, copies: Ints) -> tuple[int, int]:
    newest = timeline.newest_of_keys(decided)
    held = np.flatnonzero(copies)
    shown = np.full(timeline.key_count, -1, dtype=np.int64)
    np.maximum.at(shown, timeline.key_code[held], timeline.rank[held])
    lost = shown[timeline.key_code[newest]] < timeline.rank[newest]
    of_key = np.bincount(timeline.key_code, weights=copies, minlength=timeline.key_count)
    return int(lost.sum()), int((of_key > 1).sum())


def _unwatched(history: History, reads: list[Read]) -> int:
    looks = sorted(at for read in reads if not read.final for at in (*read.between, read.began))
    decisions = sorted(epoch.committed_at for epoch in history.epochs.values() if epoch.committed_at is not None)

    def after(times: list[float], at: float) -> float:
        place = bisect_left(times, at)
        return times[place] if place < len(times) else np.inf

    return sum(after(looks, at) > after(decisions, at) for at, _ in history.kills)
