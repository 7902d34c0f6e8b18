"""Rows that a table refuses become dead letters in the transaction of their epoch; all others are written."""

from __future__ import annotations

import json
import uuid
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from fix_postgres import gids, ranked

from epochsink.errors import PrepareFailed, RowsRejected
from epochsink.postgres.staging import DELETED
from epochsink.sink import Outcome

if TYPE_CHECKING:
    from fix_postgres import Driver, MakeDriver, Truth, Written

    from epochsink.sink import Committable

ASIDE: dict[str, Any] = {"on_rejected": "dead_letter", "spool": True}
MODES = [pytest.param({"commit": "prepared"}, id="prepared"), pytest.param({"commit": "staged"}, id="staged")]


def rows(*given: tuple[int | None, str]) -> pa.RecordBatch:
    ids, notes = zip(*given, strict=True)
    return pa.record_batch({"id": pa.array(ids, pa.int64()), "note": pa.array(notes, pa.string())})


def letters(truth: Truth, schema: str) -> list[tuple[int, str | None, dict[str, Any]]]:
    """Return epoch, SQLSTATE and row of each letter, in the order of the rows."""
    found = truth.execute(f'SELECT epoch, sqlstate, "row" FROM {schema}.dead_letter ORDER BY epoch, "row"->>\'note\'')  # noqa: S608
    return [(epoch, state, row if isinstance(row, dict) else json.loads(row)) for epoch, state, row in found]


def apply(driver: Driver, number: int, *tasks: pa.RecordBatch) -> int | None:
    """Take an epoch through all its steps; return how many rows the verdict calls dead letters."""
    written, parts = driver.prepare(number, *tasks)
    (verdict,) = driver.commit(written, parts)
    assert verdict.outcome is Outcome.COMMITTED
    driver.committer.finish(written.epoch, parts)
    return verdict.set_aside


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("rule", "bad", "good", "state"),
    [
        ("id bigint NOT NULL, note text", (None, "b"), "a", "23502"),
        ("id bigint CHECK (id > 0), note text", (-5, "b"), "a", "23514"),
        ("id bigint UNIQUE, note text", (1, "b"), "a", "23505"),
        ("id bigint UNIQUE DEFERRABLE INITIALLY DEFERRED, note text", (1, "b"), "a", "23505"),
        ("id bigint, note varchar(3)", (2, "longer"), "a", "22001"),
        ("id bigint, note uuid", (2, "nope"), "2b0f5c1e-0000-4000-8000-000000000000", None),
        ("id bigint, note jsonb", (2, "{"), "1", "22P02"),
        ("id bigint, note interval", (2, "soon"), "1 day", "22007"),
        ("id bigint, note text", (2, "z\x00"), "a", "22021"),
    ],
    ids=["not-null", "check", "unique", "deferred", "too-long", "no-uuid", "no-json", "no-interval", "nul"],
)
def test_a_row_that_the_table_refuses_is_set_aside_and_the_others_are_written(
    rule: str,
    bad: tuple[int | None, str],
    good: str,
    state: str | None,
    mode: dict[str, Any],
    *,
    pg_driver: MakeDriver,
    pg_schema: str,
    pg_truth: Truth,
) -> None:
    table = f"{pg_schema}.t"
    pg_truth.execute(f"CREATE TABLE {table} ({rule})")
    driver = pg_driver(table, rows((1, good)), **ASIDE, **mode)
    assert apply(driver, 0, rows((1, good), (7, good), bad), rows((8, good), (9, good))) == 1
    assert [number for number, _ in pg_truth.rows(table)] == [1, 7, 8, 9]
    kept = {"id": bad[0], "note": bad[1].replace("\x00", "\\x00")}
    ((epoch, sqlstate, row),) = letters(pg_truth, pg_schema)
    assert (epoch, sqlstate, row) == (0, state, kept)
    assert pg_truth.prepared() == []
    assert pg_truth.staging(pg_schema) == []
    # an epoch without such rows leaves no letter
    assert apply(driver, 1, rows((10, good))) == 0
    assert len(letters(pg_truth, pg_schema)) == 1


