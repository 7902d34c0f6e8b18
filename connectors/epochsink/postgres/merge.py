"""Merge an epoch's accepted rows from staging into the targets, one set of rows for each sink."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Final, NamedTuple, TypeVar

import psycopg
from psycopg import sql

from epochsink.errors import PrepareFailed, RowsRejected
from epochsink.postgres.catalog import read_target, require_unchanged
from epochsink.postgres.combine import STORED, Folds, combined, folds, over_key
from epochsink.postgres.committable import Member, Merge, Relation
from epochsink.postgres.dead_letter import EpochLetters, RefusedRow, halves_of_range, refused, require_a_row_taken, told
from epochsink.postgres.errors import failure, is_known_refusal, is_missing, may_be_refusal
from epochsink.postgres.prepared_transaction import transaction
from epochsink.postgres.server import Connection
from epochsink.postgres.staging import DELETED, NUMBER, REFUSED, TAG, rank_column, tag

Result = TypeVar("Result")

WORK_MEM: Final = "128MB"
"""Memory for the hash over the keys and the sort of duplicates. The server's default spills to disk at once."""


def merge(
    connection: Connection,
    members: Mapping[str, Member],
    letters: EpochLetters,
    *,
    careful: bool = False,
    known: Mapping[str, Sequence[RefusedRow]] = MappingProxyType({}),
) -> dict[str, list[RefusedRow]]:
    """Apply the staged rows of one or several sinks, by name, to their targets within the current transaction.

    Rows are written in the order of ``members``, then deleted in the reverse order. So a row that references another
    one is written after it and deleted before it. If ``careful``, rows that a target refuses go into ``letters`` if
    their member says so; deletes that it refuses raise. ``known`` has those that an earlier merge of the same rows has
    found, by sink: none is looked for then. Return the rows of each sink that became letters.

    Raises `PrepareFailed` if staging does not hold exactly the accepted rows, or if a target has changed since they
    were staged; `RowsRejected` if a key is null, or duplicated without order_by; `psycopg.Error`.
    """
    connection.execute(sql.SQL("SET LOCAL work_mem = {}").format(sql.Literal(WORK_MEM)))
    if len(members) > 1:
        # Tables that reference each other in a circle have no valid order; deferrable constraints do not need one.
        connection.execute("SET CONSTRAINTS ALL DEFERRED")
    elif careful:
        # The end of the transaction would be too late to find the row that breaks one.
        connection.execute("SET CONSTRAINTS ALL IMMEDIATE")
    written = {
        sink: _write(connection, sink, member, letters, careful=careful, known=known.get(sink))
        for sink, member in members.items()
    }
    for sink, done in reversed(written.items()):
        if members[sink].merge.deletes:
            with writing_rows(connection, members[sink].merge):
                connection.execute(_delete(members[sink].merge, done.source))
    for done in written.values():
        if done.copy is not None:
            connection.execute(sql.SQL("DROP TABLE {}").format(done.copy.quoted))
    for member in members.values():
        # Checked after the writes: their lock prevents changes from now on, and an INSERT would have cast silently to
        # the new type of a column that was changed before it.
        require_unchanged(read_target(connection, member.merge.target), member.merge)
    return {sink: done.refused for sink, done in written.items()}


def by_trying(write: Callable[..., Result], members: Collection[Member]) -> Result:
    """Write rows by ``write``; if a row may be refused, and may become a letter, write again with ``careful=True``.

    ``write`` does so in a transaction of its own.
    """
    try:
        return write()
    except Exception as error:
        if not (may_be_refusal(error) and any(member.merge.sets_aside for member in members)):
            raise
    return write(careful=True)


@contextmanager
def writing_rows(connection: Connection, plan: Merge) -> Iterator[None]:
    """Run a statement that writes rows; raise `RowsRejected` if it fails, and the same one without rows does not.

    So what depends on a row is a refusal, whatever the code of a trigger, policy, cast or index says. The transaction
    under way is rolled back to find that out. If refused rows become letters, they are looked for in another way.
    """
    try:
        yield
    except psycopg.Error as error:
        if plan.sets_aside or is_known_refusal(error) or not may_be_refusal(error):
            raise
        if not _takes_no_rows(connection, plan):
            raise
        raise failure(error, f"writing into {plan.target}", is_refusal=True) from error


