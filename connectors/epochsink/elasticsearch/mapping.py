"""Make the mapping of an index from a schema, and compare an existing mapping with a schema."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import pyarrow as pa

from epochsink.sink.row_json import is_variant

_WHOLE: Final = frozenset({"long", "unsigned_long"})
_FRACTIONAL: Final = frozenset({"double", "scaled_float"})
_LESS_EXACT: Final = frozenset({"float", "half_float"})
_NUMERIC: Final = _WHOLE | _FRACTIONAL | _LESS_EXACT | {"integer", "short", "byte", "token_count", "rank_feature"}
_DATES: Final = frozenset({"date", "date_nanos"})
_OBJECTS: Final = frozenset({"object", "nested", "flattened", "flat_object", "passthrough"})
_TEXTS: Final = frozenset(
    {"keyword", "text", "match_only_text", "wildcard", "constant_keyword", "search_as_you_type", "annotated_text"}
    | {"version", "completion", "semantic_text", "pattern_text"}
)
_LONG_DIGITS: Final = 18
_DOUBLE_DIGITS: Final = 15
"""Up to this many digits, different decimals are different doubles. Longer ones are mapped as text to stay exact."""
_LONGEST_KEYWORD: Final = 8191
"""Longest indexed text in characters: with four bytes each it fits into a term (32,766 bytes)."""
_LONGEST_FLATTENED: Final = 4096
"""Shorter, because a term of a flattened field also holds the key."""
_OURS: Final = "epochsink"
"""The key in a mapping's ``_meta`` that tells that `from_schema` made it."""
_USUAL_LEVELS: Final = 20
"""The server's default limit of nested objects in a flattened field."""


def from_schema(schema: pa.Schema) -> dict[str, Any]:
    """Return the mapping of an index that accepts every value of rows of ``schema``.

    A value that a field cannot index (NaN, a timestamp before 1970, a very long text) is stored in the document, and
    only a search for ``_ignored`` finds it.
    """
    return {"_meta": {_OURS: "made from the schema of a stream"}, "properties": _properties(schema)}


def is_ours(mapping: Mapping[str, Any]) -> bool:
    """Return whether the mapping was made by `from_schema`, so that later columns are mapped as it maps them."""
    return _OURS in mapping.get("_meta", {})


