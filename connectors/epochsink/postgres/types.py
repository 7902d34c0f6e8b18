"""Decide which Arrow types PostgreSQL columns take without loss, and how to encode them.

A binary COPY does not cast: the bytes must be what the column's receive function reads. So that function decides each
pair of types. A type without a binary form in Arrow (inet, interval, uuid[], ...) is staged as text, and the merge
casts it; a COPY directly into the target cannot write it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
import pgpq
import pyarrow as pa
import pyarrow.compute as pc
from pgpq import encoders
from pgpq import schema as pgpq_schema

from epochsink import arrow_buffers
from epochsink.postgres.catalog import Column


def _is_string(data: pa.DataType) -> bool:
    return bool(pa.types.is_string(data) or pa.types.is_large_string(data))


def _is_binary(data: pa.DataType) -> bool:
    return bool(pa.types.is_binary(data) or pa.types.is_large_binary(data) or pa.types.is_fixed_size_binary(data))


_INTEGERS: Final = {"int2recv": pa.int16(), "int4recv": pa.int32(), "int8recv": pa.int64()}
_FLOATS: Final = {"float4recv": pa.float32(), "float8recv": pa.float64()}
_TEXTS: Final = frozenset(
    {"textrecv", "varcharrecv", "bpcharrecv", "citextrecv", "enum_recv", "json_recv", "xml_recv", "namerecv"}
)
_SPARK_TYPES: Final = {
    "int2recv": "SMALLINT",
    "int4recv": "INT",
    "int8recv": "BIGINT",
    "float4recv": "FLOAT",
    "float8recv": "DOUBLE",
    "numeric_recv": "DECIMAL(38,10)",
    "boolrecv": "BOOLEAN",
    "bytearecv": "BINARY",
    "date_recv": "DATE",
    "timestamp_recv": "TIMESTAMP_NTZ",
    "timestamptz_recv": "TIMESTAMP",
}
_CUT_BY_INPUT: Final = {"charrecv": '"char" keeps one byte', "namerecv": "name keeps 63 bytes"}
# Strings are not parsed into types that Spark has too: users cast them in select=, where they can test the cast.
_HAVE_ARROW_TYPES: Final = frozenset(_SPARK_TYPES)
_SAME: Final = {
    "boolrecv": pa.types.is_boolean,
    "bytearecv": _is_binary,
    "date_recv": pa.types.is_date32,
    "interval_recv": pa.types.is_duration,
}
# the widest of Spark's integers (8, 16, 32, 64 bits) that a float holds exactly
_MANTISSA: Final = {pa.float32(): 16, pa.float64(): 32}
# the ranges of PostgreSQL's dates and timestamps, counted from 1970
_DAYS: Final = (-2440588, 2145042905)
_MICROSECONDS: Final = (-210866803200000000, 2**63 - 1)
_BIGINT_DIGITS: Final = 19
_UUID_DIGITS: Final = 32
_TIMES: Final = {"timestamp_recv", "timestamptz_recv"}
_TIMES_OF_DAY: Final = {"time_recv": "time", "timetz_recv": "timetz"}
_FRACTION_DIGITS: Final = 6


class Mismatch(Exception):
    """A pair of types that would lose or refuse values. The text gives the rule and the hint."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """How one column of the row is sent.

    ``convert`` turns the row's array into one of ``field``'s type. ``staged_as`` is the type of the staging column if
    it differs from the target's; the merge then casts to ``cast_to``. ``parses`` means that several texts give the same
    value.
    """

    field: pa.Field
    convert: Callable[[pa.Array], pa.Array]
    staged_as: str | None = None
    cast_to: str | None = None
    is_jsonb: bool = False
    parses: bool = False

    def builder(self) -> Any:
        """Return pgpq's encoder for the column."""
        if not self.is_jsonb:
            return pgpq.ArrowToPostgresBinaryEncoder.infer_encoder(self.field)
        large = pa.types.is_large_string(self.field.type)
        kind = encoders.LargeStringEncoderBuilder if large else encoders.StringEncoderBuilder
        return kind.new_with_output(self.field, pgpq_schema.Jsonb())


def row_encoding(name: str, data: pa.DataType) -> Encoding:
    """Return the encoding of a column that the sink adds. It has the matching type on both sides."""
    return Encoding(pa.field(name, data), _as_is)