def _takes_no_rows(connection: Connection, plan: Merge) -> bool:
    nulls = [
        sql.SQL("NULL::{} AS {}").format(sql.SQL(kind), sql.Identifier(name)) for name, kind in plan.columns.items()
    ]
    if plan.deletes:
        nulls.append(sql.SQL("false AS {}").format(sql.Identifier(DELETED)))
    nothing = sql.SQL("(SELECT {} WHERE false) AS staged").format(sql.SQL(", ").join(nulls))
    statements = [_upsert(plan, nothing) if plan.key else _append(plan, nothing)]
    if plan.deletes:
        statements.append(_delete(plan, nothing))
    try:
        connection.rollback()
        with transaction(connection):
            for statement in statements:
                connection.execute(statement)
            connection.rollback()
    except psycopg.Error:
        return False
    return True


class _Written(NamedTuple):
    """The rows to apply, one for each key; the copy of staging that holds them, if there is one; the letters."""

    source: sql.Composed
    copy: Relation | None
    refused: list[RefusedRow]


def _write(
    connection: Connection,
    sink: str,
    member: Member,
    letters: EpochLetters,
    *,
    careful: bool,
    known: Sequence[RefusedRow] | None,
) -> _Written:
    """Insert or update the rows that are not deleted; set those aside that are refused, if the member says so."""
    unfit = _unfit(connection, member)
    taken = replace(member, rows=member.rows - len(unfit))
    if not (careful and member.merge.sets_aside):
        written = _Written(_write_all(connection, taken), None, unfit)
    elif known is not None:
        written = _write_without(connection, taken, known)
    else:
        written = _write_taken(connection, taken, unfit)
    letters.keep(connection, sink, member, written.refused)
    return written


def _write_all(connection: Connection, member: Member) -> sql.Composed:
    """Insert or update the rows that are not deleted; return the rows to apply, one for each key."""
    plan, source = member.merge, _source(member)
    if not plan.key:
        with writing_rows(connection, plan):
            merged = connection.execute(_append(plan, source)).rowcount
        if merged != member.rows:  # a trigger may drop or redirect rows, so count the rows in staging itself
            verify_count(connection, member)
        return source
    if not _verify_keys(connection, member):
        with writing_rows(connection, plan):
            connection.execute(_upsert(plan, source))
        return source
    with folds(connection, member.schema, plan.expressions, plan.columns) as functions:
        source = _one_for_each_key(plan, source, functions)
        with writing_rows(connection, plan):
            connection.execute(_upsert(plan, source))
    return source


def _write_taken(connection: Connection, member: Member, unfit: Sequence[RefusedRow]) -> _Written:
    """Write those rows that the target takes, found by halves; the others become dead letters, as ``unfit`` do.

    A row that cannot be cast, or has no key, leaves the copy of staging before the newest row of each key is chosen: an
    older one of its key counts then. A row that the target refuses was chosen, and the stored row of its key stays.
    """
    plan = member.merge
    numbered = _copied(connection, member)
    copy = numbered.staging
    # without those that do not fit, numbers have gaps
    last = member.rows + len(unfit)
    letters = list(unfit)

    def set_aside(rows: Iterable[RefusedRow]) -> None:
        aside = list(rows)
        letters.extend(aside)
        _drop(connection, copy, aside)

    def find(write: Callable[[range], object]) -> list[tuple[range, Exception]]:
        refusals = list(refused(connection, range(1, last + 1), halves_of_range, write, none=range(1, 1)))
        if refusals and all(is_missing(error) for _, error in refusals):
            rows = _numbers(connection, sql.SQL("SELECT pg_catalog.count(*) FROM {}").format(copy.quoted))[0]
            require_a_row_taken(refusals[0][1], len(refusals), rows)
        return refusals

    if plan.casts:
        wrong = find(lambda rows: connection.execute(_cast(plan, _source(numbered, rows))))
        set_aside(RefusedRow(row.start, *told(error)) for row, error in wrong)
    if plan.key:
        null = sql.SQL(" OR ").join(sql.SQL("{} IS NULL").format(sql.Identifier(name)) for name in plan.key)
        keyless = connection.execute(
            sql.SQL("SELECT {} FROM {} WHERE {}").format(sql.Identifier(NUMBER), copy.quoted, null)
        ).fetchall()
        reason = f"the key ({', '.join(plan.key)}) is null, and matches no row"
        set_aside(RefusedRow(number, None, reason) for (number,) in keyless)
        _keep_newest(connection, numbered)

    def write(rows: range) -> object:
        return connection.execute(_rendered(plan, _source(numbered, rows)))

    left = find(write)
    # A row may need another one that was written after it, such as its parent in the same table.
    while len(again := _still_refused(connection, left, write)) < len(left):
        left = again
    set_aside(RefusedRow(row.start, *told(error), by_target=True) for row, error in left)
    return _Written(_source(numbered), copy, letters)


