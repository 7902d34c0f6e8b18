"""Find rows of attempts that must not be visible: aborted, late, unknown, or several of one epoch."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import Final

from epochsink_devkit.history.history import EpochFacts, History
from epochsink_devkit.history.views import Anomaly, Evidence

NEVER: Final = float("inf")


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
    """Find epochs of which two attempts were seen, in the same target or in two."""
    attempts: dict[int, dict[str, set[str]]] = {}
    for target, _, first in evidence.first_seen():
        for at, attempt in first:
            attempts.setdefault(at, {}).setdefault(attempt, set()).add(target.name)
    anomalies = []
    for at, seen in sorted(attempts.items()):
        if len(seen) > 1:
            places = ", ".join(sorted(set().union(*seen.values())))
            message = f"{evidence.name(at)} shows {len(seen)} attempts: {', '.join(sorted(seen))}"
            anomalies.append(Anomaly("mixed attempts", places, message))
    return anomalies


def zombie_write(evidence: Evidence) -> list[Anomaly]:
    """Find attempts of a superseded driver that appeared too late: all that it could legitimately leave was visible."""
    deadlines = _Deadlines(evidence.history)
    anomalies = []
    for target, views, first in evidence.first_seen():
        for (at, attempt), place in first.items():
            # An earlier read should have shown it already, and did not.
            if place and views[place - 1].read.began > deadlines.of(attempt) + target.lag:
                message = f"attempt {attempt} of {evidence.name(at)} appeared after a newer driver had passed it"
                anomalies.append(Anomaly("zombie write", target.name, message))
    return anomalies


def _succession(history: History) -> dict[str, int]:
    """Return the place of each driver in the order in which they took the ledger, whichever was started first.

    One that never took it comes before all that did. Where nobody took a ledger, the order is that of the starts.
    """
    started = {driver: place for place, driver in enumerate(history.drivers)}

    def taken(driver: str) -> tuple[int, int]:
        take = history.takes.get(driver)
        # two copies of a ledger may give one generation twice
        return (-1 if take is None else take.generation, started[driver])

    return {driver: place for place, driver in enumerate(sorted(started, key=taken))}


class _Deadlines:
    """Knows when a later driver had finished foreachBatch of a later epoch: no older epoch can be pending then."""

    def __init__(self, history: History) -> None:
        self._attempts = history.attempts
        self._order = _succession(history)
        self._known: dict[tuple[str, int], tuple[list[int], list[float]]] = {}

    def of(self, name: str) -> float:
        """Return the time after which an attempt may no longer appear."""
        attempt = self._attempts.get(name)
        if attempt is None:
            return NEVER
        epochs, times = self._after(attempt.run, self._order.get(attempt.driver, len(self._order)))
        return times[bisect_right(epochs, attempt.epoch)]

    def _after(self, run: str, place: int) -> tuple[list[int], list[float]]:
        """Return the epochs that later drivers finished and, for each, when it or a later one was first finished."""
        if (run, place) not in self._known:
            later = sorted(
                (attempt.epoch, attempt.returned_at)
                for attempt in self._attempts.values()
                if attempt.returned_at is not None and attempt.run == run and self._order[attempt.driver] > place
            )
            earliest = list(accumulate([NEVER, *(at for _, at in reversed(later))], min))
            self._known[run, place] = ([epoch for epoch, _ in later], earliest[::-1])
        return self._known[run, place]


def unknown_writer(evidence: Evidence) -> list[Anomaly]:
    """Find visible rows of attempts that never began, or that did not record their epoch."""
    writers = Writers(evidence.history)
    anomalies = []
    for target, _, first in evidence.first_seen():
        for at, attempt in first:
            flaw = writers.flaw(evidence.timeline.epochs[at], attempt)
            if flaw and not writers.is_aborted(attempt):
                anomalies.append(Anomaly("unknown writer", target.name, f"{evidence.name(at)} shows {attempt}, {flaw}"))
    return anomalies


class Writers:
    """Tells which attempt may have recorded an epoch: one that was running when the ledger's record appeared.

    An attempt that raised or was killed may have recorded it: the outcome of its append was unknown, and later drivers
    commit it. It cannot have done so if the ledger held the record before the attempt began, or lacked it when the next
    attempt began and its driver had the ledger, which no earlier driver has any more then. A driver that never took the
    ledger has recorded nothing, if the history says of any driver of the run when it took it. If the history holds no
    record, an attempt that raised did not record the epoch unless another attempt of it returned.
    """

    def __init__(self, history: History) -> None:
        self._attempts = history.attempts
        self._watched = any(epoch.recorded_at is not None for epoch in history.epochs.values())
        self._returned = {(one.run, one.epoch) for one in history.attempts.values() if one.returned_at is not None}
        self._able_at = _able_at(history)
        self._passed_at: dict[str, float] = {}
        order = _succession(history)
        next_at: dict[str, float] = {}
        for one in sorted(history.attempts.values(), key=lambda one: (-order[one.driver], -one.invoked_at)):
            self._passed_at[one.name] = next_at.get(one.run, NEVER)
            next_at[one.run] = min(self._passed_at[one.name], self._able_at[one.name])

    def is_aborted(self, name: str) -> bool:
        """Return whether an attempt was permanently aborted."""
        return name in self._attempts and self._attempts[name].aborted

    def flaw(self, epoch: EpochFacts, name: str) -> str | None:
        """Return the reason why an attempt cannot have written rows of an epoch; None if it can."""
        attempt = self._attempts.get(name)
        if attempt is None or (attempt.run, attempt.epoch) != (epoch.run, epoch.number):
            return "an attempt that never began"
        if self._able_at[name] == NEVER:
            return "an attempt of a driver that never took the ledger"
        if not self._watched:
            raised = attempt.raised and (epoch.run, epoch.number) not in self._returned
            return "an attempt that raised" if raised else None
        if epoch.recorded_at is None:
            return "an attempt of an epoch that the ledger does not hold"
        if self._able_at[name] > epoch.recorded_at or self._passed_at[name] <= epoch.unrecorded_until:
            return "an attempt that did not record it"
        return None


def _able_at(history: History) -> dict[str, float]:
    """Return since when each attempt could record: it had begun, and its driver had taken the ledger.

    A driver's first call on a new checkpoint begins before that.
    """
    runs = {take.run for take in history.takes.values()}

    def owned_at(driver: str, run: str) -> float:
        if run not in runs:
            return float("-inf")
        return history.takes[driver].at if driver in history.takes else NEVER

    return {one.name: max(one.invoked_at, owned_at(one.driver, one.run)) for one in history.attempts.values()}
