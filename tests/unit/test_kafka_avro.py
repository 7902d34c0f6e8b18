"""Avro schemas follow from the columns; what Avro or a registry could not take is refused before it is asked."""

from __future__ import annotations

import json
import re
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest

from epochsink import Avro, ConfigurationError, Kafka
from epochsink.kafka import avro as module

URL = "http://localhost:8081"
ROWS = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("at", pa.timestamp("us", tz="UTC")),
        pa.field("lines", pa.list_(pa.struct([pa.field("price", pa.decimal128(9, 2), nullable=False)]))),
    ]
)


def rendered(schema: pa.Schema = ROWS, **arguments: Any) -> tuple[str, Any]:
    """Return the SQL of a row, and the schema that the registry was asked for, which it calls 258."""
    with mock.patch.object(module, "_schema_id", return_value=258) as asked:
        sql = Avro(registry=URL, **({"subject": "shop.orders-value"} | arguments)).sql("row", schema)
    return sql, json.loads(asked.call_args.args[1])


def test_a_message_is_a_zero_byte_the_schema_id_in_four_bytes_and_the_body() -> None:
    sql, _ = rendered(columns="id")
    assert sql == "CAST(concat(X'0000000102', to_avro(row['id'], '\"long\"')) AS BINARY)"


def test_the_schema_of_a_row_has_a_default_for_what_may_be_null() -> None:
    _, schema = rendered()
    line = {
        "type": "record",
        "name": "shop_orders.lines",
        "fields": [
            {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}},
        ],
    }
    assert schema == {
        "type": "record",
        "name": "shop_orders",
        "fields": [
            {"name": "id", "type": "long"},
            {"name": "at", "type": ["null", {"type": "long", "logicalType": "timestamp-micros"}], "default": None},
            {"name": "lines", "type": ["null", {"type": "array", "items": ["null", line]}], "default": None},
        ],
    }


def test_the_key_may_be_a_record_of_some_columns() -> None:
    sql, schema = rendered(columns=["id"], name="shop.Key")
    assert sql.startswith("CAST(concat(X'0000000102', to_avro(named_struct('id', row['id']), '")
    assert (schema["name"], [field["name"] for field in schema["fields"]]) == ("shop.Key", ["id"])


@pytest.mark.parametrize(
    ("arguments", "schema", "reason"),
    [
        ({"columns": "idd"}, ROWS, "no column 'idd'.*name one of id, at, lines"),
        ({}, pa.schema([("order id", pa.int64())]), "column 'order id'.*rename it in select="),
        ({}, pa.schema([("took", pa.duration("us"))]), r"column 'took'.*duration\[us\].*cast it"),
        ({"name": "com.1st"}, ROWS, "'1st' is not a name in Avro"),
    ],
    ids=["an unknown column", "a name with a blank", "a type without a rendering", "a name with a digit first"],
)
def test_what_avro_cannot_take_is_named(arguments: dict[str, Any], schema: pa.Schema, reason: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        rendered(schema, **arguments)
    assert re.search(reason, f"{refused.value.message}; {refused.value.hint}")


@pytest.mark.parametrize(
    ("url", "options"),
    [("http://me:s3cret@registry:8081", {}), ("http://registry", {"basic.auth.user.info": "me:s3cret"})],
    ids=["in the URL", "in the options"],
)
def test_a_password_for_the_registry_is_neither_sent_readably_nor_shown(url: str, options: dict[str, str]) -> None:
    value = Avro(registry=url, subject="s", options=options)
    with pytest.raises(ConfigurationError, match="unencrypted") as refused:
        Kafka(bootstrap_servers="localhost:1", topic="t", value=value)
    config = Kafka(bootstrap_servers="localhost:1", topic="t", value=value, allow_insecure=True)
    assert "s3cret" not in f"{refused.value} {value!r} {config!r}"
    secure = Avro(registry=url.replace("http://", "https://"), subject="s", options=options)
    assert Kafka(bootstrap_servers="localhost:1", topic="t", key=secure).key is secure


@pytest.mark.parametrize("secret", ["s3cret/x", "1/s3cret", "x@s3cret", "x#s3cret"])
def test_a_password_for_the_registry_that_is_not_encoded_is_refused_and_not_shown(secret: str) -> None:
    with pytest.raises(ConfigurationError, match="percent-encode") as refused:
        Avro(registry=f"https://one.example,https://me:{secret}@registry:8081", subject="s")
    assert "s3cret" not in str(refused.value)
    Avro(registry="https://me:a@one:8081,https://me:b@other:8081", subject="s")


def test_a_missing_client_of_the_registry_is_named_with_the_extra() -> None:
    with (
        mock.patch.object(module, "import_module", side_effect=ModuleNotFoundError(name="httpx2")),
        pytest.raises(ConfigurationError, match="httpx2") as refused,
    ):
        Avro(registry=URL, subject="nobody-asks").sql("row", ROWS)
    assert "epochsink[avro]" in refused.value.hint
