"""Mappings made from schemas, and what they are compared with."""

from __future__ import annotations

from functools import reduce
from typing import Any

import pyarrow as pa
import pytest

from epochsink.elasticsearch.mapping import conflicts, from_schema, is_ours, unmapped

STRING, LONG, DOUBLE, BOOL = pa.string(), pa.int64(), pa.float64(), pa.bool_()
FLATTENED = {"type": "flattened", "ignore_above": 4096}
VARIANT = pa.struct([("value", pa.binary()), pa.field("metadata", pa.binary(), metadata={"variant": "true"})])
TIMESTAMP, DATE = pa.timestamp("us", tz="UTC"), pa.date32()


@pytest.mark.parametrize(
    ("kind", "mapped"),
    [
        (STRING, {"type": "keyword", "ignore_above": 8191}),
        (pa.large_string(), {"type": "keyword", "ignore_above": 8191}),
        (pa.int8(), {"type": "byte"}),
        (pa.int16(), {"type": "short"}),
        (pa.int32(), {"type": "integer"}),
        (LONG, {"type": "long"}),
        (pa.float32(), {"type": "float", "ignore_malformed": True}),
        (DOUBLE, {"type": "double", "ignore_malformed": True}),
        (pa.decimal128(18, 0), {"type": "long"}),
        (pa.decimal128(19, 0), {"type": "keyword", "ignore_above": 8191}),
        (pa.decimal128(10, 2), {"type": "double"}),
        (pa.decimal128(16, 2), {"type": "keyword", "ignore_above": 8191}),
        (BOOL, {"type": "boolean"}),
        (TIMESTAMP, {"type": "date_nanos", "ignore_malformed": True}),
        (pa.timestamp("us"), {"type": "date_nanos", "ignore_malformed": True}),
        (DATE, {"type": "date", "ignore_malformed": True}),
        (pa.binary(), {"type": "binary"}),
        (pa.list_(LONG), {"type": "long"}),
        (pa.map_(STRING, LONG), FLATTENED),
        (reduce(lambda kind, _: pa.map_(STRING, kind), range(21), LONG), {**FLATTENED, "depth_limit": 21}),
        (pa.map_(STRING, pa.struct([("x", pa.list_(pa.map_(STRING, LONG)))])), FLATTENED),
        (VARIANT, {"type": "object", "enabled": False}),
        (pa.list_(VARIANT), {"type": "object", "enabled": False}),
        (pa.map_(STRING, pa.struct([("x", VARIANT)])), {"type": "object", "enabled": False}),
        (pa.struct([("x", LONG)]), {"type": "object", "properties": {"x": {"type": "long"}}}),
        (pa.list_(pa.struct([("x", BOOL)])), {"type": "object", "properties": {"x": {"type": "boolean"}}}),
    ],
)
def test_each_type_is_mapped_and_fits_its_own_mapping(kind: pa.DataType, mapped: dict[str, Any]) -> None:
    schema = pa.schema([("f", kind)])
    assert from_schema(schema)["properties"] == {"f": mapped}
    assert conflicts(schema, from_schema(schema)) == []


@pytest.mark.parametrize(
    ("kind", "target"),
    [
        (STRING, "long"),
        (STRING, "double"),
        (STRING, "boolean"),
        (STRING, "object"),
        (LONG, "integer"),
        (LONG, "boolean"),
        (LONG, "ip"),
        (LONG, "nested"),
        (DOUBLE, "long"),
        (pa.decimal128(10, 2), "integer"),
        (BOOL, "long"),
        (BOOL, "date"),
        (TIMESTAMP, "long"),
        (DATE, "boolean"),
        (pa.binary(), "date"),
        (pa.struct([("x", LONG)]), "keyword"),
        (pa.map_(STRING, STRING), "date"),
        (pa.list_(BOOL), "long"),
        (STRING, "alias"),
    ],
)
def test_a_conflict_names_column_types_and_way_out(kind: pa.DataType, target: str) -> None:
    (finding,) = conflicts(pa.schema([("f", kind)]), {"properties": {"f": {"type": target}}})
    assert f"column 'f' is {pa.list_(BOOL).value_type if pa.types.is_list(kind) else kind}" in finding
    assert f"maps it as {target}" in finding
    assert "select" in finding


