"""How much one task may send to the driver with its answer, however many tasks there are."""

from __future__ import annotations

from typing import Final

_FIRST_TASKS: Final = 16
"""After so many partitions the limit is half; the sum over all of them grows with the logarithm of their number."""


def limit(first: int, partition: int) -> int:
    """Return how many bytes the task of a partition may send, if that of the first one may send ``first``."""
    return first * _FIRST_TASKS // (_FIRST_TASKS + partition)
