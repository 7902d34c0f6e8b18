"""The timeline of one run as one HTML page: faults, lives of drivers, epochs decided and done, rows visible."""

from __future__ import annotations

import json
from html import escape
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from epochsink_devkit.svg import STYLE, WIDTH, Svg

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

LEFT: Final = 120
LANE: Final = 22
CHART: Final = 160
TICKS: Final = 10
MINUTE: Final = 60
COLOURS: Final = {
    "isolated": "blue",
    "cannot send": "blue",
    "cannot hear": "blue",
    "link cut": "blue",
    "slow": "blue",
    "lossy": "blue",
    "paused": "amber",
    "killed": "red",
    "leader without followers": "violet",
    "usurped": "violet",
    "failover": "violet",
    "disk full": "grey",
    "clock": "grey",
}
LEGEND: Final = (
    ("blue", "network"),
    ("red", "killed"),
    ("amber", "paused"),
    ("violet", "leader lost or replaced"),
    ("grey", "disk or clock"),
    ("green", "epochs"),
)
LINES: Final = ("green", "blue", "violet", "amber")

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
        f"<!doctype html><html lang=en><meta charset=utf-8><title>nemesis</title><style>{STYLE}"
        "body{font:14px system-ui,sans-serif;background:var(--back);color:var(--text)}svg{max-width:1200px}"
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
        self._svg = Svg()
        self._y = 84.0

    def svg(self) -> str:
        """Return the drawing."""
        title, said = self._finding()
        self._svg.text(16, 30, title, class_="title")
        self._svg.text(16, 52, said, class_="weak")
        self._y = self._svg.legend(LEFT, self._y, LEGEND) - 14
        top = self._y
        self._faults()
        self._drivers()
        self._epochs()
        self._visible()
        self._axis(top)
        return self._svg.document(self._y + 30, f"{title}. {said}")

    def _finding(self) -> tuple[str, str]:
        faults = sum(len(bars) for bars in self._fault_lanes().values())
        minutes = (self._end - self._begin) / 60
        decided, done = (len(self._times(name)) for name in ("committed", "done"))
        readers = ", ".join(self._counts())
        return (
            f"{faults} faults in {minutes:.0f} minutes: {done} of {decided} decided epochs are done",
            f"above: faults and epochs by time; below: rows that readers see in {readers}",
        )

    def _x(self, at: float) -> float:
        inside = min(max(at, self._begin), self._end) - self._begin
        return float(round(LEFT + inside / (self._end - self._begin) * (WIDTH - LEFT - 20), 1))

    def _lane(self, name: str) -> None:
        self._y += LANE
        self._svg.text(LEFT - 8, self._y - 5, name, text_anchor="end", class_="small")
        self._svg.line(LEFT, self._y, WIDTH - 20, self._y, class_="grid")

    def _bar(self, begin: float, end: float, colour: str, title: str) -> None:
        x, width = self._x(begin), max(self._x(end) - self._x(begin), 2)
        self._svg.box(x, self._y - LANE + 4, width, LANE - 7, title, class_=colour)

    def _fault_lanes(self) -> dict[str, list[tuple[float, float, str]]]:
        """Return begin, end and text of each fault, by host."""
        lanes: dict[str, list[tuple[float, float, str]]] = {}
        begun: dict[tuple[str, str], float] = {}
        for event in self._events:
            if event["what"] == "fault":
                begun[event["kind"], event["where"]] = event["at"]
            elif event["what"] == "healed":
                kind, where = event["kind"], event["where"]
                start = begun.pop((kind, where), event["at"])
                lanes.setdefault(where.split()[0], []).append((start, event["at"], f"{kind} {where}"))
        return lanes

    def _faults(self) -> None:
        lanes = self._fault_lanes()
        for name in sorted(lanes):
            self._lane(name)
            for start, end, text in lanes[name]:
                colour = next((colour for kind, colour in COLOURS.items() if text.startswith(kind)), "blue")
                self._bar(start, end, colour, f"{text}, {end - start:.1f} s")

    def _driver_bars(self) -> Iterator[tuple[float, float, str]]:
        """Yield begin, end and text of each driver."""
        begun: dict[int, Event] = {}
        for event in self._events:
            if event["what"] == "driver":
                begun[event["number"]] = event
            elif event["what"] == "driver ended" and event["number"] in begun:
                start = begun.pop(event["number"])
                yield start["at"], event["at"], f"driver {event['number']}: {event['code']} {event['why']}"
        for number, start in begun.items():
            yield start["at"], self._end, f"driver {number}"

    def _drivers(self) -> None:
        self._lane("drivers")
        for begin, end, text in self._driver_bars():
            self._bar(begin, end, "blue part", text)

    def _times(self, name: str) -> list[tuple[float, str]]:
        """Return when each epoch was decided ("committed") or done, and its title."""
        return [(event["at"], f"epoch {event['epoch']}") for event in self._history if event["event"] == name]

    def _epochs(self) -> None:
        for name, lane in (("committed", "epochs decided"), ("done", "epochs done")):
            self._lane(lane)
            for at, title in self._times(name):
                self._bar(at, at, "green", title)

    def _counts(self) -> dict[str, list[tuple[float, int]]]:
        """Return when a reader of each target saw how many rows."""
        counts: dict[str, list[tuple[float, int]]] = {}
        known: dict[str, int] = {}
        for event in self._history:
            if event["event"] == "read":
                rows = known.get(event["file"])
                if rows is None:
                    with pa.memory_map(str(self._files / event["file"])) as file:
                        rows = known[event["file"]] = pa.ipc.open_file(file).read_all().num_rows
                counts.setdefault(event["target"], []).append((event["ended"], rows))
        return {target: sorted(reads) for target, reads in counts.items()}

    def _visible(self) -> None:
        counts = self._counts()
        top = max((rows for reads in counts.values() for _, rows in reads), default=1) or 1
        labels = [
            (colour, f"{name}: {reads[-1][1]:,} rows")
            for colour, (name, reads) in zip(LINES, counts.items(), strict=False)
        ]
        self._y = self._svg.legend(LEFT, self._y + 30, labels) + CHART
        for colour, reads in zip(LINES, counts.values(), strict=False):
            points = ((self._x(at), self._y - rows / top * CHART) for at, rows in reads)
            self._svg.curve(points, class_=f"{colour} thick")

    def _axis(self, top: float) -> None:
        span = self._end - self._begin
        step = next((unit for unit in (10, 20, 30, 60, 120, 300, 600) if span / unit <= TICKS), 1800)
        for seconds in range(0, int(span) + 1, step):
            x = self._x(self._begin + seconds)
            self._svg.line(x, top, x, self._y, class_="grid")
            text = f"{seconds} s" if step < MINUTE else f"{seconds // MINUTE} min"
            self._svg.text(x, self._y + 18, text, text_anchor="middle", class_="small weak")
