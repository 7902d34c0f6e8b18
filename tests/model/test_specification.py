"""The protocol as specified keeps its invariants under every plan of faults, and needs each of its rules."""

from __future__ import annotations

import pytest
from shares import SHARE

from model.exploration import Exploration
from model.specification import FAULTS, RULES, Protocol

pytestmark = pytest.mark.essential

MUTANTS = {
    "decided": ((), "early"),
    "owned": (("another driver",), "ended what is recorded"),
    "number": (("reply lost",), "ended what is recorded"),
    "adopted": (("crash",), "ended what is recorded"),
    "spared": (("crash",), "ended what is recorded"),
    "finished": (("set back",), "given up, and prepared"),
    "evidence": (("set back",), "ended what is recorded"),
    "older": (("another driver",), "ended what is recorded"),
    "alone": (("time-out", "reply lost"), "ended what is recorded"),
    "unknown append": (("reply lost",), "ended what is recorded"),
    "unknown replay": (("time-out", "reply lost"), "ended what is recorded"),
    "accepted": (("losing task",), "of a losing task"),
    "gone is not done": (("time-out",), "stopped without a cause"),
    "gone is not aborted": (("crash",), "doubled"),
    "replay recorded": (("time-out", "another driver"), "doubled"),
    "rows kept": (("reply lost",), "stopped without a cause"),
    "same id": (("crash",), "doubled"),
    "version": (("reply lost",), "stale"),
    "input": (("restore",), "early"),
    "ledger behind": (("restore",), "no progress"),
    "mark ahead": (("restore",), "doubled"),
    "mark behind": (("set back",), "no progress"),
    "read before conclusion": (("another driver",), "stopped without a cause"),
    "both marks": (("set back",), "no progress"),
    "mark replaced": (("reply lost",), "stopped without a cause"),
    "incarnation": (("set back",), "stale"),
}
"""The specification without one rule: a plan of faults that shows why the rule is there, and what goes wrong first."""


def expect_nothing_found(exploration: Exploration, at_least: int) -> None:
    report = "\n".join(exploration.report())
    print(report)  # noqa: T201 - what was explored is the result
    assert exploration.found == {}, report
    assert len(exploration.states) >= at_least


def test_every_order_of_steps_and_every_plan_with_one_fault() -> None:
    expect_nothing_found(Exploration().explore([FAULTS]), 20_000)


@pytest.mark.plans
def test_plans_with_two_faults() -> None:
    """A part of this run's share of the second faults, after every first one."""
    expect_nothing_found(Exploration().explore([FAULTS, FAULTS], SHARE.place, 16 * SHARE.each), 25_000)


def test_each_rule_has_a_mutant() -> None:
    assert MUTANTS.keys() == RULES.keys()


@pytest.mark.parametrize("rule", MUTANTS)
def test_without_the_rule_something_goes_wrong(rule: str) -> None:
    plan, wrong = MUTANTS[rule]
    exploration = Exploration(Protocol(lacks=rule), until_found=True).explore([[kind] for kind in plan])
    assert [found.partition(":")[0] for found in exploration.found] == [wrong], "\n".join(exploration.report())
