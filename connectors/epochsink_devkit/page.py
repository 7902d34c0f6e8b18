"""One HTML page about a pipeline: its epochs as bars, kills as marks, rows that readers see against rows decided.

The page needs no network and no script, and follows the reader's light or dark setting. Each picture is there in two
widths, and the page shows the one that fits the window; a phone shows each row of a table as a block of lines.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Final

from epochsink.protocol.progress import EpochProgress
from epochsink_devkit.svg import STYLE, WIDTH, Svg, letters, shortened

_RIGHT: Final = 24
_LANE: Final = 15
_CHART: Final = 150
_PHONE: Final = 300
"""The width of a picture in a window that is narrower than `WIDTH`."""
_STEPS: Final = (
    ("write_seconds", "written", "blue"),
    ("record_seconds", "prepared", "violet"),
    ("decision_seconds", "decided", "grey"),
    ("commit_seconds", "visible", "green"),
)
"""The steps of an epoch in their order: their seconds, what the epoch is after them, and their colour."""
_LINES: Final = ("green", "blue", "violet", "amber")
_PAGE: Final = f"""
body{{margin:0 auto;max-width:900px;padding:1rem;background:var(--back);color:var(--text)}}
body{{font:16px/1.5 system-ui,sans-serif;overflow-wrap:break-word}}
h1{{font-size:1.5rem;line-height:1.25}}h2{{font-size:1.15rem;margin:2.5rem 0 .25rem}}p{{margin:.25rem 0 .75rem}}
svg{{display:block;width:100%;height:auto}}.narrow{{display:none;max-width:30rem}}
figure{{margin:0}}summary{{cursor:pointer}}ol{{margin:.25rem 0;padding-left:1.5rem}}
.scroll{{overflow-x:auto}}:focus-visible{{outline:2px solid var(--blue);outline-offset:2px}}
table{{border-collapse:collapse}}td,th{{padding:.25rem .6rem;border-bottom:1px solid var(--faint)}}
td{{white-space:nowrap}}th{{vertical-align:bottom}}
td,th{{text-align:right;font-variant-numeric:tabular-nums}}td:first-child,th:first-child{{text-align:left}}
@media(max-width:{WIDTH}px){{.wide{{display:none}}.narrow{{display:block}}}}
@media(max-width:932px){{
thead{{display:none}}table,tbody{{display:block;max-width:30rem}}
tr{{display:block;padding:.5rem 0;border-bottom:1px solid var(--faint)}}
td:first-child{{font-weight:600;text-align:right}}
td{{display:flex;flex-wrap:wrap;justify-content:flex-end;column-gap:1rem;padding:0;border:0;white-space:normal}}
td::before{{content:attr(data-head);color:var(--weak);font-weight:400;text-align:left;margin-right:auto}}
}}
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
    """Return a table as HTML; ``label`` names it for readers who cannot see it."""
    # a long name of a sink takes several lines
    top = "".join(f"<th scope=col>{escape(name).replace('_', '_<wbr>')}</th>" for name in head)
    lines = "".join(
        "<tr>"
        + "".join(
            f'<td data-head="{escape(name, quote=True)}">{escape(cell)}</td>'
            for name, cell in zip(head, row, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    # what is wider than the window is reached by the keyboard, too
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label, quote=True)}">'
        f"<table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table></div>"
    )


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


def epochs_in_time(epochs: Sequence[EpochProgress]) -> tuple[str, str]:
    """Return a heading, which is the finding, and the picture of epochs as HTML."""
    took = sorted(epoch.done_at - _begun(epoch) for epoch in epochs)
    many = f"each of the newest {len(took)} epochs" if len(took) > 1 else "the newest epoch"
    span = f"{took[0]:.1f} to {took[-1]:.1f} s" if len(took) > 1 else f"{took[0]:.1f} s"
    drawn = picture(Course(epochs), f"epochs {epochs[0].epoch} to {epochs[-1].epoch} in time")
    return f"Readers saw {many} {span} after it began", drawn


