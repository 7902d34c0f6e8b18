"""An epoch's way through PostgreSQL: the server's truth after each two-phase step, in every mode."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from fix_postgres import ListedRows, Written, gids, ranked
from psycopg import sql

from epochsink.errors import WentBack
from epochsink.sink import Epoch, LastDone, Outcome, write_all

if TYPE_CHECKING:
    from fix_postgres import MakeDriver, Truth

MODES = [
    pytest.param({"commit": "prepared"}, id="prepared"),
    pytest.param({"commit": "prepared", "spool": True}, id="spooled"),
    pytest.param({"commit": "staged", "spool": True}, id="spooled-staged"),
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
    assert sorted(pg_truth.prepared()) == gids(parts)
    assert len(gids(parts)) == {"prepared": 1, "staged": 0}.get(mode.get("commit", ""), 3)

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


def test_an_upsert_writes_in_the_order_of_the_key(table: str, pg_driver: MakeDriver, pg_truth: Truth) -> None:
    """Whatever order rows arrive in: what lies side by side in the index is then written one after another."""
    driver = pg_driver(table, orders(1), key="id")
    driver.run(0, orders(5, 1, 4), orders(3, 6, 2))
    assert pg_truth.execute(f"SELECT array_agg(id ORDER BY ctid) FROM {table}") == [([1, 2, 3, 4, 5, 6],)]  # noqa: S608 - a name that the test made


@pytest.mark.parametrize("mode", MODES)
def test_of_several_rows_of_a_key_the_last_by_order_by_wins(
    mode: dict[str, Any], table: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    """And only those of the epoch are compared: a later epoch wins over an earlier one."""
    driver = pg_driver(table, orders(1), key="id", order_by="note", **mode)
    driver.run(0, [by_note(orders(*ids, note=note)) for note, ids in (("b", [1]), ("c", [1, 2]), ("a", [1]))])
    assert pg_truth.rows(table) == [(1, "c1"), (2, "c2")]
    driver.run(1, by_note(orders(1, note="a")))
    assert pg_truth.rows(table) == [(1, "a1"), (2, "c2")]


def by_note(batch: pa.RecordBatch) -> pa.RecordBatch:
    return ranked(batch, batch["note"])


def test_markers_too_old_to_be_asked_for_go_and_those_of_other_queries_stay(
    table: str, pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    """They share a table: another query that is at an earlier epoch would take an applied one for a lost one."""
    other, driver = (pg_driver(table, orders(1)) for _ in range(2))
    for each in (other, driver):
        each.committer.join()
    other.run(0, orders(1))
    for number in (0, 999, 1000, 2000):
        driver.run(number, orders(number + 2))
    markers = f"SELECT epoch FROM {pg_schema}.marker WHERE query_id = %s AND part = 'all' ORDER BY 1"  # noqa: S608 - a name that the test made
    assert pg_truth.execute(markers, driver.identity.query_id) == [(1000,), (2000,)]
    assert pg_truth.execute(markers, other.identity.query_id) == [(0,)]
    # nor the rows that each has left as it joined
    assert pg_truth.count(f"{pg_schema}.marker WHERE epoch = -1") == 2
    with pytest.raises(WentBack, match="already applied"):
        other.restart().prepare(0, orders(1))


def test_order_by_may_be_several_expressions_and_nulls_lose(table: str, pg_driver: MakeDriver, pg_truth: Truth) -> None:
    driver = pg_driver(table, orders(1), key="id", order_by=["length(note)", "note"])
    nothing = pa.record_batch({"id": pa.array([1], pa.int64()), "note": pa.array([None], pa.string())})
    rows = [nothing, orders(1, note="b"), orders(1, note="aa"), orders(1, note="zz"), nothing]
    driver.run(0, [ranked(batch, pc.utf8_length(batch["note"]), batch["note"]) for batch in rows])
    assert pg_truth.rows(table) == [(1, "zz1")]


RISING = {
    "short": pa.array([None, -(2**15), 3], pa.int16()),
    "bigint": pa.array([None, -(2**63), 2**63 - 1], pa.int64()),
    "float": pa.array([None, -1.5, float("inf")], pa.float32()),
    "nan": pa.array([None, float("inf"), float("nan")], pa.float64()),
    "decimal": pa.array([None, Decimal("-1.05"), Decimal("0.10")], pa.decimal128(9, 2)),
    "text": pa.array([None, "Z\x00", "a"], pa.string()),
    "accents": pa.array(["", "z", "\u00e9"], pa.large_string()),
    "bytes": pa.array([None, b"\x7f\xff", b"\x80"], pa.binary()),
    "boolean": pa.array([None, False, True]),
    "date": pa.array([None, -(2**31), 2**31 - 1], pa.int32()).cast(pa.date32()),
    "instant": pa.array([None, -(2**63), 2**63 - 1], pa.int64()).cast(pa.timestamp("us", "UTC")),
    "wall-clock": pa.array([None, -1, 0], pa.int64()).cast(pa.timestamp("us")),
    "interval": pa.array([None, -1, 0], pa.int64()).cast(pa.duration("us")),
}


def test_values_are_ordered_as_spark_orders_them(table: str, pg_driver: MakeDriver, pg_truth: Truth) -> None:
    """Of every type, whatever the database's collation; ranges and NUL bytes that the type itself lacks too."""
    note = pa.array(["null", "low", "high"])
    for number, (kind, rank) in enumerate(RISING.items()):
        batch = pa.record_batch({"id": pa.array([number] * 3, pa.int64()), "note": note})
        driver = pg_driver(table, batch, key="id", order_by="x")
        driver.run(0, [ranked(batch.slice(place, 1), rank.slice(place, 1)) for place in (1, 2, 0)])
        found = pg_truth.execute(f"SELECT note FROM {table} WHERE id = {number}")  # noqa: S608 - names that the test made
        assert found == [("high",)], kind


