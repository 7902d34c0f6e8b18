"""What depends on a row is a refusal, whatever its code: it is found out by trying the statement without rows."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from epochsink import Postgres
from epochsink.errors import PrepareFailed, RowsRejected
from epochsink.sink import Outcome

if TYPE_CHECKING:
    from fix_postgres import Driver, MakeDriver, Truth
    from streams import Stream

    from epochsink_devkit.services import PostgresService

SECRET = "not for every eye"
MODES = [
    pytest.param({"commit": "prepared"}, id="prepared"),
    pytest.param({"commit": "staged", "validate": True}, id="staged"),
]
RAISED = {
    "45000": f"RAISE EXCEPTION '%', NEW.note || '{SECRET}' USING ERRCODE = '45000'",
    "X0001": f"RAISE EXCEPTION '%', NEW.note || '{SECRET}' USING ERRCODE = 'X0001', DETAIL = '{SECRET}'",
    "23514": f"RAISE EXCEPTION '%', NEW.note || '{SECRET}' USING ERRCODE = '23514', CONSTRAINT = '{SECRET}'",
    "P0001": f"RAISE EXCEPTION '%', NEW.note || '{SECRET}'",
    "P0002": "SELECT 1 INTO STRICT NEW.id WHERE false",
    "P0004": f"ASSERT false, NEW.note || '{SECRET}'",
    "42P01": "EXECUTE 'SELECT * FROM nowhere'",
}


def rows(*given: tuple[int, str]) -> pa.RecordBatch:
    ids, notes = zip(*given, strict=True)
    return pa.record_batch({"id": pa.array(ids, pa.int64()), "note": pa.array(notes, pa.string())})


def apply(driver: Driver, number: int, batch: pa.RecordBatch) -> int | None:
    written, parts = driver.prepare(number, batch)
    (verdict,) = driver.commit(written, parts)
    assert verdict.outcome is Outcome.COMMITTED
    driver.committer.finish(written.epoch, parts)
    return verdict.set_aside


def with_trigger(truth: Truth, schema: str, body: str, *, when: str = "BEFORE INSERT", each: str = "ROW") -> str:
    """Make a table whose trigger does ``body`` to the row 13."""
    table, function = f"{schema}.t", f"{schema}.f()"
    guarded = body if each == "STATEMENT" else f"IF NEW.id = 13 THEN {body}; END IF; RETURN NEW"
    truth.execute(f"CREATE TABLE {table} (id bigint PRIMARY KEY, note text)")
    truth.execute(f"CREATE FUNCTION {function} RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {guarded}; END $$")
    if when.startswith("DEFERRED"):
        truth.execute(
            f"CREATE CONSTRAINT TRIGGER g AFTER INSERT ON {table} DEFERRABLE INITIALLY DEFERRED "
            f"FOR EACH ROW EXECUTE FUNCTION {function}"
        )
    else:
        truth.execute(f"CREATE TRIGGER g {when} ON {table} FOR EACH {each} EXECUTE FUNCTION {function}")
    return table


def letters(truth: Truth, schema: str) -> list[tuple[Any, ...]]:
    return truth.execute(f"SELECT sqlstate, \"row\" ->> 'id', error FROM {schema}.dead_letter ORDER BY id")  # noqa: S608


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("code", RAISED)
def test_a_trigger_that_raises_any_code_refuses_the_row(
    code: str, mode: dict[str, Any], pg_driver: MakeDriver, pg_schema: str, pg_truth: Truth
) -> None:
    """The query stops at once, without the trigger's own words; with on_rejected= the row alone is set aside."""
    table = with_trigger(pg_truth, pg_schema, RAISED[code])
    batch = rows((12, "a"), (13, "b"), (14, "c"))
    stopping = pg_driver(table, batch, **mode)
    with pytest.raises(RowsRejected) as refused:
        stopping.prepare(0, batch)
    assert refused.value.facts["sqlstate"] == code
    assert SECRET not in f"{refused.value.message} {refused.value.hint} {refused.value.facts}"
    assert "grant" not in refused.value.hint
    assert (pg_truth.count(table), pg_truth.prepared()) == (0, [])
    driver = pg_driver(table, batch, on_rejected="dead_letter", **mode)
    assert apply(driver, 0, batch) == 1
    assert [number for number, _ in pg_truth.rows(table)] == [12, 14]
    ((sqlstate, number, error),) = letters(pg_truth, pg_schema)
    assert (sqlstate, number) == (code, "13")
    assert SECRET not in error


