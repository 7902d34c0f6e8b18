"""What benchmarks have measured, kept as JSON, and the picture of it.

A file holds the newest result of each ratio, so that the benchmarks can run one after another, or one of them alone.
"""

from __future__ import annotations

import json
import platform
import statistics
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import matplotlib as mpl
import psutil
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

RESULTS: Final = "results.json"
PICTURE: Final = "ratios.svg"


@dataclass(frozen=True)
class Pair:
    """Seconds of both sides in one pair of runs, by the clock and of processors; and the server's share of these."""

    ours: float
    peer: float
    ours_processor: float
    peer_processor: float
    ours_server: float = 0.0
    peer_server: float = 0.0


@dataclass(frozen=True)
class Ratio:
    """Pairs of runs that wrote so many rows each: ours over the peer's in rows per second."""

    name: str
    aim: float
    rows: int
    pairs: Sequence[Pair]

    @property
    def median(self) -> float:
        return statistics.median(self._wall)

    @property
    def range(self) -> tuple[float, float]:
        return min(self._wall), max(self._wall)

    @property
    def processor(self) -> float | None:
        """The median of the ratios in processor seconds; None if ours took too few for the system's clock of them."""
        ratios = [pair.peer_processor / pair.ours_processor for pair in self.pairs if pair.ours_processor]
        return statistics.median(ratios) if ratios else None

    @property
    def _wall(self) -> list[float]:
        return [pair.peer / pair.ours for pair in self.pairs]

    def line(self) -> str:
        """Return the result in a form that a program reads."""
        lowest, highest = self.range
        processor = "too short to say" if self.processor is None else f"{self.processor:.2f}"
        return (
            f"RATIO {self.name} {self.median:.2f} (aim {self.aim:g}) from {lowest:.2f} to {highest:.2f}, "
            f"in processor seconds {processor}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return it with what is computed from the pairs, for readers."""
        lowest, highest = self.range
        return {
            "ratio": round(self.median, 3),
            "lowest": round(lowest, 3),
            "highest": round(highest, 3),
            "processor_ratio": None if self.processor is None else round(self.processor, 3),
            "aim": self.aim,
            "rows": self.rows,
            "pairs": [{name: round(seconds, 3) for name, seconds in asdict(pair).items()} for pair in self.pairs],
            "measured": datetime.now(UTC).isoformat(timespec="minutes"),
            "machine": machine(),
        }


def machine() -> str:
    """Return what it was measured on."""
    gib = psutil.virtual_memory().total / 2**30
    return f"{psutil.cpu_count()} cores, {gib:.0f} GiB, {platform.machine()}, Python {platform.python_version()}"


def keep(ratios: Sequence[Ratio], folder: Path) -> None:
    """Write the ratios over those of the same names, and draw all that are there."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / RESULTS
    known: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    known |= {ratio.name: ratio.to_json() for ratio in ratios}
    kept.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")
    mpl.rcParams["svg.hashsalt"] = PICTURE
    picture(known).savefig(folder / PICTURE, metadata={"Date": None})


def picture(known: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Draw a line for each ratio: its range, its median, the ratio in processor seconds, and the aim."""
    names = sorted(known, reverse=True)
    figure = Figure(figsize=(9, 1.4 + 0.36 * len(names)), layout="constrained")
    axes = figure.subplots()
    for at, name in enumerate(names):
        one = known[name]
        axes.plot([one["lowest"], one["highest"]], [at, at], color="#7aa6c2", linewidth=5, solid_capstyle="round")
        axes.plot(one["ratio"], at, "o", color="#1f4e6b", label="median of the pairs, and their range")
        if one["processor_ratio"] is not None:
            axes.plot(one["processor_ratio"], at, "x", color="#b5523b", label="in processor seconds")
        axes.plot(one["aim"], at, "|", color="black", markersize=14, label="aim")
    axes.axvline(1, color="grey", linewidth=0.8)
    axes.set_xscale("log")
    ticks = [0.5, 0.7, 1, 1.5, 2, 3, 4]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(-0.6, len(names) - 0.4)
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("rows per second, ours over the peer's")
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    below = (0.4, -0.6 / (0.5 + 0.36 * len(names)))
    axes.legend(handles.values(), handles, loc="upper center", bbox_to_anchor=below, ncols=3, frameon=False)
    return figure