def _write_without(connection: Connection, member: Member, known: Sequence[RefusedRow]) -> _Written:
    """Write all rows but those that `_write_taken` has found, in the same order of steps."""
    plan, numbered = member.merge, _copied(connection, member)
    _drop(connection, numbered.staging, [row for row in known if not row.by_target])
    if plan.key:
        _keep_newest(connection, numbered)
    _drop(connection, numbered.staging, [row for row in known if row.by_target])
    connection.execute(_rendered(plan, _source(numbered)))
    return _Written(_source(numbered), numbered.staging, [*known])


def _copied(connection: Connection, member: Member) -> Member:
    """Copy the accepted rows of staging; return the member of the copy."""
    numbered = replace(member, table=f"{member.table}_c")
    _expect(member.staging, connection.execute(_copy(member, numbered.staging)).rowcount, member.rows)
    return numbered


def _drop(connection: Connection, copy: Relation, rows: Sequence[RefusedRow]) -> None:
    """Delete rows from the copy of staging."""
    if rows:
        connection.execute(
            sql.SQL("DELETE FROM {} WHERE {} OPERATOR(pg_catalog.=) ANY (%s::pg_catalog.int8[])").format(
                copy.quoted, sql.Identifier(NUMBER)
            ),
            [[each.number for each in rows]],
        )


def _keep_newest(connection: Connection, numbered: Member) -> None:
    """Delete all rows of each key but the newest from the copy of staging."""
    plan, copy = numbered.merge, numbered.staging
    keyed = _numbers(connection, sql.SQL("SELECT pg_catalog.count(*) FROM {}").format(copy.quoted))[0]
    # what accumulates takes all rows of a key: each goes into a statement of its own then
    if _verify_keys(connection, replace(numbered, rows=keyed)) and not plan.accumulate:
        chosen = _one_for_each_key(plan, _source(numbered, also=[sql.Identifier(NUMBER)]))
        connection.execute(
            sql.SQL("DELETE FROM {} WHERE {number} NOT IN (SELECT {number} FROM {})").format(
                copy.quoted, chosen, number=sql.Identifier(NUMBER)
            )
        )


def _rendered(plan: Merge, source: sql.Composed) -> sql.Composed:
    return _upsert(plan, source) if plan.key else _append(plan, source)


def _still_refused(
    connection: Connection, rows: Sequence[tuple[range, Exception]], write: Callable[[range], object]
) -> list[tuple[range, Exception]]:
    return [still for row, _ in rows for still in refused(connection, row, halves_of_range, write, none=range(1, 1))]


def _copy(member: Member, copy: Relation) -> sql.Composed:
    return sql.SQL(
        # not a temporary table: PREPARE TRANSACTION refuses a transaction that has used one
        "CREATE UNLOGGED TABLE {} AS SELECT * FROM {} WHERE {}"
    ).format(copy.quoted, member.staging.quoted, _accepted(member))


def _unfit(connection: Connection, member: Member) -> list[RefusedRow]:
    """Return the rows that no column of the staging table could hold."""
    if not member.unfit:
        return []
    statement = sql.SQL(
        "SELECT {0}, pg_catalog.jsonb_extract_path_text({1}, '0'), pg_catalog.jsonb_extract_path_text({1}, '1') "
        "FROM {2} WHERE {1} IS NOT NULL"
    ).format(sql.Identifier(NUMBER), sql.Identifier(REFUSED), member.staging.quoted)
    rows = [RefusedRow(*row) for row in connection.execute(statement).fetchall()]
    _expect(member.staging, len(rows), member.unfit)
    return rows


