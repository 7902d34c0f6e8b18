"""What Postgres() accepts, refuses, hides and hands to Spark, all without a server."""

from __future__ import annotations

import pickle
from typing import Any

import pyarrow as pa
import pytest

from epochsink.errors import ConfigurationError
from epochsink.postgres import Postgres
from epochsink.postgres.committable import Relation
from epochsink.postgres.row_mapping import writer_schema
from epochsink.postgres.server import Server
from epochsink.sink import json_text

LOCAL = "postgresql://app@127.0.0.1/shop"
SECRET = "c4nary-p%40ss"
ROW = pa.schema(
    [
        ("id", pa.int64()),
        ("odd`name", pa.string()),
        ("tags", pa.list_(pa.string())),
        ("lines", pa.list_(pa.struct([("n", pa.int32())]))),
        ("who", pa.struct([("n", pa.string())])),
        ("extra", pa.map_(pa.string(), pa.string())),
    ]
)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"table": "a.b.c"}, "3 parts"),
        ({"table": ""}, "not a valid name"),
        ({"table": ("s", "x\x00y")}, "not a valid name"),
        ({"table": "t" * 64}, "64 bytes"),
        ({"table": "t", "key": "é" * 32}, "64 bytes"),
        ({"table": "t", "marker_schema": ""}, "marker_schema="),
        ({"table": "t", "commit": "later"}, "commit='later'"),
        ({"table": "t", "atomic": False, "commit": "staged"}, "atomic=False with commit='staged'"),
        ({"table": "t", "order_by": "v"}, "order_by= is given without key="),
        ({"table": "t", "delete_when": "gone"}, "delete_when= is given without key="),
        ({"table": "t", "newer_wins": "at"}, "newer_wins= is given without key="),
        ({"table": "t", "skip_unchanged": True}, "skip_unchanged= is given without key="),
        ({"table": "t", "accumulate": {"n": "sum"}}, "accumulate= is given without key="),
        ({"table": "t", "key": "id", "newer_wins": ["at"]}, "newer_wins=: ['at'] is not a valid name"),
        ({"table": "t", "key": "id", "newer_wins": "id"}, "newer_wins= names 'id', a column of the key"),
        ({"table": "t", "key": "id", "accumulate": "n"}, "accumulate='n'"),
        ({"table": "t", "key": "id", "accumulate": {"id": "max"}}, "accumulate= names 'id', a column of the key"),
        ({"table": "t", "key": "id", "accumulate": {"n": "avg"}}, "accumulate={'n': 'avg'}"),
        ({"table": "t", "key": "id", "accumulate": {"n": ""}}, "accumulate={'n': ''}"),
        ({"table": "t", "key": "id", "accumulate": {"n": 5}}, "accumulate={'n': 5}"),
        ({"table": "t", "key": "id", "accumulate": {"n": "new"}}, "over stored, the stored value"),
        ({"table": "t", "key": "id", "accumulate": {"n": "stored\x00"}}, "accumulate={'n': 'stored"),
        ({"table": "t", "key": "id", "accumulate": {"n": "sum"}, "delete_when": "gone"}, "with delete_when="),
        ({"table": "t", "key": "id", "accumulate": {"n": "stored"}, "delete_when": "gone"}, "with delete_when="),
        ({"table": "t", "key": "id", "accumulate": {"n": "stored"}, "newer_wins": "at"}, "with newer_wins='at'"),
        (
            {"table": "t", "key": "id", "on_rejected": "dead_letter", "accumulate": {"n": "stored"}},
            "'dead_letter' with accumulate=",
        ),
        ({"table": "t", "key": "id", "accumulate": {"n": "sum"}, "newer_wins": "at"}, "with newer_wins='at'"),
        ({"table": "t", "on_rejected": "skip"}, "invalid on_rejected='skip'"),
        ({"table": "t", "on_rejected": "dead_letter", "atomic": False}, "'dead_letter' with atomic=False"),
        ({"table": "t", "spool": False}, "spool=False with atomic=True"),
        (
            {"table": "t", "key": "id", "on_rejected": "dead_letter", "accumulate": {"n": "sum"}},
            "'dead_letter' with accumulate=",
        ),
        ({"table": "t", "letters_limit": 0.1}, "letters_limit=0.1 without on_rejected"),
        ({"table": "t", "on_rejected": "dead_letter", "letters_limit": 2}, "a number from 0 to 1"),
        ({"table": "t", "skip_unchanged": 1}, "skip_unchanged=1"),
        ({"table": "t", "add_columns": "yes"}, "add_columns='yes'"),
        ({"table": "t", "timeout": 0}, "timeout=0"),
        ({"table": "t", "options": {"sslmod": "require"}}, "did you mean 'sslmode'?"),
        ({"table": "t", "options": {"application_name": "me"}}, "epochsink sets it itself"),
        ({"table": "t", "options": "-c statement_timeout=0"}, "expected a dict"),
        ({"table": "t", "password": SECRET}, "options={'password': ...}"),
        ({"table": "t", "lock_timeout": 3}, "did you mean timeout=?"),
        ({"table": "t", "keys": ["id"]}, "did you mean key=?"),
        ({"table": "t", "selct": "*"}, "did you mean select=?"),
        ({"table": None}, "invalid table=None"),
        ({"table": []}, "table=[] is empty"),
        ({"table": 5}, "table=5"),
        ({"table": "t", "key": 5}, "key=5"),
        ({"table": "t", "key": [1]}, "key=[1]"),
        ({"table": "t", "select": []}, "select=[] is empty"),
        ({"table": "t", "where": ["a"]}, "where=['a']"),
        ({"table": "t", "atomic": "no"}, "atomic='no'"),
        ({"table": "t", "create": "yes"}, "create='yes'"),
        ({"table": "t", "allow_insecure": 1}, "allow_insecure=1"),
    ],
)
def test_a_senseless_option_is_refused_with_its_value_and_a_way_out(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Postgres(LOCAL, **options)
    assert says in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("table", "quoted"),
    [
        ("orders", '"orders"'),
        ("Sales.Orders 2024", '"Sales"."Orders 2024"'),
        (("my.schema", "my.table"), '"my.schema"."my.table"'),
        ('x"; drop table y;--', '"x""; drop table y;--"'),
        ("t" * 63, '"' + "t" * 63 + '"'),
    ],
)
def test_table_names_are_literal_and_always_quoted(table: str | tuple[str, ...], quoted: str) -> None:
    assert str(Relation.of(Postgres(LOCAL, table=table).table)) == quoted


