"""Show an operator the dead letters of a table, and retry or drop them.

A retry deletes letters and merges their rows into the target in one transaction, by the sink's own merge. So a letter
is deleted if and only if its row is written, whatever is killed, and of two retries at once the second one finds
nothing. There is one such transaction for each attempt whose letters are chosen, in the order of their epochs.
"""

from __future__ import annotations

import uuid
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import psycopg
from psycopg import sql

from epochsink.errors import ConfigurationError, OutcomeUnknown, PrepareFailed
from epochsink.failpoints import reach
from epochsink.identity import staging_table
from epochsink.postgres import dead_letter
from epochsink.postgres.catalog import read_target, require_safe
from epochsink.postgres.committable import Member, Relation
from epochsink.postgres.errors import describe, is_disconnected
from epochsink.postgres.merge import merge
from epochsink.postgres.prepared_transaction import commit, transaction
from epochsink.postgres.row_mapping import merge_of
from epochsink.postgres.staging import DELETED, LETTER, REFUSED, TAG, tag
from epochsink.postgres.types import inexact_text
from epochsink.sink import Letter, Letters, Retried

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from epochsink.postgres.catalog import Column, Target
    from epochsink.postgres.committable import Merge
    from epochsink.postgres.server import Connection
    from epochsink.postgres.table import Table
    from epochsink.sink import Chosen

_REPLACED_NUL: Final = "(sqlstate = '22021' AND \"row\"::text LIKE '%\ufffd%')"
"""A letter whose text had a NUL, which jsonb cannot hold: it is not the row that was refused."""
_KEPT: Final = "its text had a NUL, or the column's type would round a value: it cannot be written as it was"


@dataclass(frozen=True, slots=True)
class _Again(dead_letter.Letters):
    """The letters of an attempt at its retry; counts those that are kept again."""

    kept: list[int] = field(default_factory=list)

    def keep(
        self, connection: Connection, sink: str, member: Member, rows: sql.Composed, *constants: str | None
    ) -> int:
        """Insert letters as `dead_letter.Letters.keep` does."""
        count = dead_letter.Letters.keep(self, connection, sink, member, rows, *constants)
        self.kept.append(count)
        return count

    def rendered(self, plan: Merge, table: Relation, condition: sql.Composable) -> sql.Composed:  # noqa: ARG002
        """Select the rows as they were in their letters."""
        return sql.SQL("SELECT {} FROM {} WHERE {}").format(sql.Identifier(LETTER), table.quoted, condition)


