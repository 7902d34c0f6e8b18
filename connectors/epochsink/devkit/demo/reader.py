"""Read a destination while the pipeline runs and is killed, as any consumer of its rows would."""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING, Final

from epochsink.protocol.checkpoint import NOTHING_DECIDED, Checkpoint
from epochsink.protocol.storage import LocalStorage

if TYPE_CHECKING:
    from pathlib import Path

    from epochsink.devkit.demo.destination import Destination, Eye, Offsets

LOOK_SECONDS: Final = 0.2
PAUSES: Final = 5
"""How many times as long as a look the pause after it is, at least: the pipeline needs the processors."""


class Background(threading.Thread):
    """Calls `step` again and again until `end`; ``failure`` is what ended it earlier."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.ended = threading.Event()
        self.failure: Exception | None = None

    def step(self) -> float | None:
        """Do a piece of work; return the seconds to wait before the next one, None if there is none."""
        raise NotImplementedError

    def run(self) -> None:
        """Work."""
        try:
            while not self.ended.is_set():
                pause = self.step()
                if pause is None:
                    return
                self.ended.wait(pause)
        except Exception as failure:  # noqa: BLE001 - raised in the main thread, whatever it is
            self.failure = failure

    def end(self) -> None:
        """Stop working; returns when it has."""
        self.ended.set()
        self.join()

    def raise_failure(self) -> None:
        """Raise what ended it, if something did."""
        if self.failure is not None:
            raise self.failure


class Reader(Background):
    """Looks again and again; ``early`` collects the orders that were visible before their epoch was decided."""

    def __init__(self, destination: Destination, checkpoint: Path) -> None:
        super().__init__(f"reader of {destination.label}")
        self._destination = destination
        self._checkpoint = checkpoint
        self._eye: Eye | None = None
        self.visible = 0
        self.looks = 0
        self.early: set[int] = set()

    def step(self) -> float | None:
        """Note what is visible, and what of it is early."""
        if self._eye is None:
            self._eye = self._destination.eye()
        began = time.monotonic()
        self.visible = self._eye.look()
        # what is decided is read after the rows were: whatever lies beyond it was early beyond doubt
        self.early |= self._eye.beyond(decided_offsets(self._checkpoint))
        self.looks += 1
        return max(LOOK_SECONDS, PAUSES * (time.monotonic() - began))

    def end(self) -> None:
        """Stop looking."""
        super().end()
        if self._eye is not None:
            self._eye.close()


def decided_offsets(checkpoint: Path) -> Offsets:
    """Return where the newest epoch with a ``commits/N`` ends, for each partition; empty before the first."""
    files = LocalStorage(checkpoint)
    newest = Checkpoint(files).newest_decided()
    if newest == NOTHING_DECIDED:
        return {}
    text = (files.read(f"offsets/{newest}") or b"").decode()
    (ends,) = json.loads(text.splitlines()[2]).values()
    return {int(partition): end for partition, end in ends.items()}
