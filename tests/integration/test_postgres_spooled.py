"""Rows that tasks leave to the spool: only the driver connects, and copies them from there."""

from __future__ import annotations

import json
import socket
import threading
import uuid
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow as pa
import pytest
from fix_postgres import ListedRows, Written

from epochsink.errors import PrepareFailed
from epochsink.postgres import Postgres, incoming, vote
from epochsink.postgres.prepared_transaction import commit
from epochsink.protocol.spool import Spool
from epochsink.sink import Epoch, Keeping, Outcome, SpoolFile
from epochsink.testing.sink_rig import damage

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fix_postgres import Driver, MakeDriver, Truth

WAYS = [
    pytest.param({}, id="append"),
    pytest.param({"key": "id"}, id="upsert"),
    pytest.param({"commit": "staged"}, id="staged"),
    pytest.param({"commit": "staged", "key": "id"}, id="staged-upsert"),
]


def orders(*ids: int, note: str = "x") -> pa.RecordBatch:
    return pa.record_batch({"id": pa.array(ids, pa.int64()), "note": pa.array([f"{note}{i}" for i in ids])})


MANY = orders(*range(1000, 3000))


@pytest.fixture
def table(pg_schema: str, pg_truth: Truth) -> str:
    """Have a key, which a duplicated row violates."""
    pg_truth.execute(f"CREATE TABLE {pg_schema}.orders (id bigint PRIMARY KEY, note text)")
    return f"{pg_schema}.orders"


