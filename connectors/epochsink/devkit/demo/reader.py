"""A reader that looks at a destination while the pipeline runs and is killed, as any consumer of its rows would."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from epochsink.devkit.demo.background import Background
from epochsink.devkit.demo.progress import decided_offsets

if TYPE_CHECKING:
    from pathlib import Path

    from epochsink.devkit.demo.destination import Destination, Eye

LOOK_SECONDS: Final = 0.2
PAUSES: Final = 5
"""How many times as long as a look the pause after it is, at least: the pipeline needs the processors."""


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
