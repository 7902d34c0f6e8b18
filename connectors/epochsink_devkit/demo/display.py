"""Show the demo's progress, as bars on a terminal or plain lines elsewhere, and the closing table."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from rich import box
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column, Table

from epochsink_devkit import page
from epochsink_devkit.demo.destination import Tally
from epochsink_devkit.page import Course

if TYPE_CHECKING:
    from rich.console import Console


EPOCHSINK: Final = "epochsink"
"""The title of the pipeline that writes with epochsink."""
CONNECT: Final = "connect"
"""That of the same pipeline on Spark Connect."""
OURS: Final = (EPOCHSINK, CONNECT)
LINE_SECONDS: Final = 10.0
"""Pause in seconds between two lines of figures if there is no terminal."""


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the closing table: a pipeline and one of its destinations."""

    pipeline: str
    destination: str
    kills: int
    rows_in: int
    count: Tally
    divergent: int
    early: int
    looks: int
    leftovers: tuple[str, ...] = ()

    @property
    def is_exact(self) -> bool:
        """Whether every order arrived exactly once, none too early, and the destinations agree."""
        count = self.count
        wrong = (count.lost, count.duplicated, self.divergent, self.early, len(self.leftovers))
        return count.rows_out == self.rows_in and not any(wrong)

    def in_words(self) -> str:
        """Return the result as a sentence."""
        return f"{self.pipeline}, {self.destination}: {self.finding} (in {self.looks:,} looks)" + "".join(
            f"; left behind: {what}" for what in self.leftovers
        )

    @property
    def finding(self) -> str:
        """What became of the orders."""
        if self.is_exact:
            return "every order arrived exactly once, and none before the checkpoint had it"
        harms = {
            "orders lost": self.count.lost,
            "rows too many": self.count.duplicated,
            "orders held otherwise than elsewhere": self.divergent,
            "seen before the checkpoint had them": self.early,
        }
        parts = [f"{number:,} {harm}" for harm, number in harms.items() if number]
        return ", ".join(parts) or "every order arrived exactly once"


