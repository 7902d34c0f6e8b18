"""A PostgreSQL whose table, marker or prepared transactions are those of an older state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from epochsink.errors import WentBack
from epochsink.sink import LastDone

if TYPE_CHECKING:
    from fix_postgres import MakeDriver, Truth

MODES = [
    pytest.param({"commit": "prepared"}, id="prepared"),
    pytest.param({"commit": "staged"}, id="staged"),
    pytest.param({"atomic": False}, id="by-task"),
]


def orders(*ids: int) -> pa.RecordBatch:
    return pa.record_batch({"id": pa.array(ids, pa.int64())})


@pytest.fixture
def table(pg_schema: str, pg_truth: Truth) -> str:
    pg_truth.execute(f"CREATE TABLE {pg_schema}.orders (id bigint)")
    return f"{pg_schema}.orders"


@pytest.mark.parametrize("mode", MODES)
def test_a_restored_table_is_noticed_before_the_vote_in_it_and_before_the_commit(
    mode: dict[str, Any], table: str, pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    driver = pg_driver(table, orders(1), **mode)
    driver.run(0, orders(0))
    written, parts = driver.prepare(1, orders(1))
    driver.commit(written, parts)
    last = LastDone(1, written.epoch.attempt, tuple(parts))
    driver.committer.verify_applied(last, None)
    following, prepared = driver.prepare(2, orders(2))
    driver.committer.verify_applied(last, LastDone(2, following.epoch.attempt, tuple(prepared)))
    driver.committer.abort_orphans([])

    # as restored from a backup that was made after epoch 0
    pg_truth.execute(f"DELETE FROM {pg_schema}.marker WHERE epoch = 1")  # noqa: S608 - our own names
    pg_truth.execute(f"DELETE FROM {table} WHERE id = 1")  # noqa: S608 - our own names
    with pytest.raises(WentBack, match="epoch 1 is done: the target is the older copy"):
        driver.committer.verify_applied(last, None)
    again = driver.write(2, orders(2))
    with pytest.raises(WentBack, match="older copy"):
        driver.committer.vote(again.epoch, again.committables, again.rows, last)
    assert pg_truth.rows(table) == [(0,)]

    pg_truth.execute(f"DELETE FROM {pg_schema}.marker")  # noqa: S608 - our own names
    with pytest.raises(WentBack, match="no marker of this query"):
        driver.committer.verify_applied(last, None)
    driver.committer.abort_orphans([])
    pg_truth.execute(f"DROP TABLE {pg_schema}.marker")
    with pytest.raises(WentBack, match="no marker of this query"):
        driver.committer.verify_applied(last, None)


def test_a_commit_that_a_failover_has_lost_is_made_again_and_never_rolled_back(
    table: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    """The standby has PREPARE TRANSACTION and lacks COMMIT PREPARED; the ledger calls the epoch done."""
    driver = pg_driver(table, orders(1), commit="prepared")
    driver.run(0, orders(0))
    written, parts = driver.prepare(1, orders(1))
    with pytest.raises(WentBack, match="its epoch is done"):
        driver.committer.abort_orphans([], parts)
    assert len(pg_truth.prepared()) == 1
    driver.committer.verify_applied(LastDone(1, written.epoch.attempt, tuple(parts)), None)
    assert pg_truth.prepared() == []
    assert pg_truth.rows(table) == [(0,), (1,)]
