"""The page about a pipeline: self-contained, readable by machines, and every epoch and kill is on it."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from epochsink.protocol.progress import EpochProgress, SinkProgress
from epochsink_devkit import page, svg
from epochsink_devkit.demo.destination import Tally
from epochsink_devkit.demo.display import Result, page_of
from epochsink_devkit.page import Course, Sample
from epochsink_devkit.svg import Svg, letters

DOCS = Path(__file__).parents[2] / "docs"
SVG = "{http://www.w3.org/2000/svg}"


def epoch(number: int) -> EpochProgress:
    sinks = {"table": SinkProgress(rows=5), "topic": SinkProgress(rows=6)}
    return EpochProgress(number, 100.0 + number, 0.4, 0.1, 0.2, 0.1, sinks)


@pytest.fixture
def course() -> Course:
    samples = [Sample(100.0, 0, {"table": 0}), Sample(101.5, 5, {"table": 5}), Sample(103.0, 10, {"table": 10})]
    return Course([epoch(number) for number in range(3)], samples, [(101.2, "recorded <before> the decision")])


def drawn(course: Course) -> ET.Element:
    return ET.fromstring(page.picture(course, "what it shows"))[0][0]  # noqa: S314 - ours


def test_each_step_of_each_epoch_is_a_bar_in_each_sinks_lane(course: Course) -> None:
    titles = [title.text or "" for title in drawn(course).iter(f"{SVG}title")]
    assert sum(title.startswith("epoch 1, ") for title in titles) == 2 * 4
    assert "epoch 2, topic: 6 rows, written after 0.40 s" in titles


def test_kills_and_rows_are_drawn_at_their_times(course: Course) -> None:
    picture = drawn(course)
    # one in the lanes of the epochs, one in the chart of the rows
    kill, _ = [box for box in picture.iter(f"{SVG}rect") if box.get("class") == "red killed"]
    assert (kill.find(f"{SVG}title").text) == "kill -9: recorded <before> the decision"  # type: ignore[union-attr]
    decided, seen = ([*picture.iter(f"{SVG}polyline")])[::-1]
    assert (decided.get("class"), seen.get("class")) == ("ink dashed", "green thick")
    # they fall together when readers see what is decided, and the kill is between the second and the third sample
    assert decided.get("points") == seen.get("points")
    xs = [float(point.split(",")[0]) for point in str(seen.get("points")).split()]
    assert xs[0] < float(kill.get("x") or 0) + 4 < xs[1]


def test_the_page_asks_for_nothing_and_is_escaped(course: Course) -> None:
    count = Tally(rows_out=10, lost=0, duplicated=0)
    wrong = Tally(rows_out=12, lost=0, duplicated=2)
    results = [
        Result("epochsink", "table <a>", 1, 10, count, 0, 0, 9),
        Result("plain", "table <a>", 1, 10, wrong, 0, 3, 9),
    ]
    text = page_of(results, {"epochsink": course, "plain": Course()})
    assert "One kill -9: with epochsink every order arrives exactly once" in text
    assert "table <a>" not in text
    addresses = set(re.findall(r"https?://[^\"' <]+", text))
    assert addresses == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<script|<link|@import|url\(", text)
    # a description for who cannot see it, and both colour schemes
    assert 'role="img" aria-label="table' in text
    assert "prefers-color-scheme:dark" in text
    # a table that is wider than the window is reached by the keyboard, in the order in which it is read
    (region,) = re.findall(r'<div class="scroll"([^>]*)>', text)
    assert 'tabindex="0" role="region" aria-label="' in region
    # and so is what a mark says under the pointer
    assert "<li>at 2 s: recorded &lt;before&gt; the decision</li>" in text
    assert not re.search(r'tabindex="[1-9]', text)
    assert '<html lang="en">' in text
    assert re.findall(r"<h([1-6])", text) == ["1", "2", "2", "2"]


def test_a_picture_is_there_for_a_desktop_and_for_a_phone(course: Course) -> None:
    wide, narrow, kills = ET.fromstring(page.picture(course, "what it shows"))  # noqa: S314 - ours
    for part, name, width in ((wide, "wide", svg.WIDTH), (narrow, "narrow", 300)):
        assert part.get("class") == name
        assert str(part[0].get("viewBox")).startswith(f"0 0 {width} ")
        assert max(float(box.get("x") or 0) for box in part.iter(f"{SVG}rect")) < width
    assert kills[0].text == "Where kill -9 struck"
    bars = [[title.text for title in part.iter(f"{SVG}title")] for part in (wide, narrow)]
    assert bars[0] == bars[1]


def test_the_heading_over_epochs_says_how_long_they_took() -> None:
    slow = EpochProgress(7, 200.0, write_seconds=2.5, commit_seconds=1.5)
    heading, drawn = page.epochs_in_time([epoch(6), slow])
    assert heading == "Readers saw each of the newest 2 epochs 0.8 to 4.0 s after it began"
    assert 'aria-label="epochs 6 to 7 in time"' in drawn
    assert page.epochs_in_time([slow])[0] == "Readers saw the newest epoch 4.0 s after it began"


def test_one_place_that_is_not_exact_is_in_the_headline(course: Course) -> None:
    exact, wrong = Tally(10, 0, 0), Tally(12, 0, 2)
    results = [
        Result("epochsink", "table", 1, 10, exact, 0, 0, 9),
        Result("epochsink", "topic", 1, 10, wrong, 0, 0, 9),
        Result("plain", "table", 1, 10, exact, 0, 0, 9),
    ]
    text = page_of(results, {"epochsink": course})
    assert "<h1>Not every order exactly once</h1><p>Exact: table. Plain: no harm this time.</p>" in text


def test_what_readers_see_before_the_decision_is_marked(course: Course) -> None:
    assert course.most_early == 0
    early = Course((), [Sample(0.0, 0, {"t": 0}), Sample(1.0, 0, {"t": 7}), Sample(2.0, 7, {"t": 7})])
    assert early.most_early == 7
    marks = [box for box in drawn(early).iter(f"{SVG}rect") if box.get("class") == "red part"]
    # the legend's, and that of the second in which the rows were early
    assert len(marks) == 2
    assert "red part" not in page.picture(course, "").partition("</style>")[2]


def test_courses_are_drawn_on_one_scale_of_time(course: Course) -> None:
    short = Course((), [Sample(0.0, 0, {"t": 0}), Sample(1.0, 5, {"t": 5})])

    def end(drawing: str) -> float:
        (points, *_) = re.findall(r'<polyline points="([^"]*)"', drawing)
        return float(points.split()[-1].split(",")[0])

    assert end(page.picture(short, "", 10.0)) < end(page.picture(short, "")) / 2
    figure = page.figure("It is exact", "Everywhere", [("a", "exact", course), ("b", "not", short)])
    assert figure.count("It is exact") == figure.count("Everywhere") == 2
    assert 'aria-label="It is exact. Everywhere"' in figure


def luminance(colour: str) -> float:
    """Return the relative luminance of WCAG 2."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    brighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (brighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("scheme", [svg.LIGHT, svg.DARK], ids=["light", "dark"])
