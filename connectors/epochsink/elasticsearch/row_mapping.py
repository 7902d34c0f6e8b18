"""Make the SQL by which Spark renders each row for a bulk request, in the JVM.

A row becomes ``id``, the end of an action line (``"_id":"..."}``), and ``source``, the document, or NULL for a delete.
Spark's JSON encoder makes both, so values may hold any character. The beginning of the action line has the version,
which differs in each epoch. It is added when the epoch is applied, because a literal in the SQL would make Spark
compile the plan again for each epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import pyarrow as pa

from epochsink import arguments
from epochsink.elasticsearch.unfit import NOT_JSON, NOT_UTF8, PATH_BYTES, WRONG_KEY, sentence_of
from epochsink.errors import ConfigurationError
from epochsink.sink.row_json import any_of, first_of, is_text, is_variant, marked_json, not_json, not_utf8, value_json
from epochsink.sink.sql import field_of, literal, operand, text_of

_METADATA: Final = frozenset(
    {"_id", "_index", "_source", "_routing", "_field_names", "_ignored", "_nested_path", "_seq_no", "_version"}
    | {"_data_stream_timestamp", "_doc_count", "_feature", "_ignored_source", "_primary_term", "_tier", "_tsid"}
)
"""Names that the server reserves at a document's top level."""
_ARTICLES: Final = {"key": "an _id", "routing": "a routing"}


def columns(
    row: str,
    schema: pa.Schema,
    *,
    key: Sequence[str],
    delete_when: str | None,
    order_by: Sequence[str],
    routing: str | None = None,
    index_by: str | None = None,
) -> list[str]:
    """Return the expressions for ``id`` (with a key), ``source``, ``routing``, ``index``, and ``rank``, ``rank_2``, ...

    Raises `ConfigurationError` if a column's type has no stable text for ``_id``, or does not fit into a document.
    """
    _check_fields(schema, "")
    expressions = [f"{_source(row, schema, delete_when)} AS source"]
    if key:
        expressions.insert(0, f"{_end_of_action(row, schema, key)} AS id")
    if routing is not None:
        expressions.append(f"{_routing(row, schema, routing)} AS routing")
    if index_by is not None:
        expressions.append(f"{text_of(_operand(row, schema, index_by))} AS index")
    ranked = zip(_rank_names(order_by), order_by, strict=True)
    return expressions + [f"{_operand(row, schema, value)} AS {name}" for name, value in ranked]


def _rank_names(order_by: Sequence[str]) -> list[str]:
    return ["rank", *(f"rank_{place}" for place in range(2, len(order_by) + 1))][: len(order_by)]


def check_ranks(schema: pa.Schema, order_by: Sequence[str]) -> None:
    """Raise `ConfigurationError` for ``order_by`` values that cannot be sorted. ``schema`` is that of `columns`."""
    for name, expression in zip(_rank_names(order_by), order_by, strict=True):
        kind = schema.field(name).type
        if pa.types.is_nested(kind) or pa.types.is_interval(kind):
            raise ConfigurationError(
                f"invalid order_by={expression!r}: it gives values of type {kind}, which cannot be sorted",
                hint="name the fields to sort by, the most important first, e.g. order_by=['s.a', 's.b']",
            )


def _source(row: str, schema: pa.Schema, delete_when: str | None) -> str:
    """Return the SQL of the document: NULL for a delete, with a sentence before it for one to refuse."""
    kind = pa.struct(list(schema))
    delete = None if delete_when is None else operand(delete_when)
    source = marked_json(value_json(row, kind, unless=delete), first_of(_unfit_for_json(row, schema)))
    unfit_maps = first_of(_unfit_maps(row, schema))
    return source if unfit_maps is None else f"concat(coalesce({unfit_maps}, ''), {source})"


def _end_of_action(row: str, schema: pa.Schema, key: Sequence[str]) -> str:
    """Return the SQL of ``"_id":"..."}``. A NULL id gives an action line without an id, which the writer refuses."""
    if len(key) == 1 and key[0] in schema.names and pa.types.is_integer(schema.field(key[0]).type):
        # A number needs no escaping, and the JSON encoder would take a quarter of the time of a whole document.
        return f"""coalesce(concat('"_id":"', {text_of(_operand(row, schema, key[0]))}, '"}}'), '}}')"""
    # Do not depend on the session's setting for NULLs.
    named = f"to_json(named_struct('_id', {_id(row, schema, key)}), map('ignoreNullFields', 'true'))"
    return f"substring({named}, 2)"


