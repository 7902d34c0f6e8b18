"""What stands in the ledger for PostgreSQL: read as it was written, and no other version of it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from epochsink.errors import LedgerCorrupt
from epochsink.postgres.committable import Member, Merge, Part, Relation, read_part
from epochsink.postgres.place import Place

MERGE = Merge(
    Relation("public", "orders"),
    {"id": "bigint", "at": "inet"},
    {"at": "inet"},
    ("id",),
    deletes=True,
    ranks=2,
    equals={"id": "="},
    unique=[{"id": "int8_ops"}],
    newer_wins="at",
    skip_unchanged=True,
    accumulate={"n": "sum"},
)
TASKS = ("0" * 32, "1" * 32)
COPIED = Member("k", "epochsink", None, TASKS, 5, MERGE)
STAGED = replace(COPIED, table="s_x")
PLACE = Place("orders", 16384, "7412", 2)


@pytest.mark.parametrize(
    "part",
    [
        Part("attempt", {"table": STAGED}, "gid"),
        Part("attempt", {"table": COPIED}, "gid", PLACE),
        Part("attempt", {"table": STAGED, "other": replace(STAGED, key="l")}, None, PLACE),
    ],
)
def test_a_part_is_read_as_it_was_written(part: Part) -> None:
    assert read_part(json.loads(json.dumps(part.to_json()))) == part
    assert part.to_json()["version"] == 1


def test_what_is_recorded_is_read_as_it_was_written() -> None:
    staged = Part("attempt", {"table": replace(STAGED, logged=True, unfit=2)})
    assert read_part(json.loads(json.dumps(staged.to_json()))) == staged


@pytest.mark.parametrize("version", [None, 0, 2, 4])
def test_another_version_is_refused_by_name(version: int | None) -> None:
    with pytest.raises(LedgerCorrupt, match=f"version {version}, and this epochsink reads version 1"):
        read_part({**Part("attempt", {"table": COPIED}, "gid").to_json(), "version": version})
