"""What the ledger keeps of an epoch, in this version and in the one before."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from epochsink.elasticsearch.committable import PreparedEpoch, WrittenTask
from epochsink.errors import LedgerCorrupt


def test_values_survive_json() -> None:
    task = WrittenTask("a" * 32, 3, 120)
    epoch = PreparedEpoch(("a" * 32, "b" * 32), 5, 1, "orders", "uuid")
    assert WrittenTask.from_json(json.loads(json.dumps(task.to_json()))) == task
    assert PreparedEpoch.from_json(json.loads(json.dumps(epoch.to_json()))) == epoch


def test_only_an_epoch_whose_tasks_share_no_id_has_the_newest_version() -> None:
    """Earlier releases would apply replaced rows of it too; all others they can read."""
    by_task = PreparedEpoch(("a" * 32,), 5, 0, "orders", "uuid", by_task=True)
    written = WrittenTask("a" * 32, 3, 120, by_task=True)
    assert by_task.to_json()["version"] == 3
    assert replace(by_task, by_task=False).to_json()["version"] == 2
    assert PreparedEpoch.from_json(json.loads(json.dumps(by_task.to_json()))) == by_task
    assert WrittenTask.from_json(json.loads(json.dumps(written.to_json()))) == written


def test_what_has_no_version_is_version_one() -> None:
    assert WrittenTask.from_json({"task": "a", "rows": 1, "largest": 2}) == WrittenTask("a", 1, 2)
    assert PreparedEpoch.from_json({"tasks": ["a"], "rows": 1, "replaced": 0}) == PreparedEpoch(("a",), 1, 0)


def test_a_version_of_the_future_is_refused() -> None:
    with pytest.raises(LedgerCorrupt, match="version 4"):
        PreparedEpoch.from_json({"version": 4, "tasks": [], "rows": 0, "replaced": 0})
