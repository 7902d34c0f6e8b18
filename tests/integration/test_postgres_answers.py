"""Rows that ride in tasks' answers or are left to the spool: only the driver connects."""

from __future__ import annotations

import base64
import json
import socket
import uuid
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from fix_postgres import ListedRows, Written

from epochsink.errors import PrepareFailed
from epochsink.postgres import Postgres, answers, answers_vote, vote
from epochsink.sink import Epoch, Keeping, Outcome, falling_limit, write_all

if TYPE_CHECKING:
    from collections.abc import Callable

    from fix_postgres import Driver, MakeDriver, Truth

LIMIT = 10_000


def orders(*ids: int, note: str = "x") -> pa.RecordBatch:
    return pa.record_batch({"id": pa.array(ids, pa.int64()), "note": pa.array([f"{note}{i}" for i in ids])})


MANY = orders(*range(1000, 3000))
"""More than the limit."""


@pytest.fixture
def table(pg_schema: str, pg_truth: Truth) -> str:
    pg_truth.execute(f"CREATE TABLE {pg_schema}.orders (id bigint, note text)")
    return f"{pg_schema}.orders"


def test_tasks_of_a_small_epoch_connect_to_nothing_and_no_table_is_made(
    table: str, pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    """Their writers are given a server that does not exist."""
    driver = pg_driver(table, orders(1), answer_bytes=LIMIT)
    with closing(socket.socket()) as nobody:
        nobody.bind(("127.0.0.1", 0))
        lost = Postgres(f"host=127.0.0.1 port={nobody.getsockname()[1]}", table=table, answer_bytes=LIMIT)
        epoch = Epoch(0, uuid.uuid4().hex)
        written = [write_all(lost.writer(driver.task(epoch, part)), [orders(part, 10 + part)]) for part in (0, 1)]
    small = Written(epoch, written, ListedRows({}))
    (part,) = driver.vote(small)
    assert pg_truth.rows(table) == []
    assert pg_truth.prepared() == [part["gid"]]
    assert pg_truth.staging(pg_schema) == []
    assert {verdict.outcome for verdict in driver.commit(small, [part])} == {Outcome.COMMITTED}
    assert pg_truth.rows(table) == [(0, "x0"), (1, "x1"), (10, "x10"), (11, "x11")]


def test_what_is_recorded_of_an_epoch_holds_no_answer(table: str, pg_driver: MakeDriver) -> None:
    """Rows that could be needed again are the spool's."""
    driver = pg_driver(table, orders(1), answer_bytes=LIMIT)
    written, (part,) = driver.prepare(0, orders(1, note="secret"))
    assert part["rows"] == 1
    assert answers.STREAM not in part
    assert "secret" not in json.dumps(part)
    assert written.committables[0][answers.STREAM]


@pytest.mark.parametrize("options", [{}, {"key": "id"}, {"commit": "staged"}], ids=["append", "upsert", "staged"])
def test_small_tasks_go_together_with_those_that_have_staged_their_rows(
    options: dict[str, Any], table: str, pg_driver: MakeDriver, pg_truth: Truth, pg_schema: str
) -> None:
    pg_truth.execute(f"ALTER TABLE {table} ADD PRIMARY KEY (id)")
    driver = pg_driver(table, orders(1), answer_bytes=LIMIT, **options)
    written = driver.write(0, orders(1), [MANY, orders(2)], orders(3))
    assert [answers.STREAM in one for one in written.committables] == [True, False, True]
    parts = driver.vote(written)
    assert {verdict.outcome for verdict in driver.commit(written, parts)} == {Outcome.COMMITTED}
    driver.committer.finish(written.epoch, parts)
    assert pg_truth.execute(f"SELECT count(*), sum(id) FROM {table}") == [(2003, sum(range(1000, 3000)) + 6)]  # noqa: S608 - a name that the test made
    assert pg_truth.staging(pg_schema) == pg_truth.prepared() == []


def test_all_answers_of_an_epoch_fit_into_the_driver_however_many_tasks_there_are() -> None:
    mebibyte = 1 << 20
    assert falling_limit.limit(mebibyte, 0) == mebibyte
    assert falling_limit.limit(mebibyte, 9_999) > 1000
    assert sum(falling_limit.limit(mebibyte, partition) for partition in range(1_000)) < 67 * mebibyte
    assert sum(falling_limit.limit(mebibyte, partition) for partition in range(10_000)) < 104 * mebibyte


def test_a_rule_of_the_table_is_obeyed(table: str, pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth) -> None:
    """COPY would pass it by, and INSERT does not."""
    pg_truth.execute(f"CREATE TABLE {pg_schema}.elsewhere (id bigint, note text)")
    away = f"INSERT INTO {pg_schema}.elsewhere VALUES (NEW.id, NEW.note)"  # noqa: S608 - a name that the test made
    pg_truth.execute(f"CREATE RULE away AS ON INSERT TO {table} DO INSTEAD {away}")
    pg_driver(table, orders(1), answer_bytes=LIMIT).run(0, orders(1, 2))
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
        driver = pg_driver(table, orders(1), answer_bytes=LIMIT, options={"options": f"-c role={role}"})
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
    driver = pg_driver(table, batch, answer_bytes=LIMIT)
    alter_once(monkeypatch, lambda: pg_truth.execute(f"ALTER TABLE {table} ALTER n TYPE bigint"))
    written = driver.write(0, batch)
    with pytest.raises(PrepareFailed, match="has changed since rows were written"):
        driver.vote(written)
    assert pg_truth.prepared() == []
    assert pg_truth.count(table) == 0


def alter_once(monkeypatch: pytest.MonkeyPatch, alter: Callable[[], object]) -> None:
    """Alter the table once the vote has looked at it."""

    def after_altering(*arguments: Any) -> None:
        alter()
        vote.prepare_once(*arguments)

    monkeypatch.setattr(answers_vote, "prepare_once", after_altering)


def test_a_vote_whose_reply_was_lost_does_not_double_the_answers(
    table: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    driver: Driver = pg_driver(table, orders(1), answer_bytes=LIMIT)
    written = driver.write(0, orders(1), orders(2))
    assert driver.vote(written) == driver.vote(written)
    driver.commit(written, driver.vote(written))
    assert pg_truth.rows(table) == [(1, "x1"), (2, "x2")]


@pytest.mark.parametrize("answer_bytes", [LIMIT, 0])
def test_large_tasks_leave_their_rows_to_the_spool_where_the_vote_can_take_them_from_there(
    answer_bytes: int, table: str, pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    driver = pg_driver(table, orders(1), answer_bytes=answer_bytes)
    written = driver.write_from_spool(0, orders(1), [MANY, orders(2)])
    parts = driver.vote(written)
    assert pg_truth.staging(pg_schema) == []
    driver.commit(written, parts)
    assert pg_truth.execute(f"SELECT count(*), sum(id) FROM {table}") == [(2002, sum(range(1000, 3000)) + 3)]  # noqa: S608 - a name that the test made
    pg_truth.execute(f"CREATE RULE away AS ON INSERT TO {table} DO INSTEAD NOTHING")
    driver.run_from_spool(1, [MANY, orders(4)])
    assert not driver.takes_from_spool(orders(1).schema)
    assert pg_truth.count(table) == 2002
    assert pg_truth.staging(pg_schema) == pg_truth.prepared() == []


@pytest.mark.parametrize("carried", [LIMIT, 0], ids=["in the answer", "in a file"])
def test_rows_ride_in_an_answer_once(carried: int, table: str, pg_driver: MakeDriver, pg_truth: Truth) -> None:
    """As the spool's, if those ride there as well."""
    driver = pg_driver(table, orders(1), answer_bytes=LIMIT)
    epoch = Epoch(0, uuid.uuid4().hex)
    task = replace(driver.task(epoch), keeping=Keeping.IN_SPOOL_ALONE, carried=carried)
    answer = write_all(driver.sink.writer(task), [orders(1, 2, note="once")])
    assert (b"once" in base64.b64decode(answer[answers.STREAM])) is (carried == 0)
    written = Written(epoch, [answer], ListedRows({task.uuid: [orders(1, 2)]} if carried else {}))
    driver.commit(written, driver.vote(written))
    assert pg_truth.count(table) == 2


def test_a_spool_that_cannot_be_read_back_fails_the_attempt_and_not_the_query(
    table: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    driver = pg_driver(table, orders(1))
    written = driver.write_from_spool(0, orders(1))
    with pytest.raises(PrepareFailed, match="cannot be read back") as caught:
        driver.vote(Written(written.epoch, written.committables, ListedRows({})))
    assert caught.value.may_pass
    assert pg_truth.prepared() == []


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, True), ({"key": "id"}, False), ({"commit": "staged"}, False), ({"atomic": False}, False)],
    ids=["append", "upsert", "staged", "by-task"],
)
def test_tasks_stage_what_the_vote_cannot_copy(
    options: dict[str, Any], expected: object, table: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    pg_truth.execute(f"ALTER TABLE {table} ADD PRIMARY KEY (id)")
    driver = pg_driver(table, orders(1), **options)
    assert driver.takes_from_spool(orders(1).schema) is expected


def test_a_table_that_cannot_be_looked_at_is_left_to_the_tasks_to_complain_of(
    table: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    driver = pg_driver(table, orders(1))
    pg_truth.execute(f"DROP TABLE {table}")
    assert not driver.takes_from_spool(orders(1).schema)
    pg_truth.execute(f"CREATE TABLE {table} (id bigint, note text)")
    assert driver.takes_from_spool(orders(1).schema)
