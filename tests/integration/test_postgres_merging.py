"""Upserts that compare or combine a row with the stored one: newer_wins=, skip_unchanged= and accumulate=."""

from __future__ import annotations

import uuid
from decimal import Decimal
from random import Random
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from fix_postgres import ranked
from streams import Stream

from epochsink.errors import RowsRejected
from epochsink.postgres import Postgres
from epochsink.postgres.staging import DELETED
from epochsink.sink import Outcome

if TYPE_CHECKING:
    from pathlib import Path

    from fix_postgres import MakeDriver, Truth
    from pyspark.sql import SparkSession

    from epochsink.postgres.config import Commit
    from epochsink_devkit.services import PostgresService

MODES = [
    pytest.param({"commit": "prepared", "spool": True}, id="prepared"),
    pytest.param({"commit": "staged", "spool": True}, id="staged"),
    pytest.param({"commit": "staged"}, id="tasks stage"),
    pytest.param({"atomic": False}, id="by-task"),
]
Value = int | None


def rows(*given: tuple[int, Value, str], gone: list[bool] | None = None) -> pa.RecordBatch:
    """Return rows of id, at, note, perhaps with those that delete their key."""
    numbers, times, notes = zip(*given, strict=True)
    batch = pa.record_batch({"id": pa.array(numbers, pa.int64()), "at": pa.array(times, pa.int64()), "note": notes})
    return batch if gone is None else batch.append_column(DELETED, pa.array(gone))


def clicks(*given: tuple[str, Value, Value]) -> pa.RecordBatch:
    pages, counts, seen = zip(*given, strict=True)
    return pa.record_batch(
        {"page": pages, "clicks": pa.array(counts, pa.int32()), "seen": pa.array(seen, pa.int64())},
    )


@pytest.fixture
def table(pg_schema: str, pg_truth: Truth) -> str:
    pg_truth.execute(f"CREATE TABLE {pg_schema}.t (id bigint PRIMARY KEY, at bigint, note text)")
    return f"{pg_schema}.t"


@pytest.fixture
def pages(pg_schema: str, pg_truth: Truth) -> str:
    pg_truth.execute(f"CREATE TABLE {pg_schema}.pages (page text PRIMARY KEY, clicks int, seen bigint)")
    return f"{pg_schema}.pages"


COUNTED: dict[str, Any] = {"key": "page", "accumulate": {"clicks": "sum", "seen": "max"}}

# ---- newer_wins