def rank_encoding(field: pa.Field) -> Encoding:
    """Return the encoding of an ``order_by`` value, chosen so that the server sorts as Spark does.

    Text is sent as its UTF-8 bytes (no collation, NUL allowed), a timestamp as its microseconds. Raises `Mismatch`.
    """
    data = field.type
    if _is_string(data) or _is_binary(data):
        large = pa.types.is_large_string(data) or pa.types.is_large_binary(data)
        return _ranked(field, pa.large_binary() if large else pa.binary(), "bytea")
    if pa.types.is_floating(data):
        return _ranked(field, pa.float64(), "double precision")
    if pa.types.is_decimal(data):
        return _ranked(field, data, "numeric")
    if pa.types.is_nested(data):
        raise Mismatch(
            f"order_by= has a value of type {data}, which PostgreSQL cannot sort; name its fields one by one"
        )
    return Encoding(pa.field(field.name, pa.int64()), _as_numbers, "bigint")


def _ranked(field: pa.Field, target: pa.DataType, staged_as: str) -> Encoding:
    return replace(_sent(field, target), staged_as=staged_as)


def _as_numbers(array: pa.Array) -> pa.Array:
    if pa.types.is_date32(array.type):
        array = pc.cast(array, pa.int32())
    return pc.cast(array, pa.int64())


def encoding(field: pa.Field, column: Column) -> Encoding:
    """Return the encoding of ``field`` for ``column``. Raises `Mismatch`."""
    chosen = _encoding(field, column)
    if {column.receive, column.element} & _TIMES and 0 <= column.modifier < _FRACTION_DIGITS:
        step = 10 ** (_FRACTION_DIGITS - column.modifier)
        return replace(chosen, convert=partial(_unrounded, convert=chosen.convert, step=step))
    return chosen


def _unrounded(array: pa.Array, convert: Callable[[pa.Array], pa.Array], step: int) -> pa.Array:
    """Raise `pyarrow.ArrowInvalid` for timestamps that timestamp(n) would round without an error."""
    converted = convert(array)
    numbers = _as_numbers(converted.flatten() if pa.types.is_list(converted.type) else converted)
    finer = numbers.filter(pc.not_equal(pc.multiply(pc.divide(numbers, step), step), numbers))
    if len(finer):
        raise pa.ArrowInvalid(
            f"{finer[0].as_py()} microseconds since 1970 is not a multiple of {step}, and the column would round it; "
            "truncate it with date_trunc(), or widen the column"
        )
    return converted


def _encoding(field: pa.Field, column: Column) -> Encoding:
    data, receive = field.type, column.receive
    if receive == "array_recv" and pa.types.is_list(data):
        return _array(field, column)
    if _is_string(data):
        return _string(field, column)
    if receive == "uuid_recv" and _is_binary(data):
        return _sent(field, data)
    target = _binary_target(data, column, receive)
    if target is None:
        raise Mismatch(_refusal(field, column))
    return _sent(field, target)


def _binary_target(data: pa.DataType, column: Column, receive: str) -> pa.DataType | None:
    """Return the Arrow type whose encoding ``receive`` reads, or None if ``data`` does not fit it without loss."""
    if receive in _INTEGERS or receive in _FLOATS:
        return _number(data, receive)
    if receive == "numeric_recv":
        return _numeric(data, column.modifier)
    if pa.types.is_timestamp(data):
        return _timestamp(data, receive)
    if receive == "interval_recv" and column.modifier >= 0:
        return None  # a restricted interval drops fields or rounds
    is_same = _SAME.get(receive)
    return data if is_same is not None and is_same(data) else None


def _number(data: pa.DataType, receive: str) -> pa.DataType | None:
    wanted = _INTEGERS.get(receive) or _FLOATS[receive]
    if pa.types.is_floating(data):
        return wanted if receive in _FLOATS and data.bit_width <= wanted.bit_width else None
    bits = _MANTISSA.get(wanted, wanted.bit_width)
    return wanted if pa.types.is_signed_integer(data) and data.bit_width <= bits else None


def _numeric(data: pa.DataType, modifier: int) -> pa.DataType | None:
    if pa.types.is_signed_integer(data):
        return pa.decimal128(_BIGINT_DIGITS, 0) if _scale(modifier) >= 0 else None
    return data if pa.types.is_decimal(data) and data.scale <= _scale(modifier) else None


