"""Read a destination, as any consumer would, while the pipeline runs and is killed."""

from __future__ import annotations

import json
import threading
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Final

from epochsink.protocol.checkpoint import NOTHING_DECIDED, Checkpoint
from epochsink.protocol.spark_logs import OffsetEntry
from epochsink.protocol.storage import LocalStorage
from epochsink_devkit.demo.destination import Destination, Eye, Offsets

LOOK_SECONDS: Final = 0.2
PAUSES: Final = 5
"""Shortest pause after a look, as a multiple of the look's time, because the pipeline needs the processors."""


class Background(threading.Thread, ABC):
    """Calls `step` repeatedly until `end`. ``failure`` is the error that ended it earlier."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.ended = threading.Event()
        self.failure: Exception | None = None

    @abstractmethod
    def step(self) -> float | None:
        """Do one step; return the seconds to wait before the next one, or None after the last one."""

    def run(self) -> None:
        """Work."""
        try:
            while not self.ended.is_set():
                pause = self.step()
                if pause is None:
                    return
                self.ended.wait(pause)
        except Exception as failure:  # noqa: BLE001 - raised again in the main thread
            self.failure = failure

    def end(self) -> None:
        """Stop, and wait until the thread has ended."""
        self.ended.set()
        self.join()

    def raise_failure(self) -> None:
        """Raise the error that ended it, if any."""
        if self.failure is not None:
            raise self.failure


class Reader(Background):
    """Looks repeatedly. ``early`` collects the orders that were visible before their epoch was decided."""

    def __init__(self, destination: Destination, checkpoint: Path) -> None:
        super().__init__(f"reader of {destination.label}")
        self.label = destination.label
        self._destination = destination
        self._checkpoint = checkpoint
        self._eye: Eye | None = None
        self.visible = 0
        self.looks = 0
        self.early: set[int] = set()

    def step(self) -> float | None:
        """Record the visible rows, and those that are early."""
        if self._eye is None:
            self._eye = self._destination.eye()
        began = time.monotonic()
        self.visible = self._eye.look()
        # The checkpoint is read after the rows: a row beyond it was certainly early.
        self.early |= self._eye.beyond(decided_offsets(self._checkpoint))
        self.looks += 1
        return max(LOOK_SECONDS, PAUSES * (time.monotonic() - began))

    def end(self) -> None:
        """Stop looking."""
        super().end()
        if self._eye is not None:
            self._eye.close()


def decided_offsets(checkpoint: Path) -> Offsets:
    """Return the end offsets of the newest epoch with a ``commits/N``, by partition; empty before the first epoch."""
    files = LocalStorage(checkpoint)
    newest = Checkpoint(files).newest_decided()
    if newest == NOTHING_DECIDED:
        return {}
    name = f"offsets/{newest}"
    ((_, offset),) = OffsetEntry.parse(name, files.read(name) or b"").by_line()
    (ends,) = json.loads(offset).values()
    return {int(partition): end for partition, end in ends.items()}
