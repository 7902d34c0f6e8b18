"""The merge: an epoch's accepted rows go from staging into the target, as one set."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from psycopg import sql

from epochsink.errors import PrepareFailed, RowsRejected
from epochsink.postgres.staging import DELETED, TAG, rank_column, tag

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from epochsink.postgres.committable import Merge
    from epochsink.postgres.relation import Relation
    from epochsink.postgres.server import Connection

WORK_MEM: Final = "128MB"
"""For the hash over the keys and, where a key comes twice, the sort; the server's default spills at once."""


def merge(connection: Connection, plan: Merge, staging: Relation, tasks: Sequence[str], rows: int) -> None:
    """Apply the rows of ``tasks`` to the target within the transaction under way.

    Raises `PrepareFailed` if staging does not hold exactly ``rows`` rows of them, `RowsRejected` if a key comes
    twice and nothing says which row is the last, `psycopg.Error`.
    """
    connection.execute(sql.SQL("SET LOCAL work_mem = {}").format(sql.Literal(WORK_MEM)))
    source = _source(plan, staging, tasks)
    if not plan.key:
        merged = connection.execute(_append(plan, source)).rowcount
        if merged != rows:  # a trigger may have swallowed or redirected rows: only staging's own count tells
            verify_count(connection, staging, tasks, rows)
        return
    repeated = _verify_keys(connection, plan, staging, tasks, rows)
    connection.execute(_upsert(plan, _latest(plan, source) if repeated else source))


def verify(connection: Connection, plan: Merge, staging: Relation, tasks: Sequence[str], rows: int) -> None:
    """Check what can be checked of staged rows before they are merged; raises as `merge` does."""
    if plan.key:
        _verify_keys(connection, plan, staging, tasks, rows)
    else:
        verify_count(connection, staging, tasks, rows)


def verify_casts(
    connection: Connection, plan: Merge, staging: Relation, tasks: Sequence[str], types: Mapping[str, str]
) -> None:
    """Store the values that are staged as text in columns of the target's ``types``, within a transaction to roll back.

    A query that only casts them would not do: the length of char(n) and the like is checked when a value is stored.
    """
    trial = sql.Identifier(str(staging.schema), f"{staging.name}_t")
    columns = sql.SQL(", ").join(
        sql.SQL("{} {}").format(sql.Identifier(name), sql.SQL(types[name])) for name in plan.casts
    )
    connection.execute(sql.SQL("CREATE UNLOGGED TABLE {} ({})").format(trial, columns))
    connection.execute(
        sql.SQL("INSERT INTO {} SELECT {} FROM {}").format(trial, _names(plan.casts), _source(plan, staging, tasks))
    )


def verify_count(connection: Connection, staging: Relation, tasks: Sequence[str], rows: int) -> None:
    """Raise `PrepareFailed` unless staging holds exactly ``rows`` rows of ``tasks``."""
    statement = sql.SQL("SELECT pg_catalog.count(*) FROM {} WHERE {}").format(staging.quoted, _accepted(tasks))
    _expect(staging, _numbers(connection, statement)[0], rows)


def _verify_keys(connection: Connection, plan: Merge, staging: Relation, tasks: Sequence[str], rows: int) -> bool:
    """Return whether a key comes more than once; counting the rows is a by-product."""
    many = sql.Identifier(TAG)  # a name that no column of the row has
    grouped = sql.SQL("SELECT {key}, pg_catalog.count(*) AS {many} FROM {source} GROUP BY {key}").format(
        key=_names(plan.key), many=many, source=_source(plan, staging, tasks)
    )
    null = sql.SQL(" OR ").join(sql.SQL("{} IS NULL").format(sql.Identifier(name)) for name in plan.key)
    statement = sql.SQL(
        "SELECT coalesce(pg_catalog.sum({many}), 0), coalesce(pg_catalog.max({many}), 0), "
        "coalesce(pg_catalog.sum({many}) FILTER (WHERE {null}), 0) "
        "FROM ({grouped}) AS keys"
    ).format(many=many, grouped=grouped, null=null)
    found, most, without_key = _numbers(connection, statement)
    _expect(staging, found, rows)
    if without_key:
        raise RowsRejected(
            f"{without_key} rows of the epoch have null in their key ({', '.join(plan.key)}), which replaces or "
            "deletes no row",
            hint="filter them with where=, or fill the key with coalesce() in select=",
        )
    if most > 1 and not plan.is_ordered:
        example = connection.execute(sql.SQL("{} ORDER BY {} DESC LIMIT 1").format(grouped, many)).fetchone() or ()
        key = ", ".join(f"{name}={value!r}" for name, value in zip(plan.key, example, strict=False))
        raise RowsRejected(
            f"key {key} comes {most} times in one epoch, and order_by= does not say which row is the last",
            hint="set order_by= to a column or Spark SQL expression whose largest value wins, or make keys unique with "
            "dropDuplicatesWithinWatermark",
            key=key,
        )
    return most > 1


