"""The merge's SQL without newer_wins=, skip_unchanged= and accumulate=: byte for byte what it was before them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from epochsink.postgres import merge as merging
from epochsink.postgres.committable import Member, Merge, Relation
from epochsink.postgres.dead_letter import EpochLetters
from epochsink.postgres.merge import merge

if TYPE_CHECKING:
    import pytest
    from psycopg import sql

    from epochsink.postgres.server import Connection

PLAN = Merge(
    Relation("s", "t"),
    {"id": "bigint", "at": "inet"},
    {"at": "inet"},
    ("id",),
    deletes=True,
    ranks=1,
    equals={"id": "="},
)
STAGED = (
    '(SELECT "id", "at"::inet AS "at", "epochsink_delete", "epochsink_order_0" FROM "e"."s_x" '
    'WHERE "epochsink_task" OPERATOR(pg_catalog.=) ANY (ARRAY[0]::pg_catalog.int8[])) AS staged'
)
LATEST = '(SELECT DISTINCT ON ("id") * FROM {} ORDER BY "id", "epochsink_order_0" DESC NULLS LAST) AS latest_of_key'
UPSERT = (
    'INSERT INTO "s"."t" ("id", "at") SELECT "id", "at" FROM {} WHERE "epochsink_delete" IS NOT TRUE '
    'ORDER BY "id" ON CONFLICT ("id") DO UPDATE SET "at" = EXCLUDED."at"'
)
DELETE = (
    'DELETE FROM "s"."t" AS old USING (SELECT * FROM {} WHERE "epochsink_delete") AS gone '
    'WHERE "old"."id" = "gone"."id"'
)


class Recorder:
    """A session that answers that there are 5 rows, 2 of them with one key."""

    rowcount = 5

    def __init__(self) -> None:
        self.said: list[str] = []

    def execute(self, statement: sql.Composed, *_: Any) -> Recorder:
        self.said.append(statement.as_string(None))
        return self

    def fetchone(self) -> tuple[int, int, int]:
        return 5, 2, 0


def said(monkeypatch: pytest.MonkeyPatch, plan: Merge) -> list[str]:
    monkeypatch.setattr(merging, "read_target", lambda *_: None)
    monkeypatch.setattr(merging, "require_unchanged", lambda *_: None)
    session = Recorder()
    members = {"table": Member("k", "e", "s_x", ("0" * 32,), 5, plan)}
    merge(cast("Connection", session), members, EpochLetters("q", 0, "a"))
    return session.said[1:]


def test_an_upsert_replaces_and_deletes(monkeypatch: pytest.MonkeyPatch) -> None:
    latest = LATEST.format(STAGED)
    assert said(monkeypatch, PLAN)[1:] == [UPSERT.format(latest), DELETE.format(latest)]


def test_an_append_inserts(monkeypatch: pytest.MonkeyPatch) -> None:
    staged = STAGED.replace(', "epochsink_delete", "epochsink_order_0"', "")
    appended = UPSERT.partition(" WHERE")[0].format(staged)
    assert said(monkeypatch, replace(PLAN, key=(), deletes=False, ranks=0)) == [appended]
