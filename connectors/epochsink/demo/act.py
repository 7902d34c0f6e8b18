"""One pipeline from its first start to its last row, with its kills."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Final

from epochsink.demo.display import Result
from epochsink.demo.kills import ANY_MOMENT
from epochsink.demo.lives import Lives
from epochsink.demo.orders import Orders, make_topic
from epochsink.demo.progress import decided_offsets
from epochsink.demo.reader import Reader
from epochsink.demo.tally import Tally, divergent
from epochsink.demo.victim import DemoFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from epochsink.demo.background import Background
    from epochsink.demo.destination import Destination
    from epochsink.demo.display import Display, Figures
    from epochsink.demo.kills import Kill
    from epochsink.demo.settings import PipelineSettings
    from epochsink.demo.victim import Victim

LOOK_SECONDS: Final = 0.05
STANDSTILL_SECONDS: Final = 300.0
"""How long one life of the pipeline may go on without a further epoch before its kill or its end."""
BACKLOG_EPOCHS: Final = 3
"""How far producing runs ahead of the pipeline."""
RESERVED_EPOCHS: Final = 2
"""What is produced only after the last kill, so that no life runs out of orders."""


def orders_per_epoch(orders: int, kills: Sequence[Kill]) -> int:
    """Return how many orders make an epoch, so that every kill finds one to strike in."""
    epochs = sum(kill.most_epochs for kill in kills) + BACKLOG_EPOCHS + RESERVED_EPOCHS
    return max(orders // epochs, 1)


class Act:
    """Carries one pipeline through. Everything that it starts has ended when `run` returns or raises."""

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
        command = [sys.executable, "-m", "epochsink.demo.pipeline", str(settings)]
        for destination in self._settings.destinations.values():
            destination.create()
        with ExitStack() as stack:
            for thread in self._threads:
                thread.start()
                stack.callback(thread.end)
            lives = stack.enter_context(Lives(command, self._folder, self._kills))
            figures = stack.enter_context(display.figures(self._title, self._orders, len(self._kills)))
            for number, kill in enumerate(self._kills, start=1):
                with lives.begin() as victim:
                    self._live_until(kill, victim, figures)
                self._killed = number
                display.say(f"{self._title}: kill -9 number {number} of {len(self._kills)}: {kill.title}")
            with lives.begin() as victim:
                self._live_to_the_end(victim, figures)
            display.say(f"{self._title}: all {self._orders:,} orders are through; stopped in order")
        return self._results()

    def _live_until(self, kill: Kill, victim: Victim, figures: Figures) -> None:
        if kill.point != ANY_MOMENT:
            self._wait(victim, figures, victim.has_struck, kill.title)
            return
        enough = self._decided + kill.count * self._settings.orders_per_epoch
        self._wait(victim, figures, lambda: self._decided >= enough, kill.title)
        strike = time.monotonic() + kill.delay_seconds
        self._wait(victim, figures, lambda: time.monotonic() >= strike, kill.title)

    def _live_to_the_end(self, victim: Victim, figures: Figures) -> None:
        self._wait(victim, figures, lambda: self._decided >= self._orders, "the last order is through")
        victim.stop()

    def _wait(self, victim: Victim, figures: Figures, is_there: Callable[[], bool], what: str) -> None:
        moved = time.monotonic()
        while not is_there():
            victim.expect_alive()
            self._raise_failure()
            before, self._decided = self._decided, sum(decided_offsets(self._checkpoint).values())
            figures.update(self._producer.produced, self._visible(), self._killed)
            if self._decided > before:
                moved = time.monotonic()
            elif time.monotonic() - moved > STANDSTILL_SECONDS:
                raise DemoFailed(f"no epoch within {STANDSTILL_SECONDS:.0f} s, and not yet: {what}\n{victim.tail()}")
            time.sleep(LOOK_SECONDS)

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
        return [
            Result(
                pipeline=self._title,
                destination=destination.label,
                kills=len(self._kills),
                rows_in=self._producer.produced,
                tally=Tally.of(copies[name], self._orders),
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