@pytest.mark.parametrize("mode", MODES)
def test_an_older_row_never_replaces_a_newer_one_and_of_equal_ones_the_later_epochs_wins(
    mode: dict[str, Any], table: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    """Null is the oldest, in the table and in an epoch."""
    driver = pg_driver(table, rows((1, 1, "")), key="id", newer_wins="at", **mode)
    driver.run(0, rows((1, 5, "a"), (2, 5, "a"), (3, 5, "a"), (4, None, "a"), (5, None, "a"), (6, 5, "a")))
    driver.run(1, rows((1, 4, "b"), (2, 5, "b"), (3, 6, "b"), (4, None, "b"), (5, -9, "b"), (6, None, "b")))
    notes = {1: (5, "a"), 2: (5, "b"), 3: (6, "b"), 4: (None, "b"), 5: (-9, "b"), 6: (5, "a")}
    assert pg_truth.rows(table) == [(number, *kept) for number, kept in notes.items()]


def test_newer_wins_decides_within_an_epoch_and_order_by_between_equals(
    table: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    epoch = rows((1, 7, "a"), (1, 9, "b"), (1, None, "c"), (2, 3, "d"), (2, 3, "e"))
    driver = pg_driver(table, rows((1, 1, "")), key="id", newer_wins="at")
    driver.run(0, epoch.slice(0, 3))
    assert pg_truth.rows(table) == [(1, 9, "b")]
    epoch = ranked(epoch, pa.array([5, 4, 6, 2, 1]))
    driver = pg_driver(table, epoch, key="id", newer_wins="at", order_by="n")
    driver.run(0, epoch)
    assert pg_truth.rows(table) == [(1, 9, "b"), (2, 3, "d")]


@pytest.mark.parametrize("mode", MODES)
def test_a_delete_by_an_older_row_deletes_no_newer_one_and_after_a_delete_any_row_is_new(
    mode: dict[str, Any], table: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    like = rows((1, 1, ""), gone=[False])
    driver = pg_driver(table, like, key="id", newer_wins="at", delete_when="gone", **mode)
    driver.run(0, rows(*((number, 5, "a") for number in (1, 2, 3, 4)), gone=[False] * 4))
    # of 4, the epoch has an older delete beside a newer row
    epoch = [(1, 4, ""), (2, 5, ""), (3, None, ""), (4, 6, ""), (4, 7, "b")]
    driver.run(1, rows(*epoch, gone=[True, True, True, True, False]))
    assert pg_truth.rows(table) == [(1, 5, "a"), (3, 5, "a"), (4, 7, "b")]
    driver.run(2, rows((2, 1, "late"), gone=[False]))
    assert pg_truth.rows(table)[1] == (2, 1, "late")


# ---- skip_unchanged


def versions(truth: Truth, table: str) -> dict[int, str]:
    return dict(truth.execute(f"SELECT id, ctid::text FROM {table}"))  # noqa: S608 - a name of this test


@pytest.mark.parametrize("mode", MODES)
def test_a_row_that_is_the_same_leaves_no_dead_tuple(
    mode: dict[str, Any], pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    """By its bytes, so that 1.0 becomes 1.00, and types that have no equality are compared too."""
    table = f"{pg_schema}.t"
    pg_truth.execute(f"CREATE TABLE {table} (id bigint PRIMARY KEY, price numeric, doc json, note text)")

    def batch(price: str, doc: str | None, note: str | None) -> pa.RecordBatch:
        same: list[Any] = [Decimal("1.00"), "{}", None]
        columns = [(one, kept) for one, kept in zip((Decimal(price), doc, note), same, strict=True)]
        return pa.record_batch(
            {
                "id": pa.array([1, 2], pa.int64()),
                "price": pa.array(columns[0], pa.decimal128(10, 2)),
                "doc": pa.array(columns[1], pa.string()),
                "note": pa.array(columns[2], pa.string()),
            }
        )

    driver = pg_driver(table, batch("1", "", ""), key="id", skip_unchanged=True, **mode)
    driver.run(0, batch("1", "{}", None))
    before = versions(pg_truth, table)
    changes = [("1", "{}", "x"), ("1", None, "x"), ("1", "[]", None), ("2", "[]", None)]
    for number, change in enumerate(changes, start=1):
        driver.run(number, batch(*change))
        now = versions(pg_truth, table)
        assert (now[1] == before[1], now[2] == before[2]) == (False, True), change
        before = now
    pg_truth.execute(f"UPDATE {table} SET price = 1.0 WHERE id = 2")  # noqa: S608 - likewise
    driver.run(9, batch("2", "[]", None))
    assert versions(pg_truth, table)[1] == before[1]
    assert str(pg_truth.rows(table)[1][1]) == "1.00"


# ---- accumulate


@pytest.mark.parametrize("mode", MODES)
def test_values_are_added_to_what_is_stored_once_and_nulls_count_as_in_an_aggregate(
    mode: dict[str, Any], pages: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    """Rows of a key within an epoch are combined in the same way first, also without order_by."""
    driver = pg_driver(pages, clicks(("", 1, 1)), **COUNTED, **mode)
    driver.run(0, clicks(("a", 1, 7), ("a", 2, None), ("b", None, None), ("c", 4, 1)))
    assert pg_truth.rows(pages) == [("a", 3, 7), ("b", None, None), ("c", 4, 1)]
    driver.run(1, clicks(("a", 10, 5), ("b", None, 3), ("b", 20, 2), ("c", None, None), ("a", -3, 6)))
    assert pg_truth.rows(pages) == [("a", 10, 7), ("b", 20, 3), ("c", 4, 1)]


def test_columns_that_do_not_accumulate_are_those_of_the_newest_row(
    table: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    given = rows((1, 2, "a"), (1, 3, "c"), (1, 4, "b"))
    accumulate = {"at": "min"}
    driver = pg_driver(table, given, key="id", accumulate=accumulate)
    with pytest.raises(RowsRejected, match="occurs 3 times"):
        driver.prepare(0, given)
    driver.committer.abort_orphans([])
    epoch = ranked(given, pa.array(["x", "z", "y"]))
    driver = pg_driver(table, epoch, key="id", accumulate=accumulate, order_by="n")
    driver.run(0, epoch)
    driver.run(1, ranked(rows((1, 9, "d")), pa.array(["x"])))
    assert pg_truth.rows(table) == [(1, 2, "d")]


@pytest.mark.parametrize("skip", [False, True])
def test_a_sum_that_adds_nothing_is_skipped_and_domains_are_cast(
    skip: bool,  # noqa: FBT001 - a parameter
    *,
    pg_schema: str,
    pg_driver: MakeDriver,
    pg_truth: Truth,
) -> None:
    table = f"{pg_schema}.t"
    pg_truth.execute(f"CREATE DOMAIN {pg_schema}.positive AS int CHECK (VALUE >= 0)")
    pg_truth.execute(f"CREATE TABLE {table} (id bigint PRIMARY KEY, n {pg_schema}.positive)")

    def batch(*values: int) -> pa.RecordBatch:
        return pa.record_batch({"id": pa.array([1] * len(values), pa.int64()), "n": pa.array(values, pa.int32())})

    driver = pg_driver(table, batch(1), key="id", accumulate={"n": "sum"}, skip_unchanged=skip)
    driver.run(0, batch(3, 4))
    before = versions(pg_truth, table)
    driver.run(1, batch(0))
    assert (versions(pg_truth, table) == before) == skip
    driver.run(2, batch(1))
    assert pg_truth.rows(table) == [(1, 8)]


def test_a_rule_of_the_table_holds_for_the_combined_value_and_not_for_each_row_of_an_epoch(
    pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    table = f"{pg_schema}.pages"
    pg_truth.execute(f"CREATE TABLE {table} (page text PRIMARY KEY, clicks int CHECK (clicks >= 0), seen bigint)")
    driver = pg_driver(table, clicks(("", 1, 1)), **COUNTED, commit="staged")
    driver.run(0, clicks(("a", -1, 1), ("a", 3, 1)))
    assert pg_truth.rows(table) == [("a", 2, 1)]


@pytest.mark.parametrize("epoch", [[2**31 - 1], [2**30, 2**30]], ids=["stored", "within the epoch"])
def test_an_overflow_refuses_the_epoch_before_the_decision(
    epoch: list[int], pages: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    driver = pg_driver(pages, clicks(("", 1, 1)), **COUNTED, commit="prepared", spool=True)
    driver.run(0, clicks(("a", 1, 1)))
    with pytest.raises(RowsRejected, match="integer out of range") as caught:
        driver.prepare(1, clicks(*(("a", number, 1) for number in epoch)))
    assert "widen the column" in caught.value.hint
    assert pg_truth.rows(pages) == [("a", 1, 1)]


def test_another_writer_and_another_query_may_add_to_the_same_rows(
    pages: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    """The stored value is read under the lock of its row, in the statement that changes it."""
    one, other = (pg_driver(pages, clicks(("", 1, 1)), **COUNTED, commit="staged") for _ in range(2))
    steps = [(driver, *driver.prepare(0, clicks(("a", 1, 1)))) for driver in (one, other)]
    pg_truth.execute(f"INSERT INTO {pages} VALUES ('a', 100, 0)")  # noqa: S608 - likewise
    for driver, written, parts in steps:
        assert [verdict.outcome for verdict in driver.commit(written, parts)] == [Outcome.COMMITTED]
    assert pg_truth.rows(pages) == [("a", 102, 1)]


@pytest.mark.parametrize("commit", ["prepared", "staged"])
def test_an_epoch_is_combined_as_it_was_recorded_whatever_a_later_start_says(
    commit: Commit, pages: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    """Replayed from the spool by a query that replaces, and committed twice: it is added once."""
    driver = pg_driver(pages, clicks(("", 1, 1)), **COUNTED, commit=commit, spool=True)
    driver.run(0, clicks(("a", 1, 1)))
    written, parts = driver.prepare(1, clicks(("a", 2, 1), ("a", 3, 1)))
    later = driver.restart(
        Postgres(driver.sink.dsn, table=pages, key="page", marker_schema=driver.sink.marker_schema, commit=commit)
    )
    later.committer.abort_orphans([])
    assert {verdict.outcome for verdict in later.commit(written, parts)} == {Outcome.ABORTED}
    again = [later.committer.replay(written.epoch, part, written.rows, uuid.uuid4().hex) for part in parts]
    for _ in range(2):
        assert {verdict.outcome for verdict in later.commit(written, again)} == {Outcome.COMMITTED}
    assert pg_truth.rows(pages) == [("a", 6, 1)]


def test_a_stream_counts_its_rows_and_gets_a_column_at_a_later_start(
    spark: SparkSession, tmp_path: Path, postgres: PostgresService, pg_schema: str, pg_truth: Truth
) -> None:
    """As the reference page writes it; the table is made, and then extended, by the sink."""
    stream = Stream(spark, tmp_path)
    counted: dict[str, Any] = {"n": "sum", "last_seen": "max"}
    select = ["id % 2 AS odd", "1L AS n", "unix_seconds(at) AS last_seen"]
    options: dict[str, Any] = {"table": (pg_schema, "t"), "key": "odd", "create": True, "add_columns": True}
    for ids in ([1, 2, 3], [5, 7, 4], [9]):
        stream.put(ids)
        sink = Postgres(postgres.dsn, select=select, accumulate=counted, marker_schema=pg_schema, **options)
        stream.run(stream.exactly_once({"pages": sink}))
        select = [*select[:3], "id AS first_id"]
        counted["first_id"] = "min"
    stream.end()
    assert pg_truth.rows(f"{pg_schema}.t") == [(0, 2, 4, 4), (1, 5, 9, 5)]


def test_a_delete_finds_the_row_of_an_epoch_whose_commit_is_slow(
    spark: SparkSession, tmp_path: Path, postgres: PostgresService, pg_schema: str, pg_truth: Truth
) -> None:
    """Each task deletes by itself, and what is only prepared cannot be seen."""
    pg_truth.execute(f"CREATE TABLE {pg_schema}.t (odd bigint PRIMARY KEY, id bigint)")
    stream = Stream(spark, tmp_path)
    stream.put([1])
    stream.put([11])
    stream.sink.faults.arm("commit-waits")
    sink = Postgres(
        postgres.dsn,
        table=(pg_schema, "t"),
        select=["id % 2 AS odd", "id"],
        key="odd",
        delete_when="id > 10",
        atomic=False,
        marker_schema=pg_schema,
    )
    stream.run(stream.exactly_once({"slow": stream.sink, "rows": sink}))
    stream.end()
    assert stream.sink.values() == [1, 11]
    assert pg_truth.rows(f"{pg_schema}.t") == []


# ---- accumulate with an SQL expression


FOLDED: dict[str, Any] = {
    "tags": "stored || new",
    "last": "CASE WHEN new = 'none' THEN NULL ELSE coalesce(new, stored) END -- the last one",
    "best": "greatest(stored, new)",
    "mixed": "stored * 10 + new % 10",
    "first": "stored",
}


def folded(stored: dict[int, list[Any]], given: list[list[Any]]) -> None:
    """Fold an epoch's rows by key, and then into what is stored, as a hand would: row for row."""
    epoch: dict[int, list[Any]] = {}
    for row in given:
        _fold_into(epoch, row)
    for row in epoch.values():
        _fold_into(stored, row)


def _fold_into(into: dict[int, list[Any]], row: list[Any]) -> None:
    key, tags, last, best, mixed, _, n, note = row
    if key not in into:
        into[key] = list(row)
        return
    old = into[key]
    into[key] = [
        key,
        None if old[1] is None and tags is None else (old[1] or []) + (tags or []),
        None if last == "none" else old[2] if last is None else last,
        max([one for one in (old[3], best) if one is not None], default=None),
        None if old[4] is None or mixed is None else old[4] * 10 + mixed % 10,
        old[5],
        None if old[6] is None and n is None else (old[6] or 0) + (n or 0),
        note,
    ]


def _rows_of(random: Random, size: int) -> list[list[Any]]:
    return [
        [
            random.randint(1, 6),
            random.choice([["a"], ["b", "c"], [], None] if random.random() < 0.2 else [["a"], ["b"], ["x", "y"]]),
            random.choice([None, "none", "p", "q"]),
            random.choice([None, random.randint(-9, 9)]),
            random.randint(0, 9),
            random.choice([None, "f", "g"]),
            random.choice([None, random.randint(-9, 9)]),
            random.choice(["u", "v", None]),
        ]
        for _ in range(size)
    ]


def _batch_of(given: list[list[Any]], order: list[int]) -> pa.RecordBatch:
    kinds = [pa.int64(), pa.list_(pa.string()), pa.string(), pa.int32(), pa.decimal128(38, 0), pa.string(), pa.int64()]
    names = ["id", "tags", "last", "best", "mixed", "first", "n", "note"]
    arrays = [
        pa.array([Decimal(one) if name == "mixed" and one is not None else one for one in column], kind)
        for name, column, kind in zip(names, zip(*given, strict=True), [*kinds, pa.string()], strict=True)
    ]
    return ranked(pa.record_batch(dict(zip(names, arrays, strict=True))), pa.array(order, pa.int64()))


@pytest.mark.parametrize("mode", MODES)
def test_rows_are_folded_by_expressions_in_their_order_as_a_fold_by_hand_does(
    mode: dict[str, Any], pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    """Random rows over several epochs and tasks, shuffled: order_by alone says which comes first."""
    table = f"{pg_schema}.folds"
    pg_truth.execute(
        f"CREATE TABLE {table} (id bigint PRIMARY KEY, tags text[], last text, best int, mixed numeric, first text, "
        "n bigint, note text)"
    )
    random, stored = Random(7), dict[int, list[Any]]()
    like = _batch_of(_rows_of(random, 1), [0])
    options: dict[str, Any] = {"key": "id", "order_by": "n", "accumulate": {**FOLDED, "n": "sum"}, **mode}
    driver = pg_driver(table, like, **options)
    for epoch, size in enumerate([1, 30, 2, 12]):
        given = _rows_of(random, size)
        folded(stored, given)
        places = random.sample(range(size), size)
        # a task that commits on its own has all rows of its keys
        by_task: list[list[int]] = [[], []]
        for place in places:
            by_task[given[place][0] % 2].append(place)
        tasks = [_batch_of([given[place] for place in some], some) for some in by_task if some]
        driver.run(epoch, *tasks)
    assert pg_truth.rows(table) == sorted((tuple(row) for row in stored.values()), key=repr)
    left = "SELECT proname FROM pg_proc WHERE pronamespace = %s::regnamespace"
    assert pg_truth.execute(left, pg_schema) == []


def tagged(*given: tuple[str, str | None], order: bool = True) -> pa.RecordBatch:
    pages, tags = zip(*given, strict=True)
    made = pa.record_batch({"page": pages, "tags": pa.array(tags, pa.string())})
    return ranked(made, pa.array(range(len(given)), pa.int64())) if order else made


@pytest.fixture
def tags(pg_schema: str, pg_truth: Truth) -> str:
    pg_truth.execute(f"CREATE TABLE {pg_schema}.tags (page text PRIMARY KEY, tags text)")
    return f"{pg_schema}.tags"


JOINED: dict[str, Any] = {"key": "page", "order_by": "at", "accumulate": {"tags": "stored || new"}}


def test_without_an_order_rows_of_a_key_are_not_folded(tags: str, pg_driver: MakeDriver, pg_truth: Truth) -> None:
    """Keys that come once need none."""
    options = {**JOINED, "order_by": None}
    driver = pg_driver(tags, tagged(("", ""), order=False), **options)
    driver.run(0, tagged(("a", "1"), ("b", "2"), order=False))
    driver.run(1, tagged(("a", "3"), order=False))
    with pytest.raises(RowsRejected, match="occurs 2 times"):
        driver.prepare(2, tagged(("a", "4"), ("a", "5"), order=False))
    assert pg_truth.rows(tags) == [("a", "13"), ("b", "2")]


def test_an_expression_gets_null_as_it_is_and_a_new_column_of_stored_rows_is_null(
    tags: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    driver = pg_driver(tags, tagged(("", "")), **JOINED)
    driver.run(0, tagged(("a", "1"), ("b", None), ("c", "1"), ("c", None), ("c", "2")))
    driver.run(1, tagged(("a", None), ("b", "2")))
    assert pg_truth.rows(tags) == [("a", None), ("b", None), ("c", None)]
    added = tagged(("a", "1"), ("d", "1"), ("d", "2")).rename_columns(["page", "more", "epochsink_order_0"])
    expression = {"more": "coalesce(stored, '{none}') || new"}
    driver = pg_driver(tags, added, **{**JOINED, "accumulate": expression, "add_columns": True})
    driver.run(0, added)
    assert pg_truth.execute(f"SELECT page, more FROM {tags} WHERE more IS NOT NULL ORDER BY 1") == [  # noqa: S608 - likewise
        ("a", "{none}1"),
        ("d", "12"),
    ]


@pytest.mark.parametrize("commit", ["prepared", "staged"])
def test_an_epoch_is_folded_again_as_it_was_recorded(
    commit: Commit, tags: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    """Lost after the decision, replayed from the spool by a query with another expression, and committed twice."""
    driver = pg_driver(tags, tagged(("", "")), **JOINED, commit=commit, spool=True)
    driver.run(0, tagged(("a", "1")))
    written, parts = driver.prepare(1, tagged(("a", "2"), ("a", "3")))
    other = {**JOINED, "accumulate": {"tags": "new || stored"}}
    later = driver.restart(
        Postgres(driver.sink.dsn, table=tags, marker_schema=driver.sink.marker_schema, commit=commit, **other)
    )
    later.committer.abort_orphans([])
    assert {verdict.outcome for verdict in later.commit(written, parts)} == {Outcome.ABORTED}
    again = [later.committer.replay(written.epoch, part, written.rows, uuid.uuid4().hex) for part in parts]
    for _ in range(2):
        assert {verdict.outcome for verdict in later.commit(written, again)} == {Outcome.COMMITTED}
    assert pg_truth.rows(tags) == [("a", "123")]


def test_another_writer_may_change_the_value_that_an_expression_meets(
    tags: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    driver = pg_driver(tags, tagged(("", "")), **JOINED, commit="staged")
    written, parts = driver.prepare(0, tagged(("a", "2"), ("a", "3")))
    pg_truth.execute(f"INSERT INTO {tags} VALUES ('a', '1')")  # noqa: S608 - likewise
    assert [verdict.outcome for verdict in driver.commit(written, parts)] == [Outcome.COMMITTED]
    assert pg_truth.rows(tags) == [("a", "123")]


@pytest.mark.parametrize("given", [[4, 0], [0]], ids=["within the epoch", "stored"])
def test_an_expression_that_fails_for_a_row_refuses_the_epoch_before_the_decision(
    given: list[int], pages: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    """Sums of the same rows are not changed either."""
    epoch = ranked(clicks(*(("a", 1, number) for number in given)), pa.array(range(len(given)), pa.int64()))
    options: dict[str, Any] = {"key": "page", "order_by": "at", "accumulate": {"clicks": "sum", "seen": "stored / new"}}
    driver = pg_driver(pages, epoch, **options, commit="prepared", spool=True)
    driver.run(0, epoch.slice(0, 1) if given[0] else ranked(clicks(("a", 1, 8)), pa.array([0], pa.int64())))
    with pytest.raises(RowsRejected, match="division by zero"):
        driver.prepare(1, epoch)
    assert pg_truth.rows(pages) == [("a", 1, given[0] or 8)]


@pytest.mark.parametrize("skip", [False, True])
def test_each_step_of_a_fold_has_the_columns_type_collation_and_domain(
    skip: bool,  # noqa: FBT001 - a parameter
    *,
    pg_schema: str,
    pg_driver: MakeDriver,
    pg_truth: Truth,
) -> None:
    """An epoch of several rows gives what epochs of one row each give, down to the rounding."""
    table, other = f"{pg_schema}.t", f"{pg_schema}.u"
    pg_truth.execute(f"CREATE DOMAIN {pg_schema}.positive AS int CHECK (VALUE >= 0)")
    for name in (table, other):
        pg_truth.execute(
            f"CREATE TABLE {name} (id bigint PRIMARY KEY, n {pg_schema}.positive, price numeric(9,1), "
            'word text COLLATE "C", turned text COLLATE "und-x-icu")'
        )
    batch = ranked(
        pa.record_batch(
            {
                "id": pa.array([1, 1, 1], pa.int64()),
                "n": pa.array([3, 4, 0], pa.int32()),
                "price": pa.array([Decimal("1.1"), Decimal("1.5"), Decimal("1.5")], pa.decimal128(9, 1)),
                "word": ["a", "B", "B"],
                "turned": ["a", "B", "B"],
            }
        ),
        pa.array([1, 2, 3], pa.int64()),
    )
    accumulate = {
        "n": "stored + new",
        "price": "stored * new",
        "word": "greatest(stored, new)",
        "turned": "greatest(stored, new)",
    }
    options: dict[str, Any] = {"key": "id", "order_by": "at", "accumulate": accumulate, "skip_unchanged": skip}
    pg_driver(table, batch, **options).run(0, batch)
    one_by_one = pg_driver(other, batch, **options)
    for place in range(3):
        one_by_one.run(place, batch.slice(place, 1))
    assert pg_truth.rows(table) == pg_truth.rows(other) == [(1, 7, Decimal("2.6"), "a", "B")]
    before = versions(pg_truth, table)
    driver = pg_driver(table, batch, **{**options, "accumulate": dict.fromkeys(accumulate, "stored")})
    driver.run(0, batch)
    assert (versions(pg_truth, table) == before) == skip