def test_what_is_prepared_has_no_savepoints_although_the_refused_rows_are_found_under_some(
    pg_driver: MakeDriver, pg_schema: str, pg_truth: Truth
) -> None:
    """A standby that starts takes no connections while a transaction with more than 64 of them is prepared."""
    table = f"{pg_schema}.t"
    pg_truth.execute(f"CREATE TABLE {table} (id bigint CHECK (id % 5 <> 0), note varchar(3))")
    driver = pg_driver(table, rows((1, "a")), **ASIDE, commit="prepared")
    given = [(number, "long" if number % 7 == 0 else "x") for number in range(1, 201)]
    wrong = [number for number, note in given if number % 5 == 0 or note == "long"]
    written, parts = driver.prepare(0, rows(*given))
    [(of_all,)] = pg_truth.execute("SELECT transaction::text FROM pg_prepared_xacts WHERE gid = ANY (%s)", gids(parts))
    driver.commit(written, parts)
    found = pg_truth.execute(f"SELECT xmin::text, count(*) FROM {table} GROUP BY xmin")  # noqa: S608
    assert found == [(of_all, len(given) - len(wrong))]
    assert sorted(row["id"] for _, _, row in letters(pg_truth, pg_schema)) == wrong


def test_a_row_that_is_refused_only_once_the_refused_ones_are_known_is_found_all_the_same(
    pg_driver: MakeDriver, pg_schema: str, pg_truth: Truth
) -> None:
    """The table's rule has changed between the search and the writing."""
    table = f"{pg_schema}.t"
    pg_truth.execute(f"CREATE SEQUENCE {pg_schema}.looks")
    pg_truth.execute(f"CREATE TABLE {table} (id bigint, note text)")
    # a sequence counts what is rolled back, too: the search writes the row once, after the one that is refused is known
    pg_truth.execute(
        f"CREATE FUNCTION {pg_schema}.rule() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        f"IF NEW.id = 1 OR NEW.id = 3 AND nextval('{pg_schema}.looks') > 1 THEN RAISE 'no'; END IF; RETURN NEW; END $$"
    )
    pg_truth.execute(f"CREATE TRIGGER rule BEFORE INSERT ON {table} FOR EACH ROW EXECUTE FUNCTION {pg_schema}.rule()")
    driver = pg_driver(table, rows((1, "a")), **ASIDE, commit="prepared")
    assert apply(driver, 0, rows((1, "a"), (2, "b"), (3, "c"))) == 2
    assert [number for number, _ in pg_truth.rows(table)] == [2]


@pytest.mark.parametrize("mode", MODES)
def test_of_many_rows_each_refused_one_is_found_and_no_other(
    mode: dict[str, Any], pg_driver: MakeDriver, pg_schema: str, pg_truth: Truth
) -> None:
    table = f"{pg_schema}.t"
    pg_truth.execute(f"CREATE TABLE {table} (id bigint PRIMARY KEY CHECK (id % 97 <> 0), note text)")
    driver = pg_driver(table, rows((1, "a")), key="id", **ASIDE, **mode)
    given = [(number, f"{number:04}") for number in range(1, 1000)]
    wrong = [number for number, _ in given if number % 97 == 0]
    assert apply(driver, 0, rows(*given[:500]), rows(*given[500:])) == len(wrong)
    assert [row["id"] for _, _, row in letters(pg_truth, pg_schema)] == wrong
    assert pg_truth.count(table) == len(given) - len(wrong)
    again = [(number, "new") for number, _ in given]
    assert apply(driver, 1, rows(*again)) == len(wrong)
    assert pg_truth.execute(f"SELECT count(*) FROM {table} WHERE note = 'new'") == [(len(given) - len(wrong),)]  # noqa: S608


@pytest.mark.parametrize("mode", MODES)
def test_an_upsert_keeps_the_stored_row_of_a_refused_one_and_sets_null_keys_aside(
    mode: dict[str, Any], pg_driver: MakeDriver, pg_schema: str, pg_truth: Truth
) -> None:
    """Of several rows of a key the newest is chosen, and an older one is not taken in its place."""
    table = f"{pg_schema}.t"
    pg_truth.execute(f"CREATE TABLE {table} (id bigint PRIMARY KEY, note text CHECK (note <> 'bad'))")
    like = ranked(rows((1, "a")), pa.array([1]))
    driver = pg_driver(table, like, key="id", order_by="note", **ASIDE, **mode)
    assert apply(driver, 0, ranked(rows((1, "old"), (2, "old")), pa.array([1, 1]))) == 0
    batch = ranked(rows((1, "older"), (1, "bad"), (2, "new"), (None, "no key")), pa.array([1, 2, 1, 1]))
    assert apply(driver, 1, batch) == 2
    assert pg_truth.rows(table) == [(1, "old"), (2, "new")]
    assert [row for _, _, row in letters(pg_truth, pg_schema)] == [
        {"id": 1, "note": "bad"},
        {"id": None, "note": "no key"},
    ]


