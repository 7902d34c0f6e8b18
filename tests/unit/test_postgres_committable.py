"""What stands in the ledger for PostgreSQL: read as it was written, the first version included."""

from __future__ import annotations

import json

import pytest

from epochsink.errors import LedgerCorrupt
from epochsink.postgres.answers import AnsweredTask
from epochsink.postgres.committable import Merge, PreparedPart, StagedEpoch, StagedTask, read_part, read_written
from epochsink.postgres.place import Place
from epochsink.postgres.relation import Relation

MERGE = Merge(
    Relation("public", "orders"), ("id", "at"), {"at": "inet"}, ("id",), deletes=True, ranks=2, equals={"id": "="}
)
TASKS = ("0" * 32, "1" * 32)

# as the first version wrote them
OLD_PREPARED = """{"gid": "epochsink:k:1:7:a:all", "attempt": "a", "tasks": ["t"], "rows": 3, "table": "s_k_a"}"""
OLD_BY_TASK = """{"gid": "epochsink:k:1:7:a:t", "attempt": "a", "tasks": ["t"], "rows": 3}"""
OLD_STAGED = """{"attempt": "a", "tasks": ["t"], "rows": 3, "table": "s_k_a", "merge": {"target": [null, "orders"],
"columns": ["id"], "casts": {}, "key": ["id"], "order_by": ["length(note)"], "deletes": false}}"""


@pytest.mark.parametrize(
    "part",
    [
        PreparedPart("gid", "attempt", TASKS, 5, "s_x"),
        PreparedPart("gid", "attempt", TASKS, 5, "s_x", Place("orders", 16384, "7412", 2)),
        PreparedPart("gid", "attempt", TASKS, 5, "s_x", merge=MERGE),
        StagedEpoch("attempt", TASKS, 5, "s_x", MERGE, Place("orders", 16384, "7412", 2)),
        StagedEpoch("attempt", TASKS, 5, "s_x", MERGE),
    ],
)
def test_a_part_is_read_as_it_was_written(part: PreparedPart | StagedEpoch) -> None:
    assert read_part(json.loads(json.dumps(part.to_json()))) == part
    assert part.to_json()["version"] == 3


def test_what_a_task_answers_is_read_as_it_was_written() -> None:
    for answer in (StagedTask("s_x", True, TASKS[0], 5, MERGE), PreparedPart("gid", "attempt", TASKS[:1], 5)):  # noqa: FBT003 - logged
        assert read_written(json.loads(json.dumps(answer.to_json()))) == answer
    rows = AnsweredTask(TASKS[0], 3, 5, b"\x00\xff rows")
    assert read_written(json.loads(json.dumps(rows.to_json()))) == rows


def test_the_first_version_is_read() -> None:
    assert read_part(json.loads(OLD_PREPARED)) == PreparedPart("epochsink:k:1:7:a:all", "a", ("t",), 3, "s_k_a")
    assert read_part(json.loads(OLD_BY_TASK)) == PreparedPart("epochsink:k:1:7:a:t", "a", ("t",), 3)
    merge = Merge(Relation(None, "orders"), ("id",), {}, ("id",), deletes=False, order_by=("length(note)",))
    assert read_part(json.loads(OLD_STAGED)) == StagedEpoch("a", ("t",), 3, "s_k_a", merge)


def test_a_version_of_the_future_is_refused() -> None:
    with pytest.raises(LedgerCorrupt, match="version 5"):
        read_part({**PreparedPart("gid", "attempt", TASKS, 5).to_json(), "version": 5})