class Display:
    """Prints lines, each with the seconds since the start."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._began = time.monotonic()

    def say(self, text: str) -> None:
        """Print a line."""
        seconds = time.monotonic() - self._began
        self.console.print(f"{seconds:6.1f} s  {text}", markup=False, highlight=False, soft_wrap=True)

    def figures(self, title: str, orders: int, kills: int) -> Figures:
        """Return the running figures of one pipeline."""
        return Figures(self, title, orders, kills)

    def close(self, results: Sequence[Result]) -> None:
        """Print the closing table."""
        self.console.print(closing_table(results))
        for result in results:
            self.console.print(result.in_words(), highlight=False, soft_wrap=True)


class Figures:
    """Orders produced, rows visible and kills, as bars that disappear at the end, or as an occasional line."""

    def __init__(self, display: Display, title: str, orders: int, kills: int) -> None:
        self._display = display
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            console=display.console,
            transient=True,
            disable=not display.console.is_terminal,
        )
        self._produced = self._bars.add_task(f"{title}: orders produced", total=orders)
        self._visible = self._bars.add_task(f"{title}: rows visible", total=orders)
        self._killed = self._bars.add_task(f"{title}: kills -9", total=kills)
        self._next_line = time.monotonic() + LINE_SECONDS

    def update(self, produced: int, visible: int, killed: int) -> None:
        """Show new figures."""
        self._bars.update(self._produced, completed=produced)
        self._bars.update(self._visible, completed=visible)
        self._bars.update(self._killed, completed=killed)
        if not self._display.console.is_terminal and time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + LINE_SECONDS
            self._display.say(f"produced {produced:,}, visible {visible:,}")

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()


def closing_table(results: Sequence[Result]) -> Table:
    """Return the closing table."""
    numbers = ("rows in", "rows out", "lost", "duplicated", "divergent", "early")
    columns = [Column(name, justify="right", no_wrap=True) for name in numbers]
    names = [Column("pipeline", no_wrap=True), Column("into", no_wrap=True)]
    title = f"kills -9 of each pipeline: {results[0].kills}"
    table = Table(*names, *columns, box=box.SIMPLE_HEAD, padding=0, title=title)
    for result in results:
        count = result.count
        table.add_row(
            result.pipeline,
            result.destination,
            f"{result.rows_in:,}",
            f"{count.rows_out:,}",
            *(_count(number) for number in (count.lost, count.duplicated, result.divergent, result.early)),
        )
    return table


def page_of(results: Sequence[Result], courses: Mapping[str, Course]) -> str:
    """Return the page of a demo: the course of each pipeline, and the closing table."""
    head = ["pipeline, into", "kills", "rows in", "rows out", "lost", "duplicated", "divergent", "early"]
    rows = [
        [
            f"{one.pipeline}, {one.destination}",
            *(f"{number:,}" for number in (one.kills, one.rows_in, one.count.rows_out, one.count.lost)),
            *(f"{number:,}" for number in (one.count.duplicated, one.divergent, one.early)),
        ]
        for one in results
    ]
    longest = max((course.seconds for course in courses.values()), default=0.0)
    sections = []
    for title, course in courses.items():
        places: dict[str, list[str]] = {}
        for result in results:
            if result.pipeline == title:
                places.setdefault(result.finding, []).append(result.destination)
        said = " ".join(f"{', '.join(names)}: {finding}." for finding, names in places.items())
        drawn = page.picture(course, said, longest)
        sections.append((_NAMES.get(title, title), f"<p>{escape(said)}</p>{drawn}"))
    sections.append(("The end", page.table(head, rows, "the closing table")))
    return page.document(*_headline(results), sections)


_NAMES: Final = {
    EPOCHSINK: "epochsink",
    CONNECT: "epochsink on Spark Connect",
    "plain": "plain foreachBatch, with Spark's own writers",
    "upsert": "foreachBatch with an upsert by key",
}
"""What each pipeline is called in pictures."""


def _headline(results: Sequence[Result]) -> tuple[str, str]:
    """Return the finding of a demo in a title and a sentence."""
    ours = [result for result in results if result.pipeline in OURS]
    exact = dict.fromkeys(result.destination for result in ours if result.is_exact)
    times = "One kill -9" if results[0].kills == 1 else f"{results[0].kills} times kill -9 each"
    is_exact = all(result.is_exact for result in ours)
    title = f"{times}: with epochsink every order arrives exactly once" if is_exact else "Not every order exactly once"
    said = [f"Exact: {', '.join(exact) or 'nothing'}."]
    for pipeline in dict.fromkeys(result.pipeline for result in results if result not in ours):
        own = [result for result in results if result.pipeline == pipeline]
        wrong = {
            "lost": sum(one.count.lost for one in own),
            "too many": sum(one.count.duplicated for one in own),
            "seen too early": sum(one.early for one in own),
        }
        harm = ", ".join(f"{number:,} rows {what}" for what, number in wrong.items() if number)
        said.append(f"{pipeline.capitalize()}: {harm or 'no harm this time'}.")
    return title, " ".join(said)


def _count(number: int) -> str:
    return f"[bold red]{number:,}[/]" if number else "[bold green]0[/]"


def picture_of(results: Sequence[Result], courses: Mapping[str, Course]) -> str:
    """Return the courses of a demo as one picture."""
    parts = []
    for title, course in courses.items():
        own = [result for result in results if result.pipeline == title]
        said = "; ".join(
            f"{one.destination}: "
            + (
                "exact"
                if one.is_exact
                else f"{one.count.lost:,} lost, {one.count.duplicated:,} too many, {one.early:,} seen too early"
            )
            for one in own
        )
        parts.append((_NAMES.get(title, title), said, course))
    return page.figure(*_headline(results), parts)
