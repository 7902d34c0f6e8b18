"""Find the anomalies in a history, with one function for each kind."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Final

import numpy as np
import numpy.typing as npt

from epochsink_devkit.history.attempts import NEVER, Writers, aborted_read, mixed_attempts, unknown_writer, zombie_write
from epochsink_devkit.history.history import CheckedTarget, History
from epochsink_devkit.history.timeline import UNKNOWN
from epochsink_devkit.history.views import Anomaly, Evidence, Findings, View, attempts_in, identify

READ_BEGINS_SECONDS: Final = 1.0
"""How long a reader may need to begin a read after a kill."""


def lost(evidence: Evidence) -> list[Anomaly]:
    """Find source rows of decided epochs that are missing in the target at the end."""
    return [
        Anomaly("lost", target.name, _missing(evidence, view), int(view.missing.sum()))
        for target, view in evidence.finals()
        if view.missing.any() and target.dead_letters is None
    ]


def silent_drop(evidence: Evidence) -> list[Anomaly]:
    """Find source rows that are neither in the target nor among its dead letters at the end."""
    anomalies = []
    for target, view in evidence.finals():
        if view.missing.any() and target.dead_letters is not None:
            message = f"{_missing(evidence, view)}, nor in '{target.dead_letters}'"
            anomalies.append(Anomaly("silent drop", target.name, message, int(view.missing.sum())))
    return anomalies


def _missing(evidence: Evidence, view: View) -> str:
    at = np.flatnonzero(view.missing)
    names = ", ".join(evidence.name(position) for position in at[:3])
    return f"{int(view.missing.sum())} row(s) of {len(at)} epoch(s) ({names}) are missing"


def duplicate(evidence: Evidence) -> list[Anomaly]:
    """Find source rows that a read saw more than once, and keys that it saw twice in a keyed target."""
    return _of_rows(evidence, "duplicate", lambda view: view.duplicate, "row(s) seen more than once")


def corrupt(evidence: Evidence) -> list[Anomaly]:
    """Find rows that are not source rows, are damaged, have the wrong epoch, or are in the wrong target."""
    return _of_rows(evidence, "corrupt", lambda view: view.corrupt, "row(s) that were not sent like this")


def stale(evidence: Evidence) -> list[Anomaly]:
    """Find keys whose version went down, and deleted keys that came back."""
    return _of_rows(evidence, "stale", lambda view: view.stale, "row(s) older than an earlier read's")


def disorder(evidence: Evidence) -> list[Anomaly]:
    """Find rows of a log that come after a row of a later epoch, or after a newer row of their key."""
    return _of_rows(evidence, "disorder", lambda view: view.disorder, "row(s) behind later ones")


def _of_rows(evidence: Evidence, name: str, find: Callable[[View], Findings], what: str) -> list[Anomaly]:
    anomalies = []
    for target, views in evidence.targets():
        findings = [find(view) for view in views if find(view).count]
        if findings:
            worst = max(findings, key=lambda one: one.count)
            message = f"{worst.count} {what}, by {len(findings)} read(s): {'; '.join(worst.examples)}"
            anomalies.append(Anomaly(name, target.name, message, worst.count))
    return anomalies


def early(evidence: Evidence) -> list[Anomaly]:
    """Find rows that a read saw before ``commits/N`` existed."""
    absent_until = np.array([epoch.absent_until for epoch in evidence.timeline.epochs], dtype=float)
    return _of_epochs(
        evidence,
        "early",
        lambda view: (view.seen > 0) & (absent_until > view.read.ended),
        "was seen before it was decided",
    )


def torn(evidence: Evidence) -> list[Anomaly]:
    """Find epochs of which a read saw only a part."""
    return _of_epochs(
        evidence, "torn", lambda view: _firm(view) & (view.missing > 0) & (view.seen > 0), "is visible in part"
    )


def gap(evidence: Evidence) -> list[Anomaly]:
    """Find epochs of which a read saw nothing, although it saw a later one."""
    return _of_epochs(
        evidence,
        "gap",
        lambda view: _firm(view) & (view.missing > 0) & (view.seen == 0),
        "is invisible while a later one is visible",
    )


def false_ack(evidence: Evidence) -> list[Anomaly]:
    """Find epochs that the ledger called done and that a later read did not show completely."""
    return _of_epochs(
        evidence,
        "false ack",
        lambda view: view.acknowledged & (view.missing > 0),
        "is done in the ledger and not complete here",
    )


def flicker(evidence: Evidence) -> list[Anomaly]:
    """Find epochs that a read showed in part although an earlier read had shown them completely."""
    return _of_epochs(evidence, "flicker", lambda view: view.gone > 0, "had been visible and was no longer")


def _firm(view: View) -> npt.NDArray[np.bool_]:
    firm: npt.NDArray[np.bool_] = np.arange(len(view.seen)) <= view.firm
    return firm


def _of_epochs(
    evidence: Evidence, name: str, shows: Callable[[View], npt.NDArray[np.bool_]], what: str
) -> list[Anomaly]:
    anomalies = []
    for target, views in evidence.targets():
        reads = sum((shows(view).astype(int) for view in views), start=np.zeros(len(evidence.timeline), dtype=int))
        for at in np.flatnonzero(reads):
            message = f"{evidence.name(at)} {what} ({reads[at]} read(s))"
            anomalies.append(Anomaly(name, target.name, message, int(reads[at])))
    return anomalies


def divergence(evidence: Evidence) -> list[Anomaly]:
    """Find decided epochs that are in one target and not in another at the end."""
    holds = {target.name: view.missing == 0 for target, view in evidence.finals()}
    anomalies = []
    for at in range(len(evidence.timeline)):
        lacking = sorted(name for name, whole in holds.items() if not whole[at])
        if 0 < len(lacking) < len(holds):
            message = f"{evidence.name(at)} is missing here and complete elsewhere"
            anomalies.append(Anomaly("divergence", ", ".join(lacking), message))
    return anomalies


def swallowed(evidence: Evidence) -> list[Anomaly]:
    """Find completely missing epochs of a new checkpoint whose numbers an older checkpoint had used."""
    epochs, runs = evidence.timeline.epochs, evidence.timeline.runs
    highest = {run: max((epoch.number for epoch in epochs if epoch.run == run), default=-1) for run in runs}
    anomalies = []
    for target, view in evidence.finals():
        for at in np.flatnonzero((view.missing > 0) & (view.seen == 0)):
            epoch = epochs[at]
            older = [run for run, place in runs.items() if place < runs[epoch.run] and highest[run] >= epoch.number]
            if older:
                message = f"{evidence.name(at)} is missing, and {older[0]} had an epoch of that number"
                anomalies.append(Anomaly("swallowed", target.name, message, int(view.missing[at])))
    return anomalies


def letters(evidence: Evidence) -> list[Anomaly]:
    """Find dead letters that are duplicated, also in the target, or of an attempt that does not count."""
    return [
        Anomaly("letters", target.dead_letters, message, count)
        for target, view in evidence.finals()
        if target.dead_letters is not None
        for count, message in _bad_letters(evidence, target, view)
        if count
    ]


def _bad_letters(evidence: Evidence, target: CheckedTarget, view: View) -> Iterator[tuple[int, str]]:
    timeline, writers = evidence.timeline, Writers(evidence.history)
    for read in evidence.history.reads:
        if not read.final or read.target != target.dead_letters:
            continue
        damaged, rows = Findings(), read.rows()
        index = identify(rows, timeline, target.name, damaged)
        letters_of = np.bincount(index[index != UNKNOWN], minlength=timeline.source.num_rows)
        accepted = timeline.locate(view.read.rows())
        both = np.intersect1d(accepted[accepted != UNKNOWN], np.flatnonzero(letters_of))
        yield damaged.count, f"{damaged.count} row(s) that were not sent like this: {'; '.join(damaged.examples)}"
        yield int((letters_of > 1).sum()), f"{int((letters_of > 1).sum())} row(s) more than once"
        yield len(both), f"{len(both)} row(s) that '{target.name}' holds too"
        of_target = attempts_in(view.read.rows(), timeline)
        for at, attempt in sorted(attempts_in(rows, timeline)):
            flaw = _flaw_of_letter(evidence, writers, of_target, at, attempt)
            yield int(flaw is not None), f"{evidence.name(at)} has rows of {attempt}, {flaw}"


def _flaw_of_letter(
    evidence: Evidence, writers: Writers, of_target: set[tuple[int, str]], at: int, attempt: str
) -> str | None:
    epoch = evidence.timeline.epochs[at]
    if epoch.committed_at is None:
        return "and was never decided"
    if writers.is_aborted(attempt):
        return "an attempt that was aborted"
    accepted = {name for position, name in of_target if position == at}
    if accepted and attempt not in accepted:
        return "an attempt other than the target's"
    return writers.flaw(epoch, attempt)


def blind(evidence: Evidence) -> list[Anomaly]:
    """Find kills that no read followed before the recovery although it could have, or all kills if no read succeeded.

    Then no reader can have seen the state after the kill. The recovery is the first call of a driver that was started
    after the kill, or else the end of the run.
    """
    kills, anomalies = len(list(_recoveries(evidence.history))), []
    for target, unread in unread_kills(evidence):
        missed = [what for what, unreadable in unread if not unreadable or len(unread) == kills]
        if missed:
            message = f"not read between {len(missed)} of {kills} kill(s) and the recovery, the first: {missed[0]}"
            anomalies.append(Anomaly("blind", target.name, message, len(missed)))
    return anomalies


def unread_kills(evidence: Evidence) -> Iterator[tuple[CheckedTarget, list[tuple[str, bool]]]]:
    """Yield each target with the kills that no read followed before the recovery, and whether none could.

    None could if the target was unreachable all that time, but for the second that a reader may need to begin.
    """
    kills = list(_recoveries(evidence.history))
    for target, views in evidence.targets():
        moments = (at for view in views if not view.read.final for at in (*view.read.between, view.read.began))
        reads = [*sorted(moments), NEVER]
        spans = [(began, ended) for name, began, ended in evidence.history.unreachable if name == target.name]
        unread = []
        for at, end, what in kills:
            if reads[bisect_left(reads, at)] > end:
                unreachable = sum(max(0.0, min(end, ended) - max(at, began)) for began, ended in spans)
                unread.append((what, end - at - unreachable <= READ_BEGINS_SECONDS))
        yield target, unread


def _recoveries(history: History) -> Iterator[tuple[float, float, str]]:
    """Yield each kill of the run with its time and the time of the recovery from it."""
    end = history.ended_at if history.drained_at is None else history.drained_at
    first: dict[str, float] = {}
    for attempt in history.attempts.values():
        first[attempt.driver] = min(attempt.invoked_at, first.get(attempt.driver, NEVER))
    started = sorted((at, driver) for driver, at in history.drivers.items())
    recovered = [*accumulate((first.get(driver, NEVER) for _, driver in reversed(started)), min, initial=end)][::-1]
    for at, what in history.kills:
        if at < end:
            yield at, recovered[bisect_right(started, (at, ""))], what


def orphan(evidence: Evidence) -> list[Anomaly]:
    """Find leftovers that are prepared or staged."""
    return [Anomaly("orphan", target, what) for target, kind, what in evidence.history.leftovers if kind == "orphan"]


def pin(evidence: Evidence) -> list[Anomaly]:
    """Find partitions whose read_committed readers are blocked."""
    return [Anomaly("pin", target, what) for target, kind, what in evidence.history.leftovers if kind == "pin"]


def stuck(evidence: Evidence) -> list[Anomaly]:
    """Find a pipeline that made no progress after healing, or did not finish decided epochs or its input."""
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
    "lost": (lost, "a row of a decided epoch is missing at the end"),
    "duplicate": (duplicate, "a row was seen more than once"),
    "aborted read": (aborted_read, "a row of an aborted attempt was seen"),
    "early": (early, "a row was seen before commits/N existed"),
    "torn": (torn, "some but not all rows of an epoch were seen"),
    "unknown writer": (unknown_writer, "a row of an attempt that never began, or that did not record it"),
    "mixed attempts": (mixed_attempts, "two attempts of one epoch were seen"),
    "divergence": (divergence, "the sinks hold different epochs at the end"),
    "stale": (stale, "a key went back, or came back"),
    "flicker": (flicker, "an epoch that had been visible was no longer"),
    "gap": (gap, "the epochs seen are not a prefix"),
    "disorder": (disorder, "rows of a log in a different order than their epochs or their key's versions"),
    "zombie write": (zombie_write, "a superseded driver's rows appeared late"),
    "swallowed": (swallowed, "a new checkpoint's epoch was taken for an old one's"),
    "silent drop": (silent_drop, "a row is neither in the sink nor a dead letter"),
    "letters": (letters, "a dead letter twice, in the target too, or of an attempt that does not count"),
    "false ack": (false_ack, "the ledger said done, the sink lacked it"),
    "orphan": (orphan, "something prepared or staged was left over"),
    "pin": (pin, "an open transaction blocks readers"),
    "stuck": (stuck, "no progress, or decided work not done"),
    "corrupt": (corrupt, "a row that was not sent like this"),
    "blind": (blind, "no read between a kill and the recovery: the run proves nothing"),
}
"""Every anomaly: the function that finds it, and its description."""


def find_all(evidence: Evidence) -> tuple[Anomaly, ...]:
    """Return all violations, in the order of `ANOMALIES`."""
    return tuple(anomaly for find, _ in ANOMALIES.values() for anomaly in find(evidence))
