"""Values and SQL mean the same in every session, whatever a role, a database or ``options=`` has set."""

from __future__ import annotations

import uuid
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pytest
import value_cases
from fix_postgres import Driver, as_user, row_schema
from value_cases import CASES

from epochsink.postgres import Postgres
from epochsink.postgres.server import PINNED, Server

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fix_postgres import Truth

    from epochsink_devkit.services import PostgresService

SETTINGS: Final = {
    "DateStyle": "German, DMY",
    "IntervalStyle": "sql_standard",
    "TimeZone": "America/New_York",
    "array_nulls": "off",
    "bytea_output": "escape",
    "default_transaction_isolation": "serializable",
    "default_transaction_read_only": "on",
    "exit_on_error": "on",
    "extra_float_digits": "-15",
    "quote_all_identifiers": "on",
    "standard_conforming_strings": "off",
    "timezone_abbreviations": "India",
    "transform_null_equals": "on",
    "xmloption": "document",
}
"""Another value of each setting that is pinned."""
HARMLESS: Final = {
    "search_path": "set by each statement of ours; the user's for the target's triggers",
    "client_encoding": "given when the connection is opened, which takes precedence",
    "lock_timeout": "set to timeout=",
    "session_replication_role": "only a superuser can set it, to leave triggers out",
    "row_security": "off refuses what a policy would filter",
    "statement_timeout, idle_in_transaction_session_timeout, transaction_timeout, idle_session_timeout": "end a "
    "statement or a session, which is an error",
    "default_transaction_deferrable, transaction_deferrable, transaction_isolation, transaction_read_only": "of the "
    "transaction under way, or only of those that are serializable and read",
    "lc_messages, client_min_messages, escape_string_warning": "of messages",
    "lc_monetary, lc_numeric, lc_time, default_text_search_config, xmlbinary": "of functions that we do not call",
    "icu_validation_level, check_function_bodies, event_triggers, createrole_self_grant, restrict_nonsystem_relation_"
    "kind, default_table_access_method, default_tablespace, default_toast_compression, temp_tablespaces": "of DDL, and "
    "where tables are stored",
    "gin_fuzzy_search_limit, gin_pending_list_limit, synchronize_seqscans": "of how rows are found",
    "backslash_quote, lo_compat_privileges": "of what we do not write",
    "vacuum_freeze_min_age, vacuum_freeze_table_age, vacuum_failsafe_age, vacuum_multixact_freeze_min_age, vacuum_"
    "multixact_freeze_table_age, vacuum_multixact_failsafe_age": "of VACUUM; of these categories before PostgreSQL 18",
    "dynamic_library_path, extension_control_path, local_preload_libraries, session_preload_libraries": "of libraries",
}
"""Settings of the same categories that change no value, each with the reason."""
CATEGORIES: Final = ("Client Connection Defaults%", "Version and Platform Compatibility%", "Error Handling%")
TEXTS: Final = {
    "between": ("daterange", "[01/02/2026,03/04/2026)", "[2026-01-02,2026-03-04)"),
    "lasted": ("interval", "-1 2:03:04", "-1 days +02:03:04"),
    "known": ("text[]", "{a,NULL}", "a|?"),
    "since": ("tstzrange", "[2026-01-02 03:00 IST,)", '["2026-01-02 01:00:00+00",)'),
    "note": ("xml", "a<b/>c", "a<b/>c"),
    "document": ("jsonb", '{"a": [1.10]}', '{"a": [1.10]}'),
}
"""A column's type, a value as text, and the same as a server with its own defaults shows it."""
ACCUMULATE: Final = {
    "total": "stored::text::double precision + new",
    "trail": r"stored || '\n' || new || '\x61'::bytea::text",
    "last": "CASE WHEN new = NULL THEN stored ELSE new END",
}
NOON: Final = 12 * 3600 * 1_000_000


def batch(last: str | None = None) -> pa.RecordBatch:
    """Return three rows, of the same keys each time: the values of every type, and NULL."""
    return pa.record_batch(
        {
            "id": pa.array([1, 2, 3], pa.int64()),
            "at": pa.array([NOON] * 3, pa.timestamp("us", "UTC")),
            **{name: pa.array([text] * 3, pa.string()) for name, (_, text, _) in TEXTS.items()},
            "total": pa.array([1 / 3] * 3, pa.float64()),
            "trail": pa.array(["a"] * 3, pa.string()),
            "last": pa.array([last] * 3, pa.string()),
            **value_cases.columns(CASES),
        }
    )


@pytest.fixture
def table(pg_schema: str, pg_truth: Truth) -> Iterator[str]:
    """Make a table for the row; the schema of its markers, with `_m` at the end, is made by the sink itself."""
    name = f"{pg_schema}.settings"
    columns = ", ".join(f"{column} {kind}" for column, (kind, _, _) in TEXTS.items())
    others = "total double precision, trail text, last text"
    values = value_cases.definitions(CASES)
    pg_truth.execute(f"CREATE TABLE {name} (id bigint PRIMARY KEY, at timestamp, {columns}, {others}, {values})")
    yield name
    pg_truth.execute(f'DROP SCHEMA IF EXISTS "{pg_schema}_m" CASCADE')


