"""What the ledger keeps of an epoch."""

from __future__ import annotations

import json

import pytest

from epochsink.elasticsearch.committable import SpooledEpoch, WrittenTask
from epochsink.errors import LedgerCorrupt


@pytest.mark.parametrize("by_task", [False, True])
def test_values_survive_json(*, by_task: bool) -> None:
    task = WrittenTask("a" * 32, 3, 120, by_task, ("a", "b"))
    epoch = SpooledEpoch(
        tasks=("a" * 32, "b" * 32),
        rows=5,
        replaced=1,
        index="orders",
        index_uuid="uuid",
        by_task=by_task,
        placed_by="routing='a'",
        pipeline="lower",
        indices={"a": ("u", "h")},
    )
    assert WrittenTask.from_json(json.loads(json.dumps(task.to_json()))) == task
    assert SpooledEpoch.from_json(json.loads(json.dumps(epoch.to_json()))) == epoch


@pytest.mark.parametrize("version", [None, 0, 2, "1"])
def test_any_other_version_is_refused_by_name(version: object) -> None:
    task = WrittenTask("a" * 32, 3, 120).to_json()
    epoch = SpooledEpoch(tasks=("a" * 32,), rows=5, replaced=1, index="orders", index_uuid="uuid").to_json()
    with pytest.raises(LedgerCorrupt, match=f"version {version!r}"):
        WrittenTask.from_json({**task, "version": version})
    with pytest.raises(LedgerCorrupt, match=f"version {version!r}"):
        SpooledEpoch.from_json({**epoch, "version": version})
