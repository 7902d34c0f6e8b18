"""Durations as Elasticsearch writes them."""

from __future__ import annotations

import re
from typing import Final

_UNITS: Final = {"nanos": 1e-9, "micros": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def seconds(duration: str) -> float | None:
    """Return a duration as Elasticsearch writes it ("60s", "1h", "-1") in seconds; None if it is none."""
    found = re.fullmatch(r"(-?\d+)(nanos|micros|ms|s|m|h|d)?", duration)
    return None if found is None else int(found[1]) * _UNITS[found[2] or "ms"]