def _expect(staging: Relation, found: int, rows: int) -> None:
    if found != rows:
        raise PrepareFailed(
            f"staging table {staging} holds {found} rows of the accepted tasks, and they wrote {rows}",
            hint="the server has crashed since (unlogged tables are emptied) or somebody changed the table; Spark "
            "runs the epoch again when the query restarts",
            found=found,
            expected=rows,
        )


def _append(plan: Merge, source: sql.Composable) -> sql.Composed:
    return sql.SQL("INSERT INTO {} ({}) SELECT {} FROM {}").format(
        plan.target.quoted, _names(plan.columns), _names(plan.columns), source
    )


def _upsert(plan: Merge, source: sql.Composable) -> sql.Composed:
    """Return one statement that deletes and upserts; it may, because no key is in both halves."""
    values = [name for name in plan.columns if name not in plan.key]
    settings = sql.SQL(", ").join(sql.SQL("{0} = EXCLUDED.{0}").format(sql.Identifier(name)) for name in values)
    action = sql.SQL("UPDATE SET {}").format(settings) if values else sql.SQL("NOTHING")
    conflict = sql.SQL(" ON CONFLICT ({}) DO {}").format(_names(plan.key), action)
    if not plan.deletes:
        return _append(plan, source) + conflict
    kept = sql.SQL("latest WHERE {} IS NOT TRUE").format(sql.Identifier(DELETED))
    return (
        sql.SQL(
            "WITH latest AS MATERIALIZED (SELECT * FROM {source}), gone AS ("
            "DELETE FROM {target} AS old USING latest WHERE latest.{deleted} AND {same})"
        ).format(
            source=source,
            target=plan.target.quoted,
            deleted=sql.Identifier(DELETED),
            same=sql.SQL(" AND ").join(
                sql.SQL("old.{0} {1} latest.{0}").format(sql.Identifier(name), sql.SQL(plan.equals.get(name, "=")))
                for name in plan.key
            ),
        )
        + _append(plan, kept)
        + conflict
    )


def _source(plan: Merge, staging: Relation, tasks: Sequence[str]) -> sql.Composed:
    """Return the accepted rows with the target's types; flattened by the planner, so it costs nothing."""
    columns: list[sql.Composable] = [
        sql.SQL("{0}::{1} AS {0}").format(sql.Identifier(name), sql.SQL(plan.casts[name]))
        if name in plan.casts
        else sql.Identifier(name)
        for name in plan.columns
    ]
    if plan.deletes:
        columns.append(sql.Identifier(DELETED))
    columns += _ranks(plan)
    return sql.SQL("(SELECT {} FROM {} WHERE {}) AS staged").format(
        sql.SQL(", ").join(columns), staging.quoted, _accepted(tasks)
    )


def _latest(plan: Merge, source: sql.Composable) -> sql.Composed:
    # a merge that version 1 recorded has SQL over the table's columns instead of staged values
    values = _ranks(plan) or [sql.SQL("({})").format(sql.SQL(expression)) for expression in plan.order_by]
    order = [sql.SQL("{} DESC NULLS LAST").format(value) for value in values]
    return sql.SQL("(SELECT DISTINCT ON ({key}) * FROM {source} ORDER BY {key}, {order}) AS latest_of_key").format(
        key=_names(plan.key), source=source, order=sql.SQL(", ").join(order)
    )


def _ranks(plan: Merge) -> list[sql.Composable]:
    return [sql.Identifier(rank_column(place)) for place in range(plan.ranks)]


def _accepted(tasks: Sequence[str]) -> sql.Composed:
    tags = sql.SQL(", ").join(sql.Literal(tag(task)) for task in tasks)
    return sql.SQL("{} OPERATOR(pg_catalog.=) ANY (ARRAY[{}]::pg_catalog.int8[])").format(sql.Identifier(TAG), tags)


def _names(names: Iterable[str]) -> sql.Composed:
    return sql.SQL(", ").join(sql.Identifier(name) for name in names)


def _numbers(connection: Connection, statement: sql.Composed) -> list[int]:
    return [int(value) for value in connection.execute(statement).fetchone() or (0, 0, 0)]
