"""A retry of dead letters deletes them and merges their rows in one transaction: once, whatever is killed."""

from __future__ import annotations

import json
import os
import signal
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from checkpoint_kit import CheckpointKit
from fix_postgres import Driver
from postgres_letters import ALL, ASIDE, apply, correct, letters_of, read, refusing, rows
from typer.testing import CliRunner

from epochsink.cli.app import app
from epochsink.errors import ConfigurationError, PrepareFailed, RowsRejected
from epochsink.postgres import Postgres
from epochsink.postgres.staging import DELETED
from epochsink.sink import Chosen, Retried

if TYPE_CHECKING:
    from pathlib import Path

    from fix_postgres import MakeDriver, Truth

    from epochsink_devkit.services import PostgresService


def test_letters_are_read_newest_first_by_epoch_and_by_id(
    pg_driver: MakeDriver, pg_schema: str, pg_truth: Truth
) -> None:
    driver = refusing(pg_driver, pg_schema, pg_truth, key="id")
    assert apply(driver, 0, rows((1, "a"), (-1, "b"))) == 1
    assert apply(driver, 1, rows((-2, "c"), (-3, "d"))) == 2
    newest, _, oldest = read(driver)
    assert (newest.epoch, newest.code, newest.row) == (1, "23514", {"id": -3, "note": "d"})
    assert (oldest.epoch, oldest.row) == (0, {"id": -1, "note": "b"})
    assert "rule" in oldest.error
    letters = letters_of(driver)
    assert [letter.epoch for letter in letters.read(Chosen(epoch=0), 9)] == [0]
    assert letters.read(Chosen((oldest.id,)), 9) == [oldest]
    assert letters.read(Chosen((oldest.id,), epoch=1), 9) == []
    assert letters.read(ALL, 1) == [newest]
    assert (letters.count(ALL), letters.count(Chosen(epoch=1))) == (3, 2)
    with pytest.raises(ConfigurationError, match="invalid id 'x'"):
        letters.read(Chosen(("x",)), 9)


def test_a_retry_writes_what_the_corrected_table_takes_and_keeps_the_rest(
    pg_driver: MakeDriver, pg_schema: str, pg_truth: Truth
) -> None:
    driver = refusing(pg_driver, pg_schema, pg_truth)
    assert apply(driver, 0, rows((1, "a"), (-1, "b"), (-2, "c"))) == 2
    assert apply(driver, 1, rows((-3, "d"))) == 1
    assert letters_of(driver).retry(ALL) == Retried(kept=3, reason=read(driver)[0].error)
    correct(pg_schema, pg_truth)
    pg_truth.execute(f"ALTER TABLE {pg_schema}.t ADD CONSTRAINT other CHECK (id <> -2)")
    done = letters_of(driver).retry(ALL)
    assert (done.written, done.superseded, done.kept) == (2, 0, 1)
    assert "other" in done.reason
    assert pg_truth.rows(f"{pg_schema}.t") == [(-1, "b"), (-3, "d"), (1, "a")]
    (left,) = read(driver)
    assert (left.epoch, left.row) == (0, {"id": -2, "note": "c"})
    assert "other" in left.error
    assert letters_of(driver).retry(ALL).kept == 1
    assert pg_truth.staging(pg_schema) == pg_truth.prepared() == []
    # the query goes on beside them
    assert apply(driver, 2, rows((5, "e"))) == 0


def test_only_the_chosen_letters_are_retried_or_dropped(pg_driver: MakeDriver, pg_schema: str, pg_truth: Truth) -> None:
    driver = refusing(pg_driver, pg_schema, pg_truth)
    assert letters_of(driver).drop(ALL) == 0
    for epoch in range(3):
        assert apply(driver, epoch, rows((-2 * epoch - 1, "a"), (-2 * epoch - 2, "b"))) == 2
    correct(pg_schema, pg_truth)
    last = read(driver)[0]
    assert letters_of(driver).retry(Chosen((last.id,))) == Retried(written=1)
    assert letters_of(driver).drop(Chosen(epoch=1)) == 2
    assert letters_of(driver).retry(Chosen(epoch=0)) == Retried(written=2)
    assert [number for number, _ in pg_truth.rows(f"{pg_schema}.t")] == [-1, -2, -6]
    assert [letter.row["id"] for letter in read(driver)] == [-5]
    assert letters_of(driver).drop(ALL) == 1
    assert letters_of(driver).retry(ALL) == Retried()