@pytest.mark.parametrize("mode", MODES)
def test_rows_marked_for_deletion_take_their_key_away(
    mode: dict[str, Any], table: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    """Whether the last row of the key is the delete or the insert decides; deleting what is not there is no error."""

    def changes(*rows: tuple[int, str | None, bool]) -> pa.RecordBatch:
        ids, notes, deleted = zip(*rows, strict=True)
        arrays = [pa.array(ids, pa.int64()), pa.array(notes, pa.string()), pa.array(deleted)]
        return by_note(pa.record_batch(arrays, ["id", "note", "epochsink_delete"]))

    driver = pg_driver(table, changes((1, "a", False)), key="id", order_by="note", delete_when="op = 'd'", **mode)
    driver.run(0, changes((1, "a", False), (2, "a", False), (3, "a", False), (4, "z", True)))
    assert pg_truth.rows(table) == [(1, "a"), (2, "a"), (3, "a")]
    driver.run(1, changes((1, None, True), (2, "b", True), (2, "c", False), (3, "b", False), (3, "c", True)))
    assert pg_truth.rows(table) == [(2, "c")]


def test_a_table_of_key_columns_only_keeps_what_is_there(
    pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    table = f"{pg_schema}.seen"
    pg_truth.execute(f"CREATE TABLE {table} (n int, latest int, PRIMARY KEY (n, latest))")
    rows = pa.record_batch({"latest": pa.array([1, 2], pa.int32()), "n": pa.array([1, 1], pa.int32())})
    driver = pg_driver(table, rows, key=["n", "latest"], order_by="latest")
    driver.run(0, rows)
    driver.run(1, rows)
    assert pg_truth.rows(table) == [(1, 1), (1, 2)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("key", [None, "k"], ids=["append", "upsert"])
def test_hostile_names_stay_names(
    key: str | None, mode: dict[str, Any], pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    """Quotes, spaces, capitals, dots, percent signs, braces and 63 bytes, in schemas, tables and columns."""
    odd = ('S"x.y', 'x"; drop table y;--', "%s {0} Ä", "c" * 63)
    schema, name, value, long = odd
    key_column = "K y" if key else "k"
    quoted = [sql.Identifier(part).as_string() for part in (schema, name, key_column, value, long)]
    pg_truth.execute(f"CREATE SCHEMA {quoted[0]}")
    try:
        pg_truth.execute(f"CREATE TABLE {quoted[0]}.y (n int)")
        relation = f"{quoted[0]}.{quoted[1]}"
        pg_truth.execute(f"CREATE TABLE {relation} ({quoted[2]} text PRIMARY KEY, {quoted[3]} text, {quoted[4]} text)")
        rows = pa.record_batch([pa.array(["1"]), pa.array(["a"]), pa.array(["b"])], [key_column, value, long])
        options = {"key": key_column, "order_by": value, "marker_schema": schema} if key else {}
        pg_driver((schema, name), rows, **options, **mode).run(0, rows)
        assert pg_truth.rows(relation) == [("1", "a", "b")]
        assert pg_truth.count(f"{quoted[0]}.y") == 0
    finally:
        pg_truth.execute(f"DROP SCHEMA {quoted[0]} CASCADE")


def test_a_table_without_a_schema_is_found_by_the_search_path(
    pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    pg_truth.execute(f"CREATE TABLE {pg_schema}.found (id bigint, note text)")
    pg_driver("found", orders(1), options={"options": f"-c search_path={pg_schema}"}).run(0, orders(1))
    assert pg_truth.rows(f"{pg_schema}.found") == [(1, "x1")]


OPERANDS = [("bigint", "bigint"), ("bigint", "integer"), ("oid", "regclass"), ("oid", "oid"), ("text", "text")]


def booby_trap(pg_truth: Truth, schema: str) -> None:
    """Fill a schema with what our SQL would call, were it not for the names of pg_catalog."""
    raises = "LANGUAGE plpgsql AS $$ BEGIN RAISE 'stolen'; END $$"
    for left, right in OPERANDS:
        pg_truth.execute(f"CREATE FUNCTION {schema}.steal({left}, {right}) RETURNS boolean {raises}")
        for name in ("=", "<>", "<", "<=", ">", ">="):
            pg_truth.execute(
                f"CREATE OPERATOR {schema}.{name} (FUNCTION = {schema}.steal, LEFTARG = {left}, RIGHTARG = {right})"
            )
    for first, second in (("integer", "smallint"), ("smallint", "smallint")):
        pg_truth.execute(f"CREATE FUNCTION {schema}.pg_terminate_backend({first}, {second}) RETURNS boolean {raises}")
    pg_truth.execute(f"CREATE FUNCTION {schema}.to_regclass(text) RETURNS regclass {raises}")
    pg_truth.execute(f"CREATE FUNCTION {schema}.step(bigint) RETURNS bigint {raises}")
    pg_truth.execute(f"CREATE AGGREGATE {schema}.count(*) (SFUNC = {schema}.step, STYPE = bigint)")
    pg_truth.execute(f"CREATE FUNCTION {schema}.step(bigint, bigint) RETURNS bigint {raises}")
    for name in ("sum", "max"):
        pg_truth.execute(f"CREATE AGGREGATE {schema}.{name}(bigint) (SFUNC = {schema}.step, STYPE = bigint)")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"key": "id", "delete_when": "gone"},
        {"key": "id", "delete_when": "gone", "newer_wins": "note", "skip_unchanged": True},
        {"key": "id", "accumulate": {"note": "max"}},
    ],
    ids=["append", "upsert", "newer", "accumulate"],
)
def test_functions_and_operators_of_others_are_never_called(
    options: dict[str, Any], mode: dict[str, Any], table: str, pg_schema: str, *, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    """Whoever may create in a schema of the search path could run code as the sink's user."""
    booby_trap(pg_truth, pg_schema)
    deletes = pa.array([True, False])
    batch = orders(1, 2).append_column("epochsink_delete", deletes) if "delete_when" in options else orders(1, 2)
    path = {"options": f"-c search_path={pg_schema},pg_catalog"}
    driver = pg_driver("orders", batch, options=path, **options, **mode)
    driver.write(0, batch)
    later = driver.restart()
    later.committer.abort_orphans([])
    written, parts = later.prepare(1, batch)
    later.commit(written, parts)
    last = LastDone(1, written.epoch.attempt, tuple(parts))
    later.committer.verify_applied(last, None)
    again = later.write(2, batch if "key" in options else orders(3))
    voted = later.committer.vote(again.epoch, again.committables, again.rows, last)
    for part in voted:
        assert later.committer.commit(again.epoch, part, again.rows, last).outcome is Outcome.COMMITTED
    kept = [2] if "delete_when" in options else [1, 2] if options else [1, 2, 3]
    assert pg_truth.rows(table) == [(number, f"x{number}") for number in kept]


def test_triggers_of_the_target_keep_their_search_path(pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth) -> None:
    table = f"{pg_schema}.watched"
    pg_truth.execute(f"CREATE TABLE {table} (id bigint, note text)")
    pg_truth.execute(f"CREATE TABLE {pg_schema}.audit (id bigint)")
    pg_truth.execute(
        f"CREATE FUNCTION {pg_schema}.note() RETURNS trigger LANGUAGE plpgsql AS "  # noqa: S608 - names that the test made
        "$$ BEGIN INSERT INTO audit VALUES (NEW.id); RETURN NEW; END $$"
    )
    pg_truth.execute(f"CREATE TRIGGER t BEFORE INSERT ON {table} FOR EACH ROW EXECUTE FUNCTION {pg_schema}.note()")
    path = {"options": f"-c search_path={pg_schema}"}
    modes: list[dict[str, Any]] = [
        {"commit": "prepared"},
        {"commit": "staged"},
        {"atomic": False},
        {"commit": "prepared", "spool": True},
    ]
    for number, mode in enumerate(modes):
        pg_driver(table, orders(1), options=path, **mode).run(0, orders(number))
    assert pg_truth.rows(f"{pg_schema}.audit") == [(0,), (1,), (2,), (3,)]


def test_deletes_compare_as_the_tables_index_does(pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth) -> None:
    """By the operator of the key's own type, wherever that is: this one's ignores case."""
    table = f"{pg_schema}.names"
    pg_truth.execute(f"CREATE EXTENSION citext SCHEMA {pg_schema}")
    pg_truth.execute(f"CREATE TABLE {table} (name {pg_schema}.citext PRIMARY KEY)")
    pg_truth.execute(f"INSERT INTO {table} VALUES ('Ada'), ('Bob')")  # noqa: S608 - a name that the test made
    batch = pa.record_batch({"name": ["ADA"], "epochsink_delete": pa.array([True])})
    pg_driver(table, batch, key="name", delete_when="gone").run(0, batch)
    assert pg_truth.execute(f"SELECT name::text FROM {table}") == [("Bob",)]  # noqa: S608 - a name that the test made


def test_partitioned_tables_route_their_rows(pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth) -> None:
    table = f"{pg_schema}.parts"
    pg_truth.execute(f"CREATE TABLE {table} (id bigint PRIMARY KEY, note text) PARTITION BY RANGE (id)")
    pg_truth.execute(f"CREATE TABLE {table}_low PARTITION OF {table} FOR VALUES FROM (0) TO (10)")
    pg_truth.execute(f"CREATE TABLE {table}_high PARTITION OF {table} FOR VALUES FROM (10) TO (20)")
    for options in ({}, {"key": "id"}, {"key": "id", "atomic": False}):
        driver = pg_driver(table, orders(1), **options)
        driver.run(0, orders(1, 11) if "key" in options else orders(2, 12))
    assert pg_truth.count(f"{table}_low") == pg_truth.count(f"{table}_high") == 2


def test_a_trigger_that_redirects_rows_is_no_loss(pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth) -> None:
    """INSERT then counts fewer rows than were staged, which alone proves nothing."""
    table = f"{pg_schema}.watched"
    pg_truth.execute(f"CREATE TABLE {table} (id bigint, note text)")
    pg_truth.execute(f"CREATE TABLE {table}_elsewhere (id bigint, note text)")
    pg_truth.execute(
        f"CREATE FUNCTION {pg_schema}.divert() RETURNS trigger LANGUAGE plpgsql AS $$ "  # noqa: S608 - names that the test made
        f"BEGIN INSERT INTO {table}_elsewhere VALUES (NEW.*); RETURN NULL; END $$"
    )
    pg_truth.execute(f"CREATE TRIGGER t BEFORE INSERT ON {table} FOR EACH ROW EXECUTE FUNCTION {pg_schema}.divert()")
    pg_driver(table, orders(1)).run(0, orders(1, 2))
    assert pg_truth.rows(f"{table}_elsewhere") == [(1, "x1"), (2, "x2")]


@pytest.mark.parametrize("mode", MODES)
def test_rows_of_tasks_that_spark_did_not_accept_are_never_applied(
    mode: dict[str, Any], table: str, pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    """A speculative copy of a task wrote other rows; after the epoch nothing of it is left."""
    driver = pg_driver(table, orders(1), key="id" if "atomic" not in mode else None, **mode)
    written = driver.write(0, orders(1, 2), orders(8, 9, note="loser"))
    written.committables.pop()
    parts = driver.vote(written)
    driver.commit(written, parts)
    driver.committer.finish(written.epoch, parts)
    assert pg_truth.rows(table) == [(1, "x1"), (2, "x2")]
    driver.committer.abort_orphans([])
    assert pg_truth.prepared() == pg_truth.staging(pg_schema) == []


@pytest.mark.parametrize("mode", MODES)
def test_many_tasks_may_begin_at_the_same_moment(
    mode: dict[str, Any], table: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    """None fails: where tasks write themselves, they race; where the driver does, it finds the rows of each."""
    driver = pg_driver(table, orders(1), key="id", **mode)
    epoch = Epoch(0, uuid.uuid4().hex)
    keeping = driver.committer.begin(epoch, orders(1).schema).keeping
    tasks = [replace(driver.task(epoch, partition), keeping=keeping) for partition in range(8)]
    with ThreadPoolExecutor(len(tasks)) as pool:
        made = list(pool.map(lambda task: write_all(driver.sink.writer(task), [orders(task.partition)]), tasks))
    written = Written(epoch, made, ListedRows({task.uuid: [orders(task.partition)] for task in tasks}))
    driver.commit(written, driver.vote(written))
    assert pg_truth.rows(table) == [(n, f"x{n}") for n in range(8)]


def test_old_markers_are_forgotten_and_the_newest_stays(
    table: str, pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    driver = pg_driver(table, orders(1))
    driver.run(5, orders(1))
    driver.run(1005, orders(2))
    driver.run(1107, orders(3))
    assert pg_truth.execute(f"SELECT epoch FROM {pg_schema}.marker ORDER BY 1") == [(1005,), (1107,)]  # noqa: S608
    assert driver.committer.newest() == 1107


def test_a_new_checkpoint_is_a_new_identity(table: str, pg_driver: MakeDriver, pg_truth: Truth) -> None:
    """Its epoch 0 is not taken for the old one's."""
    pg_driver(table, orders(1)).run(0, orders(1))
    fresh = pg_driver(table, orders(1))
    assert fresh.committer.newest() is None
    fresh.run(0, orders(2))
    assert pg_truth.count(table) == 2
