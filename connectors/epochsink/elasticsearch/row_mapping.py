"""The SQL that makes, in the JVM, what a bulk request needs of each row.

A row becomes ``id``, the end of an action line (``"_id":"..."}``), and ``source``, the document, or NULL where the
document is to be deleted. Both come from Spark's JSON encoder, whatever characters the values hold. The
beginning of the action line names the version, which differs in each epoch: it is put before at apply
time, since a literal in the SQL would have Spark compile the plan anew for each epoch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pyarrow as pa

from epochsink.errors import ConfigurationError
from epochsink.sink import JSON_TIMES

if TYPE_CHECKING:
    from collections.abc import Sequence

_JSON_OPTIONS: Final = f"map({JSON_TIMES}, 'ignoreNullFields', 'true')"


def columns(
    row: str,
    schema: pa.Schema,
    *,
    key: Sequence[str],
    delete_when: str | None,
    order_by: Sequence[str],
) -> list[str]:
    """Return the expressions for ``id`` (with a key), ``source``, and ``rank``, ``rank_2``, ... (with an order).

    Raises `ConfigurationError` if a column's type makes no stable ``_id``.
    """
    source = f"to_json({row}, {_JSON_OPTIONS})"
    if delete_when is not None:
        source = f"CASE WHEN ({delete_when}) THEN NULL ELSE {source} END"
    made = [f"{source} AS source"]
    if key:
        made.insert(0, f"substring(to_json(named_struct('_id', {_id(row, schema, key)})), 2) AS id")
    names = ("rank", *(f"rank_{place}" for place in range(2, len(order_by) + 1)))
    return made + [f"{_operand(row, schema, value)} AS {name}" for name, value in zip(names, order_by, strict=False)]


def _id(row: str, schema: pa.Schema, key: Sequence[str]) -> str:
    for name in key:
        if name in schema.names:
            _check_id_type(schema.field(name))
    operands = [_operand(row, schema, name) for name in key]
    texts = [f"CAST({operand} AS STRING)" for operand in operands]
    if len(texts) == 1:
        return texts[0]
    # A JSON array keeps ("a", "bc") and ("ab", "c") apart, as no separator does.
    missing = " OR ".join(f"{operand} IS NULL" for operand in operands)
    return f"CASE WHEN {missing} THEN NULL ELSE to_json(array({', '.join(texts)})) END"


def _operand(row: str, schema: pa.Schema, expression: str) -> str:
    if expression in schema.names:
        return f"{row}.{_quoted(expression)}"
    return f"({expression})"


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _check_id_type(field: pa.Field) -> None:
    kind = field.type
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        raise _no_id(field, f"hex({field.name})", "bytes that are no text would fall together")
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        raise _no_id(field, f"unix_micros({field.name})", "its text depends on the session's time zone")
    if pa.types.is_nested(kind):
        raise _no_id(field, f"to_json({field.name})", "it has no text of its own")


def _no_id(field: pa.Field, instead: str, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"key={field.name!r} is of type {field.type}, which makes no _id: {reason}",
        hint=f"give an expression, e.g. key={instead!r}",
    )
