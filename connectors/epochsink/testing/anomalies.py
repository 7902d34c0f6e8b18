"""Every anomaly that a history can show: one function each, from evidence to findings."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from epochsink.testing.timeline import Timeline
from epochsink.testing.views import View, scan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

    from epochsink.testing.history import History, Target
    from epochsink.testing.views import Findings

NEVER: Final = float("inf")


@dataclass(frozen=True, slots=True)
class Anomaly:
    """A violation. ``name`` is a key of `ANOMALIES`; ``count`` is in the message's terms."""

    name: str
    target: str
    message: str
    count: int = 1

    def __str__(self) -> str:
        return f"{self.name}: {self.target}: {self.message}" if self.target else f"{self.name}: {self.message}"


@dataclass(slots=True)
class Evidence:
    """A history with every read already compared with the source rows."""

    history: History
    timeline: Timeline
    progress_within: float
    views: dict[str, list[View]] = field(default_factory=dict)

    @classmethod
    def of(cls, history: History, progress_within: float) -> Evidence:
        """Judge every read. Raises ValueError if nothing can be concluded: no final read, offsets not dense."""
        timeline = Timeline(history)
        return cls(history, timeline, progress_within, scan(history, timeline))

    def targets(self) -> Iterator[tuple[Target, list[View]]]:
        """Yield each target with its views, oldest first."""
        for name, views in self.views.items():
            yield self.history.targets[name], views

    def finals(self) -> Iterator[tuple[Target, View]]:
        """Yield each target with its final read."""
        for target, views in self.targets():
            yield target, [view for view in views if view.read.final][-1]

    def first_seen(self) -> Iterator[tuple[Target, list[View], dict[tuple[int, str], int]]]:
        """Yield each target with its views and, for each (epoch's position, attempt), the first view that shows it."""
        for target, views in self.targets():
            first: dict[tuple[int, str], int] = {}
            for place, view in enumerate(views):
                for pair in view.attempts:
                    first.setdefault(pair, place)
            yield target, views, dict(sorted(first.items()))

    def name(self, position: int | np.integer[Any]) -> str:
        """Return an epoch's name for people."""
        return self.timeline.name(int(position))


def lost(evidence: Evidence) -> list[Anomaly]:
    """Find source rows of decided epochs that the target does not hold in the end."""
    return [
        Anomaly("lost", target.name, _missing(evidence, view), int(view.missing.sum()))
        for target, view in evidence.finals()
        if view.missing.any() and target.dead_letters is None
    ]


def silent_drop(evidence: Evidence) -> list[Anomaly]:
    """Find source rows that are neither in the target nor among its dead letters in the end."""
    found = []
    for target, view in evidence.finals():
        if view.missing.any() and target.dead_letters is not None:
            message = f"{_missing(evidence, view)}, nor in '{target.dead_letters}'"
            found.append(Anomaly("silent drop", target.name, message, int(view.missing.sum())))
    return found


def _missing(evidence: Evidence, view: View) -> str:
    at = np.flatnonzero(view.missing)
    names = ", ".join(evidence.name(position) for position in at[:3])
    return f"{int(view.missing.sum())} row(s) of {len(at)} epoch(s) ({names}) are not there"


def duplicate(evidence: Evidence) -> list[Anomaly]:
    """Find source rows that a read saw more than once, or a key twice in a keyed target."""
    return _of_rows(evidence, "duplicate", lambda view: view.duplicate, "row(s) seen more than once")


def corrupt(evidence: Evidence) -> list[Anomaly]:
    """Find rows that are not source rows, are damaged, have a wrong epoch, or are in the wrong target."""
    return _of_rows(evidence, "corrupt", lambda view: view.corrupt, "row(s) that were not sent like this")


def stale(evidence: Evidence) -> list[Anomaly]:
    """Find keys whose version went down, and deleted keys that came back."""
    return _of_rows(evidence, "stale", lambda view: view.stale, "row(s) older than an earlier read's")


def _of_rows(evidence: Evidence, name: str, find: Callable[[View], Findings], what: str) -> list[Anomaly]:
    found = []
    for target, views in evidence.targets():
        findings = [find(view) for view in views if find(view).count]
        if findings:
            worst = max(findings, key=lambda one: one.count)
            message = f"{worst.count} {what}, by {len(findings)} read(s): {'; '.join(worst.examples)}"
            found.append(Anomaly(name, target.name, message, worst.count))
    return found


def early(evidence: Evidence) -> list[Anomaly]:
    """Find rows seen by a read that had ended before ``commits/N`` existed."""
    absent_until = np.array([epoch.absent_until for epoch in evidence.timeline.epochs], dtype=float)
    return _of_epochs(
        evidence,
        "early",
        lambda view: (view.seen > 0) & (absent_until > view.read.ended),
        "was seen before it was decided",
    )


