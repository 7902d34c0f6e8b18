"""Check the columns that an upsert compares or combines with the stored ones, before the first row."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Sequence
from typing import Final

from psycopg import errors, sql

from epochsink.postgres.catalog import Column, TargetTable
from epochsink.postgres.combine import NEW, STORED, expression, folds
from epochsink.postgres.config import AGGREGATES, PostgresConfig
from epochsink.postgres.errors import describe
from epochsink.postgres.prepared_transaction import transaction
from epochsink.postgres.server import Connection
from epochsink.postgres.types import Encoding

_ORDER: Final = "order"
_CUT_BY_CASTS: Final = {"varcharrecv", "bpcharrecv", "bit_recv", "varbit_recv"}
"""Types whose length a cast enforces by cutting the value, without an error."""
_CONSTANT: Final = re.compile(
    r"""'((?:[^']|'')*)'::((?:"(?:[^"]|"")*"|[\w.])+(?:\(\d+\))?(?: with(?:out)? time zone)?(?:\[\])*)"""
)
"""A constant and its type, in the server's own text of an expression."""
_READS_THE_MOMENT: Final = """
    SELECT FROM pg_catalog.pg_type t JOIN pg_catalog.pg_proc p ON p.oid = t.typinput
    WHERE t.oid = pg_catalog.to_regtype(%s) AND p.provolatile <> 'i'
    AND t.oid <> 'pg_catalog.interval'::pg_catalog.regtype
"""
"""One row if the value that a text has as one of a type may depend on more than the text. That of an interval depends
on settings alone, which each session has."""
_CUT_ALWAYS: Final = {"namerecv", "charrecv"}
# ProtocolViolation: it has a parameter, such as $1
_REFUSALS: Final = (errors.ProgrammingError, errors.NotSupportedError, errors.DataError, errors.ProtocolViolation)


def check_compared(
    config: PostgresConfig, connection: Connection, target: TargetTable, encodings: Sequence[Encoding]
) -> Iterator[str]:
    """Yield columns of newer_wins= and accumulate= whose type cannot be compared or combined exactly."""
    row = {encoding.field.name: encoding for encoding in encodings}
    comparisons: list[tuple[str, str, str]] = [("accumulate", name, how) for name, how in config.accumulate.items()]
    if config.newer_wins is not None:
        comparisons.append(("newer_wins", config.newer_wins, _ORDER))
    for argument, name, how in comparisons:
        if name not in row:
            yield f"{argument}= names {name!r}, which is not a column of the row that fits the table; add it in select="
            continue
        column = target.columns[name]
        where = f"{argument}= names column {name!r} of {target.relation}, whose type is {column.declared}"
        if how not in (*AGGREGATES, _ORDER):
            yield from _check_expression(config, connection, target, column, how)
        elif how == "sum" and column.receive in ("float4recv", "float8recv"):
            yield (
                f"{where}, and the last digits of such a sum depend on the order of the rows; make it numeric and cast "
                "to DECIMAL in select=, or take 'min' or 'max'"
            )
        elif row[name].cast_to or not column.equals.startswith("OPERATOR(pg_catalog."):
            yield f"{where}, which compares in a way of its own; use a number, a date or a timestamp"
        elif not _has(connection, target, name, how):
            yield f"{where}, which has no {how}; use a number, a date or a timestamp"


def _has(connection: Connection, target: TargetTable, name: str, how: str) -> bool:
    """Return whether a column's type has an order, or the aggregate ``how``."""
    query = "SELECT pg_catalog.{how}({name}) FROM {table} WHERE false"
    if how == _ORDER:
        query = "SELECT FROM {table} WHERE false ORDER BY {name}"
    try:
        connection.execute(
            sql.SQL(query).format(how=sql.SQL(how), name=sql.Identifier(name), table=target.relation.quoted)
        )
    except errors.UndefinedFunction:
        return False
    except errors.InsufficientPrivilege:
        return True  # that is another finding
    return True


