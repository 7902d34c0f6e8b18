"""What the ledger keeps of an epoch."""

from __future__ import annotations

import json

import pytest

from epochsink.elasticsearch.committable import PreparedEpoch, WrittenTask
from epochsink.errors import LedgerCorrupt


@pytest.mark.parametrize("by_task", [False, True])
def test_values_survive_json(*, by_task: bool) -> None:
    task = WrittenTask("a" * 32, 3, 120, by_task, ("a", "b"))
    epoch = PreparedEpoch(
        ("a" * 32, "b" * 32), 5, 1, "orders", "uuid", by_task, "routing='a'", "lower", {"a": ("u", "h")}
    )
    assert WrittenTask.from_json(json.loads(json.dumps(task.to_json()))) == task
    assert PreparedEpoch.from_json(json.loads(json.dumps(epoch.to_json()))) == epoch


@pytest.mark.parametrize("version", [None, 0, 2, "1"])
def test_any_other_version_is_refused_by_name(version: object) -> None:
    task = WrittenTask("a" * 32, 3, 120).to_json()
    epoch = PreparedEpoch(("a" * 32,), 5, 1, "orders", "uuid").to_json()
    with pytest.raises(LedgerCorrupt, match=f"version {version!r}"):
        WrittenTask.from_json({**task, "version": version})
    with pytest.raises(LedgerCorrupt, match=f"version {version!r}"):
        PreparedEpoch.from_json({**epoch, "version": version})
