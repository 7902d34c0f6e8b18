"""A letter keeps the row as Arrow: what the table takes from a stream it takes from a letter, unchanged."""

from __future__ import annotations

import json
import uuid
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow as pa
import pytest
from fix_postgres import Truth, ranked
from postgres_letters import ALL, ASIDE, apply, correct, letters_of, read, refusing, rows

from epochsink.errors import PrepareFailed, RowsRejected
from epochsink.sink import Chosen, Retried
from epochsink.sink.letter_row import decode_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fix_postgres import MakeDriver

    from epochsink_devkit.services import PostgresService

MODES = [pytest.param({"commit": "prepared"}, id="prepared"), pytest.param({"commit": "staged"}, id="staged")]


def raw_text(*values: bytes) -> pa.Array:
    """Return text as Spark may hold it: not UTF-8."""
    return pa.array(values, pa.binary()).view(pa.string())


def days(*numbers: int) -> pa.Array:
    return pa.array(numbers, pa.int32()).cast(pa.date32())


@pytest.mark.parametrize("mode", MODES)
def test_a_date_that_python_does_not_have_is_kept_in_a_letter(
    mode: dict[str, Any], pg_driver: MakeDriver, pg_schema: str, pg_truth: Truth
) -> None:
    table = f"{pg_schema}.t"
    pg_truth.execute(f"CREATE TABLE {table} (id bigint, note varchar(3), d date)")
    batch = pa.record_batch({"id": [1, 2], "note": ["ok", "too long"], "d": days(0, 6_593_713)})
    driver = pg_driver(table, batch, **ASIDE, **mode)
    assert apply(driver, 0, batch) == 1
    assert read(driver)[0].row == {"id": 2, "note": "too long", "d": "20022-12-22"}
    pg_truth.execute(f"ALTER TABLE {table} ALTER note TYPE text")
    assert letters_of(driver).retry(ALL) == Retried(written=1)
    assert pg_truth.execute(f"SELECT note, d::text FROM {table} WHERE id = 2") == [("too long", "20022-12-22")]  # noqa: S608


@pytest.mark.parametrize("mode", MODES)
def test_text_that_is_not_utf_8_in_a_refused_row_is_kept_as_its_bytes(
    mode: dict[str, Any], pg_driver: MakeDriver, pg_schema: str, pg_truth: Truth
) -> None:
    table = f"{pg_schema}.t"
    pg_truth.execute(f"CREATE TABLE {table} (id bigint CHECK (id > 0), note text)")
    batch = pa.record_batch({"id": pa.array([-1, 2]), "note": raw_text(b"a\xffb", b"ok")})
    driver = pg_driver(table, batch, **ASIDE, **mode)
    assert apply(driver, 0, batch) == 1
    (letter,) = read(driver)
    assert letter.row == {"id": -1, "note": "a\\xffb"}
    [(kept,)] = pg_truth.execute(f"SELECT row_arrow FROM {pg_schema}.dead_letter")  # noqa: S608 - a name that the test made
    assert next(decode_rows([kept])).column("note").cast(pa.binary()).to_pylist() == [b"a\xffb"]
    assert letters_of(driver).retry(ALL).kept == 1


VALUES: dict[str, tuple[str, pa.Array, list[str]]] = {
    "a text in a domain over jsonb": ("{schema}.docs", pa.array(['"123"', "[1.0]"]), ['"123"', "[1.0]"]),
    "zero below zero": ("double precision", pa.array([-0.0, 0.1 + 0.2]), ["-0", "0.30000000000000004"]),
    "a number longer than a double": (
        "numeric",
        pa.array([None, None]),
        ["12345678901234567.0123456789", "-0.0000000001"],
    ),
    "an interval of hours": ("interval", pa.array(["25:00:00", "1 day 01:00:00"]), ["25:00:00", "1 day 01:00:00"]),
    "a date and a time with a zone": (
        "timestamptz",
        pa.array([1, 10**17], pa.int64()).cast(pa.timestamp("us", "GMT+8")),
        ["1970-01-01 00:00:00.000001+00", "5138-11-16 09:46:40+00"],
    ),
    "text that JSON escapes": ("text", pa.array(['\\x41 "\u2028', "\ufffd"]), ['\\x41 "\u2028', "\ufffd"]),
}


