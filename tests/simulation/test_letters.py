"""Dead letters in a topic are retried and dropped by commands that are interleaved and killed at every step."""

from __future__ import annotations

import itertools
import random
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from shares import SHARE

from epochsink.kafka.letters import KafkaLetters
from simulation.letters_topic import Plan, play

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from epochsink.kafka.letters import _Found
    from epochsink.sink import Chosen, Epoch

pytestmark = pytest.mark.plans

STEPS = 17
"""More than a command makes."""


def plans() -> Iterator[Plan]:
    for first, second in itertools.product(range(STEPS), repeat=2):
        for fault, *rest in itertools.product(["", "killed", "lost", "unsent"], *[[False, True]] * 3):
            yield Plan(first, second, str(fault), *map(bool, rest))


def test_each_letter_is_settled_once_and_its_row_written_once() -> None:
    """Two retries, or a retry and a drop, and beside them the query's transaction, which hides what is behind it."""
    for plan in SHARE.of(plans()):
        assert play(plan) == [], plan


class ReadsWhatReadersSee(KafkaLetters):
    """Reads the letters up to the last stable offset, where an open transaction hides what an earlier retry did."""

    def _letters(self, chosen: Chosen, ends: Mapping[int, int] | None = None) -> Iterator[_Found]:
        del ends
        return super()._letters(chosen)


class ReadsBeforeItBegins(KafkaLetters):
    """Reads the letters before it takes the right to commit."""

    def _settle_all(self, chosen: Chosen, how: str, kept: dict[str, str]) -> int:
        self._early = list(super()._letters(chosen))
        return super()._settle_all(chosen, how, kept)

    def _letters(self, chosen: Chosen, ends: Mapping[int, int] | None = None) -> Iterator[_Found]:
        del chosen, ends
        return iter(self._early)


class TakesAnyMarker(KafkaLetters):
    """Takes the marker of another retry for its own."""

    def _require_own(self, at: Epoch) -> None:
        pass


class NumbersBeforeItBegins(KafkaLetters):
    """Does not look again which number is next, when no earlier retry can commit any more."""

    _known: int | None = None

    def _next(self, settled_in: Sequence[str] | None = None) -> int:
        if settled_in is None:
            self._known = super()._next()
        assert self._known is not None
        return self._known


@pytest.mark.parametrize(
    ("kind", "patched"),
    [
        (ReadsWhatReadersSee, {}),
        (ReadsBeforeItBegins, {}),
        (TakesAnyMarker, {}),
        (NumbersBeforeItBegins, {}),
        (KafkaLetters, {"letters_identity": lambda identity: replace(identity, sink=uuid.uuid4().hex)}),
    ],
    ids=[
        "reads what readers see",
        "reads before it begins",
        "takes any marker",
        "numbers before it begins",
        "an id for each command",
    ],
)
def test_mutant_is_killed(kind: type[KafkaLetters], patched: dict[str, Any]) -> None:
    some = [plan for plan in plans() if not plan.fault]
    # in an order in which two plans one after the other have little in common
    random.Random(1).shuffle(some)
    played = (play(plan, kind, **patched) for plan in some)
    assert any("rows" in line or "reported" in line for found in played for line in found)