def test_rows_that_a_trigger_refuses_are_set_aside(pg_driver: MakeDriver, pg_schema: str, pg_truth: Truth) -> None:
    table = f"{pg_schema}.t"
    pg_truth.execute(f"CREATE TABLE {table} (id bigint, note text)")
    pg_truth.execute(
        f"CREATE FUNCTION {pg_schema}.f() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN IF NEW.id = 13 THEN RAISE 'no luck'; END IF; RETURN NEW; END $$"
    )
    pg_truth.execute(f"CREATE TRIGGER g BEFORE INSERT ON {table} FOR EACH ROW EXECUTE FUNCTION {pg_schema}.f()")
    driver = pg_driver(table, rows((1, "a")), **ASIDE, commit="prepared")
    assert apply(driver, 0, rows((12, "a"), (13, "b"), (14, "c"))) == 1
    assert [number for number, _ in pg_truth.rows(table)] == [12, 14]


def lost(driver: Driver, truth: Truth, written: Written, parts: list[Committable]) -> list[Committable]:
    """Lose what is prepared or staged, and prepare it again from the spool."""
    for gid in gids(parts):
        truth.execute(f"ROLLBACK PREPARED '{gid}'")
    (verdict,) = driver.commit(written, parts)
    assert verdict.outcome is Outcome.ABORTED
    return [driver.committer.replay(written.epoch, part, written.rows, uuid.uuid4().hex) for part in parts]


def test_a_row_that_refers_to_a_later_one_of_its_epoch_is_no_letter(
    pg_driver: MakeDriver, pg_schema: str, pg_truth: Truth
) -> None:
    """Another row is refused, so each is tried without the rows after it."""
    table = f"{pg_schema}.t"
    pg_truth.execute(f"CREATE TABLE {table} (id bigint PRIMARY KEY, note text, above bigint REFERENCES {table})")
    given = {"id": [1, 2, 3, 4, 5], "note": ["a"] * 5, "above": [3, 99, 4, 5, None]}
    batch = pa.record_batch({name: pa.array(each) for name, each in given.items()})
    driver = pg_driver(table, batch, **ASIDE)
    assert apply(driver, 0, batch) == 1
    assert [row[0] for row in pg_truth.rows(table)] == [1, 3, 4, 5]
    assert [row["id"] for _, _, row in letters(pg_truth, pg_schema)] == [2]


def test_letters_are_visible_with_their_epoch_and_once_if_it_is_prepared_again(
    pg_driver: MakeDriver, pg_schema: str, pg_truth: Truth
) -> None:
    """Also by a driver that was started with other options since: what is recorded counts."""
    table = f"{pg_schema}.t"
    pg_truth.execute(f"CREATE TABLE {table} (id bigint CHECK (id > 0), note text)")
    driver = pg_driver(table, rows((1, "a")), **ASIDE, commit="prepared")
    written, parts = driver.prepare(0, rows((1, "a"), (-1, "b")))
    assert (letters(pg_truth, pg_schema), pg_truth.count(table)) == ([], 0)
    plain = pg_driver(table, rows((1, "a")), spool=True)
    later = driver.restart(plain.sink)
    again = lost(later, pg_truth, written, parts)
    assert [verdict.set_aside for verdict in later.commit(written, again)] == [1]
    assert [verdict.set_aside for verdict in later.commit(written, again)] == [1]
    assert (pg_truth.rows(table), len(letters(pg_truth, pg_schema))) == ([(1, "a")], 1)


def test_an_attempt_that_is_aborted_leaves_no_letter(pg_driver: MakeDriver, pg_schema: str, pg_truth: Truth) -> None:
    table = f"{pg_schema}.t"
    pg_truth.execute(f"CREATE TABLE {table} (id bigint CHECK (id > 0), note text)")
    driver = pg_driver(table, rows((1, "a")), **ASIDE, commit="prepared")
    driver.prepare(0, rows((1, "a"), (-1, "b")))
    driver.committer.abort_orphans([])
    assert (letters(pg_truth, pg_schema), pg_truth.count(table), pg_truth.prepared()) == ([], 0, [])