@pytest.mark.parametrize("case", VALUES)
def test_a_retry_writes_the_values_that_the_stream_would_have_written(
    case: str, pg_driver: MakeDriver, pg_schema: str, pg_truth: Truth
) -> None:
    kind, values, wanted = VALUES[case]
    if kind == "numeric":
        from decimal import Decimal  # noqa: PLC0415

        values = pa.array([Decimal(text) for text in wanted], pa.decimal128(38, 10))
        wanted = ["12345678901234567.0123456789", "-0.0000000001"]
    pg_truth.execute(f"CREATE DOMAIN {pg_schema}.docs AS jsonb")
    table = f"{pg_schema}.t"
    column = kind.format(schema=pg_schema)
    pg_truth.execute(f"CREATE TABLE {table} (id bigint CONSTRAINT rule CHECK (id > 0), v {column})")
    batch = pa.record_batch({"id": pa.array([-1, -2]), "v": values})
    narrow = {"options": {"options": "-c extra_float_digits=0 -c TimeZone=America/New_York -c IntervalStyle=iso_8601"}}
    driver = pg_driver(table, batch, **ASIDE, **narrow)
    assert apply(driver, 0, batch) == 2
    pg_truth.execute(f"ALTER TABLE {table} DROP CONSTRAINT rule")
    assert letters_of(driver).retry(ALL) == Retried(written=2)
    pg_truth.execute("SET TimeZone = 'UTC'")
    assert pg_truth.execute(f"SELECT v::text FROM {table} ORDER BY id DESC") == [(text,) for text in wanted]  # noqa: S608


def test_a_decimal_is_listed_with_all_its_digits(pg_driver: MakeDriver, pg_schema: str, pg_truth: Truth) -> None:
    from decimal import Decimal  # noqa: PLC0415

    table = f"{pg_schema}.t"
    pg_truth.execute(f"CREATE TABLE {table} (id bigint CHECK (id > 0), v numeric)")
    number = Decimal("12345678901234567.0123456789")
    batch = pa.record_batch({"id": pa.array([-1]), "v": pa.array([number], pa.decimal128(38, 10))})
    driver = pg_driver(table, batch, **ASIDE)
    assert apply(driver, 0, batch) == 1
    assert json.dumps(read(driver)[0].row) == '{"v": "12345678901234567.0123456789", "id": -1}'


def test_order_by_decides_between_two_letters_of_one_key_and_epoch(
    pg_driver: MakeDriver, pg_schema: str, pg_truth: Truth
) -> None:
    """The letters have its values, so the newest row wins, as in the stream."""
    table = f"{pg_schema}.t"
    pg_truth.execute(f"CREATE TABLE {table} (id bigint PRIMARY KEY, note uuid)")
    batch = ranked(rows((1, "new"), (1, "old")), pa.array([2, 1]))
    driver = pg_driver(table, ranked(rows((1, str(uuid.uuid4()))), pa.array([1])), key="id", order_by="x", **ASIDE)
    assert apply(driver, 0, batch) == 2
    pg_truth.execute(f"ALTER TABLE {table} ALTER note TYPE text")
    assert letters_of(driver).retry(ALL) == Retried(written=1, superseded=1)
    assert pg_truth.rows(table) == [(1, "new")]