def _scale(modifier: int) -> int:
    """Return the scale of numeric(precision, scale), 11 signed bits of the modifier; very large without a modifier."""
    if modifier < 0:
        return 1 << 14
    return (((modifier - 4) & 0x7FF) ^ 0x400) - 0x400


def _timestamp(data: pa.DataType, receive: str) -> pa.DataType | None:
    if receive == "timestamptz_recv" and data.tz is not None:
        return pa.timestamp("us", "UTC")
    return pa.timestamp("us") if receive == "timestamp_recv" else None


def _string(field: pa.Field, column: Column) -> Encoding:
    if column.receive in _TEXTS:
        return _sent(field, field.type)
    if column.receive == "jsonb_recv":
        return Encoding(field, _as_is, is_jsonb=True)
    if column.receive == "uuid_recv":
        return Encoding(pa.field(field.name, pa.binary(16)), _uuids, parses=True)
    if column.receive in _HAVE_ARROW_TYPES:
        raise Mismatch(_refusal(field, column))
    _refuse_cutting(field, column, column.receive)
    return Encoding(field, _unrounded_text if column.receive in _TIMES_OF_DAY else _as_is, "text", column.bare_type)


def _refuse_cutting(field: pa.Field, column: Column, receive: str) -> None:
    """Raise `Mismatch` for types whose input function truncates text without an error."""
    if receive in _CUT_BY_INPUT:
        raise Mismatch(
            f"{field.type} from Spark into {column.declared}: {_CUT_BY_INPUT[receive]}, and the server would drop the "
            "rest without an error; change the column's type to text"
        )
    if receive == "domain_recv":
        raise Mismatch(
            f"{field.type} from Spark into {column.declared}: the cast to an array of a domain truncates values "
            "without an error; change the column to an array of the domain's base type"
        )
    if wider := _rounded(column, receive):
        raise Mismatch(
            f"{field.type} from Spark into {column.declared}: the server would round or drop what this type does not "
            f"keep, without an error; change the column's type to {wider}"
        )


def _rounded(column: Column, receive: str) -> str | None:
    """Return the type to use in place of one that rounds text, or drops fields of it, without an error."""
    array = "[]" if column.element else ""
    if receive == "cash_recv":
        return f"numeric{array}"
    if receive == "interval_recv" and column.modifier >= 0:
        return f"interval{array}"
    if receive in _TIMES_OF_DAY and 0 <= column.modifier < _FRACTION_DIGITS:
        return f"{_TIMES_OF_DAY[receive]}{array}"
    return None


def _unrounded_text(array: pa.Array) -> pa.Array:
    """Raise `pyarrow.ArrowInvalid` for times of day finer than a microsecond, which the server would round."""
    texts = array.flatten() if pa.types.is_list(array.type) else array
    finer = texts.filter(pc.match_substring_regex(texts, rf"\.\d{{{_FRACTION_DIGITS}}}\d*[1-9]"))
    if len(finer):
        raise pa.ArrowInvalid(
            f"{finer[0].as_py()!r} has more than {_FRACTION_DIGITS} digits after the second, and the column would "
            "round it; cut it in select="
        )
    return array


def _array(field: pa.Field, column: Column) -> Encoding:
    element, inner = column.element or "", field.type.value_type
    if _is_string(inner) and element not in _HAVE_ARROW_TYPES:
        exact = element == "textrecv"
        _refuse_cutting(field, column, element)
        convert = _unrounded_text if element in _TIMES_OF_DAY else _as_is
        return Encoding(field, _as_is) if exact else Encoding(field, convert, "text[]", column.bare_type)
    target = _binary_target(inner, column, element)
    if target is None:
        raise Mismatch(_refusal(field, column))
    if element == "timestamptz_recv":
        # The encoder labels the array's elements as timestamp. The session's time zone, UTC, makes the cast exact.
        return Encoding(field, partial(_in_range, target=field.type), "timestamp[]", column.bare_type)
    return _sent(field, pa.list_(pa.field("item", target)))


