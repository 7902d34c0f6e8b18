"""A setting or a shape of the table that is changed under a running query: judged where rows are written."""

from __future__ import annotations

import datetime as dt
import uuid
from contextlib import closing
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow as pa
import pytest
from fix_postgres import Driver, ListedRows, Truth, as_user

from epochsink.errors import PrepareFailed, WentBack
from epochsink.postgres import Postgres, writer
from epochsink.postgres.incoming import Incoming
from epochsink.postgres.staging import DELETED
from epochsink.sink import LastDone, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fix_postgres import MakeDriver, Written
    from fix_services import PrivatePostgres

    from epochsink.postgres.committable import Member
    from epochsink.sink import Committable, Epoch

PREPARED = pytest.param({"commit": "prepared"}, id="prepared")
STAGED = pytest.param({"commit": "staged"}, id="staged")
BY_TASK = pytest.param({"atomic": False}, id="by-task")
MODES = [PREPARED, STAGED, BY_TASK]

PRICE = pa.record_batch({"value": pa.array([Decimal("1.75")], pa.decimal128(10, 2))})
AFTERNOON = dt.datetime(2026, 11, 23, 15, 4, 5)  # noqa: DTZ001 - for a column without time zone
TIME = pa.record_batch({"value": pa.array([AFTERNOON], pa.timestamp("us"))})
ALTERED = [
    pytest.param("numeric(10,2)", "integer", PRICE, Decimal("1.75"), id="numeric to integer"),
    pytest.param("timestamp", "date", TIME, AFTERNOON, id="timestamp to date"),
]


def orders(*ids: int, note: str = "x") -> pa.RecordBatch:
    return pa.record_batch({"id": pa.array(ids, pa.int64()), "note": pa.array([f"{note}{i}" for i in ids])})


@pytest.fixture
def table(pg_schema: str, pg_truth: Truth) -> str:
    pg_truth.execute(f"CREATE TABLE {pg_schema}.orders (id bigint PRIMARY KEY, note text)")
    return f"{pg_schema}.orders"


def refused(driver: Driver, written: Written, *, match: str) -> PrepareFailed:
    """Expect the vote to refuse; return why, with nothing left prepared after the sweep."""
    with pytest.raises(PrepareFailed, match=match) as caught:
        driver.vote(written)
    driver.committer.abort_orphans([])
    return caught.value


def outcomes(driver: Driver, written: Written, parts: list[Committable]) -> set[Outcome]:
    return {verdict.outcome for verdict in driver.commit(written, parts)}


# ---- a column of another type


@pytest.mark.parametrize(("before", "after", "rows", "value"), ALTERED)
@pytest.mark.parametrize("mode", [PREPARED, STAGED])
def test_a_column_altered_between_the_tasks_and_the_vote_takes_no_other_value(
    mode: dict[str, Any],
    before: str,
    after: str,
    rows: pa.RecordBatch,
    value: object,
    *,
    pg_schema: str,
    pg_driver: MakeDriver,
    pg_truth: Truth,
) -> None:
    """Before, an INSERT cast what was staged: 2 for 1.75. Now the next attempt says that the value does not fit."""
    target = f"{pg_schema}.values"
    pg_truth.execute(f"CREATE TABLE {target} (value {before})")
    driver = pg_driver(target, rows, **mode)
    written = driver.write(0, rows)
    pg_truth.execute(f"ALTER TABLE {target} ALTER value TYPE {after}")
    refused(driver, written, match="has changed since rows|from Spark into")
    with pytest.raises(PrepareFailed, match="from Spark into"):
        driver.prepare(0, rows)
    assert pg_truth.count(target) == 0
    pg_truth.execute(f"ALTER TABLE {target} ALTER value TYPE {before}")
    driver.run(0, rows)
    assert pg_truth.rows(target) == [(value,)]