def test_values_of_every_type_arrive_as_they_were(pg_driver: MakeDriver, pg_schema: str, pg_truth: Truth) -> None:
    """Both of rows that the table refuses, and of those that no column of the staging table could hold."""
    table = f"{pg_schema}.t"
    pg_truth.execute(
        f"CREATE TABLE {table} (id bigint CONSTRAINT rule CHECK (id > 0), note jsonb, b bytea, t timestamptz, d date, "
        "n numeric(30,10), f double precision, r real, a bigint[], w text[], u uuid, i interval, o boolean, s varchar)"
    )
    at = datetime(2026, 3, 29, 1, 30, 0, 123456, tzinfo=UTC)
    values = {
        "b": pa.array([b"\x00\xff", b"", None]),
        "t": pa.array([at, at, None], pa.timestamp("us", "UTC")),
        "d": pa.array([date(2026, 2, 28)] * 2 + [None], pa.date32()),
        "n": pa.array([Decimal("0.0000001234"), Decimal("12345678901234567890.5"), None], pa.decimal128(30, 10)),
        "f": pa.array([0.1, float("nan"), float("-inf")]),
        "r": pa.array([0.1, 2.5e-40, None], pa.float32()),
        "a": pa.array([[1, None, 2**62], [], None], pa.list_(pa.int64())),
        "w": pa.array([['a"b', "{,}", None], ["\\"], None], pa.list_(pa.string())),
        "u": pa.array([str(uuid.UUID(int=7))] * 2 + [None]),
        "i": pa.array(["1 day 02:00:00", "3 mons", None]),
        "o": pa.array([True, False, None]),
        "s": pa.array(["it's \\ {\u20ac}", "", None]),
    }

    def batch(ids: list[int], notes: list[str | None]) -> pa.RecordBatch:
        return pa.record_batch({"id": pa.array(ids, pa.int64()), "note": pa.array(notes), **values})

    good: list[str | None] = ['{"k": [1, null, "x"]}', '"12"', "null"]
    driver = pg_driver(table, batch([1, 2, 3], good), **ASIDE)
    assert apply(driver, 0, batch([1, 2, 3], good)) == 0
    wanted = pg_truth.execute(f"SELECT note, b, t, d, n, f::text, r, a, w, u, i, o, s FROM {table} ORDER BY id")  # noqa: S608
    pg_truth.execute(f"DELETE FROM {table}")  # noqa: S608 - a name that the test made
    assert apply(driver, 1, batch([-1, -2, -3], good)) == 3
    # not JSON at all: no column of the staging table holds such a row
    assert apply(driver, 2, batch([4, 5, 6], ["{", "{", "{"])) == 3
    pg_truth.execute(f"ALTER TABLE {table} DROP CONSTRAINT rule")
    assert letters_of(driver).retry(Chosen(epoch=1)) == Retried(written=3)
    found = f"SELECT note, b, t, d, n, f::text, r, a, w, u, i, o, s FROM {table} ORDER BY id DESC"  # noqa: S608
    assert pg_truth.execute(found) == wanted
    pg_truth.execute(f"DELETE FROM {table}")  # noqa: S608 - likewise
    pg_truth.execute(f"ALTER TABLE {table} ALTER note TYPE text")
    assert letters_of(driver).retry(ALL) == Retried(written=3)
    found = f"SELECT b, t, d, n, f::text, r, a, w, u, i, o, s FROM {table} ORDER BY id"  # noqa: S608
    assert pg_truth.execute(found) == [row[1:] for row in wanted]


def test_a_letter_that_cannot_be_written_as_it_was_stays(
    pg_driver: MakeDriver, pg_schema: str, pg_truth: Truth
) -> None:
    """PostgreSQL's text has no NUL, and a cast would round a timestamp without an error."""
    table = f"{pg_schema}.t"
    pg_truth.execute(f"CREATE TABLE {table} (id bigint, note text, t timestamptz(0))")

    def batch(note: str, *microseconds: int) -> pa.RecordBatch:
        at = pa.array(microseconds, pa.timestamp("us", "UTC"))
        return pa.record_batch({"id": [1] * len(at), "note": [note] * len(at), "t": at})

    driver = pg_driver(table, batch("a", 0), **ASIDE)
    assert apply(driver, 0, batch("z\x00", 0)) == 1
    assert apply(driver, 1, batch("a", 1_500_000, 2_000_000)) == 1
    done = letters_of(driver).retry(ALL)
    assert (done.written, done.kept) == (0, 2)
    assert sorted(letter.error[:7] for letter in read(driver)) == ["a value", "invalid"]
    pg_truth.execute(f"ALTER TABLE {table} ALTER t TYPE timestamptz")
    assert letters_of(driver).retry(ALL).written == 1
    assert pg_truth.execute(f"SELECT extract(epoch FROM t)::float FROM {table} ORDER BY 1") == [(1.5,), (2.0,)]  # noqa: S608
    assert len(read(driver)) == 1