def _sent(field: pa.Field, target: pa.DataType) -> Encoding:
    element = target.value_type if pa.types.is_list(target) else target
    if pa.types.is_date32(element) or pa.types.is_timestamp(element):
        return Encoding(pa.field(field.name, target), partial(_in_range, target=target))
    if field.type == target:
        return Encoding(field, _as_is)
    return Encoding(pa.field(field.name, target), partial(pc.cast, target_type=target))


def _in_range(array: pa.Array, target: pa.DataType) -> pa.Array:
    """Return dates or timestamps as ``target``. Raises `pyarrow.ArrowInvalid` if PostgreSQL has no such value.

    Unchecked, the ends of Spark's range would be read as infinity or wrap around.
    """
    values = array.flatten() if pa.types.is_list(array.type) else array
    numbers = _as_numbers(values)
    lowest, highest = _DAYS if pa.types.is_date32(values.type) else _MICROSECONDS
    ends = pc.min_max(numbers).as_py()
    if ends["min"] is not None and not lowest <= ends["min"] <= ends["max"] <= highest:
        wrong = next(ends[end] for end in ("min", "max") if not lowest <= ends[end] <= highest)
        unit = "days" if pa.types.is_date32(values.type) else "microseconds"
        raise pa.ArrowInvalid(
            f"{wrong} {unit} since 1970 are outside the range of PostgreSQL's dates, 4713 BC to 5874897 or 294276"
        )
    return pc.cast(array, target)


def _as_is(array: pa.Array) -> pa.Array:
    return array


def _uuids(array: pa.Array) -> pa.Array:
    """Turn uuids from text (hyphens and braces allowed) into 16 bytes. Raises `pyarrow.ArrowInvalid`."""
    digits = pc.replace_substring_regex(pc.cast(array, pa.string()), "[-{}]", "")
    good = pc.match_substring_regex(digits, "^[0-9a-fA-F]{32}$")
    if not pc.all(good, min_count=0).as_py():
        raise pa.ArrowInvalid(f"{array.filter(pc.invert(good))[0].as_py()!r} is not a valid uuid")
    text = pc.cast(pc.fill_null(digits, arrow_buffers.text("0" * _UUID_DIGITS, pa.string())), pa.binary(_UUID_DIGITS))
    codes = np.frombuffer(text.buffers()[1], np.uint8)[text.offset * _UUID_DIGITS :][: len(text) * _UUID_DIGITS]
    # & 0x5F, the code of "_", makes a letter upper case
    nibbles = np.where(codes > ord("9"), (codes & ord("_")) - ord("A") + 10, codes - ord("0")).astype(np.uint8)
    packed = pa.py_buffer((nibbles[0::2] << 4 | nibbles[1::2]).tobytes())
    uuids = pa.FixedSizeBinaryArray.from_buffers(pa.binary(_UUID_DIGITS // 2), len(array), [None, packed])
    return pc.if_else(pc.is_valid(array), uuids, pa.nulls(1, uuids.type)[0])


def _refusal(field: pa.Field, column: Column) -> str:
    hint = f"cast it in select=, for example CAST({field.name} AS {_spark_type(column)}) AS {field.name}"
    if pa.types.is_timestamp(field.type) and field.type.tz is None and column.receive == "timestamptz_recv":
        rule = "a timestamp without time zone is not a point in time"
    elif pa.types.is_decimal(field.type) and column.receive == "numeric_recv":
        rule = f"decimal digits would be rounded away (scale {field.type.scale} > {_scale(column.modifier)})"
    elif pa.types.is_null(field.type):
        rule = "a column without a type holds only null"
    elif pa.types.is_duration(field.type):
        rule = "an interval needs a column of type interval"
        # PostgreSQL cannot parse Spark's text form, INTERVAL '...' DAY TO SECOND.
        hint = f"convert it in select=, for example unix_micros(timestamp_seconds(0) + {field.name}) AS {field.name}"
    else:
        rule = "this conversion can lose data"
    return f"{field.type} from Spark into {column.declared}: {rule}; {hint}, or change the column's type"


def _spark_type(column: Column) -> str:
    if column.receive == "numeric_recv" and column.modifier >= 0:
        return f"DECIMAL({(column.modifier - 4) >> 16 & 0xFFFF},{max(_scale(column.modifier), 0)})"
    return _SPARK_TYPES.get(column.receive, "STRING")
