"""A thread that works beside the pipelines, and whose failure is not lost."""

from __future__ import annotations

import threading


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
