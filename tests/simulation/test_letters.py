"""Dead letters in a topic are retried and dropped by commands that are interleaved and killed at every step."""

from __future__ import annotations

import itertools
import uuid
from typing import TYPE_CHECKING, Any

import pytest
from shares import SHARE

from epochsink.kafka.letters import KafkaLetters
from simulation.letters_topic import Plan, play

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from epochsink.kafka.letters import _Found
    from epochsink.sink import Chosen

pytestmark = pytest.mark.plans

STEPS = 14
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


@pytest.mark.parametrize(
    ("kind", "patched"),
    [
        (ReadsWhatReadersSee, {}),
        (ReadsBeforeItBegins, {}),
        (KafkaLetters, {"letters_id": lambda _: uuid.uuid4().hex}),
    ],
    ids=["reads what readers see", "reads before it begins", "an id for each command"],
)
def test_mutant_is_killed(kind: type[KafkaLetters], patched: dict[str, Any]) -> None:
    played = (play(plan, kind, **patched) for plan in plans() if not plan.fault)
    assert any("rows" in line for found in played for line in found)