@pytest.mark.parametrize("mode", MODES)
def test_more_letters_than_the_limit_stop_the_query_before_the_decision(
    mode: dict[str, Any], pg_driver: MakeDriver, pg_schema: str, pg_truth: Truth
) -> None:
    table = f"{pg_schema}.t"
    pg_truth.execute(f"CREATE TABLE {table} (id bigint CONSTRAINT positive CHECK (id > 0), note text)")
    driver = pg_driver(table, rows((1, "a")), **ASIDE, letters_limit=0.25, **mode)
    assert apply(driver, 0, rows((1, "a"), (2, "b"), (3, "c"), (-4, "d"))) == 1
    with pytest.raises(RowsRejected, match=r"refuses 2 of 4 rows, more than letters_limit=0.25: .*positive"):
        driver.prepare(1, rows((1, "a"), (2, "b"), (-3, "c"), (-4, "d")))
    assert (pg_truth.count(table), len(letters(pg_truth, pg_schema))) == (3, 1)


def test_deletes_go_on_beside_letters_and_late_rows_stay_out(
    pg_driver: MakeDriver, pg_schema: str, pg_truth: Truth
) -> None:
    table = f"{pg_schema}.t"
    pg_truth.execute(f"CREATE TABLE {table} (id bigint PRIMARY KEY, note text CHECK (note <> 'x'))")
    options = {"key": "id", "delete_when": "gone", "newer_wins": "note", **ASIDE}
    like = rows((1, "a")).append_column(DELETED, pa.array([False]))
    driver = pg_driver(table, like, **options)

    def epoch(number: int, gone: list[bool], *given: tuple[int | None, str]) -> int | None:
        return apply(driver, number, rows(*given).append_column(DELETED, pa.array(gone)))

    assert epoch(0, [False] * 3, (1, "m"), (2, "m"), (3, "m")) == 0
    assert epoch(1, [True, False, False, False], (1, "n"), (2, "a"), (3, "x"), (4, "n")) == 1
    assert pg_truth.rows(table) == [(2, "m"), (3, "m"), (4, "n")]
    assert letters(pg_truth, pg_schema) == [(1, "23514", {"id": 3, "note": "x"})]


def test_keys_that_repeat_without_an_order_stop_the_query(
    pg_driver: MakeDriver, pg_schema: str, pg_truth: Truth
) -> None:
    """No row is wrong there: which one is the newest is not known."""
    table = f"{pg_schema}.t"
    pg_truth.execute(f"CREATE TABLE {table} (id bigint PRIMARY KEY, note text)")
    driver = pg_driver(table, rows((1, "a")), key="id", **ASIDE)
    with pytest.raises(RowsRejected, match="occurs 2 times in one epoch"):
        driver.prepare(0, rows((1, "a"), (1, "b")))
    assert letters(pg_truth, pg_schema) == []


def test_what_is_no_row_of_the_epoch_still_stops_the_query(
    pg_driver: MakeDriver, pg_schema: str, pg_truth: Truth
) -> None:
    table = f"{pg_schema}.t"
    pg_truth.execute(f"CREATE TABLE {table} (id bigint, note text)")
    driver = pg_driver(table, rows((1, "a")), **ASIDE)
    written = driver.write(0, rows((1, "a")))
    pg_truth.execute(f"DROP TABLE {table}")
    with pytest.raises(PrepareFailed, match="does not exist"):
        driver.vote(written)


def test_check_names_the_right_that_letters_need(pg_driver: MakeDriver, pg_schema: str, pg_truth: Truth) -> None:
    table = f"{pg_schema}.t"
    pg_truth.execute(f"CREATE TABLE {table} (id bigint, note text)")
    driver = pg_driver(table, rows((1, "a")), **ASIDE)
    pg_truth.execute(f"ALTER TABLE {pg_schema}.dead_letter SET UNLOGGED")
    (finding,) = driver.committer.check(rows((1, "a")).schema)
    assert "UNLOGGED: a crash would empty it" in finding
