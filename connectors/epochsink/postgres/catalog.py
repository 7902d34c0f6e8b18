"""The facts about the target that an epoch rests on, read from the server's catalog in one query.

They may change under a running query. If a crash empties the table, a policy hides rows or a unique index is missing,
rows are lost or duplicated without an error; a column of another type stores another value, because an INSERT casts. So
these facts are judged wherever the table is read: by `check()`, by each task, and inside each transaction that writes
rows, for the vote, the commit and the replay.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from psycopg import sql

from epochsink.errors import PrepareFailed
from epochsink.postgres.committable import Merge, Relation
from epochsink.postgres.server import Connection

# tables are found along pg_inherits: pg_partition_tree would lock every partition until the transaction ends
# ON CONFLICT takes no deferrable index as its arbiter, and a partial or expression index covers other rows or values
_TARGET: Final = """
WITH RECURSIVE tree (oid) AS (
    SELECT to_regclass({table})
    UNION ALL
    SELECT i.inhrelid FROM tree
    JOIN pg_catalog.pg_class p ON p.oid = tree.oid AND p.relkind = 'p'
    JOIN pg_catalog.pg_inherits i ON i.inhparent = p.oid
), target AS MATERIALIZED (
    SELECT c.oid, n.nspname, c.relname, c.relkind::text AS kind, row_security_active(c.oid) AS row_security,
           c.relhasrules, current_setting('max_prepared_transactions')::int AS max_prepared,
           array(SELECT u.oid::regclass::text FROM tree JOIN pg_catalog.pg_class u ON u.oid = tree.oid
                 WHERE u.relkind = 'r' AND u.relpersistence = 'u' ORDER BY 1) AS unlogged,
           coalesce((
               SELECT jsonb_agg(DISTINCT k.columns) FROM pg_catalog.pg_index i CROSS JOIN LATERAL (
                   SELECT jsonb_object_agg(a.attname, concat_ws(' ', co.oid::regcollation, oc.opcname)) AS columns
                   FROM unnest(i.indkey::int2[], i.indclass::oid[], i.indcollation::oid[])
                        WITH ORDINALITY AS k (attnum, opclass, collated, place)
                   JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
                   JOIN pg_catalog.pg_opclass oc ON oc.oid = k.opclass
                   LEFT JOIN pg_catalog.pg_collation co ON co.oid = k.collated
                   WHERE k.place <= i.indnkeyatts
               ) AS k
               WHERE i.indrelid = c.oid AND i.indisunique AND i.indisvalid AND i.indimmediate
                 AND i.indpred IS NULL AND i.indexprs IS NULL
           ), '[]') AS unique_indexes
    FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    WHERE c.oid = to_regclass({table})
), base (domain, oid, modifier, not_null, is_domain) AS (
    -- a domain may be of another domain: the modifier is that of the innermost one, and any level may refuse nulls
    SELECT d.oid, n.oid, d.typtypmod, d.typnotnull OR n.typnotnull, n.typtype = 'd'
    FROM target JOIN pg_catalog.pg_attribute a ON a.attrelid = target.oid AND a.attnum > 0
    JOIN pg_catalog.pg_type d ON d.oid = a.atttypid AND d.typtype = 'd'
    JOIN pg_catalog.pg_type n ON n.oid = d.typbasetype
    UNION
    SELECT base.domain, n.oid, d.typtypmod, base.not_null OR n.typnotnull, n.typtype = 'd'
    FROM base JOIN pg_catalog.pg_type d ON base.is_domain AND d.oid = base.oid
    JOIN pg_catalog.pg_type n ON n.oid = d.typbasetype
)
SELECT target.nspname, target.relname, target.kind, target.max_prepared, target.row_security, target.relhasrules,
       target.unlogged, target.unique_indexes,
       a.attname, format_type(a.atttypid, a.atttypmod), format('%I.%I', bn.nspname, b.typname),
       coalesce(' COLLATE ' || (SELECT format('%I.%I', cn.nspname, co.collname) FROM pg_catalog.pg_collation co
         JOIN pg_catalog.pg_namespace cn ON cn.oid = co.collnamespace
         WHERE co.oid = a.attcollation AND a.attcollation <> t.typcollation), ''),
       coalesce((SELECT format('OPERATOR(%I.%s)', opn.nspname, op.oprname)
         FROM pg_catalog.pg_opclass oc
         JOIN pg_catalog.pg_am am ON am.oid = oc.opcmethod AND am.amname = 'btree'
         JOIN pg_catalog.pg_amop ao ON ao.amopfamily = oc.opcfamily AND ao.amopstrategy = 3
           AND ao.amoplefttype = oc.opcintype AND ao.amoprighttype = oc.opcintype
         JOIN pg_catalog.pg_operator op ON op.oid = ao.amopopr
         JOIN pg_catalog.pg_namespace opn ON opn.oid = op.oprnamespace
         WHERE oc.opcintype = b.oid AND oc.opcdefault), 'OPERATOR(pg_catalog.=)'),
       b.typreceive::text, e.typreceive::text, coalesce(base.modifier, a.atttypmod),
       a.attnotnull OR coalesce(base.not_null, t.typnotnull), a.atthasdef OR t.typdefault IS NOT NULL,
       a.attidentity::text, a.attgenerated::text