def unmapped(schema: Iterable[pa.Field], mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Return the properties that `from_schema` makes of columns, and of fields of structs, that the mapping lacks."""
    added: dict[str, Any] = {}
    for field in schema:
        mapped = _look_up(mapping, field.name)
        if mapped is None:
            added[field.name] = _mapped(field.type)
        elif inner := _unmapped_fields(field.type, mapped):
            kind = {"type": mapped["type"]} if "type" in mapped else {}
            added[field.name] = {**kind, "properties": inner}
    return added


def _unmapped_fields(kind: pa.DataType, mapped: Mapping[str, Any]) -> dict[str, Any]:
    if (element := _element(kind)) is not None:
        return _unmapped_fields(element, mapped)
    is_object = mapped.get("type", "object") in {"object", "nested"} and mapped.get("enabled") is not False
    return unmapped(kind.fields, mapped) if pa.types.is_struct(kind) and is_object and not is_variant(kind) else {}


def _properties(fields: Iterable[pa.Field]) -> dict[str, Any]:
    return {field.name: _mapped(field.type) for field in fields}


def _mapped(kind: pa.DataType) -> dict[str, Any]:
    types = pa.types
    if (element := _element(kind)) is not None:
        return _mapped(element)
    if _holds_any_json(kind):
        # not indexed: the types in the first document would bind all later ones
        return {"type": "object", "enabled": False}
    if types.is_struct(kind):
        return {"type": "object", "properties": _properties(kind.fields)}
    if types.is_map(kind):
        # Not an object: each key would become a field, up to a limit, with the type of its first value.
        deep = {"depth_limit": levels} if (levels := _levels(kind)) > _USUAL_LEVELS else {}
        return {"type": "flattened", "ignore_above": _LONGEST_FLATTENED, **deep}
    return _mapped_number(kind) or _mapped_scalar(kind)


def _holds_any_json(kind: pa.DataType) -> bool:
    """Return whether a type can hold any JSON, so that its fields are unknown: a VARIANT, or a map of VARIANT."""
    return is_variant(kind) or (pa.types.is_map(kind) and _holds_variant(kind))


def _holds_variant(kind: pa.DataType) -> bool:
    return is_variant(kind) or any(_holds_variant(kind.field(place).type) for place in range(kind.num_fields))


def _levels(kind: pa.DataType) -> int:
    """Return the depth of nested objects."""
    inner = max((_levels(kind.field(place).type) for place in range(kind.num_fields)), default=0)
    is_object = pa.types.is_struct(kind) or pa.types.is_map(kind)
    # The only child of a map is the struct of its entries.
    return inner + 1 if is_object and not (pa.types.is_map(kind) and inner) else inner


def _mapped_scalar(kind: pa.DataType) -> dict[str, Any]:
    types = pa.types
    if types.is_timestamp(kind) or types.is_date(kind):
        # "date" keeps milliseconds only, and Spark has microseconds
        return {"type": "date_nanos" if types.is_timestamp(kind) else "date", "ignore_malformed": True}
    if types.is_boolean(kind) or _is_binary(kind):
        return {"type": "boolean" if types.is_boolean(kind) else "binary"}
    return {"type": "keyword", "ignore_above": _LONGEST_KEYWORD}


def _mapped_number(kind: pa.DataType) -> dict[str, Any] | None:
    if pa.types.is_decimal(kind):
        return _decimal(kind)
    if pa.types.is_floating(kind):
        return {"type": _number(kind), "ignore_malformed": True}
    return {"type": _number(kind)} if pa.types.is_integer(kind) else None


def _decimal(kind: pa.DataType) -> dict[str, Any]:
    if kind.scale == 0 and kind.precision <= _LONG_DIGITS:
        return {"type": "long"}
    if kind.scale > 0 and kind.precision <= _DOUBLE_DIGITS:
        return {"type": "double"}
    # a double would lose digits
    return {"type": "keyword", "ignore_above": _LONGEST_KEYWORD}


def _number(kind: pa.DataType) -> str:
    """Return the numeric type for a number: "double" for all that are wider than "long"."""
    if pa.types.is_integer(kind):
        return {8: "byte", 16: "short", 32: "integer"}.get(kind.bit_width, "long")
    if pa.types.is_decimal(kind) and kind.scale == 0 and kind.precision <= _LONG_DIGITS:
        return "long"
    return "float" if pa.types.is_float32(kind) else "double"


def _element(kind: pa.DataType) -> pa.DataType | None:
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return kind.value_type
    return None


def _is_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def conflicts(
    schema: Iterable[pa.Field], mapping: Mapping[str, Any], path: str = "", inherited: object = "true"
) -> list[str]:
    """Return one sentence for each field that the mapping would refuse or index with a different value.

    A mismatch that depends on the value (a text that may be a date) is not a conflict. Inside an object, ``path`` is
    its name and ``inherited`` the parent's rule for unmapped fields.
    """
    differences: list[str] = []
    dynamic = mapping.get("dynamic", inherited)
    for field in schema:
        name = f"{path}{field.name}"
        mapped = _look_up(mapping, field.name)
        if mapped is not None:
            differences += _compare(name, field.type, mapped, dynamic)
        elif dynamic == "strict":
            differences.append(
                f"column {name!r} is not in the mapping, which is strict, so the server would refuse every document: "
                "add the field to the mapping or leave the column out of select="
            )
    return differences


def _look_up(mapping: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """Find a field. As for the server, a dot in a name means a field of an object."""
    properties = mapping.get("properties", {})
    if name in properties:
        return dict(properties[name])
    head, dot, rest = name.partition(".")
    return _look_up(properties[head], rest) if dot and head in properties else None


def _compare(name: str, kind: pa.DataType, mapped: Mapping[str, Any], dynamic: object) -> list[str]:
    if (element := _element(kind)) is not None:
        return _compare(name, element, mapped, dynamic)
    if _holds_any_json(kind):
        return []
    target = mapped.get("type", "object")
    if pa.types.is_struct(kind) and target in {"object", "nested"}:
        return conflicts(kind.fields, mapped, f"{name}.", dynamic)
    reason = _reason(kind, target)
    return [f"column {name!r} is {kind}, the index maps it as {target}: {reason}"] if reason else []


def _reason(kind: pa.DataType, target: str) -> str | None:
    """Return why values of ``kind`` do not fit, with the hint; None if they fit, or if it depends on the value."""
    if target == "alias":
        return "an alias of another field cannot be written; rename the column to that field in select="
    if pa.types.is_nested(kind):
        # Points, shapes, ranges and vectors are also written as objects or arrays.
        scalar = target in _NUMERIC | _DATES | _TEXTS | {"boolean", "ip", "binary"}
        return "objects do not fit; select its fields, or convert it to text with to_json()" if scalar else None
    if target in _OBJECTS:
        return "only objects fit; make it one with named_struct() in select=, or change the mapping in a new index"
    if target in _TEXTS:
        return None
    return _scalar_reason(kind, target)


def _scalar_reason(kind: pa.DataType, target: str) -> str | None:
    cast = f"cast it in select=, e.g. CAST(... AS {_cast_for(target)}), or change the mapping in a new index"
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return cast if target in _NUMERIC | {"boolean"} else None
    if pa.types.is_boolean(kind) or pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        fitting = {"boolean"} if pa.types.is_boolean(kind) else _DATES
        return None if target in fitting or target not in _NUMERIC | _DATES | {"boolean", "ip", "binary"} else cast
    if _is_binary(kind):
        return cast if target in _NUMERIC | _DATES | {"boolean", "ip"} else None
    return _number_reason(kind, target, cast)


def _number_reason(kind: pa.DataType, target: str, cast: str) -> str | None:
    if target in {"boolean", "ip", "binary"}:
        return cast
    own = _number(kind)
    if own in {"float", "double"}:
        return (
            f"searches would see the value without its fraction; {cast}"
            if target in _NUMERIC - _FRACTIONAL - _LESS_EXACT
            else None
        )
    widths = ["byte", "short", "integer", "long"]
    if own in widths and target in widths and widths.index(target) < widths.index(own):
        return f"larger values would be refused; {cast}"
    return None


def _cast_for(target: str) -> str:
    if target in {"boolean"} | _DATES:
        return {"boolean": "BOOLEAN"}.get(target, "TIMESTAMP")
    return {"long": "BIGINT", "integer": "INT", "short": "SMALLINT", "byte": "TINYINT", "double": "DOUBLE"}.get(
        target, "STRING" if target not in _NUMERIC else "DOUBLE"
    )
