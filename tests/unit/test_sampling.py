"""Readers look at a target after each kill, and the history says when they could not."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from epochsink_devkit.history import CheckedTarget, History, HistoryLog
from epochsink_devkit.history.readers.reader import nothing
from epochsink_devkit.history.rows import SCHEMA
from epochsink_devkit.history.sampling import SLOW_SECONDS, Sampler
from nemesis.reading import LONGEST_REST_SECONDS, Rest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pyarrow as pa
    import pytest


class Slow:
    """A reader whose reads take as many seconds as they are told, one after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: list[float]) -> None:
        self.clock = 100.0
        self._seconds = seconds
        monkeypatch.setattr("epochsink_devkit.history.sampling.time.monotonic", lambda: self.clock)

    def read(self, fixed: Callable[[], None] = nothing) -> pa.Table:
        fixed()
        self.clock += self._seconds.pop(0)
        return SCHEMA.empty_table()

    def leftovers(self) -> list[tuple[str, str]]:
        return []

    def close(self) -> None:
        """Nothing to close."""


def test_a_target_is_unreachable_while_a_read_takes_seconds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    reader = Slow(monkeypatch, [SLOW_SECONDS / 2, SLOW_SECONDS * 3, *[SLOW_SECONDS / 2] * 3])
    resting, ended = threading.Event(), threading.Event()
    rests: list[float] = []

    def rest(took: float) -> None:
        rests.append(took)
        if len(rests) > 3:
            resting.set()
            ended.wait(10)

    sampler = Sampler(CheckedTarget("table"), reader, HistoryLog(tmp_path), lambda: None, rest)
    sampler.start()
    assert resting.wait(10)
    ended.set()
    sampler.finish(10)
    began = 100.0 + SLOW_SECONDS / 2
    assert History.load(tmp_path).unreachable == [("table", began, began + SLOW_SECONDS * 3)]
    assert rests == [0.0, SLOW_SECONDS / 2, SLOW_SECONDS * 3, SLOW_SECONDS / 2]


def test_a_reader_at_rest_looks_at_once_when_a_driver_has_died() -> None:
    deaths, began = [0], time.monotonic()
    rest = Rest(lambda: deaths[0])
    threading.Timer(0.3, lambda: deaths.__setitem__(0, 1)).start()
    rest(1000.0)
    assert time.monotonic() - began < LONGEST_REST_SECONDS / 2


def test_a_reader_does_not_rest_after_a_read_in_which_a_driver_has_died() -> None:
    deaths, began = [0], time.monotonic()
    rest = Rest(lambda: deaths[0])
    deaths[0] = 1
    rest(1000.0)
    assert time.monotonic() - began < LONGEST_REST_SECONDS / 2