@pytest.mark.parametrize(
    ("kind", "target"),
    [
        (STRING, "date"),
        (STRING, "ip"),
        (STRING, "text"),
        (STRING, "geo_point"),
        (LONG, "keyword"),
        (LONG, "date"),
        (LONG, "double"),
        (pa.int32(), "long"),
        (DOUBLE, "float"),
        (DOUBLE, "keyword"),
        (BOOL, "keyword"),
        (TIMESTAMP, "date_nanos"),
        (DATE, "text"),
        (pa.struct([("lat", DOUBLE)]), "geo_point"),
        (pa.map_(STRING, STRING), "flattened"),
        (pa.list_(DOUBLE), "dense_vector"),
        (STRING, "a_type_of_a_plugin"),
    ],
)
def test_what_depends_on_values_is_no_conflict(kind: pa.DataType, target: str) -> None:
    assert conflicts(pa.schema([("f", kind)]), {"properties": {"f": {"type": target}}}) == []


def test_nested_fields_are_compared_with_their_path() -> None:
    schema = pa.schema([("customer", pa.struct([("name", STRING)]))])
    mapping = {"properties": {"customer": {"properties": {"name": {"type": "long"}}}}}
    (finding,) = conflicts(schema, mapping)
    assert "'customer.name'" in finding


def test_a_dotted_column_is_the_field_of_an_object() -> None:
    mapping = {"properties": {"customer": {"properties": {"age": {"type": "boolean"}}}}}
    (finding,) = conflicts(pa.schema([("customer.age", LONG)]), mapping)
    assert "'customer.age'" in finding


def test_a_column_that_a_strict_mapping_lacks_is_found() -> None:
    schema = pa.schema([("new", LONG)])
    (finding,) = conflicts(schema, {"dynamic": "strict", "properties": {}})
    assert "'new'" in finding
    assert conflicts(schema, {"properties": {}}) == []


def test_objects_inherit_strictness() -> None:
    schema = pa.schema([("customer", pa.struct([("new", LONG)]))])
    (finding,) = conflicts(schema, {"dynamic": "strict", "properties": {"customer": {"properties": {}}}})
    assert "'customer.new'" in finding
    loose = {"dynamic": "strict", "properties": {"customer": {"dynamic": "true", "properties": {}}}}
    assert conflicts(schema, loose) == []


def test_columns_and_fields_of_structs_that_a_mapping_lacks_are_mapped_as_in_a_new_index() -> None:
    before = pa.schema([("a", LONG), ("s", pa.struct([("x", LONG)])), ("l", pa.list_(pa.struct([("x", LONG)])))])
    wider = pa.struct([("x", LONG), ("y", pa.decimal128(30, 2))])
    after = pa.schema([("a", LONG), ("s", wider), ("l", pa.list_(wider)), ("m", pa.map_(STRING, LONG)), ("v", VARIANT)])
    made = from_schema(before)
    assert is_ours(made)
    assert unmapped(before, made) == {}
    keyword = {"type": "keyword", "ignore_above": 8191}
    inner = {"type": "object", "properties": {"y": keyword}}
    variant = {"type": "object", "enabled": False}
    assert unmapped(after, made) == {"s": inner, "l": inner, "m": FLATTENED, "v": variant}
    assert unmapped(after, from_schema(after)) == {}
    assert not is_ours({"properties": {"a": {"type": "long"}}})


def test_nothing_is_added_to_fields_that_hold_any_json() -> None:
    schema = pa.schema([("s", pa.struct([("x", LONG)]))])
    for mapped in ({"type": "object", "enabled": False}, {"type": "flattened"}, {"type": "keyword"}):
        assert unmapped(schema, {"properties": {"s": mapped}}) == {}
    nested = {"s": {"type": "nested", "properties": {"x": {"type": "long"}}}}
    assert unmapped(schema, {"properties": {"s": {"type": "nested"}}}) == nested
