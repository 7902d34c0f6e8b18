"""A process that is killed at any named point of a PostgreSQL epoch: the next driver brings it to the exact end."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from fix_postgres import Driver, ListedRows, Written
from psycopg.conninfo import conninfo_to_dict

from epochsink.postgres import Postgres
from epochsink.sink import Epoch, Outcome

if TYPE_CHECKING:
    from fix_postgres import MakeDriver, Truth

PREPARED: dict[str, Any] = {"commit": "prepared", "key": "id"}
STAGED: dict[str, Any] = {"commit": "staged"}
SPOOLED: dict[str, Any] = {"commit": "prepared", "spool": True}
SPOOLED_UPSERT: dict[str, Any] = {**PREPARED, "spool": True}
SPOOLED_STAGED: dict[str, Any] = {**STAGED, "spool": True}
BY_TASK: dict[str, Any] = {"atomic": False}
BY_TASK_UPSERT: dict[str, Any] = {"atomic": False, "key": "id"}

CASES = [
    *(pytest.param(PREPARED, f"postgres.{point}", id=f"atomic-{point}") for point in ("copied", "copied:2")),
    *(
        pytest.param(PREPARED, f"postgres.{point}", id=f"atomic-{point}")
        for point in ("merged", "prepared", "committed")
    ),
    *(
        pytest.param(SPOOLED, f"postgres.{point}", id=f"spooled-{point}")
        for point in ("copied", "merged", "prepared", "committed")
    ),
    *(
        pytest.param(SPOOLED_UPSERT, f"postgres.{point}", id=f"spooled-upsert-{point}")
        for point in ("copied", "merged", "prepared")
    ),
    *(
        pytest.param(SPOOLED_STAGED, f"postgres.{point}", id=f"spooled-staged-{point}")
        for point in ("copied", "merged", "committed")
    ),
    *(pytest.param(STAGED, f"postgres.{point}", id=f"staged-{point}") for point in ("copied", "merged", "committed")),
    *(
        pytest.param(BY_TASK, f"postgres.{point}", id=f"by-task-{point}")
        for point in ("copied:2", "prepared", "prepared:2", "committed", "committed:2")
    ),
    *(
        pytest.param(BY_TASK_UPSERT, f"postgres.{point}", id=f"by-task-upsert-{point}")
        for point in ("copied:2", "merged:2", "prepared:2", "committed")
    ),
]


def orders(*ids: int) -> pa.RecordBatch:
    return pa.record_batch({"id": pa.array(ids, pa.int64()), "note": [f"x{i}" for i in ids]})


FIRST, SECOND = orders(1, 2), orders(3, 4)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # the child only ever runs its own sessions
@pytest.mark.parametrize(("mode", "point"), CASES)
def test_a_kill_at_any_point_ends_exactly(
    mode: dict[str, Any], point: str, pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    """Recorded parts are committed, all else is swept and the epoch is run again, whatever the point."""
    table = f"{pg_schema}.orders"
    pg_truth.execute(f"CREATE TABLE {table} (id bigint PRIMARY KEY, note text)")
    driver = pg_driver(table, orders(1), **mode)
    recorded = killed_epoch(driver, point)
    assert pg_truth.count(table) in (0, 2, 4)

    later = driver.restart()
    if recorded is None:
        assert pg_truth.count(table) == 0
        later.committer.abort_orphans([])
        assert pg_truth.prepared() == pg_truth.staging(pg_schema) == []
        later.run(0, FIRST, SECOND)
    else:
        written, parts = recorded
        later.committer.abort_orphans(parts)
        assert {verdict.outcome for verdict in later.commit(written, parts)} == {Outcome.COMMITTED}
        later.committer.finish(written.epoch, parts)
    assert pg_truth.rows(table) == [(n, f"x{n}") for n in (1, 2, 3, 4)]
    assert later.committer.newest() == 0
    assert pg_truth.prepared() == pg_truth.staging(pg_schema) == []


def killed_epoch(driver: Driver, point: str) -> tuple[Written, list[dict[str, Any]]] | None:
    """Run an epoch in a child that kills itself at ``point``; return what it had recorded by then."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.environ["EPOCHSINK_FAILPOINT"] = point
            run_epoch(Driver(driver.sink, driver.identity), writer)
        finally:
            os._exit(3)  # the point was not reached
    os.close(writer)
    with os.fdopen(reader) as ledger:
        record = ledger.read()
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), f"{point} was never reached: status {status}"
    assert os.WTERMSIG(status) == signal.SIGKILL
    if not record:
        return None
    entry = json.loads(record)
    return Written(Epoch(**entry["epoch"]), [], ListedRows({})), entry["parts"]


def run_epoch(driver: Driver, ledger: int) -> None:
    written, parts = driver.prepare(0, FIRST, SECOND)
    os.write(ledger, json.dumps({"epoch": asdict(written.epoch), "parts": parts}).encode())
    driver.commit(written, parts)


def test_every_committable_is_json_without_secrets(pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth) -> None:
    """It goes into the ledger, which anybody who reads the checkpoint can read."""
    pg_truth.execute(f"CREATE TABLE {pg_schema}.t (id bigint PRIMARY KEY, note text)")
    for mode in (PREPARED, STAGED, BY_TASK, BY_TASK_UPSERT):
        driver = pg_driver(f"{pg_schema}.t", orders(1), **mode)
        written, parts = driver.prepare(0, orders(1))
        for committable in (*written.committables, *parts):
            text = json.dumps(committable)
            assert json.loads(text) == committable
            assert str(conninfo_to_dict(pg_truth.dsn)["password"]) not in text
        assert isinstance(driver.sink, Postgres)
        driver.committer.abort_orphans([])