@pytest.mark.parametrize("shown", [False, True])
def test_a_triggers_own_text_is_shown_only_to_who_asks_for_values(
    postgres: PostgresService, pg_schema: str, pg_truth: Truth, stream: Stream, *, shown: bool
) -> None:
    table = with_trigger(pg_truth, pg_schema, RAISED["X0001"])
    stream.put([12, 13])
    select = ["id", "word AS note"]
    sink = Postgres(postgres.dsn, table=table, select=select, marker_schema=pg_schema)
    with pytest.raises(RowsRejected, match="a trigger or function") as refused:
        stream.run(stream.exactly_once({"table": sink}, show_values=shown))
    assert (f"word 13{SECRET}" in str(refused.value)) is shown


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("code", ["40001", "40P01", "53300", "57P01", "55P03"])
def test_a_code_that_says_what_passes_sets_no_row_aside(
    code: str, mode: dict[str, Any], pg_driver: MakeDriver, pg_schema: str, pg_truth: Truth
) -> None:
    """Serialization, deadlock, connections, shutdown, lock: the row is not the reason, if only it meets the code."""
    table = with_trigger(pg_truth, pg_schema, f"RAISE EXCEPTION 'later' USING ERRCODE = '{code}'")
    batch = rows((12, "a"), (13, "b"))
    with pytest.raises(PrepareFailed) as failed:
        pg_driver(table, batch, on_rejected="dead_letter", **mode).prepare(0, batch)
    assert not isinstance(failed.value, RowsRejected)
    assert failed.value.facts["may_pass"] in (True, "True")
    assert letters(pg_truth, pg_schema) == []
    assert (pg_truth.count(table), pg_truth.prepared()) == (0, [])


def test_a_row_that_a_deferred_trigger_refuses_stops_the_query_at_once(
    pg_driver: MakeDriver, pg_schema: str, pg_truth: Truth
) -> None:
    """It speaks at PREPARE TRANSACTION."""
    table = with_trigger(pg_truth, pg_schema, RAISED["X0001"], when="DEFERRED")
    batch = rows((12, "a"), (13, "b"))
    with pytest.raises(RowsRejected, match="a trigger or function") as refused:
        pg_driver(table, batch).prepare(0, batch)
    assert SECRET not in f"{refused.value.message} {refused.value.hint} {refused.value.facts}"
    assert apply(pg_driver(table, batch, on_rejected="dead_letter"), 0, batch) == 1


@pytest.mark.parametrize("options", [{}, {"key": "id"}], ids=["copied", "merged"])
def test_a_task_that_writes_its_own_rows_is_refused_at_once_too(
    options: dict[str, Any], pg_driver: MakeDriver, pg_schema: str, pg_truth: Truth
) -> None:
    table = with_trigger(pg_truth, pg_schema, RAISED["45000"])
    batch = rows((12, "a"), (13, "b"))
    with pytest.raises(RowsRejected):
        pg_driver(table, batch, atomic=False, **options).write(0, batch)


