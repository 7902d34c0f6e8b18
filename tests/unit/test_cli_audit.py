"""`epochsink audit` on a checkpoint made by hand, with a sink in memory whose counts the test changes."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from checkpoint_kit import CheckpointKit
from folder_sink import FolderSink

from epochsink.cli.audit import audit
from epochsink.cli.checkpoint_folder import open_place
from epochsink.errors import Addresses, ConfigurationError
from epochsink.protocol.ledger import Ledger
from epochsink.protocol.ledger_entries import Resolved
from epochsink.protocol.storage import LocalStorage
from epochsink.sink import Operator

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from epochsink.cli.audit import SinkAudit
    from epochsink.sink import Comparison, Receipt

ADDRESSES = Addresses("/lake/orders", "pipeline:sink")
ROWS = pa.record_batch({"id": pa.array([1, 2], pa.int64())})


@pytest.fixture
def kit(tmp_path: Path) -> CheckpointKit:
    return CheckpointKit(tmp_path / "checkpoint", {"table": FolderSink(str(tmp_path / "table"))})


def audited(kit: CheckpointKit) -> SinkAudit:
    with open_place(str(kit.root)) as place:
        (found,) = audit(place, kit.sinks, ADDRESSES)
    return found


def count(monkeypatch: pytest.MonkeyPatch, found: Callable[[Receipt], int]) -> None:
    """Let the sink say that it has counted."""

    def counted(_: Operator, sink: str, receipts: Sequence[Receipt], newest: int) -> list[Comparison]:
        del sink, newest
        return [receipt.counted(found(receipt), receipt.rows, "gone") for receipt in receipts]

    monkeypatch.setattr(Operator, "audit", counted)


def test_a_sink_that_cannot_count_compares_its_marker(kit: CheckpointKit) -> None:
    kit.run(0, {"table": ROWS})
    assert list(audited(kit).lines()) == [
        "sink 'table', epoch 0, 2 row(s): not compared: this kind of sink counts no rows"
    ]


def test_a_difference_counts_only_if_the_ledger_stood_still(
    kit: CheckpointKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit.run(0, {"table": ROWS})
    count(monkeypatch, lambda receipt: receipt.rows - 1)
    assert audited(kit).differs

    def goes_on(receipt: Receipt) -> int:
        kit.run(kit.history().newest + 1, {"table": ROWS})
        return receipt.rows - 1

    count(monkeypatch, goes_on)
    found = audited(kit)
    assert not found.differs
    assert {each.reason for each in found.epochs} == {"the query wrote meanwhile; audit again while it writes nothing"}


def test_a_difference_that_is_gone_when_looked_at_again_is_none(
    kit: CheckpointKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit.run(0, {"table": ROWS})

    def late(receipt: Receipt) -> int:
        if kit.history().newest > 0:
            return receipt.rows
        kit.run(1, {"table": ROWS})
        return receipt.rows - 1

    count(monkeypatch, late)
    assert [(each.epoch, str(each.result)) for each in audited(kit).epochs] == [(0, "agrees"), (1, "agrees")]


def test_nothing_is_concluded_up_to_an_epoch_that_an_operator_accepted(
    kit: CheckpointKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit.run(0, {"table": ROWS})
    kit.run(1, {"table": ROWS})
    ledger = Ledger(LocalStorage(kit.root), uuid.uuid4().hex)
    ledger.take(kit.query_id, {}, -1)
    ledger.append(Resolved(1, "table", "accepted"))
    count(monkeypatch, lambda _: 0)
    assert not audited(kit).differs


def test_epochs_with_one_result_are_told_together(kit: CheckpointKit, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        kit.run(number, {"table": ROWS})
    count(monkeypatch, lambda receipt: 1 if receipt.epoch == 3 else receipt.rows)
    assert list(audited(kit).lines()) == [
        "sink 'table', epoch 0-2, 4, 8 row(s): agrees",
        "sink 'table', epoch 3, 2 row(s): differs: the target holds 1 row(s) in place of 2: gone",
    ]


def test_sinks_that_never_joined_are_refused(kit: CheckpointKit) -> None:
    with open_place(str(kit.root)) as place, pytest.raises(ConfigurationError, match="its ledger knows none of them"):
        audit(place, {"another": kit.sinks["table"]}, ADDRESSES)
