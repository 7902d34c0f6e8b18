"""Check a history for anomalies and report them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from epochsink_devkit.history.anomalies import ANOMALIES, find_all, unread_kills
from epochsink_devkit.history.history import History
from epochsink_devkit.history.views import Anomaly, Evidence, View


@dataclass(frozen=True, slots=True)
class Report:
    """The checker's verdict on one history.

    ``windows`` holds, for each target that is not atomic, the longest time in seconds that an epoch was partly visible.
    """

    anomalies: tuple[Anomaly, ...]
    counts: dict[str, int]
    windows: dict[str, float]

    @property
    def clean(self) -> bool:
        """Whether no anomaly was found."""
        return not self.anomalies

    @property
    def names(self) -> frozenset[str]:
        """The names of the anomalies found."""
        return frozenset(anomaly.name for anomaly in self.anomalies)

    def table(self) -> Table:
        """Return the result for a terminal: every kind of anomaly, how often it was found, and an example."""
        caption = ", ".join(f"{count} {name}" for name, count in self.counts.items())
        for target, seconds in self.windows.items():
            caption += f"; an epoch was partly visible in '{target}' for at most {seconds:.1f} s"
        table = Table("anomaly", "how it shows", "found", "first example", caption=caption)
        for name, (_, meaning) in ANOMALIES.items():
            anomalies = [anomaly for anomaly in self.anomalies if anomaly.name == name]
            example = str(anomalies[0]).removeprefix(f"{name}: ") if anomalies else ""
            table.add_row(name, meaning, str(len(anomalies)), example, style="bold red" if anomalies else "")
        return table

    def __str__(self) -> str:
        console = Console(width=160, color_system=None)
        with console.capture() as captured:
            console.print(self.table())
        return "\n".join([captured.get(), *map(str, self.anomalies)])


def check(history: History | Path, *, progress_within: float = 60.0) -> Report:
    """Check a history, or the one in a folder.

    More than ``progress_within`` seconds without progress after healing is an anomaly.

    Raises `ValueError` if the history proves nothing: a target has no final read, or source offsets are not dense.
    """
    if not isinstance(history, History):
        history = History.load(history)
    evidence = Evidence.of(history, progress_within)
    anomalies = find_all(evidence)
    counts = {
        "epochs": len(evidence.timeline),
        "source rows": evidence.timeline.source.num_rows,
        "reads": len(history.reads),
        "rows read": sum(int(view.seen.sum()) for views in evidence.views.values() for view in views),
        "drivers": len(history.drivers),
        "kills": history.counts.get("killed", 0),
        "unread kills": sum(len(unread) for _, unread in unread_kills(evidence)),
        "anomalies": len(anomalies),
    }
    windows = {target.name: _window(views) for target, views in evidence.targets() if not target.atomic}
    return Report(anomalies, counts, windows)


def _window(views: list[View]) -> float:
    """Return the longest time in seconds from a read that saw part of an epoch to the first that saw all of it."""
    longest = 0.0
    since: dict[int, float] = {}
    for view in views:
        partly = set(np.flatnonzero((view.seen > 0) & (view.missing > 0)).tolist())
        for at in since.keys() - partly:
            longest = max(longest, view.read.ended - since.pop(at))
        for at in partly - since.keys():
            since[at] = view.read.began
    return longest
