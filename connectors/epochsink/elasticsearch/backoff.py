"""How long, and how often, a passing failure is tried again."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_FIRST: Final = 0.1
_LONGEST: Final = 5.0


class GaveUp(Exception):
    """Only passing failures for as long as patience lasts; the argument says the last one."""


def delays(patience: float) -> Iterator[float]:
    """Yield growing delays, in seconds, until ``patience`` seconds have gone since the first was asked for."""
    deadline = time.monotonic() + patience
    delay = _FIRST
    while time.monotonic() + delay < deadline:
        yield delay * random.uniform(0.5, 1)  # noqa: S311 - spreads retries, no secret
        delay = min(2 * delay, _LONGEST)