@pytest.mark.parametrize("first", ["m", "p"])
def test_of_two_letters_of_one_key_and_epoch_newer_wins_writes_the_newer_one(
    first: str, pg_driver: MakeDriver, pg_schema: str, pg_truth: Truth
) -> None:
    driver = refusing(pg_driver, pg_schema, pg_truth, "id > 0", key="id", newer_wins="note")
    second = {"m": "p", "p": "m"}[first]
    assert apply(driver, 0, rows((-1, first), (-1, second), (1, "a"))) in {1, 2}
    correct(pg_schema, pg_truth)
    done = letters_of(driver).retry(ALL)
    assert (done.written, done.kept) == (1, 0)
    assert pg_truth.rows(f"{pg_schema}.t") == [(-1, "p"), (1, "a")]


def test_a_row_that_newer_wins_leaves_out_is_not_counted_as_written(
    pg_driver: MakeDriver, pg_schema: str, pg_truth: Truth
) -> None:
    driver = refusing(pg_driver, pg_schema, pg_truth, "note <> 'm'", key="id", newer_wins="note")
    assert apply(driver, 0, rows((1, "m"), (2, "m"), (3, "m"))) == 3
    assert apply(driver, 1, rows((1, "z"), (2, "a"))) == 0
    correct(pg_schema, pg_truth)
    assert letters_of(driver).retry(ALL) == Retried(written=2, superseded=1)
    assert pg_truth.rows(f"{pg_schema}.t") == [(1, "z"), (2, "m"), (3, "m")]


@pytest.mark.parametrize("mode", MODES)
def test_a_trigger_that_swallows_letters_stops_the_query(
    mode: dict[str, Any], pg_driver: MakeDriver, pg_schema: str, pg_truth: Truth
) -> None:
    driver = refusing(pg_driver, pg_schema, pg_truth, **mode)
    pg_truth.execute(
        f"CREATE FUNCTION {pg_schema}.swallow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$"
    )
    pg_truth.execute(
        f"CREATE TRIGGER swallow BEFORE INSERT ON {pg_schema}.dead_letter "
        f"FOR EACH ROW EXECUTE FUNCTION {pg_schema}.swallow()"
    )
    with pytest.raises(PrepareFailed, match="took 0 of 1 rows"):
        driver.prepare(0, rows((1, "a"), (-1, "b")))
    assert pg_truth.count(f"{pg_schema}.t") == 0


@pytest.mark.parametrize("doing", ["retry", "drop"])
def test_a_trigger_that_keeps_letters_stops_a_retry_and_a_drop(
    doing: str, pg_driver: MakeDriver, pg_schema: str, pg_truth: Truth
) -> None:
    driver = refusing(pg_driver, pg_schema, pg_truth)
    assert apply(driver, 0, rows((1, "a"), (-1, "b"), (-2, "c"))) == 2
    correct(pg_schema, pg_truth)
    pg_truth.execute(
        f"CREATE FUNCTION {pg_schema}.keep() RETURNS trigger LANGUAGE plpgsql AS "
        """$$ BEGIN IF OLD."row" ->> 'id' = '-2' THEN RETURN NULL; END IF; RETURN OLD; END $$"""
    )
    pg_truth.execute(
        f"CREATE TRIGGER keep BEFORE DELETE ON {pg_schema}.dead_letter FOR EACH ROW EXECUTE FUNCTION {pg_schema}.keep()"
    )
    with pytest.raises(PrepareFailed, match=r"keeps 1 dead letters .* nothing was changed"):
        getattr(letters_of(driver), doing)(ALL)
    assert letters_of(driver).count(ALL) == 2
    assert pg_truth.rows(f"{pg_schema}.t") == [(1, "a")]


