"""What benchmarks have measured, kept as JSON, and the picture of it.

A file holds the newest result of each ratio, so that the benchmarks can run one after another, or one of them alone.
"""

from __future__ import annotations

import json
import math
import platform
import statistics
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import psutil

from epochsink_devkit.svg import WIDTH, Svg

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
    (folder / PICTURE).write_text(picture(known))


TITLES: Final = {
    "elasticsearch-vs-limit": "Elasticsearch, against its limit",
    "elasticsearch-vs-parallel-bulk": "Elasticsearch, against parallel_bulk",
    "kafka-vs-flink-at-least-once": "Kafka, against Flink, at least once",
    "kafka-vs-flink-exactly-once": "Kafka, against Flink, exactly once",
    "kafka-vs-spark-default": "Kafka, against Spark's sink",
    "kafka-vs-spark-tuned": "Kafka, against Spark's sink, tuned",
    "postgres-append-vs-fair-copy": "PostgreSQL by task, against fair COPY",
    "postgres-append-vs-jdbc-default": "PostgreSQL by task, against JDBC",
    "postgres-append-vs-jdbc-tuned": "PostgreSQL by task, against JDBC, tuned",
    "postgres-atomic-append-vs-jdbc-tuned": "PostgreSQL, against JDBC, tuned",
    "postgres-upsert-existing-vs-executemany": "PostgreSQL, updates, against executemany",
    "postgres-upsert-new-vs-executemany": "PostgreSQL, inserts, against executemany",
    "public-http-logs": "Access logs, against parallel_bulk",
    "public-kafka-100-bytes": "100-byte messages, against Spark's sink",
    "public-pgbench-accounts": "pgbench_accounts, against JDBC, tuned",
}
"""What a reader calls each ratio."""
_TICKS: Final = (0.25, 0.5, 1, 2, 4)
_LEFT: Final = 340
_LANE: Final = 28


def picture(known: Mapping[str, Mapping[str, Any]]) -> str:
    """Draw a line for each ratio, the highest first: its range, its median, the ratio in processor seconds, the aim."""
    svg = Svg()
    faster = sum(one["ratio"] >= 1 for one in known.values())
    title = f"As fast as the peer or faster in {faster} of {len(known)} comparisons"
    svg.text(16, 30, title, class_="title")
    svg.text(16, 52, "rows per second, ours over the peer's; most peers are not exactly-once", class_="weak")
    legend = [("blue", "median of the pairs, on their range"), ("amber", "in processor seconds"), ("grey", "aim")]
    top = svg.legend(16, 80, legend) + 4
    bottom = top + _LANE * len(known)
    values = [one[name] for one in known.values() for name in ("lowest", "highest", "aim", "processor_ratio")]
    least = min(_TICKS[1], *(value for value in values if value))
    most = max(_TICKS[-2], *(value for value in values if value))

    def x(ratio: float) -> float:
        share = math.log(ratio / least) / math.log(most / least)
        return round(_LEFT + share * (WIDTH - _LEFT - 90), 1)

    for tick in _TICKS:
        if least <= tick <= most:
            svg.line(x(tick), top, x(tick), bottom, class_="ink" if tick == 1 else "grid")
            svg.text(x(tick), bottom + 18, f"{tick:g}", text_anchor="middle", class_="small weak")
    for place, (name, one) in enumerate(sorted(known.items(), key=lambda item: -item[1]["ratio"])):
        y = top + _LANE * place + 14
        svg.text(_LEFT - 14, y + 5, TITLES.get(name, name), text_anchor="end")
        svg.box(x(one["lowest"]), y - 4, max(x(one["highest"]) - x(one["lowest"]), 2), 8, class_="blue part")
        svg.box(x(one["aim"]) - 1, y - 9, 3, 18, f"aim {one['aim']:g}", class_="grey")
        if one["processor_ratio"] is not None:
            told = f"{one['processor_ratio']:.2f} in processor seconds"
            svg.box(x(one["processor_ratio"]) - 4, y - 4, 8, 8, told, class_="amber")
        svg.dot(x(one["ratio"]), y, f"{one['ratio']:.2f} ({one['lowest']:.2f} to {one['highest']:.2f})", class_="blue")
        svg.text(WIDTH - 16, y + 5, f"{one['ratio']:.2f}", text_anchor="end", class_="head")
    return svg.document(bottom + 34, title)
