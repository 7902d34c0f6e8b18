"""The SQL of ids, and the types that make none."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from epochsink.elasticsearch import Elasticsearch
from epochsink.errors import ConfigurationError


def columns(schema: pa.Schema, **options: Any) -> list[str]:
    return list(Elasticsearch("http://127.0.0.1:9200", index="orders", **options).columns("row", schema))


def names(made: list[str]) -> list[str]:
    return [each.rpartition(" AS ")[2] for each in made]


TEXTS = pa.schema([("a", pa.string()), ("odd `name`", pa.string())])


def test_columns_are_what_the_options_need() -> None:
    assert names(columns(TEXTS)) == ["source"]
    assert names(columns(TEXTS, key="a")) == ["id", "source"]
    assert names(columns(TEXTS, key="a", order_by="a")) == ["id", "source", "rank"]


def test_a_selected_column_is_taken_from_the_row_with_its_name_quoted() -> None:
    assert "row['odd `name`']" in columns(TEXTS, key="odd `name`")[0]


def test_anything_else_is_an_expression_over_the_stream() -> None:
    assert "(concat(x, y)\n)" in columns(TEXTS, key="concat(x, y)")[0]


@pytest.mark.parametrize(
    ("kind", "hint"),
    [
        (pa.binary(), "hex(k)"),
        (pa.timestamp("us", tz="UTC"), "unix_micros(k)"),
        (pa.struct([("x", pa.int64())]), "to_json(k)"),
        (pa.list_(pa.int64()), "to_json(k)"),
    ],
)
def test_a_type_without_a_stable_text_makes_no_id(kind: pa.DataType, hint: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        columns(pa.schema([("k", kind)]), key="k")
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        (pa.schema([("a", pa.string()), ("a", pa.int64())]), "two fields 'a'"),
        (pa.schema([("s", pa.struct([("b", pa.string()), ("b", pa.string())]))]), "two fields 's.b'"),
        (pa.schema([("_id", pa.string())]), "'_id'"),
        (pa.schema([("", pa.string())]), "must not be empty"),
        (pa.schema([("a..b", pa.string())]), "must not be empty"),
        (pa.schema([("m", pa.map_(pa.binary(), pa.string()))]), "keys of type binary"),
        (pa.schema([("l", pa.list_(pa.map_(pa.struct([("x", pa.int64())]), pa.string())))]), "keys of type struct"),
    ],
)
def test_what_no_document_can_hold_is_refused_before_any_row(schema: pa.Schema, named: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        columns(schema)
    assert named in caught.value.message
    assert caught.value.hint