@pytest.mark.parametrize(
    ("options", "stored", "after", "done"),
    [
        ({}, "z", "m", Retried(written=1)),
        ({"newer_wins": "note"}, "z", "z", Retried(superseded=1)),
        ({"newer_wins": "note"}, "b", "m", Retried(written=1)),
    ],
    ids=["replaces", "older-stays-out", "newer-wins"],
)
def test_an_upsert_treats_a_retried_row_as_any_other(
    options: dict[str, Any],
    stored: str,
    after: str,
    done: Retried,
    *,
    pg_driver: MakeDriver,
    pg_schema: str,
    pg_truth: Truth,
) -> None:
    driver = refusing(pg_driver, pg_schema, pg_truth, "note <> 'm'", key="id", **options)
    assert apply(driver, 0, rows((1, "m"))) == 1
    assert apply(driver, 1, rows((1, stored))) == 0
    correct(pg_schema, pg_truth)
    assert letters_of(driver).retry(ALL) == done
    assert pg_truth.rows(f"{pg_schema}.t") == [(1, after)]
    assert ("newer_wins" in letters_of(driver).caution()) is True


def test_a_retried_delete_deletes(pg_driver: MakeDriver, pg_schema: str, pg_truth: Truth) -> None:
    table = f"{pg_schema}.t"
    pg_truth.execute(f"CREATE TABLE {table} (id bigint PRIMARY KEY, note uuid)")
    like = pa.record_batch({"id": [1], "note": [str(uuid.uuid4())], DELETED: [False]})
    driver = pg_driver(table, like, key="id", delete_when="gone", **ASIDE)
    assert apply(driver, 0, like) == 0
    wrong = pa.record_batch({"id": [1, 2], "note": ["nope", "nope"], DELETED: [True, False]})
    assert apply(driver, 1, wrong) == 2
    assert [letter.row.get(DELETED) for letter in read(driver)] == [None, True]
    pg_truth.execute(f"ALTER TABLE {table} ALTER note TYPE text")
    assert letters_of(driver).retry(ALL) == Retried(written=2)
    assert pg_truth.rows(table) == [(2, "nope")]


def test_a_sum_is_added_to_once(pg_driver: MakeDriver, pg_schema: str, pg_truth: Truth) -> None:
    """A sink that adds sets no rows aside, but it may have been another one when it did."""
    table = f"{pg_schema}.t"
    pg_truth.execute(f"CREATE TABLE {table} (id bigint PRIMARY KEY, clicks bigint CONSTRAINT rule CHECK (clicks < 50))")

    def clicks(count: int) -> pa.RecordBatch:
        return pa.record_batch({"id": [1], "clicks": [count]})

    before = pg_driver(table, clicks(1), key="id", **ASIDE)
    assert apply(before, 0, clicks(70)) == 1
    adding = pg_driver(table, clicks(1), key="id", accumulate={"clicks": "sum"}, spool=True)
    driver = before.restart(adding.sink)
    assert apply(driver, 1, clicks(5)) == 0
    correct(pg_schema, pg_truth)
    killed(driver, "postgres.letters.committed")
    assert letters_of(driver).retry(ALL) == Retried()
    assert pg_truth.rows(table) == [(1, 75)]
    assert "combined" in letters_of(driver).caution()


def test_letters_of_one_key_and_epoch_are_retried_one_by_one(
    pg_driver: MakeDriver, pg_schema: str, pg_truth: Truth
) -> None:
    """Without order_by= it is not known which one is the newest."""
    table = f"{pg_schema}.t"
    pg_truth.execute(f"CREATE TABLE {table} (id bigint PRIMARY KEY, note uuid)")
    driver = pg_driver(table, rows((1, str(uuid.uuid4()))), key="id", **ASIDE)
    assert apply(driver, 0, rows((1, "old"), (1, "new"))) == 2
    pg_truth.execute(f"ALTER TABLE {table} ALTER note TYPE text")
    with pytest.raises(RowsRejected, match="occurs 2 times"):
        letters_of(driver).retry(ALL)
    assert (pg_truth.rows(table), letters_of(driver).count(ALL)) == ([], 2)
    for letter in reversed(read(driver)):
        assert letters_of(driver).retry(Chosen((letter.id,))) == Retried(written=1)
    assert pg_truth.rows(table) == [(1, "new")]


def test_letters_that_no_longer_fit_the_table_stay(pg_driver: MakeDriver, pg_schema: str, pg_truth: Truth) -> None:
    driver = refusing(pg_driver, pg_schema, pg_truth)
    assert apply(driver, 0, rows((-1, "a"))) == 1
    pg_truth.execute(f"ALTER TABLE {pg_schema}.t DROP COLUMN note")
    with pytest.raises(PrepareFailed, match=r"do not fit .*column 'note'.* no such column"):
        letters_of(driver).retry(ALL)
    assert letters_of(driver).count(ALL) == 1


