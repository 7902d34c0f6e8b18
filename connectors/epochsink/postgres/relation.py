"""How a table is named: parsed once, quoted always."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from psycopg import sql

from epochsink.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_BYTES: Final = 63
"""PostgreSQL cuts longer identifiers off without an error (NAMEDATALEN - 1)."""


class Relation(NamedTuple):
    """A table's schema (None: the first one of the search path that has it) and its name, both literal."""

    schema: str | None
    name: str

    @classmethod
    def parse(cls, table: str | Sequence[str]) -> Relation:
        """Read ``"table"``, ``"schema.table"`` or a tuple of one or two names.

        Names are taken as they are: case counts, nothing is quoted or folded. A name with a dot needs the
        tuple form. Raises `ConfigurationError`.
        """
        parts = table.split(".") if isinstance(table, str) else list(table)
        if len(parts) not in (1, 2):
            raise ConfigurationError(
                f"table={table!r} has {len(parts)} parts, and a table is named by one or two",
                hint='write "table", "schema.table", or for names with dots ("my.schema", "my.table")',
            )
        for part in parts:
            identifier(part, f"table={table!r}")
        return cls(parts[0], parts[1]) if len(parts) == 2 else cls(None, parts[0])  # noqa: PLR2004 - schema, name

    @property
    def quoted(self) -> sql.Identifier:
        """The name as SQL."""
        return sql.Identifier(*(part for part in self if part is not None))

    def __str__(self) -> str:
        return self.quoted.as_string()


def identifier(name: str, option: str) -> str:
    """Return ``name`` if PostgreSQL can have it as an identifier. Raises `ConfigurationError` naming ``option``."""
    if not isinstance(name, str) or not name or "\x00" in name:
        raise ConfigurationError(
            f"{option}: {name!r} is no identifier", hint="give a name of at least one character, without NUL"
        )
    if len(name.encode()) > MAX_BYTES:
        raise ConfigurationError(
            f"{option}: {name!r} has {len(name.encode())} bytes in UTF-8, and PostgreSQL keeps only {MAX_BYTES}",
            hint="give the name that the table really has: pg_class.relname, pg_attribute.attname",
        )
    return name
