"""How a table is named in SQL: quoted always."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from psycopg import sql

if TYPE_CHECKING:
    from collections.abc import Sequence


class Relation(NamedTuple):
    """A table's schema (None: the first one of the search path that has it) and its name, both literal."""

    schema: str | None
    name: str

    @classmethod
    def of(cls, table: Sequence[str]) -> Relation:
        """Return the relation that is named by (name,) or (schema, name)."""
        return cls(table[0] if len(table) > 1 else None, table[-1])

    @property
    def quoted(self) -> sql.Identifier:
        """The name as SQL."""
        return sql.Identifier(*(part for part in self if part is not None))

    def __str__(self) -> str:
        return self.quoted.as_string()