def killed(driver: Driver, point: str) -> None:
    """Retry all letters in a child that kills itself at ``point``."""
    child = os.fork()
    if child == 0:
        try:
            os.environ["EPOCHSINK_FAILPOINT"] = point
            letters_of(Driver(driver.sink, driver.identity)).retry(ALL)
        finally:
            os._exit(3)  # the point was not reached
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), f"{point} was never reached: status {status}"
    assert os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # the child only ever runs its own sessions
@pytest.mark.parametrize(
    ("point", "written"),
    [
        ("postgres.letters.taken", 0),
        ("postgres.letters.merged", 0),
        ("postgres.letters.merged:2", 2),
        ("postgres.letters.committed", 2),
        ("postgres.letters.committed:2", 3),
    ],
)
def test_a_retry_that_is_killed_anywhere_is_repeated_exactly(
    point: str, written: int, pg_driver: MakeDriver, pg_schema: str, pg_truth: Truth
) -> None:
    driver = refusing(pg_driver, pg_schema, pg_truth)
    assert apply(driver, 0, rows((-1, "a"), (-2, "b"))) == 2
    assert apply(driver, 1, rows((-3, "c"))) == 1
    correct(pg_schema, pg_truth)
    pg_truth.execute(f"ALTER TABLE {pg_schema}.t DROP CONSTRAINT t_pkey")  # a second copy would be taken
    killed(driver, point)
    assert (pg_truth.count(f"{pg_schema}.t"), letters_of(driver).count(ALL)) == (written, 3 - written)
    assert letters_of(driver).retry(ALL) == Retried(written=3 - written)
    assert [number for number, _ in pg_truth.rows(f"{pg_schema}.t")] == [-1, -2, -3]
    assert pg_truth.staging(pg_schema) == []


def test_two_retries_at_once_write_each_row_once(pg_driver: MakeDriver, pg_schema: str, pg_truth: Truth) -> None:
    driver = refusing(pg_driver, pg_schema, pg_truth)
    assert apply(driver, 0, rows(*((-number, "a") for number in range(1, 500)))) == 499
    correct(pg_schema, pg_truth)
    pg_truth.execute(f"ALTER TABLE {pg_schema}.t DROP CONSTRAINT t_pkey")  # a second copy would be taken
    drivers = [Driver(driver.sink, driver.identity, driver.family) for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        done = list(pool.map(lambda one: letters_of(one).retry(ALL), drivers))
    assert sum(each.written for each in done) == pg_truth.count(f"{pg_schema}.t") == 499
    assert letters_of(driver).count(ALL) == 0


def test_an_operator_lists_retries_and_drops_the_letters_of_a_checkpoint(
    tmp_path: Path, postgres: PostgresService, pg_schema: str, pg_truth: Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = f"{pg_schema}.t"
    pg_truth.execute(f"CREATE TABLE {table} (id bigint, note text, CONSTRAINT rule CHECK (id > 0))")
    options = {"table": table, "marker_schema": pg_schema, **ASIDE}
    (tmp_path / "sinks_with_letters.py").write_text(
        f"from epochsink import Postgres\nSINKS = {{'table': Postgres({postgres.dsn!r}, **{options!r})}}\n"
    )
    monkeypatch.chdir(tmp_path)
    sink = Postgres(postgres.dsn, **options)
    with closing(sink.participant({"table": sink})) as participant:
        assert participant.check("table", rows((1, "a")).schema) == []
    kit = CheckpointKit(tmp_path / "checkpoint", {"table": sink})

    def run(*typed: str) -> tuple[int, dict[str, Any]]:
        place = [str(tmp_path / "checkpoint"), "--sinks", "sinks_with_letters:SINKS", "--json"]
        result = CliRunner().invoke(app, ["letters", typed[0], *place, *typed[1:]])
        return result.exit_code, json.loads(result.output)

    with closing(kit):
        kit.run(0, {"table": rows((1, "a"), (-1, "b"), (-2, "c"))})
        status, listed = run("list")
        assert (status, [letter["row"]["id"] for letter in listed["sinks"][0]["letters"]]) == (0, [-2, -1])
        assert run("retry", "--all", "--yes")[0] == 3
        correct(pg_schema, pg_truth)
        newest = run("list", "--limit", "1")[1]["sinks"][0]["letters"][0]["id"]
        status, done = run("retry", "--id", newest, "--yes")
        assert (status, done["written"], done["kept"]) == (0, 1, 0)
        # what was added is no difference to the receipts
        result = CliRunner().invoke(app, ["audit", str(kit.root), "--sinks", "sinks_with_letters:SINKS"])
        assert (result.exit_code, "differs" in result.output) == (0, False)
        assert run("drop", "--all", "--yes")[1]["dropped"] == 1
        assert run("list")[1]["sinks"][0]["count"] == 0
        kit.run(1, {"table": rows((2, "d"))})
    assert len(pg_truth.rows(table)) == 3
    sys.modules.pop("sinks_with_letters")