def torn(evidence: Evidence) -> list[Anomaly]:
    """Find epochs of which a read saw a part."""
    return _of_epochs(
        evidence, "torn", lambda view: _firm(view) & (view.missing > 0) & (view.seen > 0), "is visible in part"
    )


def gap(evidence: Evidence) -> list[Anomaly]:
    """Find epochs of which a read saw nothing while it saw a later one."""
    return _of_epochs(
        evidence,
        "gap",
        lambda view: _firm(view) & (view.missing > 0) & (view.seen == 0),
        "is invisible while a later one is visible",
    )


def false_ack(evidence: Evidence) -> list[Anomaly]:
    """Find epochs that the ledger called done and a read that began after that did not show whole."""
    return _of_epochs(
        evidence,
        "false ack",
        lambda view: view.acknowledged & (view.missing > 0),
        "is done in the ledger and not whole here",
    )


def _firm(view: View) -> npt.NDArray[np.bool_]:
    firm: npt.NDArray[np.bool_] = np.arange(len(view.seen)) <= view.firm
    return firm


def _of_epochs(
    evidence: Evidence, name: str, shows: Callable[[View], npt.NDArray[np.bool_]], what: str
) -> list[Anomaly]:
    found = []
    for target, views in evidence.targets():
        reads = sum((shows(view).astype(int) for view in views), start=np.zeros(len(evidence.timeline), dtype=int))
        for at in np.flatnonzero(reads):
            message = f"{evidence.name(at)} {what} ({reads[at]} read(s))"
            found.append(Anomaly(name, target.name, message, int(reads[at])))
    return found


def aborted_read(evidence: Evidence) -> list[Anomaly]:
    """Find visible rows of attempts that were aborted."""
    aborted = {name for name, attempt in evidence.history.attempts.items() if attempt.aborted}
    return [
        Anomaly("aborted read", target.name, f"{evidence.name(at)} shows the aborted attempt {attempt}")
        for target, _, first in evidence.first_seen()
        for at, attempt in first
        if attempt in aborted
    ]


def mixed_attempts(evidence: Evidence) -> list[Anomaly]:
    """Find epochs of which two attempts were seen, in one target or in two."""
    attempts: dict[int, dict[str, set[str]]] = {}
    for target, _, first in evidence.first_seen():
        for at, attempt in first:
            attempts.setdefault(at, {}).setdefault(attempt, set()).add(target.name)
    found = []
    for at, seen in sorted(attempts.items()):
        if len(seen) > 1:
            places = ", ".join(sorted(set().union(*seen.values())))
            message = f"{evidence.name(at)} shows {len(seen)} attempts: {', '.join(sorted(seen))}"
            found.append(Anomaly("mixed attempts", places, message))
    return found


def divergence(evidence: Evidence) -> list[Anomaly]:
    """Find decided epochs that in the end one target holds and another does not."""
    holds = {target.name: view.missing == 0 for target, view in evidence.finals()}
    found = []
    for at in range(len(evidence.timeline)):
        lacking = sorted(name for name, whole in holds.items() if not whole[at])
        if 0 < len(lacking) < len(holds):
            message = f"{evidence.name(at)} is missing here and whole elsewhere"
            found.append(Anomaly("divergence", ", ".join(lacking), message))
    return found


def zombie_write(evidence: Evidence) -> list[Anomaly]:
    """Find attempts of a superseded driver that appeared after everything it could legitimately leave was visible."""
    deadlines = _Deadlines(evidence.history)
    found = []
    for target, views, first in evidence.first_seen():
        for (at, attempt), place in first.items():
            # an earlier read, which had already to show it, did not
            if place and views[place - 1].read.began > deadlines.of(attempt) + target.lag:
                message = f"attempt {attempt} of {evidence.name(at)} appeared after a newer driver had passed it"
                found.append(Anomaly("zombie write", target.name, message))
    return found


class _Deadlines:
    """When a later driver had finished foreachBatch of a later epoch: nothing older can be pending then."""

    def __init__(self, history: History) -> None:
        self._attempts = history.attempts
        self._order = {driver: place for place, driver in enumerate(history.drivers)}
        self._known: dict[tuple[str, int], tuple[list[int], list[float]]] = {}

    def of(self, name: str) -> float:
        """Return the time after which an attempt may no longer appear."""
        attempt = self._attempts.get(name)
        if attempt is None:
            return NEVER
        epochs, times = self._after(attempt.run, self._order.get(attempt.driver, len(self._order)))
        return times[bisect_right(epochs, attempt.epoch)]

    def _after(self, run: str, place: int) -> tuple[list[int], list[float]]:
        """Return the epochs that drivers after this one finished and, for each, when it or a later one first was."""
        if (run, place) not in self._known:
            later = sorted(
                (attempt.epoch, attempt.returned_at)
                for attempt in self._attempts.values()
                if attempt.returned_at is not None and attempt.run == run and self._order[attempt.driver] > place
            )
            earliest = list(accumulate([NEVER, *(at for _, at in reversed(later))], min))
            self._known[run, place] = ([epoch for epoch, _ in later], earliest[::-1])
        return self._known[run, place]


