"""Run one pipeline from its first start to its last row, with its kills."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Final

from epochsink.protocol.json_value import from_json
from epochsink.protocol.progress import EpochProgress
from epochsink_devkit.demo.destination import Destination, Tally, divergent
from epochsink_devkit.demo.display import Display, Figures, Result
from epochsink_devkit.demo.kill_plan import ANY_MOMENT, Kill
from epochsink_devkit.demo.orders import Orders, make_topic
from epochsink_devkit.demo.pipeline_process import DemoFailed, PipelineProcess, SuccessiveRuns
from epochsink_devkit.demo.reader import Background, Reader, decided_offsets
from epochsink_devkit.demo.settings import PipelineSettings
from epochsink_devkit.page import Course, Sample

LOOK_SECONDS: Final = 0.05
STANDSTILL_SECONDS: Final = 300.0
"""Longest time in seconds that a run may take without a new epoch."""
BACKLOG_EPOCHS: Final = 3
"""Number of epochs that the producer is ahead of the pipeline."""
RESERVED_EPOCHS: Final = 2
"""Number of epochs whose orders are produced only after the last kill, so that no run lacks orders."""


def orders_per_epoch(orders: int, kills: Sequence[Kill]) -> int:
    """Return the number of orders in an epoch, small enough that every kill has an epoch to interrupt."""
    epochs = sum(kill.most_epochs for kill in kills) + BACKLOG_EPOCHS + RESERVED_EPOCHS
    return max(orders // epochs, 1)


class Scenario:
    """Runs one pipeline to its end. Everything that it starts has ended when `run` returns or raises."""

    def __init__(
        self, title: str, settings: PipelineSettings, *, orders: int, kills: Sequence[Kill], folder: Path, seed: int
    ) -> None:
        self._title = title
        self._settings = settings
        self._orders = orders
        self._kills = kills
        self._folder = folder
        self._checkpoint = folder / "checkpoint"
        self._killed = 0
        self._samples: list[Sample] = []
        self._kill_times: list[tuple[float, str]] = []
        self._decided = 0
        self._producer = Orders(settings.bootstrap_servers, settings.topic, orders, self._allowed, seed)
        self._readers = {
            name: Reader(destination, self._checkpoint) for name, destination in settings.destinations.items()
        }
        self._threads: list[Background] = [self._producer, *self._readers.values()]

    def run(self, display: Display) -> list[Result]:
        """Return one result for each destination. Raises `DemoFailed`."""
        make_topic(self._settings.bootstrap_servers, self._settings.topic)
        settings = self._folder / "settings.json"
        self._settings.save(settings)
        command = [sys.executable, "-m", "epochsink_devkit.demo.pipeline", str(settings)]
        for destination in self._settings.destinations.values():
            destination.create()
        with ExitStack() as stack:
            for thread in self._threads:
                thread.start()
                stack.callback(thread.end)
            runs = stack.enter_context(SuccessiveRuns(command, self._folder, self._kills))
            figures = stack.enter_context(display.figures(self._title, self._orders, len(self._kills)))
            for number, kill in enumerate(self._kills, start=1):
                with runs.begin() as process:
                    self._run_until(kill, process, figures)
                self._killed = number
                self._kill_times.append((time.time(), kill.title))
                display.say(f"{self._title}: kill -9 number {number} of {len(self._kills)}: {kill.title}")
            with runs.begin() as process:
                self._run_to_the_end(process, figures)
            display.say(f"{self._title}: all {self._orders:,} orders are processed; stopped in order")
        return self._results()

    def _run_until(self, kill: Kill, process: PipelineProcess, figures: Figures) -> None:
        if kill.point != ANY_MOMENT:
            self._wait(process, figures, process.has_struck, kill.title)
            return
        enough = self._decided + kill.count * self._settings.orders_per_epoch
        self._wait(process, figures, lambda: self._decided >= enough, kill.title)
        strike = time.monotonic() + kill.delay_seconds
        self._wait(process, figures, lambda: time.monotonic() >= strike, kill.title)

    def _run_to_the_end(self, process: PipelineProcess, figures: Figures) -> None:
        self._wait(process, figures, lambda: self._decided >= self._orders, "the last order is through")
        process.stop()

    def _wait(self, process: PipelineProcess, figures: Figures, is_there: Callable[[], bool], what: str) -> None:
        moved = time.monotonic()
        while not is_there():
            process.expect_alive()
            self._raise_failure()
            before, self._decided = self._decided, sum(decided_offsets(self._checkpoint).values())
            figures.update(self._producer.produced, self._visible(), self._killed)
            self._sample(self._decided, {reader.label: reader.visible for reader in self._readers.values()})
            if self._decided > before:
                moved = time.monotonic()
            elif time.monotonic() - moved > STANDSTILL_SECONDS:
                raise DemoFailed(f"no epoch within {STANDSTILL_SECONDS:.0f} s, and not yet: {what}\n{process.tail()}")
            time.sleep(LOOK_SECONDS)

    def course(self) -> Course:
        """Return what happened when; after `run`."""
        file = Path(self._settings.epochs)
        lines = file.read_text().splitlines() if file.exists() else []
        return Course([from_json(EpochProgress, json.loads(line)) for line in lines], self._samples, self._kill_times)

    def _sample(self, decided: int, visible: Mapping[str, int]) -> None:
        last = self._samples[-1] if self._samples else None
        # a step of the curve is two samples: before it, and after it
        if last is None or (last.decided, last.visible) != (decided, visible):
            now = time.time()
            if last is not None:
                self._samples.append(Sample(now, last.decided, last.visible))
            self._samples.append(Sample(now, decided, visible))

    def _raise_failure(self) -> None:
        for thread in self._threads:
            thread.raise_failure()

    def _visible(self) -> int:
        return min(reader.visible for reader in self._readers.values())

    def _allowed(self) -> int:
        """Return how many orders may be in the topic by now."""
        per_epoch = self._settings.orders_per_epoch
        upto = self._decided + BACKLOG_EPOCHS * per_epoch
        last = self._orders if self._killed == len(self._kills) else self._orders - RESERVED_EPOCHS * per_epoch
        return min(upto, last)

    def _results(self) -> list[Result]:
        self._raise_failure()
        copies = {name: destination.copies() for name, destination in self._settings.destinations.items()}
        differing = divergent(list(copies.values()))
        self._sample(self._orders, {self._readers[name].label: copies[name].total() for name in copies})
        return [
            Result(
                pipeline=self._title,
                destination=destination.label,
                kills=len(self._kills),
                rows_in=self._producer.produced,
                count=Tally.of(copies[name], self._orders),
                divergent=differing,
                early=len(self._readers[name].early),
                looks=self._readers[name].looks,
                leftovers=_leftovers(destination),
            )
            for name, destination in self._settings.destinations.items()
        ]


def _leftovers(destination: Destination) -> tuple[str, ...]:
    with closing(destination.reader()) as reader:
        return tuple(what for _, what in reader.leftovers())
