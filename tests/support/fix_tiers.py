"""What `make test` leaves to `make test-all`, and the order in which two processes end at about the same time."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

RECORDED: Final = Path(__file__).parents[1] / "durations.json"
"""Seconds of one case of each test function, without the start of shared services; `pytest --record-durations`."""
LISTED_FROM: Final = 0.5
"""Seconds; what takes less is not listed."""
UNLISTED: Final = 0.1
"""Seconds; about the mean of the others."""
THOROUGH_FROM: Final = 1.5
"""Seconds; what takes longer is left to `make test-all`, unless it is marked `essential`."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-durations", action="store_true", help="write tests/durations.json anew")
    parser.addoption(
        "--files", default="0/1", metavar="K/N", help="only every Nth test file, from the Kth on (modulo N)"
    )


def pytest_report_header() -> str | None:
    """Say which plans of the simulation are played, so that the same ones can be played again."""
    share = os.environ.get("EPOCHSINK_SHARE")
    return f"fault plans: EPOCHSINK_SHARE={share}" if share else None


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Mark what takes long. Then put the files that take longest first; a process that is free takes the next one.

    The files are shared out in that order, so that each share of them takes about as long.
    """
    recorded: dict[str, float] = json.loads(RECORDED.read_text())
    takes = {item.nodeid: recorded.get(_function(item.nodeid), UNLISTED) for item in items}
    for item in items:
        if takes[item.nodeid] >= THOROUGH_FROM and not any(map(item.get_closest_marker, ("essential", "plans"))):
            item.add_marker("thorough")
    yield  # the tests that `-m` leaves out are gone after this
    seconds: dict[str, float] = defaultdict(float)
    for item in items:
        seconds[_file(item.nodeid)] += takes[item.nodeid]
    files = sorted(seconds, key=lambda file: (-seconds[file], file))
    place, _, each = config.getoption("files").partition("/")
    order = {file: number for number, file in enumerate(files) if number % int(each) == int(place) % int(each)}
    config.hook.pytest_deselected(items=[item for item in items if _file(item.nodeid) not in order])
    items[:] = sorted(
        (item for item in items if _file(item.nodeid) in order), key=lambda item: order[_file(item.nodeid)]
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Write the durations, if asked for; tests that did not run keep theirs."""
    if not config.getoption("record_durations"):
        return
    cases: dict[str, set[str]] = defaultdict(set)
    seconds: dict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport) and report.when != "setup":
                cases[_function(report.nodeid)].add(report.nodeid)
                seconds[_function(report.nodeid)] += report.duration
    known = json.loads(RECORDED.read_text()) | {name: round(seconds[name] / len(cases[name]), 1) for name in seconds}
    listed = {name: known[name] for name in sorted(known) if known[name] >= LISTED_FROM}
    RECORDED.write_text(json.dumps(listed, indent=0) + "\n")


def _function(nodeid: str) -> str:
    return nodeid.partition("[")[0]


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]
