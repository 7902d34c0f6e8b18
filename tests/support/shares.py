"""The share of many cases that one run plays."""

from __future__ import annotations

import itertools
import math
import os
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Share:
    """Which of many cases one run plays: one of every ``each``. All places together play all of them."""

    place: int
    each: int

    def __str__(self) -> str:
        return f"{self.place}/{self.each}"

    @classmethod
    def asked_for(cls) -> Share:
        """Return what EPOCHSINK_SHARE says, as in "5/16"; without it, all cases."""
        place, _, each = os.environ.get("EPOCHSINK_SHARE", "0/1").partition("/")
        return cls(int(place), int(each))

    def of(self, cases: Iterable[Item]) -> Iterator[Item]:
        """Yield this share; the chosen cases lie at no fixed distance, which might be that of one kind of fault."""
        blocks, shift = iter(cases), random.Random(self.each)
        while block := list(itertools.islice(blocks, self.each)):
            chosen = (self.place + shift.randrange(self.each)) % self.each
            yield from block[chosen : chosen + 1]

    def fewest(self, number: int) -> int:
        """Return how many of this share's cases have to show something that ``number`` of all have to show.

        None if so few are expected that a share without any is no surprise: by chance their number is up to three
        times its root below what is expected.
        """
        if self.each == 1:
            return number
        expected = number / self.each
        return max(0, min(int(expected / 2), int(expected - 3 * math.sqrt(expected))))


SHARE = Share.asked_for()