class PostgresLetters(Letters):
    """The dead letters of one table. ``ask`` lends a session; its argument says what for."""

    def __init__(self, table: Table, ask: Callable[[str], AbstractContextManager[Connection]]) -> None:
        self._table = table
        self._ask = ask
        self._letters = sql.Identifier(table.config.marker_schema, dead_letter.TABLE)

    def read(self, chosen: Chosen, limit: int) -> list[Letter]:
        """Return the newest letters. Raises `EpochsinkError`."""
        where = self._chosen(chosen)
        with self._ask(f"reading the dead letters of {self._table}") as connection:
            if not self._exist(connection):
                return []
            found = connection.execute(
                sql.SQL(
                    "SELECT id, epoch, coalesce(sqlstate, ''), error, \"row\", set_aside_at FROM {} WHERE {} "
                    "ORDER BY id DESC LIMIT {}"
                ).format(self._letters, where, sql.Literal(limit))
            ).fetchall()
        return [
            Letter(str(number), epoch, state, error, row, at.isoformat(timespec="seconds"))
            for number, epoch, state, error, row, at in found
        ]

    def count(self, chosen: Chosen) -> int:
        """Return the number of letters. Raises `EpochsinkError`."""
        where = self._chosen(chosen)
        with self._ask(f"counting the dead letters of {self._table}") as connection:
            return self._counted(connection, where) if self._exist(connection) else 0

    def caution(self) -> str:
        """Say which stored rows a retry replaces."""
        config = self._table.config
        if not config.key:
            return ""
        if config.newer_wins:
            return f"a stored row whose {config.newer_wins} is larger stays (newer_wins=)"
        if config.accumulate:
            return f"{', '.join(config.accumulate)} are combined with the stored ones; other columns are replaced"
        return "each row replaces the stored one of its key, even if that is newer: only newer_wins= would know"

    def drop(self, chosen: Chosen) -> int:
        """Delete letters. Raises `EpochsinkError`."""
        where = self._chosen(chosen)
        with self._changing("deleting") as connection:
            if not self._exist(connection):
                return 0
            return int(connection.execute(sql.SQL("DELETE FROM {} WHERE {}").format(self._letters, where)).rowcount)

    def retry(self, chosen: Chosen) -> Retried:
        """Write letters to the table, those of each attempt in a transaction. Raises `EpochsinkError`."""
        where, done = self._chosen(chosen), Retried()
        with self._changing("retrying") as connection:
            if not self._exist(connection):
                return done
            attempts = connection.execute(
                sql.SQL(
                    'SELECT epoch, attempt, array_agg(DISTINCT name), bool_or("row" ? {}) FROM {}, '
                    'jsonb_object_keys("row") AS name WHERE {} GROUP BY 1, 2 ORDER BY 1, min(id)'
                ).format(sql.Literal(DELETED), self._letters, where)
            ).fetchall()
            for epoch, attempt, names, deletes in attempts:
                again = _Again(self._table.identity.query_id, epoch, attempt)
                columns = [name for name in names if name != DELETED]
                done += self._retry(connection, again, where, columns, deletes=deletes)
        return done

    @contextmanager
    def _changing(self, doing: str) -> Iterator[Connection]:
        """Lend a session. Raises `OutcomeUnknown` if its connection is lost: a COMMIT may have been carried out."""
        doing = f"{doing} dead letters of {self._table}"
        with self._ask(doing) as connection:
            try:
                yield connection
            except psycopg.Error as error:
                if not is_disconnected(error):
                    raise
                raise OutcomeUnknown(
                    f"{doing} was broken off: {describe(error)}",
                    hint="type it again: what is done is not done twice",
                ) from error

    def _retry(
        self, connection: Connection, again: _Again, where: sql.Composed, names: Sequence[str], *, deletes: bool
    ) -> Retried:
        task = uuid.uuid4().hex
        staging = Relation(self._table.config.marker_schema, staging_table(self._table.key, task))
        mine = sql.SQL("{} AND epoch = {} AND attempt = {}").format(
            where, sql.Literal(again.epoch), sql.Literal(again.attempt)
        )
        with transaction(connection):
            target = self._target(connection, again, names)
            plan = merge_of(
                self._table.config,
                target,
                names,
                casts={name: target.columns[name].bare_type for name in names},
                deletes=deletes or self._table.config.delete_when is not None,
                sets_aside=True,
            )
            inexact = self._inexact([target.columns[name] for name in names])
            # the search path of the merge's triggers may have functions and operators of the same names
            connection.execute("SET LOCAL search_path = pg_catalog, pg_temp")
            left = self._counted(connection, sql.SQL("{} AND {}").format(mine, inexact))
            connection.execute(_create(plan, staging))
            exact = sql.SQL("{} AND NOT {}").format(mine, inexact)
            taken = connection.execute(self._move(plan, target, staging, task, exact)).rowcount
            connection.execute("SELECT pg_catalog.set_config('search_path', %s, true)", [connection.search_path])
            reach("postgres.letters.taken")
            if not taken:
                connection.rollback()  # another retry, or a drop, was first
                return Retried(kept=left, reason=_KEPT if left else "")
            member = Member(self._table.key, staging.schema or "", staging.name, (task,), taken, plan)
            merge(connection, {self._table.identity.sink: member}, again)
            connection.execute(sql.SQL("DROP TABLE {}").format(staging.quoted))
            reach("postgres.letters.merged")
            commit(connection)
        reach("postgres.letters.committed")
        refused = sum(again.kept)
        reason = self._newest_reason(connection, again) if refused else _KEPT if left else ""
        return Retried(written=taken - refused, kept=refused + left, reason=reason)

    def _target(self, connection: Connection, again: _Again, names: Sequence[str]) -> Target:
        """Return the table, which must have all columns of the letters. Raises `PrepareFailed`."""
        target = read_target(connection, self._table.relation)
        known = target.columns if target is not None else {}
        missing = [name for name in names if name not in known]
        missing += [name for name in self._table.config.key if name not in names]
        if target is None or missing:
            what = f"lacks {', '.join(missing)}" if target else "does not exist"
            raise PrepareFailed(
                f"the dead letters of epoch {again.epoch} do not fit {self._table}: table or letter {what}; nothing "
                "of that epoch was changed",
                hint="add the columns to the table, or drop these letters: epochsink letters drop",
            )
        require_safe(target, self._table.config.key, deletes=self._table.config.delete_when is not None)
        return target

    def _move(self, plan: Merge, target: Target, staging: Relation, task: str, where: sql.Composed) -> sql.Composed:
        """Delete letters, and insert their rows into the staging table, as text."""
        values = [_as_text(target.columns[name]) for name in plan.columns]
        if plan.deletes:
            values.append(sql.SQL('coalesce(("row" ->> {})::boolean, false)').format(sql.Literal(DELETED)))
        return sql.SQL(
            'WITH gone AS (DELETE FROM {letters} WHERE {where} RETURNING id, "row") '
            "INSERT INTO {staging} ({tag}, {letter}, {columns}) "
            'SELECT {task}, "row", {values} FROM gone ORDER BY id'
        ).format(
            letters=self._letters,
            where=where,
            staging=staging.quoted,
            tag=sql.Identifier(TAG),
            letter=sql.Identifier(LETTER),
            columns=sql.SQL(", ").join(map(sql.Identifier, [*plan.columns, *([DELETED] if plan.deletes else [])])),
            task=sql.Literal(tag(task)),
            values=sql.SQL(", ").join(values),
        )

    def _inexact(self, columns: Sequence[Column]) -> sql.Composed:
        """Return the condition of letters whose row is not what was refused, or would be changed without an error."""
        patterns = {column.name: pattern for column in columns if (pattern := inexact_text(column)) is not None}
        conditions = [
            sql.SQL('"row" ->> {} ~ {}').format(sql.Literal(name), sql.Literal(pattern))
            for name, pattern in patterns.items()
        ]
        conditions.append(sql.SQL(_REPLACED_NUL).format())
        return sql.SQL("coalesce({}, false)").format(sql.SQL(" OR ").join(conditions))

    def _chosen(self, chosen: Chosen) -> sql.Composed:
        conditions = [sql.SQL("key = {}").format(sql.Literal(self._table.key))]
        if chosen.ids:
            if wrong := [each for each in chosen.ids if not each.isdecimal()]:
                raise ConfigurationError(
                    f"invalid id {wrong[0]!r} of a dead letter: it is a number here", hint="see: epochsink letters list"
                )
            conditions.append(
                sql.SQL("id = ANY ({}::bigint[])").format(sql.Literal([int(each) for each in chosen.ids]))
            )
        if chosen.epoch is not None:
            conditions.append(sql.SQL("epoch = {}").format(sql.Literal(chosen.epoch)))
        return sql.SQL(" AND ").join(conditions)

    def _exist(self, connection: Connection) -> bool:
        """Return whether there is a table of letters."""
        found = connection.execute("SELECT to_regclass(%s)", [self._letters.as_string(connection)]).fetchone()
        return bool(found and found[0])

    def _counted(self, connection: Connection, where: sql.Composed) -> int:
        found = connection.execute(sql.SQL("SELECT count(*) FROM {} WHERE {}").format(self._letters, where)).fetchone()
        return int(found[0]) if found else 0

    def _newest_reason(self, connection: Connection, of: dead_letter.Letters) -> str:
        statement = sql.SQL("SELECT error FROM {} WHERE key = %s AND epoch = %s AND attempt = %s ORDER BY id DESC")
        values = [self._table.key, of.epoch, of.attempt]
        found = connection.execute(statement.format(self._letters), values).fetchone()
        return str(found[0]) if found else ""


def _create(plan: Merge, staging: Relation) -> sql.Composed:
    columns = [sql.SQL("{} text").format(sql.Identifier(name)) for name in plan.columns]
    columns += [
        sql.SQL("{} {}").format(sql.Identifier(name), sql.SQL(kind))
        for name, kind in ((TAG, "bigint"), (DELETED, "boolean"), (REFUSED, "jsonb"), (LETTER, "jsonb"))
    ]
    return sql.SQL("CREATE UNLOGGED TABLE {} ({})").format(staging.quoted, sql.SQL(", ").join(columns))


def _as_text(column: Column) -> sql.Composed:
    """Return a letter's value of a column as text that the column's type reads."""
    name = sql.Literal(column.name)
    if column.element is None:
        return sql.SQL('"row" ->> {}').format(name)
    return sql.SQL(
        "CASE jsonb_typeof(\"row\" -> {name}) WHEN 'array' "
        'THEN ARRAY(SELECT jsonb_array_elements_text("row" -> {name}))::text ELSE "row" ->> {name} END'
    ).format(name=name)
