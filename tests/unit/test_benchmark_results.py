"""Results of benchmarks are kept by name, with what is computed from their pairs, and drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

BENCHMARKS = Path(__file__).parents[1] / "instruments" / "benchmarks"


def test_a_newer_result_takes_the_place_of_the_older_one_and_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import results  # noqa: PLC0415 - a folder of scripts

    def ratio(name: str, *peers: float) -> results.Ratio:
        return results.Ratio(name, 1.2, 1000, [results.Pair(2, peer, 4, 2 * peer) for peer in peers])

    results.keep([ratio("a", 2, 4, 3), ratio("b", 1, 1, 1)], tmp_path)
    results.keep([ratio("a", 8, 6, 4)], tmp_path)
    kept = json.loads((tmp_path / results.RESULTS).read_text())
    assert {name: (one["ratio"], one["lowest"], one["highest"]) for name, one in kept.items()} == {
        "a": (3.0, 2.0, 4.0),
        "b": (0.5, 0.5, 0.5),
    }
    assert kept["a"]["processor_ratio"] == 3.0
    assert "<svg" in (tmp_path / results.PICTURE).read_text()
    assert ratio("a", 2, 4, 3).line().startswith("RATIO a 1.50 (aim 1.2) from 1.00 to 2.00, ")


def test_runs_too_short_for_the_clock_of_processor_time_are_kept_and_drawn_without_a_ratio_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import results  # noqa: PLC0415 - a folder of scripts

    short = results.Ratio("short", 1.2, 10, [results.Pair(1, 2, 0, 0)])
    results.keep([short], tmp_path)
    assert json.loads((tmp_path / results.RESULTS).read_text())["short"]["processor_ratio"] is None
    assert "<svg" in (tmp_path / results.PICTURE).read_text()
    assert short.line().endswith("in processor seconds too short to say")
