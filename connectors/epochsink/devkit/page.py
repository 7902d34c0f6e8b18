"""One HTML page about a pipeline: its epochs as bars, kills as marks, rows that readers see against rows decided.

The page needs no network and no script, follows the reader's light or dark setting, and its pictures scale.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from epochsink.devkit.svg import STYLE, WIDTH, Svg

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from epochsink.protocol.progress import EpochProgress

_LEFT: Final = 120
_RIGHT: Final = 24
_LANE: Final = 15
_CHART: Final = 150
_TICKS: Final = 10
_STEPS: Final = (
    ("write_seconds", "written", "blue"),
    ("record_seconds", "prepared", "violet"),
    ("decision_seconds", "decided", "grey"),
    ("commit_seconds", "visible", "green"),
)
"""The steps of an epoch in their order: their seconds, what the epoch is after them, and their colour."""
_LINES: Final = ("green", "blue", "violet", "amber")
_PAGE: Final = """
body{margin:0 auto;max-width:900px;padding:1rem;background:var(--back);color:var(--text)}
body{font:16px/1.5 system-ui,sans-serif;overflow-wrap:break-word}
h1{font-size:1.5rem;line-height:1.25}h2{font-size:1.15rem;margin:2.5rem 0 .25rem}p{margin:.25rem 0 .75rem}
svg{display:block;width:100%;height:auto;min-width:780px}
.scroll{overflow-x:auto}.scroll:focus-visible{outline:2px solid var(--blue);outline-offset:2px}
table{border-collapse:collapse}td,th{padding:.25rem .75rem;border-bottom:1px solid var(--faint);white-space:nowrap}
td,th{text-align:right;font-variant-numeric:tabular-nums}td:first-child,th:first-child{text-align:left}
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

    @property
    def seconds(self) -> float:
        """How long it ran."""
        begin, end = self.span
        return end - begin

    @property
    def most_early(self) -> int:
        """The largest number of rows that readers of one place saw before Spark had decided them."""
        return max((max(one.visible.values()) - one.decided for one in self.samples), default=0)


def document(title: str, finding: str, sections: Sequence[tuple[str, str]]) -> str:
    """Return a page: a title, its finding in a sentence, and sections of a heading and HTML each."""
    body = "".join(f"<section><h2>{escape(name)}</h2>{content}</section>" for name, content in sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{STYLE}{_PAGE}</style></head>"
        f"<body><main><h1>{escape(title)}</h1><p>{escape(finding)}</p>{body}</main></body></html>\n"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]], label: str = "table") -> str:
    """Return a table as HTML; ``label`` names it for who cannot see it."""
    top = "".join(f"<th scope=col>{escape(name)}</th>" for name in head)
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return _scrolling(f"<table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table>", label)


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
    return table(head, rows, "each epoch")


def picture(course: Course, label: str, seconds: float = 0.0) -> str:
    """Return a course as HTML; ``label`` says in words what it shows, for who cannot see it.

    The picture is as long as ``seconds`` at least, so that several courses can be compared.
    """
    svg = Svg()
    height = _Drawing(svg, course, max(seconds, course.seconds)).draw(20.0)
    return _scrolling(svg.document(height, label), label)


def figure(title: str, finding: str, parts: Sequence[tuple[str, str, Course]]) -> str:
    """Return one SVG of several courses, for a page that shows a picture: a heading, a sentence and a chart of each."""
    svg = Svg()
    svg.text(16, 30, title, class_="title")
    y = svg.paragraph(16, 54, finding, class_="weak") + 14
    longest = max((course.seconds for _, _, course in parts), default=0.0)
    for head, said, course in parts:
        svg.text(16, y, head, class_="head")
        y = svg.paragraph(16, y + 20, said, class_="weak") + 8
        y = _Drawing(svg, Course((), course.samples, course.kills), longest).draw(y) + 22
    return svg.document(y - 14, f"{title}. {finding}")


def _scrolling(content: str, label: str) -> str:
    # what is wider than a phone is reached by the keyboard, too
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label, quote=True)}">{content}</div>'