def _routing(row: str, schema: pa.Schema, routing: str) -> str:
    """Return the SQL of ``{"routing":"..."}``; of ``{}``, which the writer refuses, for NULL and invalid UTF-8."""
    if routing in schema.names:
        _check_id_type("routing", schema.field(routing))
    text = text_of(_operand(row, schema, routing))
    valid = f"CASE WHEN is_valid_utf8({text}) THEN {text} END"
    return f"to_json(named_struct('routing', {valid}), map('ignoreNullFields', 'true'))"


def placement(
    schema: pa.Schema, select: Sequence[str], *, key: Sequence[str], **placed_by: str | None
) -> tuple[dict[str, str], list[str]]:
    """Return the expressions ``placed_by``, by argument, and those of the key, all over the stream's columns.

    Raises `ConfigurationError` for a column that ``select`` makes without naming it.
    """
    expressions = {}
    for argument, expression in placed_by.items():
        # The same text has the same value as the key, wherever it comes from.
        if expression is not None and expression not in key:
            origin = _origin(schema, select, expression)
            if origin is None:
                raise ConfigurationError(
                    f"{argument}={expression!r} is a column that select= makes without naming it, so it cannot be "
                    "compared with the key",
                    hint=f"write it in select= as '... AS {expression}', or name it in key= too",
                )
            expressions[argument] = origin
    return expressions, [origin for name in key if (origin := _origin(schema, select, name)) is not None]


def _origin(schema: pa.Schema, select: Sequence[str], expression: str) -> str | None:
    return arguments.origin(select, expression) if expression in schema.names else expression


def _id(row: str, schema: pa.Schema, key: Sequence[str]) -> str:
    for name in key:
        if name in schema.names:
            _check_id_type("key", schema.field(name))
    texts = [text_of(_operand(row, schema, name)) for name in key]
    # JSON replaces every byte that is not UTF-8 by the same character, so two such ids could become equal: use NULL.
    whole = " AND ".join(f"coalesce(is_valid_utf8({text}), false)" for text in texts)
    # A JSON array keeps ("a", "bc") and ("ab", "c") apart; a separator would not.
    expression = texts[0] if len(texts) == 1 else f"to_json(array({', '.join(texts)}))"
    return f"CASE WHEN {whole} THEN {expression} END"


def _operand(row: str, schema: pa.Schema, expression: str) -> str:
    if expression in schema.names:
        return field_of(row, expression)
    return operand(expression)


def _check_fields(fields: Iterable[pa.Field], path: str) -> None:
    """Raise `ConfigurationError` for fields that no document can hold."""
    seen: set[str] = set()
    for field in fields:
        name = f"{path}{field.name}"
        if field.name in seen:
            raise ConfigurationError(
                f"the row has two fields {name!r}, but a document can have each field only once",
                hint="select one of them under another name with AS",
            )
        if not all(part.strip() for part in field.name.split(".")):
            raise ConfigurationError(
                f"invalid field {name!r}: a name, and each part of it between dots, must not be empty",
                hint="select it under another name with AS",
            )
        if not path and field.name in _METADATA:
            raise ConfigurationError(
                f"invalid field {name!r}: Elasticsearch reserves this name",
                hint=f"select it under another name with AS, or leave it out; key={name!r} needs no field of that name",
            )
        seen.add(field.name)
        _check_values(field.type, name)


def _check_values(kind: pa.DataType, name: str) -> None:
    if pa.types.is_struct(kind):
        _check_fields(kind.fields, f"{name}.")
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        _check_values(kind.value_type, name)
    elif pa.types.is_map(kind):
        if pa.types.is_nested(kind.key_type) or pa.types.is_binary(kind.key_type):
            raise ConfigurationError(
                f"the map {name!r} has keys of type {kind.key_type}, whose text is not the same in every run",
                hint=f"convert its keys to text, e.g. transform_keys({name}, (k, v) -> hex(k))",
            )
        _check_values(kind.item_type, name)