def swallowed(evidence: Evidence) -> list[Anomaly]:
    """Find epochs of a new checkpoint that are wholly missing, with numbers that an older checkpoint had used."""
    epochs, runs = evidence.timeline.epochs, evidence.timeline.runs
    highest = {run: max((epoch.number for epoch in epochs if epoch.run == run), default=-1) for run in runs}
    found = []
    for target, view in evidence.finals():
        for at in np.flatnonzero((view.missing > 0) & (view.seen == 0)):
            epoch = epochs[at]
            older = [run for run, place in runs.items() if place < runs[epoch.run] and highest[run] >= epoch.number]
            if older:
                message = f"{evidence.name(at)} is missing, and {older[0]} had an epoch of that number"
                found.append(Anomaly("swallowed", target.name, message, int(view.missing[at])))
    return found


def orphan(evidence: Evidence) -> list[Anomaly]:
    """Find what was prepared or staged and left over."""
    return [Anomaly("orphan", target, what) for target, kind, what in evidence.history.leftovers if kind == "orphan"]


def pin(evidence: Evidence) -> list[Anomaly]:
    """Find partitions whose read_committed readers are held back."""
    return [Anomaly("pin", target, what) for target, kind, what in evidence.history.leftovers if kind == "pin"]


def stuck(evidence: Evidence) -> list[Anomaly]:
    """Find a pipeline that made no progress after healing, or left decided work or input undone."""
    return [*_no_progress(evidence), *_not_drained(evidence), *_last_invisible(evidence)]


def _no_progress(evidence: Evidence) -> list[Anomaly]:
    history = evidence.history
    if history.healed_at is None:
        return []
    end = history.ended_at if history.drained_at is None else history.drained_at
    decided = [epoch.committed_at for epoch in evidence.timeline.epochs if epoch.committed_at is not None]
    times = sorted([history.healed_at, end, *(at for at in decided if history.healed_at < at < end)])
    longest = float(np.diff(times).max())
    if longest <= evidence.progress_within:
        return []
    return [Anomaly("stuck", "", f"no epoch was decided for {longest:.0f} s after healing")]


def _not_drained(evidence: Evidence) -> list[Anomaly]:
    decided = [epoch.committed_at is not None for epoch in evidence.timeline.epochs]
    undone = int((~np.array([*decided, False], dtype=bool)[evidence.timeline.position]).sum())
    if evidence.history.drained_at is not None and not undone:
        return []
    return [Anomaly("stuck", "", f"the input was not drained: {undone} row(s) are in no decided epoch", undone)]


def _last_invisible(evidence: Evidence) -> list[Anomaly]:
    epochs = evidence.timeline.epochs
    newest = max((at for at, epoch in enumerate(epochs) if epoch.committed_at is not None), default=None)
    return [
        Anomaly("stuck", target.name, f"{evidence.name(newest)}, the last decided, never appeared")
        for target, view in evidence.finals()
        if newest is not None and view.missing[newest] and not view.seen[newest]
    ]


ANOMALIES: Final[dict[str, tuple[Callable[[Evidence], list[Anomaly]], str]]] = {
    "lost": (lost, "a row of a decided epoch is missing in the end"),
    "duplicate": (duplicate, "a row was seen more than once"),
    "aborted read": (aborted_read, "a row of an aborted attempt was seen"),
    "early": (early, "a row was seen before commits/N existed"),
    "torn": (torn, "some but not all rows of an epoch were seen"),
    "mixed attempts": (mixed_attempts, "two attempts at one epoch were seen"),
    "divergence": (divergence, "the sinks hold different epochs in the end"),
    "stale": (stale, "a key went back, or came back"),
    "gap": (gap, "the epochs seen are not a prefix"),
    "zombie write": (zombie_write, "a superseded driver's rows appeared late"),
    "swallowed": (swallowed, "a new checkpoint's epoch was taken for an old one's"),
    "silent drop": (silent_drop, "a row is neither in the sink nor a dead letter"),
    "false ack": (false_ack, "the ledger said done, the sink lacked it"),
    "orphan": (orphan, "something prepared or staged was left over"),
    "pin": (pin, "readers are held back by an open transaction"),
    "stuck": (stuck, "no progress, or decided work left undone"),
    "corrupt": (corrupt, "a row that was not sent like this"),
}
"""Every anomaly: the function that finds it, and how it shows."""


def find_all(evidence: Evidence) -> tuple[Anomaly, ...]:
    """Return all violations, in the order of `ANOMALIES`."""
    return tuple(anomaly for find, _ in ANOMALIES.values() for anomaly in find(evidence))