def test_what_no_row_is_the_reason_of_stops_the_query_and_makes_no_letter(
    pg_driver: MakeDriver, pg_schema: str, pg_truth: Truth
) -> None:
    """A trigger of the statement refuses it without rows too, and so does a privilege that was taken away."""
    raising = "RAISE EXCEPTION 'closed' USING ERRCODE = 'X0001'"
    table = with_trigger(pg_truth, pg_schema, raising, each="STATEMENT")
    batch = rows((1, "a"))
    with pytest.raises(PrepareFailed) as failed:
        pg_driver(table, batch).prepare(0, batch)
    assert not isinstance(failed.value, RowsRejected)
    with pytest.raises(PrepareFailed) as failed:
        pg_driver(table, batch, on_rejected="dead_letter").prepare(0, batch)
    assert not isinstance(failed.value, RowsRejected)
    assert letters(pg_truth, pg_schema) == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lacking", ["table", "function", "privilege"])
def test_what_every_row_meets_because_something_is_missing_stops_the_query(
    lacking: str, mode: dict[str, Any], pg_driver: MakeDriver, pg_schema: str, pg_truth: Truth
) -> None:
    """A trigger for each row, whose own table was dropped: no row is the reason, though no row fires no trigger.

    If one row is taken, the others are letters; once what was missing is there, all are written.
    """
    body = {
        "table": f"INSERT INTO {pg_schema}.log VALUES (1)",  # noqa: S608
        "function": f"PERFORM {pg_schema}.nowhere(NEW.id)",
        "privilege": f"SET LOCAL ROLE pg_monitor; INSERT INTO {pg_schema}.t VALUES (0, ''); RESET ROLE",  # noqa: S608
    }[lacking]
    table = with_trigger(pg_truth, pg_schema, f"NULL; END IF; IF NEW.id > 13 THEN {body}")
    broken = rows((14, "a"), (15, "b"), (16, "c"))
    driver = pg_driver(table, broken, on_rejected="dead_letter", **mode)
    with pytest.raises(PrepareFailed) as failed:
        driver.prepare(0, broken)
    assert not isinstance(failed.value, RowsRejected)
    assert failed.value.facts["sqlstate"] == {"table": "42P01", "function": "42883", "privilege": "42501"}[lacking]
    assert letters(pg_truth, pg_schema) == []
    assert apply(driver, 0, rows((12, "a"), (15, "b"), (16, "c"))) == 2
    assert pg_truth.rows(table) == [(12, "a")]


