"""Tables in PostgreSQL that hold the proof columns."""

from __future__ import annotations

from typing import Final

import psycopg

from epochsink_devkit.history.rows import SCHEMA

TYPES: Final = {"string": "text", "int32": "integer", "int64": "bigint"}


def make_table(dsn: str, name: str, *, key: bool = False) -> None:
    """Create a table; without ``key`` it has no constraint that would hide a duplicate."""
    columns = ", ".join(f"{field.name} {TYPES[str(field.type)]}" for field in SCHEMA)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(f"CREATE TABLE {name} ({columns}{', PRIMARY KEY (key)' if key else ''})".encode())