def _check_id_type(argument: str, field: pa.Field) -> None:
    kind = field.type
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        raise _no_id(argument, field, f"hex({field.name})", "different bytes may become the same text")
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        raise _no_id(argument, field, f"unix_micros({field.name})", "its text depends on the session's time zone")
    if pa.types.is_nested(kind):
        raise _no_id(argument, field, f"to_json({field.name})", "it has no text form")


def _no_id(argument: str, field: pa.Field, instead: str, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"{argument}={field.name!r} is of type {field.type}, which cannot be {_ARTICLES[argument]}: {reason}",
        hint=f"give an expression, e.g. {argument}={instead!r}",
    )


_SHOWN: Final = 200


# A field of type flattened refuses a whole document if one key holds a NUL or is very long. Every index refuses a
# document with a duplicate key: `from_json` makes such maps. The server would refuse the document only after the epoch
# is recorded, and the query could not go on. Text that is not UTF-8 would be stored as another one.
def _unfit_maps(row: str, schema: pa.Schema) -> Iterator[tuple[str, str]]:
    """Yield conditions that no index takes the keys of a map, and the sentence for each, in SQL."""
    for field in schema:
        value = field_of(row, field.name)
        condition = _unfit(value, field.type, PATH_BYTES // max(1, levels(field.type)))
        if condition is not None:
            yield condition, _sentence(WRONG_KEY, field.name, _shown(value))


def _unfit_for_json(row: str, schema: pa.Schema) -> Iterator[tuple[str, str]]:
    """Yield the same for values that JSON cannot hold. The sentence has the bytes of a text; the document has not."""
    for field in schema:
        value = field_of(row, field.name)
        shown = f"hex({value})" if is_text(field.type) else _shown(value)
        for what, condition in ((NOT_UTF8, not_utf8(value, field.type)), (NOT_JSON, not_json(value, field.type))):
            if condition is not None:
                yield condition, _sentence(what, field.name, shown)


def _sentence(what: str, name: str, shown: str) -> str:
    return sentence_of(literal(f"{what} column {name!r}: "), shown)


def _shown(value: str) -> str:
    return f"left(to_json({value}), {_SHOWN})"


def levels(kind: pa.DataType) -> int:
    """Return the depth of nested maps."""
    inner = max(map(levels, _children(kind)), default=0)
    return inner + 1 if pa.types.is_map(kind) else inner


def _children(kind: pa.DataType) -> Iterator[pa.DataType]:
    for place in range(kind.num_fields):
        yield kind.field(place).type


def _unfit(value: str, kind: pa.DataType, longest: int, depth: int = 0) -> str | None:
    """Return the predicate that is true for a value with such a key; None if the type cannot have one."""
    types = pa.types
    if is_variant(kind):
        return None
    if types.is_struct(kind):
        return any_of(_unfit(field_of(value, field.name), field.type, longest, depth) for field in kind.fields)
    if types.is_list(kind) or types.is_large_list(kind):
        return _exists(value, kind.value_type, longest, depth)
    if types.is_map(kind):
        own = _unfit_keys(f"map_keys({value})", kind.key_type, longest)
        return any_of([own, _exists(f"map_values({value})", kind.item_type, longest, depth)])
    return None


def _exists(values: str, kind: pa.DataType, longest: int, depth: int) -> str | None:
    element = f"e{depth}"
    inner = _unfit(element, kind, longest, depth + 1)
    return None if inner is None else f"coalesce(exists({values}, {element} -> {inner}), false)"


def _unfit_keys(keys: str, kind: pa.DataType, longest: int) -> str:
    twice = f"size(array_distinct({keys})) < size({keys})"
    if not is_text(kind):
        return f"coalesce({twice}, false)"
    # Check all keys as one text first: Spark compiles that, but not a lambda for each key.
    joined = f"array_join({keys}, ',')"
    too_long = f"octet_length({joined}) > {longest} AND exists({keys}, k -> octet_length(k) > {longest})"
    return f"coalesce({twice} OR instr({joined}, char(0)) > 0 OR ({too_long}), false)"