@pytest.mark.parametrize(("before", "after", "rows", "value"), ALTERED)
def test_a_column_altered_after_the_decision_takes_no_other_value(
    before: str,
    after: str,
    rows: pa.RecordBatch,
    value: object,
    *,
    pg_schema: str,
    pg_driver: MakeDriver,
    pg_truth: Truth,
) -> None:
    """Staged rows are void, and staged again from the spool for the table as it is: here they do not fit it."""
    target = f"{pg_schema}.values"
    pg_truth.execute(f"CREATE TABLE {target} (value {before})")
    driver = pg_driver(target, rows, commit="staged")
    written, parts = driver.prepare(0, rows)
    pg_truth.execute(f"ALTER TABLE {target} ALTER value TYPE {after}")
    (verdict,) = driver.commit(written, parts)
    assert verdict.outcome is Outcome.ABORTED
    assert "column 'value' was" in verdict.evidence
    with pytest.raises(PrepareFailed, match="from Spark into"):
        driver.committer.replay(written.epoch, parts[0], written.rows, uuid.uuid4().hex)
    assert pg_truth.count(target) == 0
    pg_truth.execute(f"ALTER TABLE {target} ALTER value TYPE {before}")
    assert outcomes(driver, written, parts) == {Outcome.COMMITTED}
    assert pg_truth.rows(target) == [(value,)]


