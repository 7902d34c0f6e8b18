"""Make the SQL expressions of the writer's columns from the user's columns and expressions.

The writer takes, in any order: ``value`` and ``key`` (binary or string), ``topic`` (string), ``partition`` (int),
``headers`` (array of struct of key and value) and ``timestamp``. Rows with these columns, as Spark's own Kafka source
and sink have them, pass through. Any other row is rendered by SQL; its JSON is in the column ``json`` in place of
``value``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

import pyarrow as pa

from epochsink.errors import ConfigurationError
from epochsink.kafka.config import KafkaConfig, Rendering
from epochsink.kafka.rendered_value import JSON, rendered_row
from epochsink.sink.sql import converted, field_of, operand, text_of

_IGNORED: Final = frozenset({"offset", "timestampType"})
"""Columns of Spark's Kafka source that its sink ignores too."""


def _is_bytes(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_string(kind) or types.is_binary(kind) or types.is_large_string(kind) or types.is_large_binary(kind)
    )


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_headers(kind: pa.DataType) -> bool:
    if not pa.types.is_list(kind) or not pa.types.is_struct(kind.value_type):
        return False
    fields = {field.name: field.type for field in kind.value_type}
    return set(fields) == {"key", "value"} and _is_text(fields["key"]) and _is_bytes(fields["value"])


RULES: Final[dict[str, tuple[Callable[[pa.DataType], bool], str]]] = {
    "key": (_is_bytes, "string or binary"),
    "value": (_is_bytes, "string or binary"),
    "topic": (_is_text, "string"),
    "partition": (pa.types.is_int32, "int"),
    "headers": (_is_headers, "array<struct<key:string,value:binary>>"),
    "timestamp": (pa.types.is_timestamp, "timestamp"),
}
"""Column of Spark's Kafka sink -> (test of its type, the type in words)."""


_NUMBERS: Final = {"partition": "INT", "timestamp": "TIMESTAMP_LTZ"}
"""The types of what is neither text nor bytes. In a session, TIMESTAMP can be a type without a zone."""


def columns(config: KafkaConfig, row: str, schema: pa.Schema) -> Sequence[str]:
    """Return the SQL expressions, each with its ``AS`` name. Raises ConfigurationError.

    ``row`` names the struct with the fields of ``schema``.
    """
    passing = frozenset() if config.value is not None else _passing(schema)
    rendered: dict[str, str] = {}
    for name in RULES:
        expression = config.topic_column if name == "topic" else getattr(config, name)
        if isinstance(expression, Rendering):
            rendered[name] = expression.sql(row, schema)
        elif expression is not None:
            rendered[name] = _cast(name, _resolve(expression, row, schema))
        elif name in passing:
            rendered[name] = _passed(name, row, schema)
    if config.topic is not None:
        rendered.pop("topic", None)  # as in Spark, the option takes precedence over the column
    elif "topic" not in rendered:
        raise ConfigurationError(
            "the rows have no column 'topic' and no topic is set",
            hint="set topic= for all rows, or topic_column= to an SQL expression, or select a column 'topic'",
        )
    delete_when = None if config.delete_when is None else operand(config.delete_when)
    if delete_when is not None and "key" not in rendered:
        raise ConfigurationError(
            "delete_when= writes tombstones, and a tombstone without a key deletes nothing",
            hint="set key= to the expression that identifies a row",
        )
    if "value" not in rendered:
        rendered[JSON] = rendered_row(row, schema, delete_when=delete_when)
    elif delete_when is not None:
        rendered["value"] = f"CASE WHEN {delete_when} THEN NULL ELSE {rendered['value']} END"
    return [f"{expression} AS `{name}`" for name, expression in rendered.items()]


def fields(config: KafkaConfig, schema: pa.Schema) -> frozenset[str]:
    """Return which of a message's fields the rows fill, without rendering them. Raises ConfigurationError."""
    given = frozenset(name for name in RULES if name != "topic" and getattr(config, name) is not None)
    return given | (frozenset() if config.value is not None else _passing(schema)) | {"value"}


def _passing(schema: pa.Schema) -> frozenset[str]:
    """Return the columns that pass through: those of Spark's Kafka sink, if the row is meant for it."""
    if "value" not in schema.names:
        return frozenset()
    wrong = [
        f"column '{field.name}' is of type {field.type}, and Kafka takes {RULES[field.name][1]}: cast it"
        for field in schema
        if field.name in RULES and not RULES[field.name][0](field.type)
    ]
    others = [name for name in schema.names if name not in RULES and name not in _IGNORED]
    if wrong or others:
        reason = wrong[0] if wrong else f"there are other columns too ({', '.join(others)})"
        raise ConfigurationError(
            f"the rows have a column 'value', which may be the whole message or one field of it; {reason}",
            hint="set value='value' to write that column alone, or value='to_json(struct(*))' to write the row",
        )
    return frozenset(RULES) & frozenset(schema.names)


def _passed(name: str, row: str, schema: pa.Schema) -> str:
    value = field_of(row, name)
    # as in timestamp=, a time without a zone is one in the session's
    return _cast(name, value) if name == "timestamp" and schema.field(name).type.tz is None else value


def _resolve(expression: str, row: str, schema: pa.Schema) -> str:
    """Resolve a bare name to the selected column of that name, even if ``select`` has renamed it."""
    bare = re.fullmatch(r"\s*`?(\w+)`?\s*", expression)
    return field_of(row, bare[1]) if bare and bare[1] in schema.names else operand(expression)


def _cast(name: str, expression: str) -> str:
    """Cast an expression to the type that the writer takes; numbers and dates become their SQL text."""
    if name in _NUMBERS:
        return converted(expression, _NUMBERS[name], f"{name}=")
    if name == "headers":
        return f"TRY_CAST({expression} AS ARRAY<STRUCT<key: STRING, value: BINARY>>)"
    # by way of STRING: numbers become text, not bytes
    return text_of(expression) if name == "topic" else f"CAST({text_of(expression)} AS BINARY)"
