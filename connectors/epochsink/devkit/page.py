"""One HTML page about a pipeline: its epochs as bars, kills as marks, rows that readers see against rows decided.

The page needs no network and no script, follows the reader's light or dark setting, and its pictures scale.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Final

from epochsink.devkit.svg import Svg

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from epochsink.protocol.progress import EpochProgress

WIDTH: Final = 960
_LEFT: Final = 150
_RIGHT: Final = 20
_LANE: Final = 15
_CHART: Final = 170
_TICKS: Final = 10
_STEPS: Final = (
    ("write_seconds", "written", "s1"),
    ("record_seconds", "prepared", "s2"),
    ("decision_seconds", "decided", "s3"),
    ("commit_seconds", "visible", "s4"),
)
"""The steps of an epoch in their order: their seconds, what the epoch is after them, and their colour."""
_LINES: Final = ("l1", "l2", "l3", "l4")

STYLE: Final = """
:root{--back:#fff;--text:#1f2328;--faint:#d0d7de;--weak:#59636e}
@media(prefers-color-scheme:dark){:root{--back:#0d1117;--text:#e6edf3;--faint:#30363d;--weak:#9198a1}}
text{fill:var(--text);font-size:13px}.weak{fill:var(--weak)}.grid{stroke:var(--faint)}.kill{stroke:#d1242f;stroke-width:1.5}
.s1{fill:#4493f8}.s2{fill:#9a6fe0}.s3{fill:#8b949e}.s4{fill:#2da44e}.back{fill:var(--back)}.killed{fill:#d1242f}
.decided{stroke:var(--text);stroke-width:1.5;stroke-dasharray:5 4}
.l1{stroke:#2da44e}.l2{stroke:#4493f8}.l3{stroke:#9a6fe0}.l4{stroke:#bf8700}.l1,.l2,.l3,.l4{stroke-width:2}
"""
_PAGE: Final = """
body{margin:0 auto;max-width:1000px;padding:1rem;background:var(--back);color:var(--text)}
body{font:16px/1.5 system-ui,sans-serif}
h1{font-size:1.5rem;line-height:1.25}h2{font-size:1.15rem;margin-top:2rem}svg{width:100%;height:auto;min-width:600px}
.scroll{overflow-x:auto}table{border-collapse:collapse}td,th{padding:.25rem .75rem;border-bottom:1px solid var(--faint)}
td{text-align:right;font-variant-numeric:tabular-nums}td:first-child,th:first-child{text-align:left}
"""


@dataclass(frozen=True, slots=True)
class Sample:
    """How many rows Spark had decided, and how many readers saw in each place, at a time (seconds since 1970)."""

    at: float
    decided: int
    visible: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Course:
    """What one pipeline did: its epochs, samples of it, and (time, title) of each kill."""

    epochs: Sequence[EpochProgress] = ()
    samples: Sequence[Sample] = ()
    kills: Sequence[tuple[float, str]] = ()

    @property
    def span(self) -> tuple[float, float]:
        """The times between which it ran."""
        times = [at for epoch in self.epochs for at in (_begun(epoch), epoch.done_at)]
        times += [sample.at for sample in self.samples] + [at for at, _ in self.kills]
        begin, end = min(times, default=0.0), max(times, default=0.0)
        return begin, max(end, begin + 1.0)


def document(title: str, finding: str, sections: Sequence[tuple[str, str]]) -> str:
    """Return a page: a title, its finding in a sentence, and sections of a heading and HTML each."""
    body = "".join(f"<section><h2>{escape(name)}</h2>{content}</section>" for name, content in sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}{_PAGE}</style></head>"
        f"<body><main><h1>{escape(title)}</h1><p>{escape(finding)}</p>{body}</main></body></html>\n"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as HTML."""
    top = "".join(f"<th scope=col>{escape(name)}</th>" for name in head)
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table></div>'


def epochs_table(epochs: Sequence[EpochProgress]) -> str:
    """Return a table of epochs, the newest first."""
    sinks = list(dict.fromkeys(name for epoch in epochs for name in epoch.sinks))
    head = [
        "epoch",
        "visible since",
        *(f"rows in {name}" for name in sinks),
        *(f"{word} after" for _, word, _ in _STEPS),
    ]
    rows = [
        [
            str(epoch.epoch),
            time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(epoch.done_at)) + " UTC",
            *(f"{epoch.sinks[name].rows:,}" if name in epoch.sinks else "0" for name in sinks),
            *(f"{getattr(epoch, step):.2f} s" for step, _, _ in _STEPS),
        ]
        for epoch in reversed(epochs)
    ]
    return table(head, rows)


def picture(course: Course, label: str) -> str:
    """Return a course as SVG with its own style; ``label`` says in words what it shows, for who cannot see it."""
    return _Drawing(course).draw().replace("<svg ", f'<svg role="img" aria-label="{escape(label, quote=True)}" ', 1)


def _begun(epoch: EpochProgress) -> float:
    return epoch.done_at - float(sum(getattr(epoch, step) for step, _, _ in _STEPS))


class _Drawing:
    def __init__(self, course: Course) -> None:
        self._course = course
        self._begin, self._end = course.span
        self._svg = Svg(WIDTH, STYLE)
        self._y = 24.0

    def draw(self) -> str:
        if self._course.epochs:
            self._epochs()
        if self._course.samples:
            self._rows()
        self._kills()
        self._axis()
        return self._svg.document(self._y + 12, 'class="back"')

    def _x(self, at: float) -> float:
        share = (at - self._begin) / (self._end - self._begin)
        return round(_LEFT + share * (WIDTH - _LEFT - _RIGHT), 1)

    def _epochs(self) -> None:
        x = float(_LEFT)
        for _, word, colour in _STEPS:
            self._svg.box(x, self._y - 10, 12, 12, class_=colour)
            self._svg.text(x + 17, self._y, f"until {word}")
            x += 130
        self._y += 10
        for name in dict.fromkeys(name for epoch in self._course.epochs for name in epoch.sinks):
            self._svg.text(4, self._y + _LANE + 4, name)
            for epoch in self._course.epochs:
                if name in epoch.sinks:
                    self._bars(epoch, name, self._y + (epoch.epoch % 2) * _LANE)
            self._y += 2 * _LANE + 8
            self._svg.line(_LEFT, self._y - 4, WIDTH - _RIGHT, self._y - 4, class_="grid")

    def _bars(self, epoch: EpochProgress, sink: str, y: float) -> None:
        at = _begun(epoch)
        for step, word, colour in _STEPS:
            seconds = getattr(epoch, step)
            width = self._x(at + seconds) - self._x(at)
            title = f"epoch {epoch.epoch}, {sink}: {epoch.sinks[sink].rows:,} rows, {word} after {seconds:.2f} s"
            self._svg.box(self._x(at), y, max(width, 1.0), _LANE - 3, title, class_=colour)
            at += seconds

    def _rows(self) -> None:
        samples = self._course.samples
        most = max(max(one.decided, *one.visible.values()) for one in samples) or 1
        self._y += 34
        top, bottom = self._y, self._y + _CHART
        self._svg.line(_LEFT, top - 18, _LEFT + 30, top - 18, class_="decided")
        self._svg.text(_LEFT + 36, top - 14, "rows decided by Spark")
        x = _LEFT + 210
        places = list(samples[0].visible)
        for place, colour in zip(places, _LINES, strict=False):
            self._svg.line(x, top - 18, x + 30, top - 18, class_=colour)
            self._svg.text(x + 36, top - 14, f"seen in {place}")
            x += 60 + 7 * (len(place) + 8)
        for share in (0.0, 0.5, 1.0):
            y = bottom - share * _CHART
            self._svg.line(_LEFT, y, WIDTH - _RIGHT, y, class_="grid")
            self._svg.text(_LEFT - 8, y + 4, f"{round(most * share):,}", text_anchor="end", class_="weak")

        def height(rows: int) -> float:
            return bottom - rows / most * _CHART

        for place, colour in zip(places, _LINES, strict=False):
            self._svg.curve(((self._x(one.at), height(one.visible[place])) for one in samples), class_=colour)
        self._svg.curve(((self._x(one.at), height(one.decided)) for one in samples), class_="decided")
        self._y = bottom + 4

    def _kills(self) -> None:
        for at, title in self._course.kills:
            self._svg.line(self._x(at), 30, self._x(at), self._y, class_="kill")
            self._svg.box(self._x(at) - 4, 26, 8, 8, f"kill -9: {title}", class_="killed")

    def _axis(self) -> None:
        seconds = self._end - self._begin
        unit = next((step for step in (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800) if seconds / step <= _TICKS), 3600)
        self._y += 16
        for tick in range(0, int(seconds) + 1, unit):
            self._svg.text(self._x(self._begin + tick), self._y, f"{tick} s", class_="weak", text_anchor="middle")
