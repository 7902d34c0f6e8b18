"""Sinks added and removed between runs: the others miss nothing, and nothing pending is forgotten."""

from __future__ import annotations

import pytest

from epochsink.errors import ConfigurationError
from simulation.driver import Variant
from simulation.explorer import quiet, steps_of
from simulation.invariants import newest_rows
from simulation.simulation import Simulation, play


def crashed_at(step: int, sinks: str, later: str) -> Simulation:
    """Play a crash, after which the query goes on with other sinks."""
    with quiet():
        return play(((step, ("before",)),), sinks, 0, Variant(later_sinks=later))


def sources(simulation: Simulation, sink: str) -> list[int]:
    """Return the rows that a sink shows."""
    return sorted(row.source for row in newest_rows(simulation.world, sink))


@pytest.mark.parametrize(("kept", "removed"), [("K", "P"), ("P", "K"), ("S", "E")])
def test_a_sink_is_removed(kept: str, removed: str) -> None:
    """Whatever the removed sink was owed is settled first, or named; the other one misses nothing."""
    both, refused = "".join(sorted(kept + removed)), 0
    for step in range(1, steps_of(both, 0) + 1):
        simulation = crashed_at(step, both, kept)
        shown = sources(simulation, removed)
        if isinstance(simulation.loud, ConfigurationError):
            refused += 1
            assert f"'{removed}'" in str(simulation.loud)
            continue
        assert simulation.loud is None, (step, simulation.loud)
        assert sources(simulation, kept) == list(range(simulation.source_rows)), step
        assert shown == list(range(len(shown))), step
        assert not [one for one in simulation.anomalies if not one.startswith((f"LOST {removed}", "ORPHAN"))], step
    assert refused > 3


@pytest.mark.parametrize(("old", "added"), [("K", "P"), ("P", "K"), ("K", "S"), ("S", "E")])
def test_a_sink_is_added(old: str, added: str) -> None:
    """It gets every epoch written from then on, the other one all of them."""
    both = "".join(sorted(old + added))
    for step in range(1, steps_of(old, 0) + 1):
        simulation = crashed_at(step, old, both)
        assert simulation.loud is None, (step, simulation.loud)
        assert sources(simulation, old) == list(range(simulation.source_rows)), step
        shown = sources(simulation, added)
        assert shown == list(range(simulation.source_rows - len(shown), simulation.source_rows)), step
        assert len(shown) >= 2
        assert simulation.anomalies == [], step
