"""What stands in the ledger for PostgreSQL: read as it was written, and no other version of it."""

from __future__ import annotations

import json

import pytest

from epochsink.errors import LedgerCorrupt
from epochsink.postgres.answers import AnsweredTask
from epochsink.postgres.committable import Merge, PreparedPart, StagedEpoch, StagedTask, read_part, read_written
from epochsink.postgres.place import Place
from epochsink.postgres.relation import Relation

MERGE = Merge(
    Relation("public", "orders"),
    {"id": "bigint", "at": "inet"},
    {"at": "inet"},
    ("id",),
    deletes=True,
    ranks=2,
    equals={"id": "="},
    unique=[{"id": "int8_ops"}],
)
TASKS = ("0" * 32, "1" * 32)
PLACE = Place("orders", 16384, "7412", 2)


@pytest.mark.parametrize(
    "part",
    [
        PreparedPart("gid", "attempt", TASKS, 5, MERGE, "s_x"),
        PreparedPart("gid", "attempt", TASKS, 5, MERGE, place=PLACE),
        StagedEpoch("attempt", TASKS, 5, "s_x", MERGE, PLACE),
    ],
)
def test_a_part_is_read_as_it_was_written(part: PreparedPart | StagedEpoch) -> None:
    assert read_part(json.loads(json.dumps(part.to_json()))) == part
    assert part.to_json()["version"] == 1


def test_what_a_task_answers_is_read_as_it_was_written() -> None:
    for answer in (StagedTask("s_x", True, TASKS[0], 5, MERGE), PreparedPart("gid", "attempt", TASKS[:1], 5, MERGE)):  # noqa: FBT003 - logged
        assert read_written(json.loads(json.dumps(answer.to_json()))) == answer
    rows = AnsweredTask(TASKS[0], 3, 5, b"\x00\xff rows")
    assert read_written(json.loads(json.dumps(rows.to_json()))) == rows


@pytest.mark.parametrize("version", [None, 0, 2, 4])
def test_another_version_is_refused_by_name(version: int | None) -> None:
    with pytest.raises(LedgerCorrupt, match=f"version {version}, and this epochsink reads version 1"):
        read_part({**PreparedPart("gid", "attempt", TASKS, 5, MERGE).to_json(), "version": version})
