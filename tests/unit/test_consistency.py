"""Each disagreement names the epochs and sinks that it is about, and ends in what to do."""

from __future__ import annotations

import pytest

from epochsink.errors import ConfigurationError, EpochsinkError, OutcomeUnknown, PrepareFailed, WentBack
from epochsink.protocol import consistency

CASES: list[tuple[EpochsinkError, type[EpochsinkError], list[str]]] = [
    (consistency.no_ledger(41), WentBack, ["41", "join_running=True"]),
    (consistency.ledger_is_older(41, 37), WentBack, ["41", "37", "restore", "epochsink abandon CHECKPOINT"]),
    (
        consistency.ledger_lost_prepared(41, 37, "sink 'table' has x"),
        WentBack,
        ["41", "37", "sink 'table' has x", "restore", "epochsink accept CHECKPOINT 41"],
    ),
    (
        consistency.decided_without_us(41, 41, attempted=40),
        WentBack,
        ["epoch 41 was", "accept CHECKPOINT 41"],
    ),
    (consistency.decided_without_us(41, 43, attempted=41), WentBack, ["epochs 41 to 43 were", "CHECKPOINT 43"]),
    (consistency.ledger_is_lost("table", 40, ["gid-1", "gid-2"]), WentBack, ["'table'", "40", "gid-1 and 1 more"]),
    (consistency.ledger_is_lost("table", None, ["gid-1"]), WentBack, ["'table'", "gid-1"]),
    (consistency.sink_is_gone(41, "table"), ConfigurationError, ["41", "'table'", "epochsink resolve"]),
    (consistency.other_input(41), WentBack, ["41", "other offsets"]),
    (consistency.undecided_before(40, 41), WentBack, ["40", "41"]),
    (consistency.unknown_past(12, 41), WentBack, ["12", "41"]),
    (consistency.overtaken(41), PrepareFailed, ["41"]),
    (consistency.unknown_outcome(41, "table", "no marker"), OutcomeUnknown, ["41", "'table'", "no marker"]),
]


@pytest.mark.parametrize(("error", "kind", "said"), CASES, ids=lambda value: getattr(value, "message", "")[:30] or None)
def test_an_error_names_its_epochs_and_what_to_do(
    error: EpochsinkError, kind: type[EpochsinkError], said: list[str]
) -> None:
    assert type(error) is kind
    assert error.hint
    assert [each for each in said if each not in str(error)] == []
