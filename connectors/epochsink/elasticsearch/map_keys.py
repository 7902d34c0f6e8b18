"""The SQL that finds map keys which no index takes, so that their rows are refused before the checkpoint decides.

A field of type flattened refuses a whole document for one key that holds a NUL or is very long, any index one that
holds a key twice (`from_json` makes such maps), and JSON puts one sign for every byte that is not UTF-8, so that two
keys fall together. The server would say so after the decision only, and the query could not go on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pyarrow as pa

from epochsink.sink.sql import quoted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

PATH_BYTES: Final = 20_000
"""How long the keys of a value may be together: with a text that is not too long to be indexed, a term may have 32,766
bytes."""
_SHOWN: Final = 200


def refused(row: str, schema: pa.Schema) -> str | None:
    """Return the SQL of a sentence about the first column with such a key, NULL for none; None if there are no maps."""
    found = [
        f"WHEN {predicate} THEN concat({_literal(f'column {field.name!r}: ')}, "
        f"left(to_json({row}.{quoted(field.name)}), {_SHOWN}))"
        for field in schema
        if (predicate := _unfit(f"{row}.{quoted(field.name)}", field.type, PATH_BYTES // max(1, levels(field.type))))
    ]
    return f"CASE {' '.join(found)} END" if found else None


def levels(kind: pa.DataType) -> int:
    """Return how many maps lie in one another."""
    inner = max(map(levels, _children(kind)), default=0)
    return inner + 1 if pa.types.is_map(kind) else inner


def is_variant(kind: pa.DataType) -> bool:
    """Return whether a type stands for Spark's VARIANT, which holds any JSON."""
    return pa.types.is_struct(kind) and any(b"variant" in (field.metadata or ()) for field in kind.fields)


def _children(kind: pa.DataType) -> Iterator[pa.DataType]:
    for place in range(kind.num_fields):
        yield kind.field(place).type


def _unfit(value: str, kind: pa.DataType, longest: int, depth: int = 0) -> str | None:
    """Return the predicate that is true for a value with such a key, None if it can have none."""
    types = pa.types
    if is_variant(kind):
        return None
    if types.is_struct(kind):
        return _any(_unfit(f"{value}.{quoted(field.name)}", field.type, longest, depth) for field in kind.fields)
    if types.is_list(kind) or types.is_large_list(kind):
        return _exists(value, kind.value_type, longest, depth)
    if types.is_map(kind):
        own = _unfit_keys(f"map_keys({value})", kind.key_type, longest)
        return _any([own, _exists(f"map_values({value})", kind.item_type, longest, depth)])
    return None


def _exists(values: str, kind: pa.DataType, longest: int, depth: int) -> str | None:
    element = f"e{depth}"
    inner = _unfit(element, kind, longest, depth + 1)
    return None if inner is None else f"coalesce(exists({values}, {element} -> {inner}), false)"


def _unfit_keys(keys: str, kind: pa.DataType, longest: int) -> str:
    twice = f"size(array_distinct({keys})) < size({keys})"
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        return f"coalesce({twice}, false)"
    # All keys as one text first: that is compiled code, which a look at each of them is not.
    joined = f"array_join({keys}, ',')"
    too_long = f"octet_length({joined}) > {longest} AND exists({keys}, k -> octet_length(k) > {longest})"
    return f"coalesce({twice} OR instr({joined}, char(0)) > 0 OR NOT is_valid_utf8({joined}) OR ({too_long}), false)"


def _any(predicates: Iterable[str | None]) -> str | None:
    found = [each for each in predicates if each is not None]
    return f"({' OR '.join(found)})" if found else None


def _literal(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
