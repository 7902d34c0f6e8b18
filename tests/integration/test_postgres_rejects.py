"""Rows and circumstances that an epoch cannot survive: named with value, rule and hint; nothing is applied."""

from __future__ import annotations

import re
import time
import uuid
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from fix_postgres import Driver, Truth

from epochsink.errors import PrepareFailed, RowsRejected
from epochsink.postgres import Postgres
from epochsink.postgres.incoming import Incoming
from epochsink.sink import Epoch
from epochsink.testing.sink_rig import OneSink

if TYPE_CHECKING:
    from fix_postgres import MakeDriver
    from fix_services import PrivatePostgres

    from epochsink.postgres.committable import Member

PREPARED = [
    pytest.param({"commit": "prepared"}, id="prepared"),
    pytest.param({"atomic": False}, id="by-task"),
    pytest.param({"commit": "prepared", "spool": True}, id="spooled"),
]
OPEN = "pg_stat_activity WHERE application_name LIKE 'epochsink:%' AND state <> 'idle'"
MODES = [*PREPARED, pytest.param({"commit": "staged"}, id="staged")]


def rows(*ids: int | None, note: str = "x") -> pa.RecordBatch:
    return pa.record_batch({"id": pa.array(ids, pa.int64()), "note": pa.array([note] * len(ids))})


@pytest.mark.parametrize("mode", PREPARED)
@pytest.mark.parametrize(
    ("rule", "batch", "says"),
    [
        ("id bigint NOT NULL, note text", rows(1, None), 'null value in column "id"'),
        ("id bigint CONSTRAINT positive CHECK (id > 0), note text", rows(1, -5), "positive"),
        ("id bigint CONSTRAINT once UNIQUE, note text", rows(7, 7), "(id)=(7)"),
        ("id bigint CONSTRAINT late UNIQUE DEFERRABLE INITIALLY DEFERRED, note text", rows(7, 7), "late"),
        ("id bigint, note varchar(3)", rows(1, note="long"), "character varying(3)"),
        ("id bigint, note uuid", rows(1, note="nope"), "'nope' is not a valid uuid"),
        ("id bigint, note jsonb", rows(1, note="{"), "json"),
        ("id bigint, note jsonb", rows(1, note='"\\u0000"'), "\\u0000"),
        ("id bigint, note text", rows(1, note="a\x00b"), "column note"),
    ],
    ids=["not-null", "check", "unique", "deferred", "too-long", "no-uuid", "no-json", "nul-in-jsonb", "nul-in-text"],
)
def test_rows_that_break_a_rule_are_rejected_before_the_decision(
    rule: str,
    batch: pa.RecordBatch,
    says: str,
    mode: dict[str, Any],
    pg_driver: MakeDriver,
    *,
    pg_schema: str,
    pg_truth: Truth,
) -> None:
    table = f"{pg_schema}.t"
    pg_truth.execute(f"CREATE TABLE {table} ({rule})")
    driver = pg_driver(table, rows(1), **mode)
    with pytest.raises(RowsRejected) as caught:
        driver.prepare(0, batch)
    assert says in str(caught.value)
    assert caught.value.hint
    caught.value.hide_values()
    assert re.search(r"Failing row|\(7\)|nope|-5", str(caught.value)) is None
    driver.committer.abort_orphans([])
    assert pg_truth.prepared() == []
    assert pg_truth.count(table) == 0
    driver.run(0, rows(2, note="2b0f5c1e-0000-4000-8000-000000000000" if "uuid" in rule else "1"))
    assert pg_truth.count(table) == 1