@pytest.mark.parametrize(
    "dsn",
    [
        f"postgresql://app:{SECRET}@127.0.0.1/shop",
        f"host=127.0.0.1 password={SECRET}",
        "host=127.0.0.1",
    ],
)
def test_the_text_form_masks_secrets(dsn: str) -> None:
    """Also those given by name, and those of TLS keys."""
    password: dict[str, Any] = {} if "4nary" in dsn else {"password": SECRET}
    sink = Postgres(dsn, table="t", options={"sslpassword": SECRET, **password})
    server = Server.of(sink)
    for text in (repr(sink), str(sink), repr(sink.dsn), repr(server), f"{server}", server.database):
        assert SECRET not in text
        assert "c4nary" not in text
    assert "password=***" in repr(sink)
    assert "127.0.0.1" in repr(sink)


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://app:{}#@[::1/shop",
        "postgresql://app:p/{}@127.0.0.1:5432/shop",
        "postgresql://app:{}/p@127.0.0.1:5432/shop",
        "postgresql://app:12/{}@127.0.0.1:5432/shop",
        "postgresql://app:p@{}@127.0.0.1:5432/shop",
        "postgresql://app:p@{}/x@127.0.0.1:5432/shop",
        "postgresql://app:p/a?{}@127.0.0.1:5432/shop",
        "host=127.0.0.1 port={} dbname=shop",
        "host=127.0.0.1 password=p {}",
    ],
)
def test_a_dsn_that_cannot_be_parsed_or_is_misread_is_not_quoted(dsn: str) -> None:
    """A part of a password that is not percent-encoded is taken for the host, the port or the database."""
    with pytest.raises(ConfigurationError, match="percent-encode") as caught:
        Postgres(dsn.format(SECRET), table="t")
    assert "c4nary" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://app:p%2F%40@127.0.0.1:5432/shop?user=me@server",
        "postgresql://app:p#s?s@127.0.0.1,[::1]:5433/shop",
        "postgresql://%2Fvar%2Frun/shop%40home",
        "host=/var/run,@abstract port=5432,5433 dbname=a@b",
    ],
)
def test_a_dsn_that_libpq_reads_as_meant_is_taken(dsn: str) -> None:
    Postgres(dsn, table="t", allow_insecure=True)


@pytest.mark.parametrize("where", ["host=db.example.org", "postgresql://10.1.2.3/x", "host=localhost,db.example.org"])
def test_another_host_needs_an_explicit_sslmode(where: str) -> None:
    with pytest.raises(ConfigurationError, match="no sslmode is given"):
        Postgres(where, table="t", options={"password": SECRET})
    Postgres(where, table="t", options={"password": SECRET, "sslmode": "verify-full"})
    Postgres(where, table="t", options={"password": SECRET}, allow_insecure=True)


@pytest.mark.parametrize("where", ["", "host=/run/postgresql", "host=localhost", "host=127.1.2.3", "hostaddr=::1"])
def test_this_machine_needs_none(where: str) -> None:
    Postgres(where, table="t", options={"password": SECRET})