@pytest.mark.parametrize("mode", MODES)
def test_a_trigger_that_swallows_the_marker_stops_the_query(
    mode: dict[str, Any], pg_driver: MakeDriver, pg_schema: str, pg_truth: Truth
) -> None:
    driver = refusing(pg_driver, pg_schema, pg_truth, **mode)
    assert apply(driver, 0, rows((1, "a"))) == 0
    pg_truth.execute(
        f"CREATE FUNCTION {pg_schema}.swallow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$"
    )
    pg_truth.execute(
        f"CREATE TRIGGER swallow BEFORE INSERT ON {pg_schema}.marker "
        f"FOR EACH ROW EXECUTE FUNCTION {pg_schema}.swallow()"
    )
    with pytest.raises(PrepareFailed, match="took 0 rows of 1"):
        apply(driver, 1, rows((2, "b")))
    with pytest.raises(PrepareFailed, match="took 0 rows of 1"):
        driver.committer.join()
    assert pg_truth.rows(f"{pg_schema}.t") == [(1, "a")]


@pytest.mark.parametrize("mode", MODES)
def test_as_many_letters_as_the_limit_says_are_kept(
    mode: dict[str, Any], pg_driver: MakeDriver, pg_schema: str, pg_truth: Truth
) -> None:
    """0.29 * 100 is less than 29 in floats."""
    driver = refusing(pg_driver, pg_schema, pg_truth, "note = 'a'", letters_limit=0.29, **mode)
    given = [(number, "b" if number <= 29 else "a") for number in range(1, 101)]
    assert apply(driver, 0, rows(*given)) == 29
    with pytest.raises(RowsRejected, match="refuses 30 of 100 rows"):
        driver.prepare(1, rows(*((number + 100, "b" if number <= 30 else "a") for number in range(1, 101))))


@contextmanager
def database(postgres: PostgresService, truth: Truth, encoding: str) -> Iterator[str]:
    """Make a database of another encoding; yield its dsn."""
    name = f"of_{uuid.uuid4().hex[:10]}"
    truth.execute(f"CREATE DATABASE {name} ENCODING '{encoding}' TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'")
    try:
        yield psycopg.conninfo.make_conninfo(postgres.dsn, dbname=name)
    finally:
        truth.execute(f"DROP DATABASE {name} WITH (FORCE)")


def test_a_letter_fits_into_a_database_of_another_encoding(
    postgres: PostgresService, pg_driver: MakeDriver, pg_truth: Truth
) -> None:
    """A character that the database lacks is why the row is refused, and must not refuse the letter too."""
    with database(postgres, pg_truth, "LATIN1") as dsn, closing(Truth(dsn)) as truth:
        truth.execute("CREATE SCHEMA epochsink; CREATE TABLE t (id bigint, note text)")
        driver = pg_driver("t", rows((1, "a")), dsn=dsn, marker_schema="epochsink", **ASIDE)
        assert apply(driver, 0, rows((1, "a"), (2, "\u20ac"))) == 1
        (letter,) = read(driver)
        assert (letter.code, letter.row) == ("22P05", {"id": 2, "note": "\\u20ac"})
        assert letters_of(driver).retry(ALL).kept == 1
        truth.execute("ALTER TABLE t ALTER note TYPE bytea USING note::bytea")
        assert letters_of(driver).count(ALL) == 1
        driver.close()


class Counting:
    """Counts the statements of all sessions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.statements: list[str] = []
        execute = psycopg.Cursor.execute

        def counted(cursor: psycopg.Cursor[Any], query: Any, *given: Any, **options: Any) -> Any:
            self.statements.append(query if isinstance(query, str) else query.as_string(cursor.connection))
            return execute(cursor, query, *given, **options)

        monkeypatch.setattr(psycopg.Cursor, "execute", counted)


@pytest.mark.parametrize("options", [{}, {"key": "id"}], ids=["append", "upsert"])
def test_an_epoch_without_refused_rows_costs_no_statement_more(
    options: dict[str, Any], pg_driver: MakeDriver, pg_schema: str, pg_truth: Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none of them looks at the table of letters."""
    pg_truth.execute(f"CREATE TABLE {pg_schema}.t (id bigint PRIMARY KEY, note text)")
    counts = []
    for number, aside in enumerate([{}, ASIDE]):
        driver = pg_driver(f"{pg_schema}.t", rows((1, "a")), commit="prepared", **aside, **options)
        apply(driver, 0, rows((10 * number, "a")))
        with monkeypatch.context() as patched:
            counting = Counting(patched)
            assert apply(driver, 1, rows((10 * number + 1, "a"), (10 * number + 2, "b"))) == 0
        assert not any("dead_letter" in each for each in counting.statements)
        counts.append(len(counting.statements))
    assert counts[0] == counts[1]


