"""Compare the columns of the row with the table's, for the check before the first row and for each writer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import pyarrow as pa

from epochsink.errors import PrepareFailed
from epochsink.identity import staging_table
from epochsink.postgres.catalog import Column, TargetTable, read_checks, read_target, require_safe
from epochsink.postgres.committable import Member, Merge, Relation
from epochsink.postgres.config import PostgresConfig
from epochsink.postgres.server import Connection
from epochsink.postgres.sink_table import SinkTable
from epochsink.postgres.staging import (
    DELETED,
    DELETED_ENCODING,
    NUMBER,
    REFUSED,
    TAG,
    Note,
    Staging,
    is_rank,
    is_reserved,
)
from epochsink.postgres.types import Encoding, Mismatch, encoding, rank_encoding
from epochsink.sink import Epoch


@dataclass(frozen=True, slots=True)
class Fitted:
    """The live table, how rows of a schema are encoded for it, and how they go into it, as it is recorded."""

    table: SinkTable
    target: TargetTable
    encodings: Sequence[Encoding]
    merge: Merge

    @classmethod
    def of(cls, connection: Connection, table: SinkTable, schema: pa.Schema, *, direct: bool) -> Self:
        """Return how rows of a schema fit into the live table. Raises `PrepareFailed`, `psycopg.Error`.

        ``direct`` as for `fit`.
        """
        target, config = read_target(connection, table.relation), table.config
        if target is None:
            raise PrepareFailed(
                f"table {table} does not exist or is not visible to this user",
                hint="it was dropped or renamed while the query ran: create it again, then restart the query",
                may_pass=False,
            )
        require_safe(target, config.key, deletes=config.delete_when is not None, direct=direct)
        encodings, findings = fit(schema, target, direct=direct)
        if findings:
            raise PrepareFailed(
                "; ".join(findings), hint="restart the query, which checks the table anew", may_pass=False
            )
        return cls(table, target, encodings, _merge_of(config, target, encodings))

    def staging(self, connection: Connection, epoch: Epoch) -> tuple[Staging, bool]:
        """Return the staging table of an attempt, created if there is none, and whether there was none."""
        table, target, merge = self.table, self.target, self.merge
        relation = Relation(table.config.marker_schema, staging_table(table.key, epoch.attempt))
        staging = Staging(relation, table.config.mode(target.max_prepared_transactions) == "staged")
        columns, checks = {}, {}
        for each in self.encodings:
            name = each.field.name
            # the target's types, if binary COPY can send them
            columns[name] = "boolean" if name == DELETED else each.staged_as or target.columns[name].definition
        if merge.sets_aside:
            columns[REFUSED] = "jsonb"
        elif staging.logged and not merge.deletes:
            # the target's own rules: rows that break them then fail before the decision, not after
            exact = [name for name in merge.columns if name not in merge.casts]
            columns |= {name: f"{columns[name]} NOT NULL" for name in exact if target.columns[name].not_null}
            # a sum may satisfy a rule that one of its rows breaks
            checks = read_checks(connection, target, [name for name in exact if name not in merge.accumulate])
        columns[NUMBER if merge.sets_aside else TAG] = "bigint"
        return staging, staging.ensure(connection, columns, checks, Note.of(table.identity, epoch))

    def member(self, tasks: tuple[str, ...], rows: int, staging: Staging | None = None) -> Member:
        """Return what is recorded of rows; ``staging`` is None if they go straight into the target."""
        name, logged = (staging.relation.name, staging.logged) if staging else (None, False)
        return Member(self.table.key, self.table.config.marker_schema, name, tasks, rows, self.merge, logged)


def _merge_of(config: PostgresConfig, target: TargetTable, encodings: Sequence[Encoding]) -> Merge:
    names = [encoding.field.name for encoding in encodings if not is_reserved(encoding.field.name)]
    return merge_of(
        config,
        target,
        names,
        casts={encoding.field.name: encoding.cast_to for encoding in encodings if encoding.cast_to is not None},
        deletes=any(encoding.field.name == DELETED for encoding in encodings),
        ranks=sum(is_rank(encoding.field.name) for encoding in encodings),
        sets_aside=config.sets_aside,
    )


def merge_of(
    config: PostgresConfig,
    target: TargetTable,
    names: Sequence[str],
    *,
    casts: Mapping[str, str],
    deletes: bool,
    sets_aside: bool,
    ranks: int = 0,
) -> Merge:
    """Return how rows with the columns ``names`` are merged into the live table. The rest as in `Merge`."""
    return Merge(
        target.relation,
        {name: target.columns[name].declared for name in names},
        casts,
        config.key,
        deletes,
        ranks,
        {name: target.columns[name].equals for name in config.key if name in target.columns},
        target.unique_for(config.key),
        config.newer_wins,
        config.skip_unchanged,
        config.accumulate,
        sets_aside,
    )


def fit(schema: pa.Schema, target: TargetTable, *, direct: bool) -> tuple[list[Encoding], list[str]]:
    """Return how each column of a writer's input is encoded, and a finding for each that does not fit.

    ``direct``: there is no merge that could cast what binary COPY cannot send.
    """
    encodings, findings = [], []
    for field in schema:
        if field.name == DELETED:
            encodings.append(DELETED_ENCODING)
            continue
        try:
            ranks = is_rank(field.name)
            encodings.append(rank_encoding(field) if ranks else _fit_one(field, target, direct=direct))
        except Mismatch as mismatch:
            findings.append(f"column {field.name!r} of {target.relation}: {mismatch}")
    return encodings, findings


def _fit_one(field: pa.Field, target: TargetTable, *, direct: bool) -> Encoding:
    column = target.columns.get(field.name)
    if column is None:
        raise Mismatch(_unknown(field.name, target))
    if column.generated:
        raise Mismatch("it is generated from other columns and takes no values; leave it out of select=")
    if column.identity == "a":
        raise Mismatch(
            "it is GENERATED ALWAYS AS IDENTITY and takes no values; leave it out of select=, or "
            f"ALTER TABLE {target.relation} ALTER COLUMN {field.name} SET GENERATED BY DEFAULT"
        )
    fitting = encoding(field, column)
    if direct and fitting.staged_as is not None:
        raise Mismatch(
            f"{field.type} goes into {column.declared} only by way of a staging table, and atomic=False without key= "
            "copies straight into the target; use atomic=True, or change the column's type"
        )
    return fitting


def _unknown(name: str, target: TargetTable) -> str:
    near = [known for known in target.columns if known.lower() == name.lower()]
    if near:
        return f"there is only {near[0]!r}, and case counts; select it AS `{near[0]}`"
    known = ", ".join(target.columns)
    return f"the table has no such column, only {known}; leave it out with select=, or set add_columns=True"


def writer_schema(row: pa.Schema, *, deletes: bool) -> pa.Schema:
    """Return the writers' input for rows of schema ``row``: what `Postgres.columns` makes of it."""
    fields = [pa.field(field.name, pa.string()) if is_nested(field.type) else field for field in row]
    return pa.schema([*fields, pa.field(DELETED, pa.bool_())] if deletes else fields)


def is_nested(data: pa.DataType) -> bool:
    """Return whether a type has no column type of its own in PostgreSQL, and goes there as JSON text."""
    if pa.types.is_list(data):
        return is_nested(data.value_type) or bool(pa.types.is_list(data.value_type))
    return bool(pa.types.is_struct(data) or pa.types.is_map(data))


def unfilled(schema: pa.Schema, target: TargetTable) -> Sequence[Column]:
    """Return the columns that need a value, get none from the row, and have no default."""
    return [
        column
        for column in target.columns.values()
        if column.name not in schema.names
        and column.not_null
        and not (column.has_default or column.identity or column.generated)
    ]
