"""The timeline of one run as one HTML page: faults, lives of drivers, epochs decided and done, rows visible."""

from __future__ import annotations

import json
from html import escape
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from epochsink.devkit.svg import Svg

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

WIDTH: Final = 1500
LEFT: Final = 130
LANE: Final = 18
CHART: Final = 160
COLOURS: Final = {
    "isolated": "#c0392b",
    "cannot send": "#d35400",
    "cannot hear": "#e67e22",
    "link cut": "#8e44ad",
    "paused": "#2980b9",
    "killed": "#111111",
    "leader without followers": "#6c3483",
    "usurped": "#16a085",
    "failover": "#7f0000",
    "disk full": "#7f8c8d",
    "clock": "#e84393",
}
OTHER: Final = "#b7950b"
LINES: Final = ("#1f77b4", "#2ca02c", "#9467bd", "#ff7f0e")

Event = dict[str, Any]


def write_page(folder: Path, summary: Mapping[str, Any]) -> Path:
    """Write `timeline.html` from what a run has left in its folder; also the drawing alone, `timeline.svg`."""
    events = [json.loads(line) for line in (folder / "timeline.jsonl").read_text().splitlines()]
    history = [json.loads(line) for line in (folder / "history" / "history.jsonl").read_text().splitlines()]
    drawing = Drawing(events, history, folder / "history").svg()
    (folder / "timeline.svg").write_text(drawing)
    rows = "".join(
        f"<tr><th>{escape(str(k))}</th><td><pre>{escape(_text(v))}</pre></td></tr>" for k, v in summary.items()
    )
    log = "".join(f"<tr><td>{seconds:.1f} s</td><td>{escape(text)}</td></tr>" for seconds, text in _log(events))
    page = folder / "timeline.html"
    page.write_text(
        "<!doctype html><meta charset=utf-8><title>nemesis</title><style>body{font:14px sans-serif}"
        "td,th{text-align:left;vertical-align:top;padding:1px 8px}pre{margin:0}</style>"
        f"<h1>Nemesis: {escape(str(summary['sinks']))}, seed {summary['seed']}</h1><table>{rows}</table>"
        f"{drawing}<h2>What happened</h2><table>{log}</table>"
    )
    return page


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, indent=1)


def _log(events: list[Event]) -> Iterator[tuple[float, str]]:
    began = events[0]["at"]
    for event in events:
        facts = ", ".join(f"{k}: {v}" for k, v in event.items() if k not in {"at", "what"} and v not in ("", None))
        yield event["at"] - began, f"{event['what']} {facts}"


class Drawing:
    """Lanes of faults by host, a lane of drivers, a lane of epochs, and a chart of rows visible."""

    def __init__(self, events: list[Event], history: list[Event], files: Path) -> None:
        self._events = events
        self._history = history
        self._files = files
        self._begin = next((one["at"] for one in events if one["what"] == "begin"), events[0]["at"])
        self._end = max(events[-1]["at"], self._begin + 1)
        self._svg = Svg(WIDTH)
        self._y = 20

    def svg(self) -> str:
        """Return the drawing."""
        self._faults()
        self._drivers()
        self._epochs()
        self._visible()
        self._axis()
        self._legend()
        return self._svg.document(self._y + 50)

    def _x(self, at: float) -> float:
        inside = min(max(at, self._begin), self._end) - self._begin
        return float(round(LEFT + inside / (self._end - self._begin) * (WIDTH - LEFT - 20), 1))

    def _lane(self, name: str) -> None:
        self._y += LANE
        self._svg.text(4, self._y - 5, name)
        self._svg.line(LEFT, self._y, WIDTH - 20, self._y, stroke="#eee")

    def _bar(self, begin: float, end: float, colour: str, title: str) -> None:
        x, width = self._x(begin), max(self._x(end) - self._x(begin), 2)
        self._svg.box(x, self._y - LANE + 3, width, LANE - 5, title, fill=colour)

    def _faults(self) -> None:
        lanes: dict[str, list[tuple[float, float, str]]] = {}
        begun: dict[tuple[str, str], float] = {}
        for event in self._events:
            if event["what"] == "fault":
                begun[event["kind"], event["where"]] = event["at"]
            elif event["what"] == "healed":
                kind, where = event["kind"], event["where"]
                start = begun.pop((kind, where), event["at"])
                lanes.setdefault(where.split()[0], []).append((start, event["at"], f"{kind} {where}"))
        for name in sorted(lanes):
            self._lane(name)
            for start, end, text in lanes[name]:
                colour = next((colour for kind, colour in COLOURS.items() if text.startswith(kind)), OTHER)
                self._bar(start, end, colour, f"{text}, {end - start:.1f} s")

    def _drivers(self) -> None:
        self._lane("drivers")
        begun: dict[int, Event] = {}
        for event in self._events:
            if event["what"] == "driver":
                begun[event["number"]] = event
            elif event["what"] == "driver ended" and event["number"] in begun:
                start = begun.pop(event["number"])
                self._bar(
                    start["at"], event["at"], "#aed6f1", f"driver {event['number']}: {event['code']} {event['why']}"
                )
        for number, start in begun.items():
            self._bar(start["at"], self._end, "#aed6f1", f"driver {number}")

    def _epochs(self) -> None:
        for name, colour in (("committed", "#1e8449"), ("done", "#117a65")):
            self._lane({"committed": "epochs decided", "done": "epochs done"}[name])
            for event in self._history:
                if event["event"] == name:
                    self._bar(event["at"], event["at"], colour, f"epoch {event['epoch']}")

    def _visible(self) -> None:
        counts: dict[str, list[tuple[float, int]]] = {}
        known: dict[str, int] = {}
        for event in self._history:
            if event["event"] == "read":
                rows = known.get(event["file"])
                if rows is None:
                    with pa.memory_map(str(self._files / event["file"])) as file:
                        rows = known[event["file"]] = pa.ipc.open_file(file).read_all().num_rows
                counts.setdefault(event["target"], []).append((event["ended"], rows))
        top = max((rows for reads in counts.values() for _, rows in reads), default=1) or 1
        self._y += CHART + 10
        for colour, (name, reads) in zip(LINES, counts.items(), strict=False):
            points = ((self._x(at), self._y - rows / top * CHART) for at, rows in sorted(reads))
            self._svg.curve(points, stroke=colour, stroke_width=1.5)
            label = self._y - CHART + 14 * (1 + list(counts).index(name))
            self._svg.text(4, label, f"{name}: {reads[-1][1]:,} rows", fill=colour)

    def _legend(self) -> None:
        for place, (kind, colour) in enumerate([*COLOURS.items(), ("slow or lossy", OTHER)]):
            x, y = LEFT + place * 130, self._y + 40
            self._svg.box(x, y - 9, 12, 10, fill=colour)
            self._svg.text(x + 16, y, kind)

    def _axis(self) -> None:
        step = max(int((self._end - self._begin) / 10 // 10 * 10), 10)
        for seconds in range(0, int(self._end - self._begin) + 1, step):
            x = self._x(self._begin + seconds)
            self._svg.line(x, 20, x, self._y, stroke="#ddd")
            self._svg.text(x - 8, self._y + 16, f"{seconds} s")
