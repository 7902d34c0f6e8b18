"""The pages of `epochsink demo` and `epochsink report` in a real browser: on a phone and a desktop, light and dark."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pytest
from checkpoint_kit import CheckpointKit
from folder_sink import FolderSink
from typer.testing import CliRunner

from epochsink.cli.app import app
from epochsink.errors import RowsRejected
from epochsink.protocol.progress import EpochProgress, SinkProgress
from epochsink_devkit.demo.destination import Tally
from epochsink_devkit.demo.display import Result, page_of
from epochsink_devkit.page import Course, Sample
from programs.chromium import Chromium

if TYPE_CHECKING:
    from collections.abc import Iterator

CHECKS: Final = Path(__file__).with_name("page_checks.js").read_text()
PHONE, DESKTOP = 360, 1280
DOCS: Final = Path(__file__).parents[3] / "docs"
PICTURES: Final = sorted(path for path in DOCS.rglob("*.svg") if path.name != "favicon.svg")
# what a person can operate, as HTML says
OPERABLE: Final = "[...document.querySelectorAll('a[href],button,input,select,textarea,summary,[tabindex]')]"
SHOTS: Final = os.environ.get("EPOCHSINK_SCREENSHOTS")
"""A folder that keeps what the browser shows."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    program = shutil.which("chromium") or shutil.which("google-chrome")
    assert program, "no Chromium is installed: apt-get install chromium fonts-dejavu-core"
    with Chromium(program, tmp_path_factory.mktemp("profile")) as started:
        yield started


def course(places: list[str], *, early: bool) -> Course:
    """Return two minutes of a pipeline that is killed twice; readers see rows after the decision, or before it."""
    epochs, samples, kills = [], [Sample(1000.0, 0, dict.fromkeys(places, 0))], []
    for number in range(14):
        at, rows = 1000.0 + 8 * number, 14_000 * number
        seen = dict.fromkeys(places, rows + 14_000)
        samples.append(
            Sample(at + 4, rows, seen) if early else Sample(at + 4, rows + 14_000, dict.fromkeys(places, rows))
        )
        samples.append(Sample(at + 6, rows + 14_000, seen))
        sinks = dict.fromkeys(("table", "index", "topic"), SinkProgress(rows=14_000))
        epochs.append(EpochProgress(number, at + 6, 2.5, 0.5, 1.0, 2.0, sinks))
        if number in {3, 9}:
            kills.append((at + 5, "between the transactions of one epoch, in Kafka"))
    return Course(() if early else epochs, samples, kills)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the page of a demo, whose figures are made up."""
    places = ["PostgreSQL", "Elasticsearch", "Kafka"]
    results = [Result("epochsink", place, 7, 200_000, Tally(200_000, 0, 0), 0, 0, 726) for place in places]
    results += [
        Result("plain", "PostgreSQL", 7, 200_000, Tally(238_088, 0, 38_088), 19_044, 190_478, 323),
        Result("plain", "Kafka", 7, 200_000, Tally(219_044, 12, 19_044), 19_044, 25_789, 131),
        Result("upsert", "PostgreSQL", 7, 200_000, Tally(200_000, 0, 0), 0, 151_327, 318),
    ]
    courses = {
        "epochsink": course(places, early=False),
        "plain": course(["PostgreSQL", "Kafka"], early=True),
        "upsert": course(["PostgreSQL"], early=True),
    }
    file = tmp_path_factory.mktemp("demo") / "demo.html"
    file.write_text(page_of(results, courses))
    return file


@pytest.fixture(scope="module")
def docs() -> Path:
    """Return the page of a real run, which the docs show."""
    return DOCS / "assets" / "demo-page.html"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the page of `epochsink report` about a checkpoint with a late epoch and a failure."""
    folder = tmp_path_factory.mktemp("a-folder-whose-name-is-longer-than-a-line-of-a-phone")
    sinks = {name: FolderSink(str(folder / name)) for name in ("table", "orders_by_customer_and_day")}
    kit = CheckpointKit(folder / "checkpoint", sinks)
    rows = pa.record_batch({"id": pa.array(range(1000), pa.int64())})
    for number in range(12):
        kit.run(number, dict.fromkeys(sinks, rows))
    kit.record(12, dict.fromkeys(sinks, rows))
    kit.decide(12)
    kit.coordinator.note_failure(RowsRejected("the target refuses [3] rows; " + "x" * 60))
    file = folder / "report.html"
    done = CliRunner().invoke(app, ["report", str(kit.root), "--output", str(file)])
    assert done.exit_code == 0, done.output
    return file


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, PHONE, 821, DESKTOP])
@pytest.mark.parametrize("name", ["demo", "docs", "report"])
def test_a_page_can_be_read_at_every_width_and_in_both_schemes(
    browser: Chromium, request: pytest.FixtureRequest, name: str, width: int, scheme: str
) -> None:
    """Nothing is cut or covered, text has 12 px and a contrast of 4.5 to what is behind it, and nothing is fetched."""
    page: Path = request.getfixturevalue(name)
    browser.open(page, width, scheme)
    browser.run("document.querySelectorAll('details').forEach(each => each.open = true)")
    browser.grow(width)
    found = browser.run(CHECKS)
    if SHOTS:
        browser.screenshot(Path(SHOTS) / f"{name}-{width}-{scheme}.png")
    assert found["wrong"] == []
    # a page whose text was not found would pass
    assert found["judged"] > 60
    assert found["pictures"] == {"demo": 3, "docs": 3, "report": 1}[name]
    dark = browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(13, 17, 23)"
    assert dark == (scheme == "dark")
    assert browser.requested == [page.as_uri()]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.stem)