def test_letters_of_an_attempt_are_found_by_an_index(pg_driver: MakeDriver, pg_schema: str, pg_truth: Truth) -> None:
    driver = refusing(pg_driver, pg_schema, pg_truth)
    apply(driver, 0, rows((-1, "a")))
    [(definition,)] = pg_truth.execute(
        "SELECT pg_get_indexdef(indexrelid) FROM pg_index WHERE indrelid = %s::regclass AND NOT indisprimary",
        f"{pg_schema}.dead_letter",
    )
    assert "(key, epoch, attempt)" in definition


def test_a_letter_that_is_refused_again_keeps_its_row(pg_driver: MakeDriver, pg_schema: str, pg_truth: Truth) -> None:
    """However often it is retried; the reason is the newest one."""
    driver = refusing(pg_driver, pg_schema, pg_truth)
    assert apply(driver, 0, rows((-1, "z\x00"), (1, "a"))) == 1
    for _ in range(2):
        assert letters_of(driver).retry(ALL).kept == 1
    (letter,) = read(driver)
    assert (letter.code, letter.row) == ("22021", {"id": -1, "note": "z\\x00"})


@pytest.mark.parametrize("mode", MODES)
def test_a_nul_beside_what_a_row_is_first_refused_for_stays_in_its_letter(
    mode: dict[str, Any], pg_driver: MakeDriver, pg_schema: str, pg_truth: Truth
) -> None:
    """The first reason may be mended. Then the NUL is the reason, and is not lost on the way."""
    table = f"{pg_schema}.t"
    pg_truth.execute(f"CREATE TABLE {table} (short varchar(3), note text)")
    batch = pa.record_batch({"short": ["ok", "too long"], "note": ["a", "z\x00"]})
    driver = pg_driver(table, batch, **ASIDE, **mode)
    assert apply(driver, 0, batch) == 1
    assert read(driver)[0].code == "22001"
    pg_truth.execute(f"ALTER TABLE {table} ALTER short TYPE text")
    assert letters_of(driver).retry(ALL).kept == 1
    (letter,) = read(driver)
    assert (letter.code, letter.row) == ("22021", {"short": "too long", "note": "z\\x00"})
    [(kept,)] = pg_truth.execute(f"SELECT row_arrow FROM {pg_schema}.dead_letter")  # noqa: S608 - a name that the test made
    assert next(decode_rows([kept])).column("note").to_pylist() == ["z\x00"]
    assert pg_truth.rows(table) == [("ok", "a")]


def test_letters_of_a_session_zone_that_python_does_not_know_are_kept(
    pg_driver: MakeDriver, pg_schema: str, pg_truth: Truth
) -> None:
    table = f"{pg_schema}.t"
    pg_truth.execute(f"CREATE TABLE {table} (id bigint CONSTRAINT rule CHECK (id > 0), t timestamptz(0))")
    at = pa.array([1_500_000, 2_000_000], pa.int64()).cast(pa.timestamp("us", "GMT+8"))
    batch = pa.record_batch({"id": pa.array([1, -2]), "t": at})
    driver = pg_driver(table, batch, **ASIDE)
    assert apply(driver, 0, batch) == 2
    pg_truth.execute(f"ALTER TABLE {table} DROP CONSTRAINT rule")
    assert letters_of(driver).retry(Chosen()).written == 1
    assert pg_truth.execute(f"SELECT id, extract(epoch FROM t)::int FROM {table}") == [(-2, 2)]  # noqa: S608