def test_rows_that_a_policy_refuses_are_letters_though_none_of_the_epoch_is_taken(
    pg_driver: MakeDriver, pg_schema: str, pg_truth: Truth
) -> None:
    """It has the code of a privilege that is lacking; so has invalid text of a tsquery that of a wrong statement."""
    table = f"{pg_schema}.t"
    pg_truth.execute(f"CREATE TABLE {table} (id bigint, note tsquery); ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
    pg_truth.execute(f"CREATE POLICY positive ON {table} FOR INSERT WITH CHECK (id > 0)")
    role = f"writer_{uuid.uuid4().hex[:10]}"
    pg_truth.execute(f"CREATE ROLE {role}; GRANT USAGE, CREATE ON SCHEMA {pg_schema} TO {role}")
    pg_truth.execute(f"GRANT INSERT ON {table} TO {role}")
    batch = rows((-2, "a"), (-1, "b"), (1, "& !"), (2, "& !"))
    try:
        driver = pg_driver(table, batch, on_rejected="dead_letter", options={"options": f"-c role={role}"})
        assert apply(driver, 0, batch) == 4
        driver.close()
    finally:
        pg_truth.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


def test_text_too_large_for_an_index_is_a_letter(pg_driver: MakeDriver, pg_schema: str, pg_truth: Truth) -> None:
    table = f"{pg_schema}.t"
    pg_truth.execute(f"CREATE TABLE {table} (id bigint, note text); CREATE INDEX ON {table} (note)")
    large = "".join(str(uuid.uuid4()) for _ in range(300))
    batch = rows((1, "a"), (2, large))
    with pytest.raises(RowsRejected, match="index row requires") as refused:
        pg_driver(table, batch).prepare(0, batch)
    assert refused.value.facts["sqlstate"] == "54000"
    assert apply(pg_driver(table, batch, on_rejected="dead_letter"), 0, batch) == 1
    assert pg_truth.rows(table) == [(1, "a")]


def test_rows_that_a_trigger_makes_equal_are_refused(pg_driver: MakeDriver, pg_schema: str, pg_truth: Truth) -> None:
    """With on_rejected= they are written one after another, as from two epochs."""
    table = with_trigger(pg_truth, pg_schema, "NEW.id = 12")
    batch = rows((12, "a"), (13, "b"))
    with pytest.raises(RowsRejected, match="a second time"):
        pg_driver(table, batch, key="id").prepare(0, batch)
    assert apply(pg_driver(table, batch, key="id", on_rejected="dead_letter"), 0, batch) == 0
    assert pg_truth.rows(table) == [(12, "b")]


@pytest.mark.parametrize("mode", MODES)
def test_text_that_a_cast_cannot_read_is_refused_and_not_shown(
    mode: dict[str, Any], pg_driver: MakeDriver, pg_schema: str, pg_truth: Truth
) -> None:
    """A tsquery's syntax error has the code of an error in the statement."""
    table = f"{pg_schema}.t"
    pg_truth.execute(f"CREATE TABLE {table} (id bigint, note tsquery)")
    batch = rows((1, "a & b"), (2, "secret & & !"))
    with pytest.raises(RowsRejected) as refused:
        pg_driver(table, batch, **mode).prepare(0, batch)
    assert "secret" not in f"{refused.value.message} {refused.value.hint} {refused.value.facts}"
    assert apply(pg_driver(table, batch, on_rejected="dead_letter", **mode), 0, batch) == 1
    ((_, number, error),) = letters(pg_truth, pg_schema)
    assert (number, "secret" in error) == ("2", False)


def test_a_row_that_a_policy_refuses_is_a_letter_and_no_question_of_grants(
    pg_driver: MakeDriver, pg_schema: str, pg_truth: Truth
) -> None:
    table = f"{pg_schema}.t"
    pg_truth.execute(f"CREATE TABLE {table} (id bigint, note text); ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
    pg_truth.execute(f"CREATE POLICY positive ON {table} FOR INSERT WITH CHECK (id > 0)")
    role = f"writer_{uuid.uuid4().hex[:10]}"
    pg_truth.execute(f"CREATE ROLE {role}; GRANT USAGE, CREATE ON SCHEMA {pg_schema} TO {role}")
    pg_truth.execute(f"GRANT INSERT ON {table} TO {role}")
    as_role = {"options": {"options": f"-c role={role}"}}
    batch = rows((1, "a"), (-1, "b"))
    try:
        driver = pg_driver(table, batch, on_rejected="dead_letter", **as_role)
        assert apply(driver, 0, batch) == 1
        driver.close()
        stopping = pg_driver(table, batch, **as_role)
        with pytest.raises(RowsRejected, match="row-level security") as refused:
            stopping.prepare(0, batch)
        stopping.close()
    finally:
        pg_truth.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")
    assert "policy" in refused.value.hint
    assert "grant" not in refused.value.hint


def test_a_letter_names_its_constraint_once_and_a_value_that_does_not_fit_its_column(
    pg_driver: MakeDriver, pg_schema: str, pg_truth: Truth
) -> None:
    table = f"{pg_schema}.t"
    pg_truth.execute(f"CREATE TABLE {table} (id bigint CONSTRAINT positive CHECK (id > 0), note uuid)")
    batch = rows((-1, str(uuid.uuid4())), (1, "nope"))
    assert apply(pg_driver(table, batch, on_rejected="dead_letter"), 0, batch) == 2
    errors = {number: error for _, number, error in letters(pg_truth, pg_schema)}
    assert errors["-1"].count("positive") == 1
    assert errors["1"] == "a value does not fit column 'note'"
    with pytest.raises(RowsRejected, match="a value does not fit column 'note'"):
        pg_driver(table, batch).prepare(0, batch)