def test_it_crosses_to_executors() -> None:
    sink = Postgres(LOCAL, table="t", key=["a", "b"], order_by="v", delete_when="gone", options={"password": SECRET})
    copied = pickle.loads(pickle.dumps(sink))  # noqa: S301 - made one line above
    assert (copied, hash(copied)) == (sink, hash(sink))
    assert copied != Postgres(LOCAL, table="t", key=["a", "b"])


def test_options_cannot_be_changed_afterwards() -> None:
    with pytest.raises(AttributeError):
        Postgres(LOCAL, table="t").table = ("u",)  # type: ignore[misc]


def test_columns_quote_names_and_turn_structs_and_maps_into_json() -> None:
    columns = Postgres(LOCAL, table="t").columns("r", ROW)
    assert columns[:3] == ["r['id'] AS `id`", "r['odd`name'] AS `odd``name`", "r['tags'] AS `tags`"]
    for name, column in zip(("lines", "who", "extra"), columns[3:], strict=True):
        assert json_text(f"r['{name}']") in column
        assert column.endswith(f" AS `{name}`")


def test_a_delete_that_is_null_is_none() -> None:
    sink = Postgres(LOCAL, table="t", key="id", delete_when="op = 'd'")
    assert sink.columns("r", pa.schema([("id", pa.int64())])) == [
        "r['id'] AS `id`",
        "coalesce((op = 'd'\n), false) AS `epochsink_delete`",
    ]


def test_what_decides_between_rows_of_a_key_is_computed_by_spark() -> None:
    """A column of the row by its name, anything else over the stream; a string is one expression."""
    row = pa.schema([("id", pa.int64()), ("at", pa.int64())])
    for order_by, made in (("at", ["r['at']"]), (["at", "length(x)"], ["r['at']", "(length(x)\n)"])):
        sink = Postgres(LOCAL, table="t", key="id", order_by=order_by)
        ranks = [f"{rank} AS `epochsink_order_{place}`" for place, rank in enumerate(made)]
        assert sink.columns("r", row) == ["r['id'] AS `id`", "r['at'] AS `at`", *ranks]


def test_a_string_and_a_list_of_one_mean_the_same() -> None:
    one = Postgres(LOCAL, table="t", key="id", select="order_id", order_by="at")
    assert one == Postgres(LOCAL, table=("t",), key=["id"], select=["order_id"], order_by=["at"])
    assert one.select == ("order_id",)


def test_the_writers_schema_is_what_the_columns_make() -> None:
    made = writer_schema(ROW, deletes=True)
    assert made.names == [*ROW.names, "epochsink_delete"]
    assert [made.field(name).type for name in ("tags", "lines", "who")] == [
        pa.list_(pa.string()),
        pa.string(),
        pa.string(),
    ]


def test_a_column_named_as_one_of_ours_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="epochsink_task"):
        Postgres(LOCAL, table="t").columns("r", pa.schema([("epochsink_task", pa.int64())]))


@pytest.mark.parametrize(
    ("select", "spread"),
    [
        ("*", ("`id`", "`tenant`")),
        (["order_id AS id", "*"], ("order_id", "`tenant`")),
        (["upper(x as string) as `id`", "t  As  tenant"], ("upper(x as string)", "t ")),
    ],
)
def test_tasks_that_merge_on_their_own_never_share_a_key(select: Any, spread: tuple[str, ...]) -> None:
    """Rows are spread by the expressions that make the key, wherever the row takes them from."""
    sink = Postgres(LOCAL, table="t", key=["id", "tenant"], atomic=False, select=select)
    assert [expression.strip() for expression in sink.distribute_by] == [one.strip() for one in spread]
    assert Postgres(LOCAL, table="t", key=["id", "tenant"], select=select).distribute_by == ()


@pytest.mark.parametrize("select", [["upper(id) id"], ["id other", "x"], ["concat(a, b) `id`", "a"]])
def test_a_key_that_select_does_not_name_with_as_is_refused_where_tasks_must_not_share_it(select: list[str]) -> None:
    """Spread by the stream's own column of that name, two tasks would write one row."""
    with pytest.raises(ConfigurationError, match=r"AS id"):
        Postgres(LOCAL, table="t", key="id", atomic=False, select=select)
    assert Postgres(LOCAL, table="t", key="id", select=select).distribute_by == ()


@pytest.mark.parametrize(
    ("options", "limit", "mode"),
    [
        ({}, 64, "prepared"),
        ({}, 0, "staged"),
        ({"atomic": False}, 0, "prepared"),
        ({"commit": "staged"}, 64, "staged"),
        ({"commit": "prepared"}, 0, "prepared"),
    ],
)
def test_auto_picks_by_what_the_server_can(options: dict[str, Any], limit: int, mode: str) -> None:
    assert Postgres(LOCAL, table="t", **options).mode(limit) == mode