def test_text_and_colours_stand_out_from_the_ground(scheme: dict[str, str]) -> None:
    found = {name: contrast(value, scheme["back"]) for name, value in scheme.items() if name not in {"back", "faint"}}
    # text needs 4.5, and every colour may be that of a text
    assert {name: round(value, 1) for name, value in found.items() if value < 4.5} == {}


def test_no_text_is_small_and_no_legend_is_cut() -> None:
    sizes = [int(size) for size in re.findall(r"(?:font|font-size):(?:\d+ )?(\d+)px", svg.STYLE)]
    assert sizes
    assert min(sizes) >= 12
    drawing = Svg()
    drawing.legend(100, 20, [("blue", f"a rather long description, number {number}") for number in range(9)])
    boxes = ET.fromstring(drawing.document(300))  # noqa: S314 - ours
    ends = [float(text.get("x") or 0) + letters(text.text or "") for text in boxes.iter(f"{SVG}text")]
    assert len(ends) == 9
    assert max(ends) <= svg.WIDTH


@pytest.mark.parametrize(
    "name",
    [
        "demo.svg",
        "nemesis.svg",
        "explanation/proof.svg",
        "reference/speed/ratios.svg",
        "how-to/outage/stopped.svg",
        *(f"explanation/experiments/{path.name}" for path in DOCS.glob("explanation/experiments/*.svg")),
    ],
)
def test_the_pictures_of_the_docs_are_in_the_house_style(name: str) -> None:
    text = (DOCS / name).read_text()
    assert svg.STYLE in text
    drawing = ET.fromstring(text)  # noqa: S314 - ours
    title = drawing.find(f"{SVG}text[@class='title']")
    assert title is not None
    assert (drawing.get("aria-label") or "").startswith(title.text or "?")
    for each in drawing.iter(f"{SVG}text"):
        size = {"title": 18.0, "head": 15.0}.get(each.get("class") or "", 14.0)
        x, width = float(each.get("x") or 0), letters(each.text or "", size)
        left = {"end": x - width, "middle": x - width / 2}.get(each.get("text-anchor") or "", x)
        # by an estimate that is wide rather than narrow
        assert left > -0.08 * width, f"{each.text!r} is cut"
        assert left + width < svg.WIDTH + 0.08 * width, f"{each.text!r} is cut"


@pytest.mark.parametrize(
    "name", ["kill.svg", *(f"explanation/pictures/{path.name}" for path in DOCS.glob("explanation/pictures/*"))]
)
def test_the_pictures_drawn_by_hand_have_a_title_and_follow_the_scheme(name: str) -> None:
    text = (DOCS / name).read_text()
    drawing = ET.fromstring(text)  # noqa: S314 - ours
    title = drawing.find(f"{SVG}text")
    assert title is not None
    assert drawing.get("aria-label") == title.text
    assert "prefers-color-scheme:dark" in text
