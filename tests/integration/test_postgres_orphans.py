"""Leftovers: what earlier drivers, lost tasks and zombies left on the server ends, and nothing else does."""

from __future__ import annotations

import socket
import time
import uuid
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow as pa
import pytest
from fix_postgres import gids, tables

from epochsink.errors import PrepareFailed
from epochsink.postgres import Postgres
from epochsink.postgres.committable import Member, Merge, Part, Relation
from epochsink.postgres.committer import PostgresCommitter
from epochsink.postgres.orphans import Orphans
from epochsink.sink import Epoch, Identity, Outcome, Remnant, identity_key
from epochsink.testing.sink_rig import OneSink

if TYPE_CHECKING:
    from fix_postgres import MakeDriver, Truth

MODES = [
    pytest.param({"commit": "prepared"}, id="prepared"),
    pytest.param({"commit": "staged"}, id="staged"),
    pytest.param({"atomic": False}, id="by-task"),
    pytest.param({"atomic": False, "key": "id"}, id="by-task-upsert"),
]


def orders(*ids: int) -> pa.RecordBatch:
    return pa.record_batch({"id": pa.array(ids, pa.int64()), "note": [f"x{i}" for i in ids]})


@pytest.fixture
def table(pg_schema: str, pg_truth: Truth) -> str:
    pg_truth.execute(f"CREATE TABLE {pg_schema}.orders (id bigint PRIMARY KEY, note text)")
    return f"{pg_schema}.orders"