def _begun(epoch: EpochProgress) -> float:
    return epoch.done_at - float(sum(getattr(epoch, step) for step, _, _ in _STEPS))


class _Drawing:
    """Draws a course into a drawing, from a ``y`` downwards."""

    def __init__(self, svg: Svg, course: Course, seconds: float) -> None:
        self._svg = svg
        self._course = course
        self._begin, _ = course.span
        self._seconds = seconds
        self._y = 0.0

    def draw(self, y: float) -> float:
        """Return where it ends."""
        self._y = y
        if self._course.epochs:
            self._epochs()
        if self._course.samples:
            self._rows()
        self._axis()
        return self._y + 12

    def _x(self, at: float) -> float:
        share = (at - self._begin) / self._seconds
        return round(_LEFT + share * (WIDTH - _LEFT - _RIGHT), 1)

    def _epochs(self) -> None:
        legend = [(colour, f"until {word}") for _, word, colour in _STEPS]
        y = self._y = self._svg.legend(_LEFT, self._y, legend)
        for name in dict.fromkeys(name for epoch in self._course.epochs for name in epoch.sinks):
            self._svg.text(_LEFT - 10, self._y + _LANE + 4, name[:16], text_anchor="end")
            for epoch in self._course.epochs:
                if name in epoch.sinks:
                    self._bars(epoch, name, self._y + (epoch.epoch % 2) * _LANE)
            self._y += 2 * _LANE + 8
            self._svg.line(_LEFT, self._y - 4, WIDTH - _RIGHT, self._y - 4, class_="grid")
        self._kills(y)
        self._y += 30

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
        places = list(samples[0].visible)
        legend = [(colour, f"seen in {place}") for place, colour in zip(places, _LINES, strict=False)]
        beside = [("red part", "seen before the decision")] if self._course.most_early > 0 else []
        beside += [("red", "kill -9")] if self._course.kills else []
        self._svg.line(_LEFT, self._y - 4, _LEFT + 24, self._y - 4, class_="ink dashed")
        self._svg.text(_LEFT + 30, self._y, "rows decided by Spark")
        top = self._svg.legend(_LEFT + 205, self._y, [*legend, *beside]) + 4
        bottom = top + _CHART
        most = max(max(one.decided, *one.visible.values()) for one in samples) or 1
        for share in (0.0, 0.5, 1.0):
            y = bottom - share * _CHART
            self._svg.line(_LEFT, y, WIDTH - _RIGHT, y, class_="grid")
            self._svg.text(_LEFT - 10, y + 4, f"{round(most * share):,}", text_anchor="end", class_="small weak")

        def height(rows: int) -> float:
            return round(bottom - rows / most * _CHART, 1)

        for one, after in pairwise(samples):
            if (seen := max(one.visible.values())) > one.decided:
                x, y = self._x(one.at), height(seen)
                self._svg.box(x, y, max(self._x(after.at) - x, 1), height(one.decided) - y, class_="red part")
        for place, colour in zip(places, _LINES, strict=False):
            points = ((self._x(one.at), height(one.visible[place])) for one in samples)
            self._svg.curve(points, class_=f"{colour} thick")
        self._svg.curve(((self._x(one.at), height(one.decided)) for one in samples), class_="ink dashed")
        self._y = bottom + 4
        self._kills(top)

    def _kills(self, top: float) -> None:
        for at, title in self._course.kills:
            self._svg.line(self._x(at), top, self._x(at), self._y, class_="red")
            self._svg.box(self._x(at) - 4, top - 6, 8, 8, f"kill -9: {title}", class_="red killed")

    def _axis(self) -> None:
        units = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800)
        unit = next((step for step in units if self._seconds / step <= _TICKS), 3600)
        self._y += 16
        for tick in range(0, int(self._seconds) + 1, unit):
            at = self._x(self._begin + tick)
            self._svg.text(at, self._y, f"{tick} s", class_="small weak", text_anchor="middle")
