"""From the user's columns and SQL expressions to the columns that the writer takes.

The writer takes, in any order: ``value`` and ``key`` (binary or string), ``topic`` (string), ``partition`` (int),
``headers`` (array of struct of key and value) and ``timestamp``. Rows that have such columns already, as those of
Spark's own Kafka source and sink do, pass through; any other row is rendered by SQL.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from epochsink.errors import ConfigurationError
from epochsink.sink import json_text
from epochsink.sink.sql import operand

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from epochsink.kafka.config import KafkaConfig

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


@dataclass(frozen=True, slots=True)
class Expressions:
    """What the user says about a message, as SQL; None where nothing is said."""

    key: str | None = None
    value: str | None = None
    headers: str | None = None
    topic: str | None = None
    partition: str | None = None
    timestamp: str | None = None


def columns(config: KafkaConfig, row: str, schema: pa.Schema) -> Sequence[str]:
    """Return the SQL expressions of a configured sink, each with its ``AS`` name. Raises ConfigurationError."""
    said = Expressions(
        key=config.key,
        value=config.value,
        headers=config.headers,
        topic=config.topic_column,
        partition=config.partition,
        timestamp=config.timestamp,
    )
    return render(row, schema, said, config.topic, config.delete_when)


def render(
    row: str, schema: pa.Schema, said: Expressions, fixed_topic: str | None, delete_when: str | None
) -> Sequence[str]:
    """Return the SQL expressions, each with its ``AS`` name. Raises ConfigurationError.

    ``row`` names the struct with the fields of ``schema``.
    """
    passing = _passing(schema, said)
    rendered: dict[str, str] = {}
    for name in RULES:
        expression = getattr(said, name)
        if expression is not None:
            rendered[name] = _cast(name, _resolve(expression, row, schema))
        elif name in passing:
            rendered[name] = f"{row}.`{name}`"
    if fixed_topic is not None:
        rendered.pop("topic", None)  # as in Spark, the option goes before the column
    elif "topic" not in rendered:
        raise ConfigurationError(
            "the rows have no column 'topic' and no topic is set",
            hint="set topic= for all rows, or topic_column= to an SQL expression, or select a column 'topic'",
        )
    rendered.setdefault("value", f"CAST({json_text(row)} AS BINARY)")
    if delete_when is not None:
        if "key" not in rendered:
            raise ConfigurationError(
                "delete_when= writes tombstones, and a tombstone without a key deletes nothing",
                hint="set key= to what identifies a row",
            )
        rendered["value"] = f"CASE WHEN {operand(delete_when)} THEN NULL ELSE {rendered['value']} END"
    return [f"{expression} AS `{name}`" for name, expression in rendered.items()]


def findings(schema: pa.Schema) -> list[str]:
    """Return what is wrong with the types of columns that already bear the writer's names."""
    return [
        f"column '{field.name}' is of type {field.type}, and Kafka takes {RULES[field.name][1]}: cast it"
        for field in schema
        if field.name in RULES and not RULES[field.name][0](field.type)
    ]


def _passing(schema: pa.Schema, said: Expressions) -> frozenset[str]:
    """Return the columns that pass through: those of Spark's Kafka sink, if the row is meant for it."""
    if said.value is not None or "value" not in schema.names:
        return frozenset()
    wrong = findings(schema)
    others = [name for name in schema.names if name not in RULES and name not in _IGNORED]
    if wrong or others:
        reason = wrong[0] if wrong else f"there are other columns too ({', '.join(others)})"
        raise ConfigurationError(
            f"the rows have a column 'value', which may be the whole message or one field of it; {reason}",
            hint="say value='value' to write that column alone, or value='to_json(struct(*))' to write the row",
        )
    return frozenset(RULES) & frozenset(schema.names)


def _resolve(expression: str, row: str, schema: pa.Schema) -> str:
    """Let a bare name mean the selected column of that name, even if ``select`` has renamed it."""
    bare = re.fullmatch(r"\s*`?(\w+)`?\s*", expression)
    return f"{row}.`{bare[1]}`" if bare and bare[1] in schema.names else operand(expression)


def _cast(name: str, expression: str) -> str:
    """Give an expression the type that the writer takes; text of numbers and dates as SQL writes it."""
    casts = {
        # through STRING, so that numbers become their text and not their bytes
        "key": "CAST(CAST({} AS STRING) AS BINARY)",
        "value": "CAST(CAST({} AS STRING) AS BINARY)",
        "topic": "CAST({} AS STRING)",
        "partition": "CAST({} AS INT)",
        "headers": "CAST({} AS ARRAY<STRUCT<key: STRING, value: BINARY>>)",
        "timestamp": "CAST({} AS TIMESTAMP)",
    }
    return casts[name].format(expression)
