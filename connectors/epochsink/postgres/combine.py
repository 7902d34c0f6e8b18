"""Combine the values of a key's rows with each other, and with the stored value, as ``accumulate`` says.

`sum`, `min` and `max` are the server's own aggregates. An SQL expression over ``stored`` and ``new`` becomes an
aggregate of the user's, which exists only within the transaction that needs it.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final, LiteralString

from psycopg import sql

from epochsink.postgres.committable import Merge
from epochsink.postgres.server import Connection
from epochsink.postgres.staging import NUMBER

STORED: Final = "stored"
"""What the SQL of a merge calls the stored row, and an expression the stored value."""
NEW: Final = "new"
_COMBINED: Final[Mapping[str, LiteralString]] = {
    "sum": "coalesce({stored} OPERATOR(pg_catalog.+) {new}, {stored}, {new})",
    "min": "LEAST({stored}, {new})",
    "max": "GREATEST({stored}, {new})",
}
"""What combines two values as the aggregate of that name does."""

Folds = dict[str, sql.Identifier]
"""The aggregate function of each column that has an expression."""


def expression(text: str) -> sql.Composed:
    """Return the text of an expression as one operand, whatever operators and comments it has."""
    return sql.SQL("({}\n)").format(sql.SQL(text))


def combined(plan: Merge, name: str) -> sql.Composed:
    """Return what a column becomes if its key is stored already."""
    new, stored = sql.SQL("EXCLUDED.{}").format(sql.Identifier(name)), sql.Identifier(STORED, name)
    kind = sql.SQL(plan.columns[name])
    if name in plan.expressions:
        return sql.SQL("(SELECT {}::{} FROM (SELECT {}, {}) AS both_values ({}, {}))").format(
            expression(plan.expressions[name]), kind, stored, new, sql.Identifier(STORED), sql.Identifier(NEW)
        )
    both = sql.SQL(_COMBINED[plan.accumulate[name]]).format(stored=stored, new=new)
    return sql.SQL("({})::{}").format(both, kind)


@contextmanager
def folds(
    connection: Connection, schema: str, expressions: Mapping[str, str], columns: Mapping[str, str]
) -> Iterator[Folds]:
    """Lend the aggregates that fold a key's rows by ``expressions``, in the transaction under way, and drop them.

    ``columns`` has the type of each column. The first row's value is taken as it is. So an aggregate takes the value,
    and whether it is the first one. The names are new ones: another transaction that makes the same name in ``schema``
    would wait for the end of this one, prepared as it may be. Raises `psycopg.Error`.
    """
    prefix = f"epochsink_fold_{uuid.uuid4().hex}"
    functions: Folds = {}
    for place, (name, text) in enumerate(expressions.items()):
        functions[name] = sql.Identifier(schema, f"{prefix}_{place}")
        kind, new = sql.SQL(columns[name]), sql.Identifier(NEW)
        # as text, and not as RETURN: only then are values compared by the collation of their column
        body = sql.SQL("SELECT CASE WHEN $3 THEN {} ELSE {}::{} END").format(new, expression(text), kind)
        connection.execute(
            sql.SQL(
                "CREATE FUNCTION {step} ({stored} {kind}, {new} {kind}, boolean) RETURNS {kind} LANGUAGE sql IMMUTABLE "
                "AS {body}; "
                "CREATE AGGREGATE {fold} ({kind}, boolean) (SFUNC = {step}, STYPE = {kind})"
            ).format(
                step=_step(schema, prefix, place),
                fold=functions[name],
                kind=kind,
                stored=sql.Identifier(STORED),
                new=new,
                body=sql.Literal(body.as_string(connection)),
            )
        )
    yield functions
    for place, fold in enumerate(functions.values()):
        connection.execute(sql.SQL("DROP ROUTINE {}; DROP ROUTINE {}").format(fold, _step(schema, prefix, place)))


def _step(schema: str, prefix: str, place: int) -> sql.Identifier:
    return sql.Identifier(schema, f"{prefix}_{place}_step")


def over_key(plan: Merge, functions: Folds, name: str) -> sql.Composable:
    """Return a column of the newest row of a key: what accumulates is taken over all rows of the key.

    The rows are numbered within their key if there are folds.
    """
    column = sql.Identifier(name)
    if name not in plan.accumulate:
        return column
    key = sql.SQL(", ").join(map(sql.Identifier, plan.key))
    if name not in plan.expressions:
        return sql.SQL("pg_catalog.{}({column}) OVER (PARTITION BY {key}) AS {column}").format(
            sql.SQL(plan.accumulate[name]),
            column=column,
            key=key,
        )
    return sql.SQL(
        "{}({column}, {number} OPERATOR(pg_catalog.=) 1) OVER (PARTITION BY {key} ORDER BY {number} "
        "ROWS BETWEEN UNBOUNDED PRECEDING AND UNBOUNDED FOLLOWING) AS {column}"
    ).format(functions[name], column=column, key=key, number=sql.Identifier(NUMBER))
