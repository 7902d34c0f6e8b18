"""Ratios against a peer, measured in the same run: alternating pairs after a warm-up, their median and range."""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import results
from results import Pair, Ratio
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable

PAIRS = 5

console = Console()


@dataclass
class Report:
    """Measures ratios whose names have ``only`` in them; prints each at once, and all of them as the last lines."""

    only: str = ""
    folder: Path | None = None
    pairs: int = PAIRS
    ratios: list[Ratio] = field(default_factory=list)

    @classmethod
    def of(cls, options: argparse.Namespace) -> Report:
        """Return a report as the command line of `sizes` wants it."""
        return cls(options.only, options.keep, options.pairs)

    def ratio(self, name: str, aim: float, rows: int, ours: Callable[[], float], peer: Callable[[], float]) -> None:
        """Measure both (seconds for ``rows`` rows) in turn, after a warm-up."""
        if self.only not in name:
            return
        ours()
        peer()
        pairs = []
        for _ in range(self.pairs):
            own, theirs = _timed(ours), _timed(peer)
            pairs.append(Pair(own.seconds, theirs.seconds, own.processor, theirs.processor))
        table = Table(title=f"{name}: {rows:,} rows", title_justify="left")
        for heading in ("pair", "ours, s", "peer, s", "ratio", "ours, processor s", "peer, processor s"):
            table.add_column(heading, justify="right")
        for number, pair in enumerate(pairs, 1):
            figures = (pair.ours, pair.peer, pair.peer / pair.ours, pair.ours_processor, pair.peer_processor)
            table.add_row(str(number), *(f"{figure:.2f}" for figure in figures))
        console.print(table)
        self.ratios.append(Ratio(name, aim, rows, pairs))
        if self.folder is not None:
            # at once: a later one may be broken off
            results.keep(self.ratios, self.folder)

    def print(self) -> None:
        """Print the ratios as the last lines, in a form that a program reads."""
        for ratio in self.ratios:
            console.print(ratio.line(), highlight=False, soft_wrap=True)


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


def sizes(description: str | None, rows: int, **needed: str) -> argparse.Namespace:
    """Read the command line: ``rows`` of the timed epoch, how many small ``epochs`` the latencies take, what to keep.

    ``needed`` are options of one benchmark alone, with their help.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rows", type=int, default=rows, help="rows of the timed epoch (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=60, help="small epochs for latencies (default: %(default)s)")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="measure the ratios alone that have it in their names"
    )
    parser.add_argument("--pairs", type=int, default=PAIRS, help="pairs of runs for each ratio (default: %(default)s)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave results (JSON) and picture there")
    for name, text in needed.items():
        parser.add_argument(f"--{name}", required=True, help=text)
    return parser.parse_args()


def spread(milliseconds: list[float]) -> str:
    """Return median and p99 of some times."""
    ordered = sorted(milliseconds)
    return f"median {statistics.median(ordered):.1f} ms, p99 {ordered[int(len(ordered) * 0.99)]:.1f} ms"
