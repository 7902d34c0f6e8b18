"""The facts about a table that an epoch rests on. They may change under a running query.

A table that a crash empties, a policy that hides rows and a missing unique index lose or double rows without an error.
A column of another type stores another value, because an INSERT casts. So these facts are judged wherever the table is
read: by `check()`, by each task, and inside each transaction that writes rows, for the vote, the commit and the replay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from psycopg import sql

from epochsink.errors import PrepareFailed
from epochsink.postgres.catalog import read_written_target

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from epochsink.postgres.catalog import Target
    from epochsink.postgres.committable import Merge
    from epochsink.postgres.server import Connection


class TableChanged(PrepareFailed):
    """The table is not the one that rows were staged for, or copied into: they have to be written again."""


def unsafe(target: Target, key: Sequence[str], *, deletes: bool) -> Iterator[str]:
    """Yield why the table cannot hold epochs safely, each with the way out."""
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
    if key and not target.unique_for(key):
        known = "; ".join(", ".join(index) for index in target.unique) or "none"
        columns = sql.SQL(", ").join(map(sql.Identifier, key)).as_string()
        yield (
            f"key={list(key)} is no primary key or unique constraint of {target.relation} (it has: {known}; "
            "partial, deferrable and expression indexes do not count); "
            f"ALTER TABLE {target.relation} ADD UNIQUE ({columns})"
        )


def require_safe(target: Target, key: Sequence[str], *, deletes: bool) -> None:
    """Raise `PrepareFailed` if the table cannot hold epochs safely: somebody has to act."""
    found = list(unsafe(target, key, deletes=deletes))
    if found:
        raise PrepareFailed(
            "; ".join(found), hint="change the table as said above, then restart the query", may_pass=False
        )


def require_unchanged(connection: Connection, merge: Merge, *, copied: bool = False) -> None:
    """Raise `PrepareFailed` unless the table is the one that rows were staged for, and safe.

    ``copied``: by COPY, which passes rules by and has to be refused by policies.

    Call this after the transaction has written: the locks of its writes then keep the table as it is until it ends, a
    prepared one also through a crash. Raises `psycopg.Error`.
    """
    target = read_written_target(connection, merge.target)
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


def _changes(merge: Merge, target: Target) -> Iterator[str]:
    for name, declared in merge.columns.items():
        column = target.columns.get(name)
        if column is None:
            yield f"column {name!r} is gone"
        elif column.declared != declared:
            yield f"column {name!r} was {declared} and is {column.declared}"
    if merge.key and target.unique_for(merge.key) != merge.unique:
        yield f"the unique index behind key={list(merge.key)} is another one"