def test_a_picture_of_the_docs_can_be_read_in_both_schemes(
    browser: Chromium, picture: Path, scheme: str, tmp_path: Path
) -> None:
    """In a column as wide as the picture was drawn for."""
    page = tmp_path / "picture.html"
    page.write_text(f"<!doctype html><body style='margin:0;width:820px'>{picture.read_text()}</body>")
    browser.open(page, 820, scheme)
    browser.grow(820)
    if SHOTS:
        browser.screenshot(Path(SHOTS) / f"{picture.stem}-{scheme}.png")
    found = browser.run(CHECKS)
    assert found["wrong"] == []
    assert found["judged"] > 5


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
@pytest.mark.parametrize("name", ["demo", "report"])
def test_a_page_is_operated_by_the_keyboard(
    browser: Chromium, request: pytest.FixtureRequest, name: str, width: int
) -> None:
    """Tab reaches everything that can be operated, in the order of the page, and it is seen where one is."""
    browser.open(request.getfixturevalue(name), width, "light")
    count = browser.run(f"{OPERABLE}.length")
    assert count == {"demo": 4, "report": 1}[name]
    reached = []
    for _ in range(count):
        browser.press("Tab", 9)
        reached.append(browser.run(f"{OPERABLE}.indexOf(document.activeElement)"))
        style = "getComputedStyle(document.activeElement)"
        assert browser.run(f"{style}.outlineStyle") == "solid"
        assert browser.run(f"parseFloat({style}.outlineWidth)") >= 2
    assert reached == list(range(count))


def test_enter_opens_the_list_of_kills(browser: Chromium, demo: Path) -> None:
    browser.open(demo, PHONE, "light")
    browser.press("Tab", 9)
    browser.press("Enter", 13, "\r")
    said = browser.run("document.querySelector('details[open]').innerText")
    assert "at 29 s: between the transactions of one epoch, in Kafka" in said


@pytest.mark.parametrize(
    ("style", "says"),
    [
        ("p { width: 2000px }", "px wide in a window of 360 px"),
        ("p { font-size: 11px }", "has 11.0 px"),
        ("p { color: #888888 }", "has a contrast of 3.5"),
        ("text { fill: #888888 !important }", "has a contrast of 3.5"),
        ("text { transform: translateX(-40px) }", "is cut"),
        ("text { font-size: 30px !important }", "overlap"),
        ("figure { position: relative; top: -60px }", "is covered"),
        ("td::before { color: #bbbbbb !important }", "the name beside"),
    ],
)
def test_the_checks_notice_what_is_wrong(browser: Chromium, demo: Path, style: str, says: str) -> None:
    browser.open(demo, PHONE, "light")
    browser.run(f"document.head.appendChild(document.createElement('style')).textContent = {style!r}")
    browser.grow(PHONE)
    assert any(says in each for each in browser.run(CHECKS)["wrong"])