def take_two_epochs(dsn: str, table: str, **options: Any) -> None:
    """Start a query in an empty database and take two epochs through all their steps."""
    sink = Postgres(
        dsn, table=table, key="id", accumulate=ACCUMULATE, marker_schema=f"{table.partition('.')[0]}_m", **options
    )
    driver = Driver(sink)
    with closing(driver):
        assert driver.committer.check(row_schema(batch())) == []
        driver.committer.join()
        driver.run(0, batch("x"))
        driver.run(1, batch())
        driver.committer.abort_orphans([])


def expect_values(truth: Truth, table: str) -> None:
    """Compare the rows with what a session with the server's own defaults would have stored."""
    columns = ", ".join("array_to_string(known, '|', '?')" if name == "known" else f"{name}::text" for name in TEXTS)
    truth.execute("SET TimeZone = 'UTC'")
    rows = truth.execute(f"SELECT at::text, total, trail, last, {columns} FROM {table}")  # noqa: S608 - made here
    row = ("1970-01-01 12:00:00", 2 / 3, r"a\na\x61", None, *(stored for _, _, stored in TEXTS.values()))
    assert rows == [row] * 3
    values = truth.execute(f"SELECT {value_cases.shown(CASES)} FROM {table} ORDER BY id")  # noqa: S608 - made here
    assert values == value_cases.stored(CASES)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_of_the_session_changes_no_value(
    name: str, table: str, postgres: PostgresService, pg_truth: Truth
) -> None:
    """With one setting that a user may have given by options=."""
    value = SETTINGS[name].replace(" ", r"\ ")
    take_two_epochs(postgres.dsn, table, options={"options": f"-c {name}={value}"})
    expect_values(pg_truth, table)


@pytest.fixture
def role(postgres: PostgresService, pg_truth: Truth) -> Iterator[str]:
    """Make a role with all of the settings, which a user does not see in the code; return its dsn."""
    name = f"r_{uuid.uuid4().hex[:10]}"
    pg_truth.execute(f"CREATE ROLE {name} LOGIN SUPERUSER PASSWORD 'x'")
    for setting, value in SETTINGS.items():
        pg_truth.execute(f"ALTER ROLE {name} SET {setting} = '{value}'")
    yield as_user(postgres.dsn, name, "x")
    pg_truth.execute(f"DROP OWNED BY {name} CASCADE; DROP ROLE {name}")


@pytest.mark.parametrize("options", [{"commit": "staged"}, {"atomic": False}], ids=str)
def test_all_settings_of_a_role_together_change_no_value(
    options: dict[str, Any], table: str, role: str, pg_truth: Truth
) -> None:
    """In the ways in which the driver merges staged rows, and tasks stage them."""
    take_two_epochs(role, table, **options)
    expect_values(pg_truth, table)


def test_a_refused_row_becomes_a_letter_with_all_settings_of_a_role(role: str, pg_schema: str, pg_truth: Truth) -> None:
    """Also if any error ends the role's sessions."""
    table = f"{pg_schema}.short"
    pg_truth.execute(f"CREATE TABLE {table} (id bigint, note varchar(3))")
    rows = pa.record_batch({"id": pa.array([1, 2], pa.int64()), "note": pa.array(["kept", "all"], pa.string())})
    sink = Postgres(role, table=table, marker_schema=pg_schema, on_rejected="dead_letter")
    with closing(Driver(sink)) as driver:
        assert driver.committer.check(row_schema(rows)) == []
        driver.run(0, rows)
    assert pg_truth.rows(table) == [(2, "all")]
    assert pg_truth.count(f"{pg_schema}.dead_letter") == 1


def test_each_setting_of_the_server_is_pinned_or_known_to_be_harmless(pg_truth: Truth) -> None:
    """A newer server's settings are looked at before it is supported."""
    found = pg_truth.execute(
        "SELECT name FROM pg_settings WHERE context IN ('user', 'superuser') AND category LIKE ANY (%s)",
        list(CATEGORIES),
    )
    harmless = {name for names in HARMLESS for name in names.split(", ")}
    assert {name for (name,) in found} <= harmless | PINNED.keys()
    assert not harmless & PINNED.keys()
    assert SETTINGS.keys() == PINNED.keys()


def test_what_is_pinned_is_what_a_server_has_by_default(postgres: PostgresService, pg_truth: Truth) -> None:
    """So the sink changes nothing for whoever has set nothing. Time zones have no common default."""
    with closing(Server.of(Postgres(postgres.dsn, table="t")).connect("epochsink")) as connection:
        pinned = dict(
            connection.execute(
                "SELECT name, setting FROM pg_catalog.pg_settings WHERE name = ANY (%s)", [list(PINNED)]
            ).fetchall()
        )
    defaults = dict(pg_truth.execute("SELECT name, boot_val FROM pg_settings WHERE name = ANY (%s)", list(PINNED)))
    assert {**defaults, "TimeZone": "UTC", "timezone_abbreviations": "Default"} == pinned
