"""An epoch's way through PostgreSQL: the server's truth after each two-phase step, in every mode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from epochsink.protocol import Outcome

if TYPE_CHECKING:
    from fix_postgres import MakeDriver, Truth

MODES = [
    pytest.param({"commit": "prepared"}, id="prepared"),
    pytest.param({"commit": "staged"}, id="staged"),
    pytest.param({"atomic": False}, id="by-task"),
]


def orders(*ids: int, note: str = "x") -> pa.RecordBatch:
    return pa.record_batch({"id": pa.array(ids, pa.int64()), "note": pa.array([f"{note}{i}" for i in ids])})


@pytest.fixture
def table(pg_schema: str, pg_truth: Truth) -> str:
    pg_truth.execute(f"CREATE TABLE {pg_schema}.orders (id bigint PRIMARY KEY, note text)")
    return f"{pg_schema}.orders"


@pytest.mark.parametrize("mode", MODES)
def test_append_is_visible_only_after_commit(
    mode: dict[str, Any], table: str, pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    driver = pg_driver(table, orders(1), **mode)
    written = driver.write(0, orders(1, 2), [orders(3), orders(4)])
    assert pg_truth.rows(table) == []
    parts = driver.vote(written)
    assert pg_truth.rows(table) == []
    gids = [part["gid"] for part in parts if "gid" in part]
    assert sorted(pg_truth.prepared()) == sorted(gids)
    assert len(gids) == {"prepared": 1, "staged": 0}.get(mode.get("commit", ""), 2)

    later = driver.restart()
    assert later.committer.newest() is None
    assert {verdict.outcome for verdict in later.commit(written, parts)} == {Outcome.COMMITTED}
    assert pg_truth.rows(table) == [(1, "x1"), (2, "x2"), (3, "x3"), (4, "x4")]
    assert pg_truth.prepared() == []
    assert later.committer.newest() == 0
    later.committer.finish(written.epoch, parts)
    assert pg_truth.staging(pg_schema) == []
    later.committer.close()


@pytest.mark.parametrize("mode", MODES)
def test_upsert_replaces_rows_of_the_same_key(
    mode: dict[str, Any], table: str, pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    driver = pg_driver(table, orders(1), key="id", **mode)
    driver.run(0, orders(1, 2), orders(3))
    driver.run(1, orders(2, 4, note="y"))
    assert pg_truth.rows(table) == [(1, "x1"), (2, "y2"), (3, "x3"), (4, "y4")]
    assert pg_truth.prepared() == pg_truth.staging(pg_schema) == []