FROM target
JOIN pg_catalog.pg_attribute a ON a.attrelid = target.oid AND a.attnum > 0 AND NOT a.attisdropped
JOIN pg_catalog.pg_type t ON t.oid = a.atttypid
LEFT JOIN base ON base.domain = t.oid AND NOT base.is_domain
JOIN pg_catalog.pg_type b ON b.oid = coalesce(base.oid, t.oid)
JOIN pg_catalog.pg_namespace bn ON bn.oid = b.typnamespace
LEFT JOIN pg_catalog.pg_type e ON e.oid = b.typelem AND b.typcategory = 'A'
ORDER BY a.attnum
"""

_ON_PATH: Final = """
SELECT n.nspname FROM unnest(%s::text[]) WITH ORDINALITY AS path (schema, place)
JOIN pg_catalog.pg_namespace n ON n.nspname = path.schema
JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = %s
ORDER BY place LIMIT 1
"""
_CHECKS: Final = """
SELECT k.conname, pg_get_expr(k.conbin, k.conrelid)
FROM pg_catalog.pg_constraint k
WHERE k.conrelid = to_regclass(%s) AND k.contype = 'c' AND 0 <> ALL (k.conkey)
  AND coalesce((to_jsonb(k) ->> 'conenforced')::boolean, true)
  AND NOT EXISTS (SELECT FROM pg_catalog.pg_attribute a
                  WHERE a.attrelid = k.conrelid AND a.attnum = ANY (k.conkey) AND a.attname <> ALL (%s))
ORDER BY 1
"""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the target.

    ``declared`` is its type with its modifier, ``bare_type`` the one to cast text to, of a domain its base type: by its
    catalog name, because ``bit`` and ``character`` in SQL mean those of length 1, and a cast to them cuts without an
    error. ``collation`` is a COLLATE clause or nothing. ``equals`` is the operator that its indexes compare with.
    ``receive`` is the server's function that reads the type's binary form, of a domain its base type's;
    ``element`` that of an array's elements. ``modifier`` is the type modifier (-1: none).
    """

    name: str
    declared: str
    bare_type: str
    collation: str
    equals: str
    receive: str
    element: str | None
    modifier: int
    not_null: bool
    has_default: bool
    identity: str
    generated: str

    @property
    def definition(self) -> str:
        """Return its type as SQL for a table of ours."""
        return self.declared + self.collation


@dataclass(frozen=True, slots=True)
class TargetTable:
    """The live target table, as far as an epoch rests on it.

    ``max_prepared_transactions`` is the server's. ``row_security`` says whether policies apply to this user.
    ``unlogged`` names the table, or those of its partitions, that a crash would empty. ``unique`` has a mapping for
    each index that ON CONFLICT may rely on: its columns, each with the collation and operator class it compares by.
    """

    relation: Relation
    kind: str
    max_prepared_transactions: int
    row_security: bool
    has_rules: bool
    unlogged: Sequence[str]
    unique: Sequence[Mapping[str, str]]
    columns: Mapping[str, Column]

    def unique_for(self, key: Sequence[str]) -> list[Mapping[str, str]]:
        """Return those of ``unique`` that are on exactly these columns."""
        return [index for index in self.unique if index.keys() == set(key)]


def located(connection: Connection, relation: Relation) -> Relation:
    """Return the table with its schema: if the name has none, the first one on the session's search path that has it.

    Without a schema if there is no such table. Raises `psycopg.Error`.
    """
    if relation.schema is not None:
        return relation
    row = connection.execute(_ON_PATH, [list(connection.schemas), relation.name]).fetchone()
    return Relation(row[0] if row else None, relation.name)


def read_target(connection: Connection, relation: Relation) -> TargetTable | None:
    """Return the table as it is now, or None if this user sees no such table.

    Also within a transaction on the target, whose search path is the user's (see `begin`).
    """
    relation = located(connection, relation)
    # one round trip, since each transaction that writes looks here; a message of several statements takes no parameters
    ours_and_back = sql.SQL(
        "SET LOCAL search_path = pg_catalog, pg_temp; {}; SELECT pg_catalog.set_config('search_path', {}, true)"
    )
    query = sql.SQL(_TARGET).format(table=sql.Literal(str(relation)))
    cursor = connection.execute(ours_and_back.format(query, sql.Literal(connection.search_path)))
    cursor.nextset()
    rows = cursor.fetchall()
    if not rows:
        return None
    columns = {row[8]: Column(*row[8:]) for row in rows}
    schema, name, kind, limit, row_security, has_rules, unlogged, unique = rows[0][:8]
    return TargetTable(Relation(schema, name), kind, limit, row_security, has_rules, unlogged, unique, columns)


