"""Ratios against a peer, measured in the same run: alternating pairs after a warm-up, and their median."""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable

PAIRS = 3

console = Console()


@dataclass
class Report:
    """Collects ratios; prints each as it is measured, and all of them, by name, as the last lines."""

    lines: list[str] = field(default_factory=list)

    def ratio(self, name: str, aim: float, rows: int, ours: Callable[[], float], peer: Callable[[], float]) -> float:
        """Measure both (seconds for ``rows`` rows) in turn; return ours over the peer's in rows per second."""
        ours()
        peer()
        pairs = [(ours(), peer()) for _ in range(PAIRS)]
        ratios = [theirs / own for own, theirs in pairs]
        median = statistics.median(ratios)
        table = Table(title=f"{name}: {rows:,} rows", title_justify="left")
        for heading in ("pair", "ours, s", "peer, s", "ratio"):
            table.add_column(heading, justify="right")
        for number, ((own, theirs), value) in enumerate(zip(pairs, ratios, strict=True), 1):
            table.add_row(str(number), f"{own:.2f}", f"{theirs:.2f}", f"{value:.2f}")
        console.print(table)
        self.lines.append(f"RATIO {name} {median:.2f} (aim {aim:.1f})")
        return median

    def print(self) -> None:
        """Print the ratios as the last lines, in a form that a program reads."""
        for line in self.lines:
            console.print(line, highlight=False)


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
