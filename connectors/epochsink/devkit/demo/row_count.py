"""Counting: what a destination holds in the end, against what went in and against the other destinations."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Sequence

Copies = Counter[int]
"""How many rows there are of each order, by its id."""


@dataclass(frozen=True, slots=True)
class RowCount:
    """What a destination holds in the end, against the orders 0 to n - 1 that went in."""

    rows_out: int
    lost: int
    duplicated: int

    @classmethod
    def of(cls, copies: Copies, orders: int) -> Self:
        """Count; a row that is not an order is one too many."""
        rows = copies.total()
        there = sum(order in copies for order in range(orders))
        return cls(rows_out=rows, lost=orders - there, duplicated=rows - there)


def divergent(destinations: Sequence[Copies]) -> int:
    """Return the number of orders of which some destination holds more rows than another."""
    every = set().union(*destinations)
    return sum(len({copies[order] for copies in destinations}) > 1 for order in every)
