"""Render values as JSON in Spark's SQL, and find those that JSON cannot hold.

Spark's `to_json` writes U+FFFD for bytes that are not UTF-8, an exponent for a small decimal (``0E-18``), and, in Spark
4.0, ``NaN`` and ``Infinity`` of a VARIANT without quotes, which is not JSON. So decimals that may be small go through
VARIANT, which has plain digits, and a value with one of the other two is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import pyarrow as pa

from epochsink.errors import ConfigurationError
from epochsink.sink.sql import field_of, json_text, literal, text_of

_PLAIN_SCALE: Final = 6
"""Up to this scale Java writes a decimal without an exponent."""


def value_json(value: str, kind: pa.DataType, *, unless: str | None = None) -> str:
    """Return the SQL of a struct, map or array of a type as JSON; NULL if the condition ``unless`` is true.

    Raises `ConfigurationError` for a map whose keys Spark would write as the name of a Java object, with its address.
    """
    if _holds(kind, _has_keys_without_text):
        raise ConfigurationError(
            f"a map in {kind} has keys whose text is not the same in every run, so that JSON cannot hold them",
            hint="convert its keys to text with select=, e.g. transform_keys(NAME, (k, v) -> hex(k)) AS NAME",
        )
    plain = _plain(value, kind, 0)
    return json_text(plain if unless is None else f"IF({unless}, NULL, {plain})")


def marked_json(json: str, mark: str | None) -> str:
    """Return the SQL of a value's JSON, with ``mark`` before it unless that is NULL: the SQL of a text.

    Both decode the value, which costs less than a look into the JSON for U+FFFD first: and what the JSON is made of,
    such as a condition of chance, is evaluated once.
    """
    return json if mark is None else f"concat(coalesce({mark}, ''), {json})"


def is_variant(kind: pa.DataType) -> bool:
    """Return whether a type represents Spark's VARIANT, which holds any JSON."""
    return pa.types.is_struct(kind) and any(b"variant" in (field.metadata or ()) for field in kind.fields)


def not_utf8(value: str, kind: pa.DataType) -> str | None:
    """Return the condition that a value holds text that is not UTF-8; None if its type holds no text."""
    if not _holds(kind, is_text):
        return None
    if is_text(kind):
        return f"NOT is_valid_utf8({value})"
    if not _holds(kind, _is_binary):
        # the text of a list, struct or map keeps each byte, and has ASCII between the parts
        return f"NOT is_valid_utf8({text_of(value)})"
    return _anywhere(value, kind, not_utf8)


def not_json(value: str, kind: pa.DataType) -> str | None:
    """Return the condition that a value holds a VARIANT whose text is not JSON; None if its type holds none."""
    if not _holds(kind, is_variant):
        return None
    # a VARIANT alone, or what holds some, in the field of a struct: `to_json` takes no other value of any type
    text = f"to_json(named_struct('v', {value}))"
    return f"({text} RLIKE 'NaN|Infinity' AND try_parse_json({text}) IS NULL)"


def first_of(texts: Iterable[tuple[str, str]]) -> str | None:
    """Return the SQL of the text of the first condition that holds, or of NULL; None if there is no condition."""
    cases = " ".join(f"WHEN {condition} THEN {text}" for condition, text in texts)
    return f"CASE {cases} END" if cases else None


def any_of(conditions: Iterable[str | None]) -> str | None:
    """Return the condition that one of some conditions holds; None if there is none."""
    present = [each for each in conditions if each is not None]
    return f"({' OR '.join(present)})" if present else None


def is_text(kind: pa.DataType) -> bool:
    """Return whether a type is text."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _may_be_small(kind: pa.DataType) -> bool:
    return bool(pa.types.is_decimal(kind) and kind.scale > _PLAIN_SCALE)


def _has_keys_without_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_map(kind) and (pa.types.is_nested(kind.key_type) or _is_binary(kind.key_type)))


def _holds(kind: pa.DataType, wanted: Callable[[pa.DataType], bool]) -> bool:
    if wanted(kind):
        return True
    return not is_variant(kind) and any(_holds(kind.field(place).type, wanted) for place in range(kind.num_fields))


def _anywhere(value: str, kind: pa.DataType, condition: Callable[[str, pa.DataType], str | None]) -> str | None:
    """Return the condition that ``condition`` makes of a struct's fields, of elements, or of keys and values."""
    if pa.types.is_struct(kind):
        return any_of(condition(field_of(value, field.name), field.type) for field in kind.fields)
    if pa.types.is_map(kind):
        parts = {f"map_keys({value})": kind.key_type, f"map_values({value})": kind.item_type}
        return any_of(condition(part, pa.list_(element)) for part, element in parts.items())
    return f"exists({value}, e -> {condition('e', kind.value_type)})"


def _plain(value: str, kind: pa.DataType, depth: int) -> str:
    """Return the SQL of a value whose decimals have plain digits in JSON; the value itself if it holds none."""
    if not _holds(kind, _may_be_small):
        return value
    each, key = f"x{depth}", f"k{depth}"
    if pa.types.is_decimal(kind):
        return f"CAST({value} AS VARIANT)"
    if pa.types.is_struct(kind):
        fields = (f"{literal(field.name)}, {_plain(field_of(value, field.name), field.type, depth)}" for field in kind)
        return f"IF({value} IS NULL, NULL, named_struct({', '.join(fields)}))"
    if pa.types.is_map(kind):
        item = _plain(each, kind.item_type, depth + 1)
        items = value if item == each else f"transform_values({value}, ({key}, {each}) -> {item})"
        # the keys of an object are text
        return f"transform_keys({items}, ({key}, {each}) -> {text_of(key)})" if _may_be_small(kind.key_type) else items
    return f"transform({value}, {each} -> {_plain(each, kind.value_type, depth + 1)})"