@pytest.mark.parametrize("mode", MODES)
def test_what_is_recorded_stays_and_the_rest_goes(
    mode: dict[str, Any], table: str, pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    """Leftovers: an attempt that never voted, and one that voted and was not recorded."""
    driver = pg_driver(table, orders(1), **mode)
    recorded, kept = driver.prepare(0, orders(1), orders(2))
    driver.write(1, orders(3), orders(4))
    driver.prepare(1, orders(5))
    later = driver.restart()
    assert later.committer.abort_orphans(kept)
    assert sorted(pg_truth.prepared()) == gids(kept)
    assert pg_truth.staging(pg_schema) == tables(kept)
    assert later.committer.abort_orphans(kept) == []
    assert {verdict.outcome for verdict in later.commit(recorded, kept)} == {Outcome.COMMITTED}
    assert pg_truth.rows(table) == [(1, "x1"), (2, "x2")]


@pytest.mark.parametrize("mode", [{"commit": "prepared"}, {"commit": "staged"}], ids=str)
def test_a_long_reader_of_a_staging_table_does_not_hold_epochs_up(
    mode: dict[str, Any], table: str, pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    """As pg_dump does: its table stays, until a sweep after it has gone."""
    driver = pg_driver(table, orders(1), key="id", **mode)
    written, parts = driver.prepare(0, orders(1))
    with psycopg.connect(pg_truth.dsn) as dump:
        (staging,) = pg_truth.staging(pg_schema)
        dump.execute(f"SELECT count(*) FROM {pg_schema}.{staging}".encode())  # noqa: S608 - our own names
        began = time.monotonic()
        driver.commit(written, parts)
        driver.committer.finish(written.epoch, parts)
        driver.committer.abort_orphans([])
        driver.run(1, orders(2))
        # the sink itself would wait for a lock for 60 s
        assert time.monotonic() - began < 30
        assert pg_truth.staging(pg_schema) == [staging]
    driver.committer.abort_orphans([])
    assert pg_truth.staging(pg_schema) == []
    assert pg_truth.count(table) == 2


def test_another_query_and_another_sink_are_left_alone(
    table: str, pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    stranger = pg_driver(table, orders(1), atomic=False, key="id")
    written, parts = stranger.prepare(0, orders(1))
    open_task = stranger.sink.writer(stranger.task(Epoch(1, uuid.uuid4().hex)))
    open_task.write(orders(2))
    assert pg_driver(table, orders(1)).committer.abort_orphans([]) == []
    assert sorted(pg_truth.prepared()) == gids(parts)
    assert len(pg_truth.staging(pg_schema)) == 2
    open_task.prepare()
    assert {verdict.outcome for verdict in stranger.commit(written, parts)} == {Outcome.COMMITTED}


def test_a_newer_driver_is_left_alone_by_an_older_one(
    table: str, pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    """A driver that slept through the take-over ends nothing of its successor's: sessions, gids, tables."""
    older = pg_driver(table, orders(1), atomic=False, key="id")
    older.committer.newest()
    newer = older.restart()
    written, parts = newer.prepare(0, orders(1))
    task = newer.sink.writer(newer.task(Epoch(1, uuid.uuid4().hex)))
    task.write(orders(2))
    assert older.committer.abort_orphans([]) == []
    assert sorted(pg_truth.prepared()) == gids(parts)
    assert len(pg_truth.staging(pg_schema)) == 2
    task.prepare()
    assert {verdict.outcome for verdict in newer.commit(written, parts)} == {Outcome.COMMITTED}


@pytest.mark.parametrize("mode", MODES[2:])
def test_a_zombie_task_in_the_middle_of_its_copy_is_ended(
    mode: dict[str, Any], table: str, pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    """The sweep does not hang behind its lock, and the zombie can neither write nor prepare afterwards."""
    driver = pg_driver(table, orders(1), **mode)
    zombie = driver.sink.writer(driver.task(Epoch(0, uuid.uuid4().hex)))
    zombie.write(orders(1))
    later = driver.restart()
    assert any("terminated session" in line for line in later.committer.abort_orphans([]))
    assert pg_truth.staging(pg_schema) == []
    with pytest.raises(PrepareFailed):
        zombie.prepare()
    zombie.abort()
    assert pg_truth.prepared() == []
    later.run(0, orders(1))
    assert pg_truth.rows(table) == [(1, "x1")]


def test_a_zombie_task_that_prepares_as_the_sweep_begins_leaves_nothing(
    table: str, pg_driver: MakeDriver, pg_truth: Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its session is ended, and then the sweep looks once more: what it has prepared until then is ended too."""
    driver = pg_driver(table, orders(1), atomic=False)
    zombie = driver.sink.writer(driver.task(Epoch(0, uuid.uuid4().hex)))
    zombie.write(orders(1))
    end = Orphans.end

    def preparing(sweep: Orphans, remnants: Sequence[Remnant]) -> list[str]:
        if not pg_truth.prepared():
            zombie.prepare()
        return end(sweep, remnants)

    monkeypatch.setattr(Orphans, "end", preparing)
    later = driver.restart()
    assert any("rolled back" in line for line in later.committer.abort_orphans([]))
    assert pg_truth.prepared() == []


def test_a_zombie_driver_in_the_middle_of_its_merge_is_ended(
    table: str, pg_driver: MakeDriver, pg_truth: Truth, pg_schema: str
) -> None:
    """Its open marker row would make the new driver's vote wait."""
    driver = pg_driver(table, orders(1))
    key = identity_key(driver.identity)
    assert driver.committer.newest() is None
    with closing(psycopg.connect(pg_truth.dsn, application_name=f"epochsink:{key}:1:driver")) as zombie:
        values = f"('{key}', 0, 'all', 'a', 'q', 's')"
        zombie.execute(f"INSERT INTO {pg_schema}.marker (key, epoch, part, attempt, query_id, sink) VALUES {values}")  # noqa: S608 - names that the test made
        later = driver.restart()
        assert any(":1:driver" in line for line in later.committer.abort_orphans([]))
        later.run(0, orders(1))
    assert pg_truth.rows(table) == [(1, "x1")]


def test_a_table_that_something_else_holds_is_left_for_the_next_sweep(
    table: str, pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    """A session that is not ours, such as a backup, is not ended and not waited for without end."""
    driver = pg_driver(table, orders(1), commit="staged")
    (staging,) = tables(driver.prepare(0, orders(1))[1])
    with psycopg.connect(pg_truth.dsn) as backup:
        backup.execute(f"LOCK TABLE {pg_schema}.{staging} IN ACCESS SHARE MODE")
        assert driver.committer.abort_orphans([]) == []
        assert pg_truth.staging(pg_schema) == [staging]
    assert driver.committer.abort_orphans([]) == [f"dropped staging table {staging}"]


def test_a_zombie_that_comes_back_after_the_sweep_changes_nothing(
    table: str, pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    """It may make its staging table anew, and prepare; nobody commits that, and the next sweep ends both."""
    driver = pg_driver(table, orders(1), atomic=False, key="id")
    attempt = Epoch(0, uuid.uuid4().hex)
    later = driver.restart()
    later.committer.abort_orphans([])
    zombie = driver.sink.writer(driver.task(attempt))
    zombie.write(orders(9))
    zombie.prepare()
    later.run(0, orders(1))
    assert pg_truth.rows(table) == [(1, "x1")]
    assert len(later.committer.abort_orphans([])) == 2
    assert pg_truth.staging(pg_schema) == []


def test_an_unreachable_server_makes_a_sweep_a_matter_for_later() -> None:
    with closing(socket.socket()) as nobody:
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
        sink = Postgres(f"host=127.0.0.1 port={port}", table="orders")
        committer = OneSink(PostgresCommitter({"table": sink}, retry_seconds=0.1))
        committer.open(Identity(str(uuid.uuid4()), "table", 1))
        with pytest.raises(ConnectionError, match=str(port)):
            committer.abort_orphans([])
        merge = Merge(Relation(None, "orders"), {}, {}, (), deletes=False)
        part = Part("attempt", {"table": Member("k", "epochsink", "s", (), 0, merge)})
        committer.finish(Epoch(0, uuid.uuid4().hex), [part.to_json()])
