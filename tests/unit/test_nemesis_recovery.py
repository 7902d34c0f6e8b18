"""How long the soak waits for an epoch after a healing, and what it tells of a wait."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from nemesis.recovery import Recovery, patience

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(("load", "waits"), [(0.5, 120), (8, 120), (16, 240), (40, 480), (400, 480)])
def test_a_run_waits_longer_only_where_other_work_takes_the_machine_and_never_for_ever(load: float, waits: int) -> None:
    assert patience(120, load, cores=2) == waits


def test_a_wait_in_vain_is_told_step_by_step(tmp_path: Path) -> None:
    (tmp_path / "history").mkdir()
    told = [
        {"at": 99.5, "what": "driver", "number": 7},
        {"at": 130.0, "what": "driver ended", "number": 7, "why": "Fenced"},
    ]
    happened = [{"at": 50.0, "event": "committed", "epoch": 3}, {"at": 110.0, "event": "invoked", "epoch": 4}]
    for file, events in (("timeline.jsonl", told), ("history/history.jsonl", happened)):
        (tmp_path / file).write_text("".join(json.dumps(event) + "\n" for event in events))
    assert Recovery(began=100.0, seconds=120.0, load=24.7).steps(tmp_path) == [
        "-0.5 s driver number=7",
        "+10.0 s invoked epoch=4",
        "+30.0 s driver ended number=7 why=Fenced",
    ]