@pytest.mark.parametrize(
    ("rule", "batch", "says"),
    [
        (("id bigint NOT NULL, note text", ""), rows(1, None), 'null value in column "id"'),
        (("id bigint, note text", "positive CHECK (id > 0) NOT VALID"), rows(1, -5), "positive"),
        (("id bigint, note text", '"odd %" CHECK (id < length(note)::int % 7)'), rows(5), "odd %"),
        (("id bigint, note varchar(3)", ""), rows(1, note="long"), "character varying(3)"),
        (("id bigint, note inet", ""), rows(1, note="nowhere"), "nowhere"),
    ],
    ids=["not-null", "check", "odd-check", "too-long", "cast"],
)
def test_staged_rows_too_are_held_to_the_rules_before_the_decision(
    rule: tuple[str, str],
    batch: pa.RecordBatch,
    says: str,
    pg_schema: str,
    pg_driver: MakeDriver,
    *,
    pg_truth: Truth,
) -> None:
    columns, constraint = rule
    pg_truth.execute(f"CREATE TABLE {pg_schema}.t ({columns}, spare int CHECK (spare > 0) DEFAULT 1)")
    if constraint:
        pg_truth.execute(f"ALTER TABLE {pg_schema}.t ADD CONSTRAINT {constraint}")
    driver = pg_driver(f"{pg_schema}.t", rows(1), commit="staged")
    with pytest.raises(RowsRejected) as caught:
        driver.prepare(0, batch)
    assert says in str(caught.value)
    driver.committer.abort_orphans([])
    assert pg_truth.staging(pg_schema) == []
    driver.run(0, rows(0, note="10.0.0.1") if "inet" in columns else rows(0 if "odd" in constraint else 1))
    assert pg_truth.count(f"{pg_schema}.t") == 1