def _cast(plan: Merge, source: sql.Composed) -> sql.Composed:
    values = (sql.SQL("pg_catalog.count({})").format(sql.Identifier(name)) for name in plan.casts)
    return sql.SQL("SELECT {} FROM {}").format(sql.SQL(", ").join(values), source)


def _numbered(rows: range) -> sql.Composed:
    number = sql.Identifier(NUMBER)
    return sql.SQL("{0} OPERATOR(pg_catalog.>=) {1} AND {0} OPERATOR(pg_catalog.<) {2}").format(
        number, sql.Literal(rows.start), sql.Literal(rows.stop)
    )


def superseded(connection: Connection, member: Member, refusals: Sequence[RefusedRow]) -> int:
    """Return how many merged rows of a member with a key are not in the target, because a newer row of their key is.

    That may be one of these rows, or one that was stored already. ``refusals`` are not counted.
    """
    plan = member.merge
    if plan.accumulate:
        return 0  # every row is in the result
    letters = [each.number for each in refusals]
    taken = sql.SQL("(SELECT * FROM {} WHERE NOT {} OPERATOR(pg_catalog.=) ANY ({}::pg_catalog.int8[])) AS taken")
    rows = taken.format(_source(member, also=[sql.Identifier(NUMBER)]), sql.Identifier(NUMBER), sql.Literal(letters))
    chosen = _one_for_each_key(plan, rows)
    older: sql.Composable = sql.SQL("0")
    if plan.newer_wins:
        older = sql.SQL("(SELECT pg_catalog.count(*) FROM {} JOIN {} AS {stored} ON {} WHERE NOT {})").format(
            chosen,
            plan.target.quoted,
            _same_key(plan, STORED, "latest_of_key"),
            _is_not_older(plan.newer_wins, "latest_of_key", STORED),
            stored=sql.Identifier(STORED),
        )
    return _numbers(
        connection,
        sql.SQL(
            "SELECT (SELECT pg_catalog.count(*) FROM {}) OPERATOR(pg_catalog.-) (SELECT pg_catalog.count(*) FROM {}) "
            "OPERATOR(pg_catalog.+) {}"
        ).format(rows, chosen, older),
    )[0]


def verify(connection: Connection, member: Member) -> None:
    """Check staged rows before they are merged: their count, and their keys. Raises as `merge` does."""
    if member.merge.key:
        _verify_keys(connection, member)
    else:
        verify_count(connection, member)


def verify_casts(connection: Connection, member: Member) -> None:
    """Store the values that are staged as text in columns of the target's types. The caller rolls back afterwards.

    A SELECT with casts is not enough: the server checks the length of char(n) and similar types on storing.
    """
    plan = member.merge
    trial = sql.Identifier(member.schema, f"{member.table}_t")
    columns = sql.SQL(", ").join(
        sql.SQL("{} {}").format(sql.Identifier(name), sql.SQL(plan.columns[name])) for name in plan.casts
    )
    connection.execute(sql.SQL("CREATE UNLOGGED TABLE {} ({})").format(trial, columns))
    connection.execute(sql.SQL("INSERT INTO {} SELECT {} FROM {}").format(trial, _names(plan.casts), _source(member)))


def verify_count(connection: Connection, member: Member) -> None:
    """Raise `PrepareFailed` unless staging holds exactly the number of rows that the accepted tasks wrote."""
    statement = sql.SQL("SELECT pg_catalog.count(*) FROM {} WHERE {}").format(member.staging.quoted, _accepted(member))
    _expect(member.staging, _numbers(connection, statement)[0], member.rows)


