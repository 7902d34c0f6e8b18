"""Wait for a condition, with a deadline."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

SECONDS: Final = 60.0
"""Far more than anything here takes on a machine that is not busy."""


def wait_until(condition: Callable[[], Any], what: Any = "the condition", seconds: float = SECONDS) -> None:
    """Wait until something holds. AssertionError with ``what``, which may be a function, after so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what() if callable(what) else what}"
        time.sleep(0.02)