def picture(course: Course, label: str, seconds: float = 0.0) -> str:
    """Return a course as HTML; ``label`` says in words what it shows, for readers who cannot see it.

    The picture is as long as ``seconds`` at least, so that several courses can be compared.
    """
    pictures = []
    for name, width in (("wide", WIDTH), ("narrow", _PHONE)):
        svg = Svg(width)
        height = _Drawing(svg, course, max(seconds, course.seconds)).draw(20.0)
        pictures.append(f'<div class="{name}">{svg.document(height, label)}</div>')
    return f"<figure>{''.join(pictures)}{_kills(course)}</figure>"


def _kills(course: Course) -> str:
    """Return when and where each kill struck, as text: on a phone, nobody can hover over a mark."""
    if not course.kills:
        return ""
    begin, _ = course.span
    items = "".join(f"<li>at {at - begin:.0f} s: {escape(title)}</li>" for at, title in course.kills)
    return f"<details><summary>Where kill -9 struck</summary><ol>{items}</ol></details>"


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
        self._sinks = list(dict.fromkeys(name for epoch in course.epochs for name in epoch.sinks))
        # a narrow drawing has the sinks' names above their lanes
        self._is_narrow = svg.width < WIDTH
        longest = max(map(letters, self._sinks), default=0.0)
        self._left = 66 if self._is_narrow else min(max(120.0, longest + 16), 240.0)
        self._right = svg.width - _RIGHT

    def draw(self, y: float) -> float:
        """Return where it ends."""
        self._y = y
        if self._course.epochs:
            self._epochs()
        if self._course.samples:
            self._rows()
        self._axis()
        return self._y + 12

    @property
    def _legend_left(self) -> float:
        return 0 if self._is_narrow else self._left

    def _x(self, at: float) -> float:
        share = (at - self._begin) / self._seconds
        return round(self._left + share * (self._right - self._left), 1)

    def _epochs(self) -> None:
        legend = [(colour, f"until {word}") for _, word, colour in _STEPS]
        y = self._y = self._svg.legend(self._legend_left, self._y, legend)
        for name in self._sinks:
            if self._is_narrow:
                self._svg.text(0, self._y + 12, shortened(name, self._svg.width))
                self._y += 18
            else:
                label = shortened(name, self._left - 12)
                self._svg.text(self._left - 10, self._y + _LANE + 4, label, text_anchor="end")
            for epoch in self._course.epochs:
                if name in epoch.sinks:
                    self._bars(epoch, name, self._y + (epoch.epoch % 2) * _LANE)
            self._y += 2 * _LANE + 8
            self._svg.line(self._left, self._y - 4, self._right, self._y - 4, class_="grid")
        self._kills(y)
        self._y += 30 if self._course.samples else 4

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
        legend = [("ink dashed", "rows decided by Spark")]
        legend += [(colour, f"seen in {place}") for place, colour in zip(places, _LINES, strict=False)]
        legend += [("red part", "seen before the decision")] if self._course.most_early > 0 else []
        legend += [("red", "kill -9")] if self._course.kills else []
        top = self._svg.legend(self._legend_left, self._y, legend) + 4
        bottom = top + _CHART
        most = max(max(one.decided, *one.visible.values()) for one in samples) or 1
        for share in (0.0, 0.5, 1.0):
            y = bottom - share * _CHART
            self._svg.line(self._left, y, self._right, y, class_="grid")
            self._svg.text(self._left - 10, y + 4, f"{round(most * share):,}", text_anchor="end", class_="small weak")

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
        most = 4 if self._is_narrow else 10
        unit = next((step for step in units if self._seconds / step <= most), 3600)
        self._y += 16
        for tick in range(0, int(self._seconds) + 1, unit):
            at = self._x(self._begin + tick)
            self._svg.text(at, self._y, f"{tick} s", class_="small weak", text_anchor="middle")
