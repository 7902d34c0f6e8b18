"""A target that was set back is repaired from retained epochs: nothing lost, nothing doubled."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
from shares import SHARE

from simulation import plans
from simulation.driver import Variant
from simulation.explorer import quiet, steps_of
from simulation.invariants import verdict
from simulation.simulation import Simulation, play

if TYPE_CHECKING:
    from collections.abc import Iterable

pytestmark = pytest.mark.plans

RETAINS = Variant(retains=True)
BACK = tuple(("back", k) for k in (1, 2, 3)) + tuple(("failover", k) for k in (1, 3, 5))


def judged(some: Iterable[tuple[plans.Plan, Variant]], sinks: str, schedule: int = 0) -> list[Simulation]:
    """Play plans and return those histories in which something was repaired; fail at the first violation."""
    repaired = []
    with quiet():
        for plan, variant in SHARE.of(some):
            simulation = play(plan, sinks, schedule, variant)
            assert verdict(simulation, plan) == [], (plan, sinks, schedule, variant)
            if simulation.repaired:
                loud, excused = simulation.loud, ["is being applied"]
                # what the newest commit has begun to apply, the index was set back under: the error names that attempt
                if sinks == "K" and variant.repairs_on_copies:
                    # a copy of the checkpoint does not know where the other one's repair has written
                    excused.append("cannot be told exactly")
                if sinks == "K":
                    # requests of one commit were lost: its rows are there, and no marker or an older one
                    excused.append(" in place of ")
                    # the pending epoch's id has committed an epoch that was applied again: nothing tells that from a
                    # commit of this one whose marker is late
                    excused.append("is still CompleteCommit")
                assert loud is None or any(words in str(loud) for words in excused), (plan, sinks, variant, loud)
                repaired.append(simulation)
    return repaired


@pytest.mark.parametrize("sinks", ["K", "P", "S", "E", "F", "T", "AB", "CD"])
def test_a_target_that_was_set_back_at_any_step_is_repaired_and_the_query_goes_on(sinks: str) -> None:
    """By one to three commits, or by some requests: every row is there once in the end, and repair has nothing left."""
    # an epoch by task is three commits
    faults = [(name, sinks[0], k + 3 * (sinks == "T" and name == "back")) for name, k in BACK]
    some = ((plan, RETAINS) for plan in plans.one_fault(steps_of(sinks, 0, RETAINS) + 10, faults))
    repaired = judged(itertools.islice(some, 0, None, 5), sinks)
    assert len(repaired) >= SHARE.fewest(15)
    assert sum(one.repaired > 1 for one in repaired) >= SHARE.fewest(2)


@pytest.mark.parametrize("copies", [False, True], ids=["one checkpoint", "two copies"])
@pytest.mark.parametrize("sinks", ["K", "P", "S", "E", "F", "T", "AB"])
def test_a_repair_is_killed_at_any_step_and_typed_again(sinks: str, copies: bool) -> None:  # noqa: FBT001 - a parameter
    """Also twice, and also if every second one works on a copy of the checkpoint."""
    plan: plans.Plan = ((steps_of(sinks, 0, RETAINS) - 1, ("back", sinks[0], 6 if sinks == "T" else 2)),)
    deaths = [(first,) for first in range(60)] + [(first, first + 3) for first in range(0, 40, 5)]
    some = ((plan, Variant(retains=True, dies_in_repair=each, repairs_on_copies=copies)) for each in deaths)
    assert len(judged(some, sinks)) >= SHARE.fewest(60)


def test_a_topic_whose_markers_alone_are_gone_gets_nothing_again() -> None:
    """At any step: the log shows that the rows are there, and the repair is refused."""
    some = ((plan, RETAINS) for plan in plans.one_fault(steps_of("K", 0, RETAINS), [("unmark", "K")]))
    refused = 0
    with quiet():
        for plan, variant in SHARE.of(some):
            simulation = play(plan, "K", 0, variant)
            assert verdict(simulation, plan) == [], plan
            refused += "cannot be told exactly" in str(simulation.loud)
    assert refused >= SHARE.fewest(10)


def test_rows_are_written_again_whose_producer_id_another_transaction_has_got() -> None:
    """A cluster that was set back gives ids away again: what is open at the place of the lost rows is not theirs."""
    plan: plans.Plan = ((56, ("failover", "K", 5)),)
    with quiet():
        simulation = play(plan, "K", 0, RETAINS)
    assert (verdict(simulation, plan), simulation.repaired, simulation.loud) == ([], 1, None)