def test_tasks_connect_to_nothing_and_an_append_needs_no_staging_table(
    table: str, pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    """Their writers are given a server that does not exist."""
    driver = pg_driver(table, orders(1), spool=True)
    with closing(socket.socket()) as nobody:
        nobody.bind(("127.0.0.1", 0))
        away = Postgres(f"host=127.0.0.1 port={nobody.getsockname()[1]}", table=table)
        written = replace(driver, sink=away).write(0, orders(0, 10), orders(1, 11))
    (part,) = driver.vote(written)
    assert pg_truth.rows(table) == []
    assert pg_truth.prepared() == [part["gid"]]
    assert pg_truth.staging(pg_schema) == []
    assert {verdict.outcome for verdict in driver.commit(written, [part])} == {Outcome.COMMITTED}
    assert pg_truth.rows(table) == [(0, "x0"), (1, "x1"), (10, "x10"), (11, "x11")]


@pytest.mark.parametrize("options", WAYS)
def test_every_row_of_tasks_with_few_rows_and_with_many_arrives(
    options: dict[str, Any], table: str, pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    driver = pg_driver(table, orders(1), spool=True, **options)
    driver.run(0, [orders(1), orders(2), MANY], orders(3))
    assert pg_truth.execute(f"SELECT count(*), sum(id) FROM {table}") == [(2003, sum(range(1000, 3000)) + 6)]  # noqa: S608 - a name that the test made
    assert pg_truth.staging(pg_schema) == pg_truth.prepared() == []


@pytest.mark.parametrize("options", WAYS)
def test_the_ledger_gets_the_tasks_and_the_number_of_rows_and_no_value(
    options: dict[str, Any], table: str, pg_driver: MakeDriver
) -> None:
    driver = pg_driver(table, orders(1), spool=True, **options)
    written, (part,) = driver.prepare(0, orders(1, note="secret"), orders(2))
    (member,) = part["members"].values()
    assert (member["rows"], member["tasks"]) == (2, written.rows.tasks())
    assert "secret" not in json.dumps([part, *written.committables])


@pytest.mark.parametrize(
    ("options", "keeping"),
    [
        ({}, Keeping.IN_SPOOL_ALONE),
        ({"key": "id"}, Keeping.IN_SPOOL_ALONE),
        ({"commit": "staged"}, Keeping.IN_SPOOL_ALONE),
        ({"atomic": False}, Keeping.IN_SPOOL),
        ({"atomic": False, "spool": False}, Keeping.NOT),
    ],
    ids=["append", "upsert", "staged", "by-task", "without"],
)
def test_only_tasks_that_commit_their_own_rows_write_them_to_the_server_too(
    options: dict[str, Any], keeping: Keeping, table: str, pg_driver: MakeDriver
) -> None:
    driver = pg_driver(table, orders(1), **{"spool": True, **options})
    assert driver.committer.begin(Epoch(0, uuid.uuid4().hex), orders(1).schema).keeping is keeping


def test_a_rule_of_the_table_is_obeyed(table: str, pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth) -> None:
    """COPY would pass it by, and INSERT does not."""
    pg_truth.execute(f"CREATE TABLE {pg_schema}.elsewhere (id bigint, note text)")
    away = f"INSERT INTO {pg_schema}.elsewhere VALUES (NEW.id, NEW.note)"  # noqa: S608 - a name that the test made
    pg_truth.execute(f"CREATE RULE away AS ON INSERT TO {table} DO INSTEAD {away}")
    pg_driver(table, orders(1), spool=True).run(0, orders(1, 2))
    assert pg_truth.rows(table) == []
    assert pg_truth.rows(f"{pg_schema}.elsewhere") == [(1, "x1"), (2, "x2")]


def test_policies_of_the_table_are_obeyed(table: str, pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth) -> None:
    """COPY refuses a table with row security, and INSERT does not."""
    pg_truth.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
    pg_truth.execute(f"CREATE POLICY positive ON {table} FOR INSERT WITH CHECK (id > 0)")
    role = f"writer_{uuid.uuid4().hex[:10]}"
    pg_truth.execute(f"CREATE ROLE {role}")
    pg_truth.execute(f"GRANT USAGE, CREATE ON SCHEMA {pg_schema} TO {role}; GRANT INSERT ON {table} TO {role}")
    try:
        driver = pg_driver(table, orders(1), spool=True, options={"options": f"-c role={role}"})
        driver.run(0, orders(1, 2))
        assert pg_truth.count(table) == 2
        with pytest.raises(PrepareFailed, match="row-level security"):
            driver.prepare(1, orders(3, -3))
        driver.close()
    finally:
        pg_truth.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


def test_a_table_that_is_altered_just_before_the_copy_gets_no_row_that_means_something_else(
    pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A binary COPY has no casts: the bytes of 1.0 as an integer are 4607182418800017408."""
    table = f"{pg_schema}.numbers"
    pg_truth.execute(f"CREATE TABLE {table} (n double precision)")
    batch = pa.record_batch({"n": pa.array([1.0])})
    driver = pg_driver(table, batch, spool=True)
    alter_once(monkeypatch, lambda: pg_truth.execute(f"ALTER TABLE {table} ALTER n TYPE bigint"))
    written = driver.write(0, batch)
    with pytest.raises(PrepareFailed, match="has changed since rows were written"):
        driver.vote(written)
    assert pg_truth.prepared() == []
    assert pg_truth.count(table) == 0


def alter_once(monkeypatch: pytest.MonkeyPatch, alter: Callable[[], object]) -> None:
    """Alter the table once the vote has looked at it."""
    real = vote._prepared

    def after_altering(*arguments: Any) -> Any:
        alter()
        return real(*arguments)

    monkeypatch.setattr(vote, "_prepared", after_altering)


def test_a_table_that_gets_a_rule_is_obeyed_from_the_next_epoch_on(
    table: str, pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    driver = pg_driver(table, orders(1), spool=True)
    driver.run(0, orders(1))
    pg_truth.execute(f"CREATE RULE away AS ON INSERT TO {table} DO INSTEAD NOTHING")
    driver.run(1, [MANY, orders(4)])
    assert pg_truth.rows(table) == [(1, "x1")]
    assert pg_truth.staging(pg_schema) == pg_truth.prepared() == []


@pytest.mark.parametrize("options", WAYS)
def test_a_vote_whose_reply_was_lost_does_not_double_rows(
    options: dict[str, Any], table: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    driver: Driver = pg_driver(table, orders(1), spool=True, **options)
    written = driver.write(0, orders(1), orders(2))
    assert driver.vote(written) == driver.vote(written)
    driver.commit(written, driver.vote(written))
    assert pg_truth.rows(table) == [(1, "x1"), (2, "x2")]


@pytest.mark.parametrize("options", WAYS[1:])
def test_a_connection_lost_as_the_driver_stages_is_made_again(
    options: dict[str, Any], table: str, pg_driver: MakeDriver, pg_truth: Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has committed the first COPY, and the driver does not know it."""
    driver: Driver = pg_driver(table, orders(1), spool=True, **options)
    lost: list[Any] = []

    def commit_once(connection: Any) -> None:
        commit(connection)
        if not lost:
            lost.append(connection)
            connection.close()
            raise psycopg.OperationalError("server closed the connection unexpectedly")

    monkeypatch.setattr(incoming, "commit", commit_once)
    driver.run(0, orders(1), orders(2))
    assert lost
    assert pg_truth.rows(table) == [(1, "x1"), (2, "x2")]


@pytest.mark.parametrize("options", WAYS[1:])
def test_a_commit_that_comes_late_as_the_driver_stages_again_does_not_double_rows(
    options: dict[str, Any], table: str, pg_driver: MakeDriver, pg_truth: Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection has broken, and something on the way has kept its COMMIT."""
    driver: Driver = pg_driver(table, orders(1), spool=True, **options)
    calls: list[Any] = []
    again = threading.Event()

    def commit_once(connection: Any) -> None:
        calls.append(connection)
        if len(calls) > 1:
            again.set()
        commit(connection)
        if len(calls) == 1:
            schema = table.partition(".")[0]
            [staging] = pg_truth.staging(schema)
            late.execute(f"INSERT INTO {schema}.{staging} TABLE {schema}.{staging}".encode())
            arrives.start()
            connection.close()
            raise psycopg.OperationalError("server closed the connection unexpectedly")

    def arrive() -> None:
        again.wait(1.0)
        late.commit()

    arrives = threading.Thread(target=arrive)
    monkeypatch.setattr(incoming, "commit", commit_once)
    with psycopg.connect(pg_truth.dsn) as late:
        driver.run(0, orders(1), orders(2))
        arrives.join()
    assert len(calls) > 1
    assert pg_truth.rows(table) == [(1, "x1"), (2, "x2")]


@pytest.mark.parametrize("options", WAYS)
def test_a_spool_file_that_is_missing_fails_the_attempt_and_not_the_query(
    options: dict[str, Any], table: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    driver = pg_driver(table, orders(1), spool=True, **options)
    written = driver.write(0, orders(1))
    with pytest.raises(PrepareFailed, match="cannot be read back") as caught:
        driver.vote(Written(written.epoch, written.committables, ListedRows({})))
    assert caught.value.may_pass
    assert pg_truth.prepared() == []
    driver.run(0, orders(1))
    assert pg_truth.rows(table) == [(1, "x1")]


@pytest.mark.parametrize("options", WAYS)
def test_a_spool_file_that_is_damaged_is_named_and_none_of_its_rows_is_prepared(
    options: dict[str, Any], table: str, pg_driver: MakeDriver, pg_truth: Truth, tmp_path: Path
) -> None:
    driver = pg_driver(table, orders(1), spool=True, **options)
    written, files, spool = driver.write(0, orders(1), MANY), dict[str, SpoolFile](), Spool(str(tmp_path))
    spool.make(driver.identity.query_id, written.epoch)
    for uuid_ in written.rows.tasks():
        file = spool.writer(replace(driver.task(written.epoch), uuid=uuid_), MANY.schema)
        for batch in written.rows.read(uuid_):
            file.write(batch)
        files[uuid_] = file.close()
    damage(spool, driver.identity.query_id, written.epoch, written.rows.tasks()[1])
    kept = spool.rows(driver.identity, written.epoch, written.rows.tasks(), files)
    with pytest.raises(PrepareFailed, match=r"cannot be read back: the spool file .* was cut or changed") as caught:
        driver.committer.vote(written.epoch, written.committables, kept)
    assert caught.value.may_pass
    assert (pg_truth.prepared(), pg_truth.rows(table)) == ([], [])
    # the rows that came before the damage are not taken for the whole
    driver.commit(written, driver.vote(written))
    assert pg_truth.count(table) == 2001


@pytest.mark.parametrize("options", WAYS)
def test_a_spool_with_fewer_rows_than_the_tasks_wrote_fails_the_attempt(
    options: dict[str, Any], table: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    driver = pg_driver(table, orders(1), spool=True, **options)
    written = driver.write(0, orders(1, 2), orders(3))
    first, second = written.rows.tasks()
    fewer = ListedRows({first: [orders(1)], second: [orders(3)]})
    with pytest.raises(PrepareFailed, match="holds 2 rows"):
        driver.vote(Written(written.epoch, written.committables, fewer))
    assert pg_truth.prepared() == []