@pytest.mark.parametrize("mode", MODES)
def test_a_key_that_comes_twice_without_an_order_is_refused_by_name(
    mode: dict[str, Any], pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    table = f"{pg_schema}.t"
    pg_truth.execute(f"CREATE TABLE {table} (id bigint PRIMARY KEY, note text)")
    driver = pg_driver(table, rows(1), key="id", **mode)
    with pytest.raises(RowsRejected, match=r"\(id\) occurs 2 times in one epoch[\s\S]*Values: id=42") as caught:
        driver.prepare(0, [rows(1, 42), rows(42, 3)])
    assert "order_by=" in caught.value.hint
    assert pg_truth.count(table) == 0
    assert pg_truth.prepared() == []


@pytest.mark.parametrize("mode", MODES)
def test_a_delete_without_a_key_is_refused(
    mode: dict[str, Any], pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    """It would match no row and delete nothing, without an error."""
    table = f"{pg_schema}.t"
    pg_truth.execute(f"CREATE TABLE {table} (id bigint PRIMARY KEY, note text)")
    batch = rows(1, None).append_column("epochsink_delete", pa.array([True, True]))
    driver = pg_driver(table, batch, key="id", delete_when="gone", **mode)
    with pytest.raises(RowsRejected, match=r"1 rows for .* have null in their key"):
        driver.prepare(0, batch)


DAYS, MICROSECONDS = pa.date32(), pa.timestamp("us", "UTC")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("column", "kind", "value"),
    [
        ("date", DAYS, -(2**31)),
        ("date", DAYS, -(2**31) - 10957 + 2**32),
        ("date", DAYS, 2**31 - 1),
        ("timestamptz", MICROSECONDS, -(2**63)),
        ("timestamp", pa.timestamp("us"), -(2**63) + 1),
        ("timestamptz[]", pa.list_(MICROSECONDS), -(2**63)),
        ("date[]", pa.list_(DAYS), -(2**31)),
    ],
)
def test_dates_and_instants_beyond_the_servers_range_do_not_become_infinite(
    column: str,
    kind: pa.DataType,
    value: int,
    mode: dict[str, Any],
    pg_schema: str,
    *,
    pg_driver: MakeDriver,
    pg_truth: Truth,
) -> None:
    if column == "timestamptz[]" and "atomic" in mode:
        return  # such arrays need staging
    table = f"{pg_schema}.t"
    pg_truth.execute(f"CREATE TABLE {table} (at {column})")
    element = kind.value_type if pa.types.is_list(kind) else kind
    values = pa.array([value], pa.int32() if element == DAYS else pa.int64()).cast(element)
    batch = pa.record_batch({"at": pa.array([values], kind) if kind != element else values})
    driver = pg_driver(table, batch, **mode)
    with pytest.raises(RowsRejected, match="outside the range"):
        driver.prepare(0, batch)


CUT = [
    ("char(2)[]", pa.array([["abc"]]), "character(2)"),
    ("bit(2)", pa.array(["101"]), "bit string length 3"),
    ("bit varying(2)[]", pa.array([["101"]]), "bit string too long"),
    ("varchar(2)[]", pa.array([["abc"]]), "character varying(2)"),
    ("{schema}.short", pa.array(["10110"]), "bit string length 5"),
]


@pytest.mark.parametrize("commit", ["prepared", "staged"])
@pytest.mark.parametrize(("column", "values", "says"), CUT)
def test_no_cast_cuts_a_value_without_an_error(
    column: str, values: pa.Array, says: str, commit: str, pg_schema: str, *, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    table = f"{pg_schema}.t"
    pg_truth.execute(f"CREATE DOMAIN {pg_schema}.short AS bit(2)")
    pg_truth.execute(f"CREATE TABLE {table} (v {column.format(schema=pg_schema)})")
    batch = pa.record_batch({"v": values})
    driver = pg_driver(table, batch, commit=commit)
    with pytest.raises(RowsRejected) as caught:
        driver.prepare(0, batch)
    assert says in str(caught.value)
    assert pg_truth.count(table) == 0


@pytest.mark.parametrize("kind", ["timestamp(3)", "timestamptz(3)", "timestamp(3)[]", "timestamptz(3)[]"])
def test_instants_finer_than_their_column_are_refused_and_not_rounded(
    kind: str, pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    pg_truth.execute(f"CREATE TABLE {pg_schema}.t (at {kind})")
    instants = pa.timestamp("us", "UTC" if "tz" in kind else None)

    def batch(micros: int) -> pa.RecordBatch:
        array = pa.array([micros, None], pa.int64()).cast(instants)
        return pa.record_batch({"at": pa.array([array.to_pylist()], pa.list_(instants)) if "[" in kind else array})

    driver = pg_driver(f"{pg_schema}.t", batch(0))
    with pytest.raises(RowsRejected, match="1500 microseconds since 1970 is not a multiple of 1000"):
        driver.prepare(0, batch(1500))
    driver.committer.abort_orphans([])
    driver.run(0, batch(-2000))
    assert pg_truth.count(f"{pg_schema}.t") == (1 if "[" in kind else 2)


@pytest.mark.parametrize("commit", ["prepared", "staged"])
@pytest.mark.parametrize("kind", ["time", "timetz(6)", "time[]"])
def test_times_of_day_finer_than_their_column_are_refused_and_not_rounded(
    kind: str, commit: str, pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    """Java's LocalTime has nine digits."""
    pg_truth.execute(f"CREATE TABLE {pg_schema}.t (at {kind})")

    def batch(*texts: str) -> pa.RecordBatch:
        return pa.record_batch({"at": pa.array([texts] if "[" in kind else texts)})

    driver = pg_driver(f"{pg_schema}.t", batch(""), commit=commit)
    with pytest.raises(RowsRejected, match=r"12:30:00\.123456789"):
        driver.prepare(0, batch("12:30:00.123456", "12:30:00.123456789"))
    driver.committer.abort_orphans([])
    driver.run(0, batch("12:30:00.123456", "12:30:00.999999000"))
    assert "999999" in str(pg_truth.execute(f"SELECT at::text FROM {pg_schema}.t"))  # noqa: S608 - our own name


ROUNDED = ["time(0)", "timetz(3)[]", "interval(2)", "interval year to month", "{schema}.rough", "money", "money[]"]


@pytest.mark.parametrize("column", ['"char"', '"char"[]', "name[]", "{schema}.short[]", *ROUNDED])
def test_types_that_cut_their_own_input_are_refused_before_the_first_row(
    column: str, pg_schema: str, pg_truth: Truth
) -> None:
    pg_truth.execute(f"CREATE DOMAIN {pg_schema}.short AS char(2); CREATE DOMAIN {pg_schema}.rough AS time(1)")
    pg_truth.execute(f"CREATE TABLE {pg_schema}.t (v {column.format(schema=pg_schema)})")
    text = pa.list_(pa.string()) if column.endswith("[]") else pa.string()
    sink = Postgres(pg_truth.dsn, table=f"{pg_schema}.t", marker_schema=pg_schema)
    with closing(OneSink.of(sink)) as committer:
        (finding,) = committer.check(pa.schema([("v", text)]))
    assert "without an error" in finding


def test_a_foreign_key_is_checked_before_the_decision(pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth) -> None:
    pg_truth.execute(f"CREATE TABLE {pg_schema}.customers (id bigint PRIMARY KEY)")
    pg_truth.execute(f"CREATE TABLE {pg_schema}.t (id bigint REFERENCES {pg_schema}.customers, note text)")
    driver = pg_driver(f"{pg_schema}.t", rows(1))
    with pytest.raises(RowsRejected, match="t_id_fkey"):
        driver.prepare(0, rows(1))
    assert pg_truth.prepared() == []


def test_a_trigger_that_notifies_points_to_staging(pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth) -> None:
    """PREPARE TRANSACTION refuses what has executed NOTIFY."""
    table = f"{pg_schema}.t"
    pg_truth.execute(f"CREATE TABLE {table} (id bigint, note text)")
    pg_truth.execute(
        f"CREATE FUNCTION {pg_schema}.tell() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN NOTIFY orders; RETURN NEW; END $$"
    )
    pg_truth.execute(f"CREATE TRIGGER t AFTER INSERT ON {table} EXECUTE FUNCTION {pg_schema}.tell()")
    with pytest.raises(PrepareFailed) as caught:
        pg_driver(table, rows(1)).prepare(0, rows(1))
    assert "commit='staged'" in caught.value.hint
    pg_driver(table, rows(1), commit="staged").run(0, rows(1))
    assert pg_truth.count(table) == 1


@pytest.mark.parametrize("mode", PREPARED)
def test_used_up_prepared_transactions_are_counted_and_the_setting_is_named(
    mode: dict[str, Any], private_postgres: PrivatePostgres
) -> None:
    # the task's and the seal, or the epoch's
    ours = 1 if mode.get("atomic", True) else 2
    server = private_postgres(max_prepared_transactions=ours + 1)
    truth = Truth(server.dsn)
    truth.execute("CREATE TABLE t (id bigint, note text)")
    truth.execute("BEGIN")
    truth.execute("INSERT INTO t VALUES (0, 'theirs')")
    truth.execute("PREPARE TRANSACTION 'theirs'")
    driver = Driver(Postgres(server.dsn, table="t", **mode))
    assert driver.committer.check(rows(1).schema) == []
    written, parts = driver.prepare(0, rows(1))
    with pytest.raises(PrepareFailed) as caught:
        driver.prepare(1, rows(2))
    assert f"max_prepared_transactions = {ours + 1} are used: {ours} by epochsink, 1 by others" in caught.value.message
    assert "pg_prepared_xacts" in caught.value.hint
    driver.committer.abort_orphans(parts)
    driver.commit(written, parts)
    assert truth.rows("t") == [(1, "x")]
    driver.close()
    truth.close()


def test_a_table_that_changes_while_the_query_runs_fails_the_epoch(
    pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    table = f"{pg_schema}.t"
    pg_truth.execute(f"CREATE TABLE {table} (id bigint, note text)")
    driver = pg_driver(table, rows(1))
    pg_truth.execute(f"ALTER TABLE {table} RENAME note TO remark")
    with pytest.raises(PrepareFailed, match="'note'"):
        driver.prepare(0, rows(1))
    pg_truth.execute(f"ALTER TABLE {table} RENAME TO elsewhere")
    with pytest.raises(PrepareFailed, match="does not exist"):
        driver.prepare(0, rows(1))


@pytest.mark.parametrize(
    "damage", ["DROP TABLE {}", "DELETE FROM {} WHERE id = 1", "INSERT INTO {0} SELECT * FROM {0}"]
)
@pytest.mark.parametrize("options", [{"commit": "staged"}, {"key": "id"}], ids=["append", "upsert"])
def test_a_vote_counts_what_is_staged(
    options: dict[str, Any],
    damage: str,
    *,
    pg_schema: str,
    pg_driver: MakeDriver,
    pg_truth: Truth,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = f"{pg_schema}.t"
    pg_truth.execute(f"CREATE TABLE {table} (id bigint PRIMARY KEY, note text)")
    driver = pg_driver(table, rows(1), **options)
    stage = Incoming.stage

    def damaged(incoming: Incoming, epoch: Epoch) -> Member:
        member = stage(incoming, epoch)
        pg_truth.execute(damage.format(member.staging))
        return member

    monkeypatch.setattr(Incoming, "stage", damaged)
    with pytest.raises(PrepareFailed):
        driver.prepare(0, rows(1, 2))
    assert pg_truth.prepared() == []
    assert pg_truth.count(table) == 0


@pytest.mark.parametrize("key", [None, "id"], ids=["append", "upsert"])
def test_a_task_that_commits_its_own_rows_counts_what_the_server_took(
    key: str | None, pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    """A trigger that swallows rows of a COPY is named; merged rows are counted in staging, which has no trigger."""
    table = f"{pg_schema}.t"
    pg_truth.execute(f"CREATE TABLE {table} (id bigint PRIMARY KEY, note text)")
    pg_truth.execute(
        f"CREATE FUNCTION {pg_schema}.swallow() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RETURN CASE WHEN NEW.id > 1 THEN NULL ELSE NEW END; END $$"
    )
    pg_truth.execute(f"CREATE TRIGGER t BEFORE INSERT ON {table} FOR EACH ROW EXECUTE FUNCTION {pg_schema}.swallow()")
    rows = pa.record_batch({"id": pa.array([1, 2, 3], pa.int64()), "note": ["a", "b", "c"]})
    driver = pg_driver(table, rows, atomic=False, key=key)
    if key is None:
        with pytest.raises(PrepareFailed, match="the server took 1 of 3 rows"):
            driver.write(0, rows)
        assert pg_truth.prepared() == []
    else:
        driver.run(0, rows)
        assert pg_truth.rows(table) == [(1, "a")]


def test_a_prepared_task_that_is_gone_fails_the_vote(pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth) -> None:
    pg_truth.execute(f"CREATE TABLE {pg_schema}.t (id bigint, note text)")
    driver = pg_driver(f"{pg_schema}.t", rows(1), atomic=False)
    written = driver.write(0, rows(1), rows(2))
    pg_truth.execute(f"ROLLBACK PREPARED '{written.committables[1]['gid']}'")
    with pytest.raises(PrepareFailed, match="not in pg_prepared_xacts"):
        driver.vote(written)


def test_a_lock_is_waited_for_no_longer_than_the_option_says(
    pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    table = f"{pg_schema}.t"
    pg_truth.execute(f"CREATE TABLE {table} (id bigint, note text)")
    driver = pg_driver(table, rows(1), timeout=0.2)
    written = driver.write(0, rows(1))
    pg_truth.execute("BEGIN")
    pg_truth.execute(f"LOCK TABLE {table} IN SHARE MODE")
    with pytest.raises(PrepareFailed) as caught:
        driver.vote(written)
    assert "timeout=" in caught.value.hint
    pg_truth.execute("ROLLBACK")
    driver.vote(written)


def test_a_statement_time_out_names_its_setting(pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth) -> None:
    table = f"{pg_schema}.t"
    pg_truth.execute(f"CREATE TABLE {table} (id bigint, note text)")
    driver = pg_driver(table, rows(1), options={"options": "-c statement_timeout=300"}, timeout=30)
    written = driver.write(0, rows(1))
    pg_truth.execute("BEGIN")
    pg_truth.execute(f"LOCK TABLE {table} IN SHARE MODE")
    with pytest.raises(PrepareFailed) as caught:
        driver.vote(written)
    assert "statement_timeout" in caught.value.hint
    pg_truth.execute("ROLLBACK")


def test_a_writer_that_is_given_up_leaves_nothing_open(pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth) -> None:
    table = f"{pg_schema}.t"
    pg_truth.execute(f"CREATE TABLE {table} (id bigint, note text)")
    driver = pg_driver(table, rows(1), atomic=False)
    writer = driver.sink.writer(driver.task(Epoch(0, uuid.uuid4().hex)))
    writer.write(rows(1))
    writer.abort()
    writer.abort()
    deadline = time.monotonic() + 10  # the server ends a session some time after its client has gone
    while time.monotonic() < deadline and pg_truth.count(OPEN):
        pass
    assert pg_truth.count(OPEN) == 0
    assert pg_truth.count(table) == 0
