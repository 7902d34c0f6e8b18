"""What a benchmark looks at again and again, in a thread of its own, while a query runs."""

from __future__ import annotations

import threading
from typing import Self


class Beside:
    """Runs `look` in a thread, from ``with`` to its end; ``pause`` (seconds) is between two looks."""

    def __init__(self, pause: float = 0.0) -> None:
        self._pause = pause
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._go_on)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._over.set()
        self._thread.join()
        self.close()

    def _go_on(self) -> None:
        while not self._over.wait(self._pause):
            self.look()

    def look(self) -> None:
        """Look once."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of what the looks needed."""