def read_checks(connection: Connection, target: TargetTable, columns: Sequence[str]) -> dict[str, str]:
    """Return the expressions of the CHECK constraints that use no columns but ``columns``, by name."""
    return dict(connection.execute(_CHECKS, [str(target.relation), list(columns)]).fetchall())


def max_prepared_transactions(connection: Connection) -> int:
    """Return the server's limit; 0 means that it prepares none. Raises `psycopg.Error`."""
    row = connection.execute("SELECT current_setting('max_prepared_transactions')::int").fetchone()
    return int(row[0]) if row else 0


class TableChanged(PrepareFailed):
    """The table has changed since rows were staged for it or copied into it. They have to be written again."""


def require_target(here: Relation, relation: Relation, targets: Collection[Relation]) -> None:
    """Raise `TableChanged` unless tasks have written to ``here``, which this session finds, and compares the epochs of.

    A name without a schema is looked up on the search path, which each session has from its role and its environment.
    """
    for target in targets:
        if target != here:
            raise TableChanged(
                f"tasks have written to {target}, and the driver writes to {here}: table={relation.name!r} names no "
                "schema, and their sessions have different search paths",
                hint="name the schema in table=. The role's search_path was changed while the query ran (a restart "
                "finds the new one), or options or PGOPTIONS of driver and executors differ",
                may_pass=False,
            )


def unsafe(target: TargetTable, key: Sequence[str], *, deletes: bool, direct: bool = False) -> Iterator[str]:
    """Yield why the table cannot hold epochs safely, each with the way out. ``direct``: tasks copy into it."""
    if target.unlogged:
        alter = " ".join(f"ALTER TABLE {name} SET LOGGED;" for name in target.unlogged)
        yield (
            f"{', '.join(target.unlogged)} is UNLOGGED: a crash of the server empties it, and committed epochs are "
            f"lost; {alter}"
        )
    if target.row_security and deletes:
        yield (
            f"row security of {target.relation} applies to this user: a delete_when= row whose target a policy hides "
            "would delete nothing, without an error; use a role with BYPASSRLS, or the table's owner"
        )
    if target.has_rules and direct:
        yield (
            f"{target.relation} has rules, and atomic=False without key= writes by COPY, which ignores them; use "
            f"atomic=True, or drop the rules, then VACUUM {target.relation}, which notes that there are none"
        )
    if target.row_security and direct:
        yield (
            f"row security of {target.relation} applies to this user, and atomic=False without key= writes by COPY, "
            "which is refused then; use atomic=True, or a role with BYPASSRLS, or the table's owner"
        )
    if key and not target.unique_for(key):
        known = "; ".join(", ".join(index) for index in target.unique) or "none"
        columns = sql.SQL(", ").join(map(sql.Identifier, key)).as_string()
        yield (
            f"key={list(key)} is not a primary key or unique constraint of {target.relation} (it has: {known}; "
            "partial, deferrable and expression indexes do not count); "
            f"ALTER TABLE {target.relation} ADD UNIQUE ({columns})"
        )


def require_safe(target: TargetTable, key: Sequence[str], *, deletes: bool, direct: bool = False) -> None:
    """Raise `PrepareFailed` if the table cannot hold epochs safely; an operator has to act."""
    reasons = list(unsafe(target, key, deletes=deletes, direct=direct))
    if reasons:
        raise PrepareFailed(
            "; ".join(reasons), hint="change the table as said above, then restart the query", may_pass=False
        )


def require_unchanged(target: TargetTable | None, merge: Merge, *, copied: bool = False) -> None:
    """Raise `PrepareFailed` unless the table is as it was when rows were staged for it, and safe.

    ``copied``: the rows came by COPY, which ignores rules and policies.

    Read ``target`` after the transaction has written. Its locks then keep the table as it is until the transaction
    ends; those of a prepared one survive a crash.
    """
    if target is None:
        raise TableChanged(f"table {merge.target} is gone", hint="create it again, then restart the query")
    require_safe(target, merge.key, deletes=merge.deletes)
    changes = list(_changes(merge, target))
    if copied and (target.has_rules or target.row_security):
        changes.append("it has rules or row security")
    if changes:
        raise TableChanged(
            f"table {merge.target} has changed since rows were written for it: {'; '.join(changes)}",
            hint="Spark runs the epoch again, which sees the table as it is now",
        )


def _changes(merge: Merge, target: TargetTable) -> Iterator[str]:
    for name, declared in merge.columns.items():
        column = target.columns.get(name)
        if column is None:
            yield f"column {name!r} is gone"
        elif column.declared != declared:
            yield f"column {name!r} was {declared} and is {column.declared}"
    if merge.key and target.unique_for(merge.key) != merge.unique:
        yield f"the unique index behind key={list(merge.key)} is another one"
