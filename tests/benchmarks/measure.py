"""Ratios against a peer, measured in the same run: alternating pairs after a warm-up, their median and range."""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import psutil
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable

PAIRS = 5

console = Console()


@dataclass
class Report:
    """Collects ratios; prints each as it is measured, and all of them, by name, as the last lines."""

    lines: list[str] = field(default_factory=list)

    def ratio(self, name: str, aim: float, rows: int, ours: Callable[[], float], peer: Callable[[], float]) -> float:
        """Measure both (seconds for ``rows`` rows) in turn; return ours over the peer's in rows per second."""
        ours()
        peer()
        pairs = [(_timed(ours), _timed(peer)) for _ in range(PAIRS)]
        table = Table(title=f"{name}: {rows:,} rows", title_justify="left")
        for heading in ("pair", "ours, s", "peer, s", "ratio", "ours, processor s", "peer, processor s"):
            table.add_column(heading, justify="right")
        for number, (own, theirs) in enumerate(pairs, 1):
            wall = theirs.seconds / own.seconds
            figures = (own.seconds, theirs.seconds, wall, own.processor, theirs.processor)
            table.add_row(str(number), *(f"{figure:.2f}" for figure in figures))
        console.print(table)
        ratios = sorted(theirs.seconds / own.seconds for own, theirs in pairs)
        processor = statistics.median(theirs.processor / own.processor for own, theirs in pairs)
        median = statistics.median(ratios)
        spread_ = f"from {ratios[0]:.2f} to {ratios[-1]:.2f}, in processor seconds {processor:.2f}"
        self.lines.append(f"RATIO {name} {median:.2f} (aim {aim:g}) {spread_}")
        return median

    def print(self) -> None:
        """Print the ratios as the last lines, in a form that a program reads."""
        for line in self.lines:
            console.print(line, highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Run:
    """One side's run: seconds of the timed epoch, and processor seconds of the whole run, the server's among them."""

    seconds: float
    processor: float


def _timed(run: Callable[[], float]) -> Run:
    os.sync()  # what the run before has left to be written counts against no other
    before = _processor_seconds()
    seconds = run()
    return Run(seconds, _processor_seconds() - before)


def _processor_seconds() -> float:
    """Return what this process and all below it have used: Spark, its workers, and the server."""
    mine = psutil.Process()
    used = 0.0
    for process in (mine, *mine.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            used += sum(process.cpu_times()[:4])  # user and system, its own and of children that have ended
    return used


def processor_by_kind() -> Counter[str]:
    """Return the processor seconds of the driver's Python, the executors' Python, Spark's JVM, and the server."""
    mine = psutil.Process()
    used: Counter[str] = Counter()
    for process in (mine, *mine.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            command = " ".join(process.cmdline())
            kind = "executors" if "pyspark.daemon" in command else "Spark" if "SparkSubmit" in command else "server"
            times = process.cpu_times()
            # those of a Python worker that has ended are its daemon's
            ended = times.children_user + times.children_system if kind == "executors" else 0.0
            used["driver" if process == mine else kind] += times.user + times.system + ended
    return used


def sizes(description: str | None, rows: int) -> argparse.Namespace:
    """Read the command line: ``rows`` of the timed epoch, and how many small ``epochs`` the latencies take."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rows", type=int, default=rows, help="rows of the timed epoch (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=60, help="small epochs for latencies (default: %(default)s)")
    return parser.parse_args()


def spread(milliseconds: list[float]) -> str:
    """Return median and p99 of some times."""
    ordered = sorted(milliseconds)
    return f"median {statistics.median(ordered):.1f} ms, p99 {ordered[int(len(ordered) * 0.99)]:.1f} ms"