def _verify_keys(connection: Connection, member: Member) -> bool:
    """Count the rows, and return whether a key is duplicated."""
    plan = member.merge
    many = sql.Identifier(TAG)  # a name that no row column can have
    grouped = sql.SQL("SELECT {key}, pg_catalog.count(*) AS {many} FROM {source} GROUP BY {key}").format(
        key=_names(plan.key), many=many, source=_source(member)
    )
    null = sql.SQL(" OR ").join(sql.SQL("{} IS NULL").format(sql.Identifier(name)) for name in plan.key)
    statement = sql.SQL(
        "SELECT coalesce(pg_catalog.sum({many}), 0), coalesce(pg_catalog.max({many}), 0), "
        "coalesce(pg_catalog.sum({many}) FILTER (WHERE {null}), 0) "
        "FROM ({grouped}) AS keys"
    ).format(many=many, grouped=grouped, null=null)
    rows, most, without_key = _numbers(connection, statement)
    _expect(member.staging, rows, member.rows)
    if without_key:
        raise RowsRejected(
            f"{without_key} rows for {plan.target} have null in their key ({', '.join(plan.key)}), which matches "
            "no row",
            hint="filter them with where=, or fill the key with coalesce() in select=",
        )
    if most > 1 and (plan.replaced or plan.expressions) and not (plan.ranks or plan.newer_wins):
        example = connection.execute(sql.SQL("{} ORDER BY {} DESC LIMIT 1").format(grouped, many)).fetchone() or ()
        key = ", ".join(f"{name}={value!r}" for name, value in zip(plan.key, example, strict=False))
        raise RowsRejected(
            f"a key of {plan.target} ({', '.join(plan.key)}) occurs {most} times in one epoch, and without order_by= "
            "it is unknown which row is the newest",
            hint="set order_by= to a column or Spark SQL expression whose largest value wins, or make keys unique with "
            "dropDuplicatesWithinWatermark",
            values=key,
        )
    return most > 1


def _expect(staging: Relation, staged: int, rows: int) -> None:
    if staged != rows:
        raise PrepareFailed(
            f"staging table {staging} holds {staged} rows of the accepted tasks, but they wrote {rows}",
            hint="the server has crashed since (which empties unlogged tables) or the table was changed; Spark "
            "runs the epoch again when the query restarts",
            found=staged,
            expected=rows,
        )


def _append(plan: Merge, source: sql.Composable, target: sql.Composable | None = None) -> sql.Composed:
    return sql.SQL("INSERT INTO {} ({}) SELECT {} FROM {}").format(
        target or plan.target.quoted, _names(plan.columns), _names(plan.columns), source
    )


def _upsert(plan: Merge, source: sql.Composed) -> sql.Composed:
    values = {name: _merged(plan, name) for name in plan.columns if name not in plan.key}
    settings = sql.SQL(", ").join(sql.SQL("{} = {}").format(sql.Identifier(name), values[name]) for name in values)
    action = sql.SQL("UPDATE SET {}").format(settings) if values else sql.SQL("NOTHING")
    conditions = []
    if plan.newer_wins:
        conditions.append(_is_not_older(plan.newer_wins, "excluded", STORED))
    if plan.skip_unchanged and values:
        conditions.append(
            # by their bytes: that needs no operator of the type, and tells 1.0 from 1.00. As a function, because ROW()
            # on both sides of an operator would compare column by column
            sql.SQL("pg_catalog.record_image_ne(ROW({}), ROW({}))").format(
                sql.SQL(", ").join(sql.Identifier(STORED, name) for name in values),
                sql.SQL(", ").join(values.values()),
            )
        )
    if conditions:
        action = sql.SQL("{} WHERE {}").format(action, sql.SQL(" AND ").join(conditions))
    if plan.deletes:
        source = sql.SQL("{} WHERE {} IS NOT TRUE").format(source, sql.Identifier(DELETED))
    rows = _append(plan, source)
    if conditions or plan.accumulate:
        rows = _append(plan, source, sql.SQL("{} AS {}").format(plan.target.quoted, sql.Identifier(STORED)))
    # In key order, because neighbouring keys share a page of the index and often of the table.
    return sql.SQL("{} ORDER BY {key} ON CONFLICT ({key}) DO {}").format(rows, action, key=_names(plan.key))


def _merged(plan: Merge, name: str) -> sql.Composable:
    """Return what a column becomes if its key is stored already."""
    if name in plan.accumulate:
        return combined(plan, name)
    return sql.SQL("EXCLUDED.{}").format(sql.Identifier(name))


def _is_not_older(column: str, new: str, stored: str) -> sql.Composed:
    """Compare a column in two rows by the default order of its type; null is the smallest."""
    return sql.SQL(
        "({stored} IS NULL OR {new} IS NOT NULL AND pg_catalog.record_ge(ROW({new}), ROW({stored})))"
    ).format(stored=sql.Identifier(stored, column), new=sql.Identifier(new, column))


