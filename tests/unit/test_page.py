"""The page about a pipeline: self-contained, readable by machines, and every epoch and kill is on it."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

import pytest

from epochsink.devkit import page
from epochsink.devkit.demo.destination import Tally
from epochsink.devkit.demo.display import Result, page_of
from epochsink.devkit.page import Course, Sample
from epochsink.protocol.progress import EpochProgress, SinkProgress

SVG = "{http://www.w3.org/2000/svg}"


def epoch(number: int) -> EpochProgress:
    sinks = {"table": SinkProgress(rows=5), "topic": SinkProgress(rows=6)}
    return EpochProgress(number, 100.0 + number, 0.4, 0.1, 0.2, 0.1, sinks)


@pytest.fixture
def course() -> Course:
    samples = [Sample(100.0, 0, {"table": 0}), Sample(101.5, 5, {"table": 5}), Sample(103.0, 10, {"table": 10})]
    return Course([epoch(number) for number in range(3)], samples, [(101.2, "recorded <before> the decision")])


def drawn(course: Course) -> ET.Element:
    return ET.fromstring(page.picture(course, "what it shows"))  # noqa: S314 - ours


def test_each_step_of_each_epoch_is_a_bar_in_each_sinks_lane(course: Course) -> None:
    titles = [title.text or "" for title in drawn(course).iter(f"{SVG}title")]
    assert sum(title.startswith("epoch 1, ") for title in titles) == 2 * 4
    assert "epoch 2, topic: 6 rows, written after 0.40 s" in titles


def test_kills_and_rows_are_drawn_at_their_times(course: Course) -> None:
    picture = drawn(course)
    (kill,) = [box for box in picture.iter(f"{SVG}rect") if box.get("class") == "killed"]
    assert (kill.find(f"{SVG}title").text) == "kill -9: recorded <before> the decision"  # type: ignore[union-attr]
    decided, seen = ([*picture.iter(f"{SVG}polyline")])[::-1]
    assert (decided.get("class"), seen.get("class")) == ("decided", "l1")
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
    assert "1 times kill -9: every order exactly once" in text
    assert "table <a>" not in text
    addresses = set(re.findall(r"https?://[^\"' <]+", text))
    assert addresses == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<script|<link|@import|url\(", text)
    # a description for who cannot see it, and both colour schemes
    assert 'role="img" aria-label="epochsink, table' in text
    assert "prefers-color-scheme:dark" in text


def test_one_place_that_is_not_exact_is_in_the_headline(course: Course) -> None:
    exact, wrong = Tally(10, 0, 0), Tally(12, 0, 2)
    results = [
        Result("epochsink", "table", 1, 10, exact, 0, 0, 9),
        Result("epochsink", "topic", 1, 10, wrong, 0, 0, 9),
        Result("plain", "table", 1, 10, exact, 0, 0, 9),
    ]
    text = page_of(results, {"epochsink": course})
    assert "<h1>Not every order exactly once</h1><p>Exact: table. The plain pipeline had luck.</p>" in text