def _check_expression(
    config: PostgresConfig, connection: Connection, target: TargetTable, column: Column, text: str
) -> Iterator[str]:
    """Yield why an expression cannot combine a column's values: the server tries it on an empty table of ours."""
    said = f"accumulate={{{column.name!r}: {text!r}}}"
    kinds = {column.receive, column.element}
    if (column.modifier >= 0 and kinds & _CUT_BY_CASTS) or kinds & _CUT_ALWAYS:
        yield (
            f"{said}: a result that is too long for {column.declared} would be cut without an error; make column "
            f"{column.name!r} of {target.relation} text"
        )
        return
    try:
        constants = _try(connection, config.marker_schema, column, text)
    except errors.InvalidObjectDefinition:
        yield (
            f"{said}: the expression is not immutable, so an epoch that is prepared again could get another result; "
            "leave out now(), random() and functions that read settings or tables, such as concat() and to_char()"
        )
    except errors.InsufficientPrivilege as refused:
        user = sql.Identifier(connection.info.user).as_string(connection)
        yield f"{said}: {describe(refused)}; let the owner grant it to {user}"
    except _REFUSALS as refused:
        yield (
            f"{said}: {describe(refused)}; write one expression over stored, the stored value of the column, and new, "
            f"the row's, whose result can be assigned to {column.declared}"
        )
    else:
        if constants:
            yield (
                f"{said}: the server has read another constant out of it, {', '.join(constants)}, so an epoch that is "
                "prepared again, or a later start, could get another one; leave out 'now', 'today' and the like, and "
                "write a constant as the server does, e.g. '2026-01-31'::date"
            )


def _try(connection: Connection, schema: str, column: Column, text: str) -> list[str]:
    """Let the server parse and plan all SQL that an expression is part of; return `_read_constants` of it.

    Raises `psycopg.Error`.
    """
    trial = sql.Identifier(schema, f"epochsink_trial_{uuid.uuid4().hex}")
    declared = sql.SQL(column.declared)
    kind = sql.SQL(column.definition)
    # with the search path of the merge
    with transaction(connection):
        connection.execute(
            sql.SQL("CREATE UNLOGGED TABLE {} ({} {kind}, {} {kind})").format(
                trial, sql.Identifier(STORED), sql.Identifier(NEW), kind=kind
            )
        )
        # without parentheses, so that none within it can match ours; binary, so that the server takes one statement
        whole = sql.SQL("SELECT CASE WHEN true THEN {}\n END FROM {}").format(sql.SQL(text), trial)
        connection.execute(whole, binary=True)
        # what a generated column may be is what a merge may use: it is immutable and reads no other row. The first one
        # is assigned to the type, and the second one is what the merge writes
        generated = sql.SQL("ADD COLUMN {} {} GENERATED ALWAYS AS {} STORED")
        columns = (
            generated.format(sql.Identifier("result"), kind, expression(text)),
            generated.format(sql.Identifier("cast"), kind, sql.SQL("({}::{})").format(expression(text), declared)),
        )
        connection.execute(sql.SQL("ALTER TABLE {} {}").format(trial, sql.SQL(", ").join(columns)))
        constants = _read_constants(connection, trial, text)
        with folds(connection, schema, {column.name: text}, {column.name: column.declared}):
            pass
        connection.rollback()
    return constants


def _read_constants(connection: Connection, trial: sql.Identifier, text: str) -> list[str]:
    """Return the constants in the columns of a trial table that are not in an expression's text as they are.

    The server reads a constant such as ``DATE 'today'`` when it parses the expression, so that its rule for what is
    immutable does not see it. What it has read shows in its own text of the expression, and whether that may depend on
    the moment, by the volatility of the type's input function.
    """
    query = "SELECT pg_catalog.pg_get_expr(adbin, adrelid) FROM pg_catalog.pg_attrdef WHERE adrelid = %s::regclass"
    shown = connection.execute(query, [trial.as_string(connection)]).fetchall()
    constants = {(value.replace("''", "'"), kind) for (whole,) in shown for value, kind in _CONSTANT.findall(whole)}
    return [
        f"'{value}'::{kind}"
        for value, kind in sorted(constants)
        if value not in text and connection.execute(_READS_THE_MOMENT, [kind]).fetchone() is not None
    ]