def _delete(plan: Merge, source: sql.Composed) -> sql.Composed:
    same = _same_key(plan, "old", "gone")
    if plan.newer_wins:
        same = sql.SQL("{} AND {}").format(same, _is_not_older(plan.newer_wins, "gone", "old"))
    return sql.SQL("DELETE FROM {} AS old USING (SELECT * FROM {} WHERE {}) AS gone WHERE {}").format(
        plan.target.quoted, source, sql.Identifier(DELETED), same
    )


def _same_key(plan: Merge, one: str, other: str) -> sql.Composed:
    return sql.SQL(" AND ").join(
        sql.SQL("{1} {0} {2}").format(
            sql.SQL(plan.equals.get(name, "=")), sql.Identifier(one, name), sql.Identifier(other, name)
        )
        for name in plan.key
    )


def _source(member: Member, rows: range | None = None, also: Sequence[sql.Composable] = ()) -> sql.Composed:
    """Return the accepted rows with the target's types. The planner flattens the subquery, so it costs nothing.

    ``rows`` are those numbers of a copy of staging, ``also`` are further columns.
    """
    plan = member.merge
    columns: list[sql.Composable] = [
        sql.SQL("{0}::{1} AS {0}").format(sql.Identifier(name), sql.SQL(plan.casts[name]))
        if name in plan.casts
        else sql.Identifier(name)
        for name in plan.columns
    ]
    if plan.deletes:
        columns.append(sql.Identifier(DELETED))
    columns += [*_ranks(plan), *also]
    conditions = [_accepted(member)] if rows is None else [_accepted(member), _numbered(rows)]
    return sql.SQL("(SELECT {} FROM {} WHERE {}) AS staged").format(
        sql.SQL(", ").join(columns), member.staging.quoted, sql.SQL(" AND ").join(conditions)
    )


def _one_for_each_key(plan: Merge, source: sql.Composable, functions: Folds | None = None) -> sql.Composed:
    """Return the newest row of each key, with what accumulates taken over all rows of the key."""
    # first by newer_wins: of a key, the row that order_by alone chooses could be older than the stored one
    newest = [sql.Identifier(plan.newer_wins)] if plan.newer_wins else []
    decides = [*newest, *_ranks(plan)]
    if functions:
        # numbered once: of rows that order_by does not tell apart, the newest one is also the last to be folded
        source = sql.SQL(
            "(SELECT *, pg_catalog.row_number() OVER (PARTITION BY {} ORDER BY {}) AS {number} FROM {}) AS numbered"
        ).format(
            _names(plan.key),
            sql.SQL(", ").join(sql.SQL("{} ASC NULLS FIRST").format(value) for value in decides),
            source,
            number=sql.Identifier(NUMBER),
        )
        decides = [sql.Identifier(NUMBER)]
    order = [sql.SQL("{} DESC NULLS LAST").format(value) for value in decides]
    columns = [over_key(plan, functions or {}, name) for name in plan.columns] if plan.accumulate else [sql.SQL("*")]
    return sql.SQL("(SELECT DISTINCT ON ({key}) {columns} FROM {source} ORDER BY {order}) AS latest_of_key").format(
        key=_names(plan.key),
        columns=sql.SQL(", ").join(columns),
        source=source,
        order=sql.SQL(", ").join([_names(plan.key), *order]),
    )


def _ranks(plan: Merge) -> list[sql.Composable]:
    return [sql.Identifier(rank_column(place)) for place in range(plan.ranks)]


def _accepted(member: Member) -> sql.Composed:
    """Select the rows of the accepted tasks that are to be written."""
    if member.merge.sets_aside:
        return sql.SQL("{} IS NULL").format(sql.Identifier(REFUSED))  # the driver has staged accepted rows alone
    tags = sql.SQL(", ").join(sql.Literal(tag(task)) for task in member.tasks)
    return sql.SQL("{} OPERATOR(pg_catalog.=) ANY (ARRAY[{}]::pg_catalog.int8[])").format(sql.Identifier(TAG), tags)


def _names(names: Iterable[str]) -> sql.Composed:
    return sql.SQL(", ").join(sql.Identifier(name) for name in names)


def _numbers(connection: Connection, statement: sql.Composed) -> list[int]:
    return [int(value) for value in connection.execute(statement).fetchone() or (0, 0, 0)]