def test_a_column_made_wider_after_the_decision_gets_the_rows_of_the_spool(
    pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    target = f"{pg_schema}.values"
    pg_truth.execute(f"CREATE TABLE {target} (value integer)")
    rows = pa.record_batch({"value": pa.array([7], pa.int32())})
    driver = pg_driver(target, rows, commit="staged")
    written, parts = driver.prepare(0, rows)
    pg_truth.execute(f"ALTER TABLE {target} ALTER value TYPE bigint")
    assert outcomes(driver, written, parts) == {Outcome.ABORTED}
    again = driver.committer.replay(written.epoch, parts[0], written.rows, uuid.uuid4().hex)
    assert outcomes(driver, written, [again]) == {Outcome.COMMITTED}
    assert pg_truth.rows(target) == [(7,)]


class NoRows(ListedRows):
    """A spool that keeps nothing, as with ``spool=False``."""

    def verify(self) -> None:
        for task in self.tasks() or ["?"]:
            list(ListedRows({}).read(task))


@pytest.mark.parametrize("alter", ["ALTER value TYPE text", "RENAME value TO other"])
def test_without_a_spool_a_table_altered_after_the_decision_has_to_be_altered_back(
    alter: str, pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    """Some changes make the INSERT fail, and some do not: the error names the change in either case."""
    target = f"{pg_schema}.values"
    pg_truth.execute(f"CREATE TABLE {target} (value integer)")
    rows = pa.record_batch({"value": pa.array([7], pa.int32())})
    driver = pg_driver(target, rows, commit="staged")
    written, parts = driver.prepare(0, rows)
    pg_truth.execute(f"ALTER TABLE {target} {alter}")
    with pytest.raises(PrepareFailed, match="column 'value'") as caught:
        driver.committer.commit(written.epoch, parts[0], NoRows({}))
    assert "change the table back" in caught.value.hint
    assert not caught.value.may_pass


def altering(monkeypatch: pytest.MonkeyPatch, where: str, alter: Callable[[], object]) -> None:
    """Run ``alter`` the first time that a task calls a function of its module."""
    real = getattr(writer, where)
    turns: list[None] = []

    def altered(*given: Any) -> Any:
        if not turns:
            turns.append(None)
            alter()
        return real(*given)

    monkeypatch.setattr(writer, where, altered)


@pytest.mark.parametrize(
    ("options", "where"), [({}, "begin"), ({"key": "id"}, "transaction")], ids=["append", "upsert"]
)
def test_a_column_altered_under_a_task_that_commits_on_its_own_takes_no_other_value(
    options: dict[str, Any],
    where: str,
    *,
    pg_schema: str,
    pg_driver: MakeDriver,
    pg_truth: Truth,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between its look at the table and its COPY, or between its COPY into staging and its merge."""
    target = f"{pg_schema}.values"
    pg_truth.execute(f"CREATE TABLE {target} (id bigint PRIMARY KEY, value double precision)")
    rows = pa.record_batch({"id": pa.array([1], pa.int64()), "value": pa.array([1.75])})
    driver = pg_driver(target, rows, atomic=False, **options)
    altering(monkeypatch, where, lambda: pg_truth.execute(f"ALTER TABLE {target} ALTER value TYPE bigint"))
    with pytest.raises(PrepareFailed, match="column 'value' was double precision and is bigint"):
        driver.prepare(0, rows)
    assert pg_truth.prepared() == []
    assert pg_truth.count(target) == 0


# ---- a table that gets columns


@pytest.mark.parametrize("lost", [False, True], ids=["kept", "lost"])
@pytest.mark.parametrize("mode", [STAGED, BY_TASK])
def test_an_epoch_of_before_a_column_was_added_is_committed_as_it_was_recorded(
    mode: dict[str, Any],
    lost: bool,  # noqa: FBT001 - a parameter
    *,
    table: str,
    pg_driver: MakeDriver,
    pg_truth: Truth,
) -> None:
    """What is prepared holds the lock that ALTER TABLE needs: that is said, with the command that ends it."""
    wide = orders(2).append_column("price", pa.array([5], pa.int64()))
    driver = pg_driver(table, orders(1), add_columns=True, timeout=0.3, **{**mode, "spool": True})
    written, parts = driver.prepare(0, orders(1))
    driver.committer.verify_applied(None, LastDone(0, written.epoch.attempt, tuple(parts)))
    prepared, later = pg_truth.prepared(), driver.restart()
    found = later.committer.check(wide.schema)
    if prepared:
        (said,) = found
        assert any(f"prepared transaction '{gid}' holds it" in said for gid in prepared)
        assert "epochsink recover CHECKPOINT" in said
    else:
        assert found == []
    if lost:
        later.committer.abort_orphans([])
        assert later.committer.check(wide.schema) == []
        assert outcomes(later, written, parts) == {Outcome.ABORTED}
        parts = [later.committer.replay(written.epoch, part, written.rows, uuid.uuid4().hex) for part in parts]
    assert outcomes(later, written, parts) == {Outcome.COMMITTED}
    assert later.committer.check(wide.schema) == []
    later.committer.finish(written.epoch, parts)
    later.committer.verify_applied(LastDone(0, parts[0]["attempt"], tuple(parts)), None)
    later.run(1, wide)
    assert pg_truth.rows(table) == [(1, "x1", None), (2, "x2", 5)]


# ---- a table that a crash empties


@pytest.mark.parametrize("mode", [*MODES, pytest.param({"atomic": False, "key": "id"}, id="by-task upsert")])
def test_a_table_that_is_made_unlogged_gets_no_further_epoch(
    mode: dict[str, Any], table: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    driver = pg_driver(table, orders(1), **mode)
    driver.run(0, orders(1))
    pg_truth.execute(f"ALTER TABLE {table} SET UNLOGGED")
    with pytest.raises(PrepareFailed, match=rf"{table} is UNLOGGED.*ALTER TABLE {table} SET LOGGED") as caught:
        driver.prepare(1, orders(2))
    assert not caught.value.may_pass
    driver.committer.abort_orphans([])
    pg_truth.execute(f"ALTER TABLE {table} SET LOGGED")
    driver.run(1, orders(2))
    assert pg_truth.count(table) == 2


@pytest.mark.parametrize("mode", [PREPARED, STAGED])
def test_a_table_that_is_made_unlogged_after_the_tasks_have_staged_refuses_the_vote(
    mode: dict[str, Any], table: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    driver = pg_driver(table, orders(1), **mode)
    written = driver.write(0, orders(1))
    pg_truth.execute(f"ALTER TABLE {table} SET UNLOGGED")
    assert not refused(driver, written, match="is UNLOGGED").may_pass


def test_a_staged_epoch_waits_until_its_table_is_logged_again(
    table: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    driver = pg_driver(table, orders(1), commit="staged")
    written, parts = driver.prepare(0, orders(1))
    pg_truth.execute(f"ALTER TABLE {table} SET UNLOGGED")
    with pytest.raises(PrepareFailed, match="is UNLOGGED") as caught:
        driver.commit(written, parts)
    assert "the next start commits it" in caught.value.hint
    assert pg_truth.count(table) == 0
    pg_truth.execute(f"ALTER TABLE {table} SET LOGGED")
    assert outcomes(driver.restart(), written, parts) == {Outcome.COMMITTED}
    assert pg_truth.count(table) == 1


def test_a_partition_that_is_made_unlogged_refuses_the_next_epoch(
    pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    """Also one that the epoch does not write to: earlier epochs may have."""
    target = f"{pg_schema}.parted"
    pg_truth.execute(f"CREATE TABLE {target} (id bigint, note text) PARTITION BY RANGE (id)")
    for number in (0, 1):
        bounds = f"FROM ({10 * number}) TO ({10 * number + 10})"
        pg_truth.execute(f"CREATE TABLE {target}_{number} PARTITION OF {target} FOR VALUES {bounds}")
    driver = pg_driver(target, orders(1), commit="prepared")
    driver.run(0, orders(1), orders(11))
    written = driver.write(1, orders(12))
    pg_truth.execute(f"ALTER TABLE {target}_0 SET UNLOGGED")
    refused(driver, written, match="parted_0 is UNLOGGED")


@pytest.mark.parametrize("mode", [PREPARED, BY_TASK])
def test_what_is_prepared_keeps_its_table_as_it_is_even_through_a_crash(
    mode: dict[str, Any], private_postgres: PrivatePostgres
) -> None:
    """Its locks outlive the server: before the commit nobody makes the table UNLOGGED, alters it or drops its index."""
    server = private_postgres()
    with closing(Truth(server.dsn)) as truth:
        truth.execute("CREATE TABLE orders (id bigint PRIMARY KEY, note text)")
    driver = Driver(Postgres(server.dsn, table="orders", **mode))
    assert driver.committer.check(orders(1).schema) == []
    written, parts = driver.prepare(0, orders(1))
    for _ in range(2):
        with psycopg.connect(server.dsn, autocommit=True) as operator:
            operator.execute("SET lock_timeout = '200ms'")
            for change in (
                "ALTER TABLE orders SET UNLOGGED",
                "ALTER TABLE orders ALTER id TYPE integer",
                "ALTER TABLE orders ENABLE ROW LEVEL SECURITY",
                "ALTER TABLE orders DROP CONSTRAINT orders_pkey",
            ):
                with pytest.raises(psycopg.errors.LockNotAvailable):
                    operator.execute(change)
        server.kill()
        server.start()
    assert outcomes(driver, written, parts) == {Outcome.COMMITTED}
    with closing(Truth(server.dsn)) as truth:
        assert truth.count("orders") == 1
    driver.close()


class Crashing:
    """A server of the test's own with one done epoch in its table."""

    def __init__(self, start: PrivatePostgres) -> None:
        self.server = start()
        self.execute("CREATE TABLE orders (id bigint PRIMARY KEY, note text)")
        self.driver = Driver(Postgres(self.server.dsn, table="orders", commit="prepared"))
        assert self.driver.committer.check(orders(1).schema) == []
        self.driver.committer.verify_applied(None, None)
        written, parts = self.driver.prepare(0, orders(1))
        assert outcomes(self.driver, written, parts) == {Outcome.COMMITTED}
        self.last = LastDone(0, written.epoch.attempt, tuple(parts))
        self.look()

    def execute(self, *statements: str) -> None:
        with closing(Truth(self.server.dsn)) as truth:
            for statement in statements:
                truth.execute(statement)

    def crash(self) -> None:
        self.execute("CHECKPOINT")
        self.server.kill()
        self.server.start()

    def look(self) -> None:
        """Do what each epoch and each start begins with."""
        self.driver.committer.verify_applied(self.last, None)

    def count(self) -> int:
        with closing(Truth(self.server.dsn)) as truth:
            return truth.count("orders")


@pytest.fixture
def crashing(private_postgres: PrivatePostgres) -> Iterator[Crashing]:
    found = Crashing(private_postgres)
    yield found
    found.driver.close()


@pytest.mark.parametrize("restarted", [False, True])
def test_a_table_that_a_crash_has_emptied_is_noticed_once_it_is_logged_again(
    restarted: object, crashing: Crashing
) -> None:
    """Its markers are whole, and nothing of the table tells: it was UNLOGGED when the server crashed."""
    crashing.execute("ALTER TABLE orders SET UNLOGGED")
    crashing.crash()
    assert crashing.count() == 0
    with pytest.raises(PrepareFailed, match="is UNLOGGED"):
        crashing.driver.prepare(1, orders(2))
    crashing.driver.committer.abort_orphans([])
    crashing.execute("ALTER TABLE orders SET LOGGED")
    if restarted:
        crashing.driver = crashing.driver.restart()
    for _ in range(2):
        with pytest.raises(WentBack, match="was rewritten, and the server has crashed") as caught:
            crashing.look()
    assert "epochsink accept CHECKPOINT 0 --sink NAME" in caught.value.hint
    crashing.driver.committer.verify_applied(LastDone(0, "", ()), None)  # as accepted by an operator
    crashing.look()
    crashing.driver.run(1, orders(2))


def test_a_table_that_was_unlogged_without_a_crash_goes_on(crashing: Crashing) -> None:
    crashing.execute("ALTER TABLE orders SET UNLOGGED")
    crashing.server.stop()
    crashing.server.start()
    crashing.execute("ALTER TABLE orders SET LOGGED")
    crashing.look()
    crashing.crash()
    crashing.look()
    crashing.driver.run(1, orders(2))
    assert crashing.count() == 2


def test_rewrites_and_crashes_of_a_logged_table_go_on(crashing: Crashing) -> None:
    """Each alone, with a look between them."""
    for rewrite in ("VACUUM FULL orders", "ALTER TABLE orders ALTER id TYPE integer", "TRUNCATE orders"):
        crashing.crash()
        crashing.look()
        crashing.execute(rewrite)
        crashing.look()


# ---- a name without a schema


class TwoSchemas:
    """Two schemas, each with a table orders, and a role whose search path has the first one."""

    def __init__(self, schema: str, make: MakeDriver, truth: Truth) -> None:
        self.role, self.first, self.second = (f"{schema}_{end}" for end in ("role", "first", "second"))
        self._schema, self._make, self._truth = schema, make, truth
        for name in (self.first, self.second):
            truth.execute(f"CREATE SCHEMA {name}; CREATE TABLE {name}.orders (id bigint PRIMARY KEY, note text)")
        truth.execute(f"CREATE ROLE {self.role} SUPERUSER LOGIN PASSWORD 'made-up'")
        self.search(self.first)

    def search(self, schema: str) -> None:
        """Let sessions that are opened from now on find the table of this schema."""
        self._truth.execute(f"ALTER ROLE {self.role} SET search_path = {schema}")

    def driver(self, **options: Any) -> Driver:
        dsn = as_user(self._truth.dsn, self.role, "made-up")
        return self._make("orders", orders(1), dsn=dsn, marker_schema=self._schema, **options)

    def counts(self) -> tuple[int, int]:
        return self._truth.count(f"{self.first}.orders"), self._truth.count(f"{self.second}.orders")

    def drop(self) -> None:
        self._truth.execute(f"DROP SCHEMA {self.first}, {self.second} CASCADE")
        self._truth.execute(f"DROP OWNED BY {self.role}")
        self._truth.execute(f"DROP ROLE {self.role}")


@pytest.fixture
def two_schemas(pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth) -> Iterator[TwoSchemas]:
    made = TwoSchemas(pg_schema, pg_driver, pg_truth)
    yield made
    for gid in pg_truth.prepared():
        pg_truth.execute(f"ROLLBACK PREPARED '{gid}'")
    made.drop()


@pytest.mark.parametrize("mode", [BY_TASK, pytest.param({"atomic": False, "key": "id"}, id="upsert")])
def test_tasks_that_find_another_table_of_the_same_name_get_no_vote(
    mode: dict[str, Any], two_schemas: TwoSchemas
) -> None:
    """The role's search path is changed under the query: a task's session has the new one, the driver's the old."""
    driver = two_schemas.driver(**mode)
    driver.committer.verify_applied(None, None)
    driver.run(0, orders(0))
    two_schemas.search(two_schemas.second)
    found = refused(driver, driver.write(1, orders(1), orders(2)), match="their sessions have different search paths")
    assert f'"{two_schemas.second}"."orders"' in found.message
    assert f'"{two_schemas.first}"."orders"' in found.message
    assert "name the schema in table=" in found.hint
    assert not found.may_pass
    assert two_schemas.counts() == (1, 0)
    two_schemas.search(two_schemas.first)
    driver.run(1, orders(1), orders(2))
    assert two_schemas.counts() == (3, 0)


def test_a_driver_looks_a_name_without_a_schema_up_once(two_schemas: TwoSchemas) -> None:
    """Sessions that it opens later, with another search path, write to the table that is compared with the ledger."""
    driver = two_schemas.driver(commit="prepared", spool=True)
    driver.committer.verify_applied(None, None)
    two_schemas.search(two_schemas.second)
    driver.run(0, orders(0))
    assert two_schemas.counts() == (1, 0)


# ---- row security


@pytest.fixture
def role(pg_schema: str, pg_truth: Truth, table: str) -> Iterator[str]:
    """Make a role that policies apply to, once it does not bypass them."""
    name = f"writer_{uuid.uuid4().hex[:10]}"
    pg_truth.execute(f"CREATE ROLE {name} BYPASSRLS")
    pg_truth.execute(f"GRANT USAGE, CREATE ON SCHEMA {pg_schema} TO {name}; GRANT ALL ON {table} TO {name}")
    pg_truth.execute(f"CREATE POLICY mine ON {table} USING (note <> 'hidden') WITH CHECK (true)")
    yield name
    pg_truth.execute(f"DROP OWNED BY {name}; DROP ROLE {name}")


@pytest.mark.parametrize("bypass_taken", [False, True], ids=["enabled", "bypass taken away"])
@pytest.mark.parametrize("mode", [PREPARED, STAGED])
def test_row_security_that_begins_to_hide_rows_refuses_the_epoch(
    mode: dict[str, Any], bypass_taken: object, *, table: str, role: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    """A policy hides the row that is to be deleted: before, it stayed, and the epoch was called done."""
    pg_truth.execute(f"INSERT INTO {table} VALUES (1, 'hidden')")  # noqa: S608 - a name that the test made
    gone = orders(1).append_column(DELETED, pa.array([True]))
    as_role = {"options": f"-c role={role}"}
    if bypass_taken:
        pg_truth.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
    driver = pg_driver(table, gone, key="id", delete_when="true", options=as_role, **mode)
    written = driver.write(0, gone)
    on, off = (
        (f"ALTER ROLE {role} NOBYPASSRLS", f"ALTER ROLE {role} BYPASSRLS")
        if bypass_taken
        else (
            f"ALTER ROLE {role} NOBYPASSRLS; ALTER TABLE {table} ENABLE ROW LEVEL SECURITY",
            f"ALTER TABLE {table} DISABLE ROW LEVEL SECURITY",
        )
    )
    pg_truth.execute(on)
    assert not refused(driver, written, match="row security of").may_pass
    pg_truth.execute(off)
    staged, parts = driver.prepare(0, gone)
    if mode["commit"] == "staged":
        pg_truth.execute(on)
        with pytest.raises(PrepareFailed, match="row security of"):
            driver.commit(staged, parts)
        assert pg_truth.count(table) == 1
        pg_truth.execute(off)
    assert outcomes(driver, staged, parts) == {Outcome.COMMITTED}
    assert pg_truth.count(table) == 0
    driver.close()


@pytest.mark.parametrize("moment", ["before the task", "under the task"])
def test_tasks_that_copy_into_a_table_do_not_pass_its_rules_by(
    moment: str, table: str, pg_driver: MakeDriver, pg_truth: Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    """COPY ignores rules without an error: the rows would be there, which the rule sends elsewhere or swallows."""
    driver = pg_driver(table, orders(1), atomic=False)
    driver.run(0, orders(1))
    rule = f"CREATE RULE away AS ON INSERT TO {table} DO INSTEAD NOTHING"
    if moment == "under the task":
        altering(monkeypatch, "begin", lambda: pg_truth.execute(rule))
        says = "it has rules or row security"
    else:
        pg_truth.execute(rule)
        says = "writes by COPY, which ignores them; use atomic=True"
    with pytest.raises(PrepareFailed, match=says):
        driver.write(1, orders(2))
    driver.committer.abort_orphans([])
    assert pg_truth.prepared() == []
    assert "has rules" in driver.committer.check(orders(1).schema)[0]
    pg_truth.execute(f"DROP RULE away ON {table}")
    pg_truth.execute(f"VACUUM {table}")
    assert driver.committer.check(orders(1).schema) == []
    driver.run(1, orders(2))
    assert pg_truth.rows(table) == [(1, "x1"), (2, "x2")]


def test_tasks_that_copy_into_a_table_are_told_of_its_row_security(
    table: str, role: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    """The server's own error is of an unsupported feature, and says nothing of the way out."""
    driver = pg_driver(table, orders(1), atomic=False, options={"options": f"-c role={role}"})
    pg_truth.execute(f"ALTER ROLE {role} NOBYPASSRLS; ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
    (finding,) = driver.committer.check(orders(1).schema)
    with pytest.raises(PrepareFailed, match="row security of") as caught:
        driver.write(0, orders(1))
    for told in (finding, caught.value.message):
        assert "use atomic=True, or a role with BYPASSRLS, or the table's owner" in told
    driver.close()


# ---- the unique index behind the key


@pytest.mark.parametrize("mode", [PREPARED, STAGED, pytest.param({"atomic": False}, id="by-task")])
def test_an_epoch_without_the_unique_index_behind_its_key_is_refused(
    mode: dict[str, Any], table: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    driver = pg_driver(table, orders(1), key="id", **mode)
    driver.run(0, orders(1))
    pg_truth.execute(f"ALTER TABLE {table} DROP CONSTRAINT orders_pkey")
    with pytest.raises(PrepareFailed, match=r"key=\['id'\] is not a primary key.*ADD UNIQUE") as caught:
        driver.prepare(1, orders(1))
    assert not caught.value.may_pass


def test_a_staged_epoch_waits_for_the_unique_index_behind_its_key(
    table: str, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    driver = pg_driver(table, orders(1), key="id", commit="staged")
    written, parts = driver.prepare(0, orders(1))
    pg_truth.execute(f"ALTER TABLE {table} DROP CONSTRAINT orders_pkey")
    with pytest.raises(PrepareFailed, match=r"key=\['id'\] is not a primary key"):
        driver.commit(written, parts)
    pg_truth.execute(f"ALTER TABLE {table} ADD UNIQUE (id)")
    assert outcomes(driver, written, parts) == {Outcome.COMMITTED}
    assert pg_truth.rows(table) == [(1, "x1")]


@pytest.mark.parametrize("mode", [PREPARED, STAGED])
def test_a_unique_index_that_compares_keys_in_another_way_runs_the_epoch_again(
    mode: dict[str, Any], pg_schema: str, pg_driver: MakeDriver, pg_truth: Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a collation that ignores case, 'Ann' would replace 'ann'."""
    target = f"{pg_schema}.people"
    loose = f"{pg_schema}.loose"
    pg_truth.execute(f"CREATE COLLATION {loose} (provider = icu, locale = 'und-u-ks-level2', deterministic = false)")
    pg_truth.execute(f"CREATE TABLE {target} (name text NOT NULL)")
    pg_truth.execute(f"CREATE UNIQUE INDEX people_name ON {target} (name)")
    ann = pa.record_batch({"name": pa.array(["ann"])})
    driver = pg_driver(target, ann, key="name", **mode)
    stage = Incoming.stage

    def before_the_merge(incoming: Incoming, epoch: Epoch) -> Member:
        member = stage(incoming, epoch)
        pg_truth.execute(f"DROP INDEX {pg_schema}.people_name")
        pg_truth.execute(f"CREATE UNIQUE INDEX people_name ON {target} (name COLLATE {loose})")
        return member

    with monkeypatch.context() as patched:
        patched.setattr(Incoming, "stage", before_the_merge)
        assert refused(driver, driver.write(0, ann), match="the unique index behind key=").may_pass
    driver.run(0, ann)
    assert pg_truth.count(target) == 1


def test_an_index_that_is_built_anew_is_the_same(table: str, pg_driver: MakeDriver, pg_truth: Truth) -> None:
    driver = pg_driver(table, orders(1), key="id", commit="staged")
    written, parts = driver.prepare(0, orders(1))
    pg_truth.execute(f"REINDEX TABLE CONCURRENTLY {table}")
    pg_truth.execute(f"CREATE UNIQUE INDEX another ON {table} (id) INCLUDE (note) WITH (fillfactor = 50)")
    assert outcomes(driver, written, parts) == {Outcome.COMMITTED}
