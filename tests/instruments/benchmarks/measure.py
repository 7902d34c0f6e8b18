"""Ratios against a peer, measured in the same run: alternating pairs after a warm-up, their median and range."""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
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
WARM_UPS = 3
"""Runs of each side before the first pair: a JVM goes on compiling for that long, and streams run for days."""

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
        """Measure both (seconds for ``rows`` rows) in turn, after `WARM_UPS`."""
        if self.only not in name:
            return
        for _ in range(WARM_UPS):
            ours()
            peer()
        pairs = []
        for _ in range(self.pairs):
            own, theirs = _timed(ours), _timed(peer)
            processor = [sum(run.used.values()) for run in (own, theirs)]
            server = [run.used.get("server", 0.0) for run in (own, theirs)]
            pairs.append(Pair(own.seconds, theirs.seconds, *processor, *server))
        table = Table(title=f"{name}: {rows:,} rows", title_justify="left")
        for heading in (
            "pair",
            "ours, s",
            "peer, s",
            "ratio",
            "ours, processor s",
            "peer",
            "server for ours",
            "for peer",
        ):
            table.add_column(heading, justify="right")
        for number, pair in enumerate(pairs, 1):
            used = (pair.ours_processor, pair.peer_processor, pair.ours_server, pair.peer_server)
            figures = (pair.ours, pair.peer, pair.peer / pair.ours, *used)
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
    """One side's run: seconds of the timed epochs, and processor seconds of the whole run, as `processor_by_kind`."""

    seconds: float
    used: dict[str, float]


def _timed(run: Callable[[], float]) -> Run:
    os.sync()  # what the run before has left to be written counts against no other
    before = processor_by_kind()
    seconds = run()
    after = processor_by_kind()
    return Run(seconds, {kind: total - before.get(kind, 0.0) for kind, total in after.items()})


def processor_by_kind() -> dict[str, float]:
    """Return the processor seconds of this process and all below it, those that have ended among them.

    The kinds are the driver's Python, the executors' Python, Spark's JVM, the server, and others (Flink).
    """
    mine = psutil.Process()
    used: dict[str, float] = {}
    for process in (mine, *mine.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            # those of a process that has ended are then its parent's
            kind = "driver" if process == mine else _kind(" ".join(process.cmdline()))
            used[kind] = used.get(kind, 0.0) + sum(process.cpu_times()[:4])
    return used


def _kind(command: str) -> str:
    kinds = {
        "pyspark.daemon": "executors",
        "SparkSubmit": "Spark",
        "kafka.Kafka": "server",
        "org.elasticsearch": "server",
        "postgres": "server",
    }
    return next((kind for part, kind in kinds.items() if part in command), "others")


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
