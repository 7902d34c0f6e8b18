"""The staging table of one attempt: every task copies into it, the merge reads it, dropping it fences zombies.

Each row carries the tag of its task, so that rows of attempts that Spark did not accept are never merged. The
table is unlogged where the merge is prepared before the checkpoint decides, and logged where it has to outlive a
crash. Its comment names the generation that made it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from psycopg import errors, sql

from epochsink.postgres.types import row_encoding

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from epochsink.postgres.relation import Relation
    from epochsink.postgres.server import Connection
    from epochsink.postgres.types import Encoding

TAG: Final = "epochsink_task"
DELETED: Final = "epochsink_delete"
RESERVED: Final = (TAG, DELETED)

TAG_ENCODING: Final = row_encoding(TAG, pa.int64())
DELETED_ENCODING: Final = row_encoding(DELETED, pa.bool_())


def tag(task: str) -> int:
    """Return the number that stands for a task's uuid in each of its rows: its first 8 bytes."""
    return int.from_bytes(bytes.fromhex(task)[:8], signed=True)


@dataclass(frozen=True, slots=True)
class Staging:
    """Where one attempt's rows wait."""

    relation: Relation
    logged: bool

    def ensure(self, connection: Connection, target: Relation, encodings: Sequence[Encoding], note: str) -> None:
        """Create the table if no other task has. Raises `psycopg.Error`."""
        name = self.relation.quoted
        found = connection.execute("SELECT to_regclass(%s)", [name.as_string(connection)]).fetchone()
        if found and found[0]:
            return
        columns = sql.SQL(", ").join(_column(encoding) for encoding in encodings)
        # The lock lets one task create while the others wait: CREATE ... IF NOT EXISTS alone fails in races.
        connection.execute(
            sql.SQL(
                "SELECT pg_advisory_xact_lock({lock}); "
                "CREATE {kind} TABLE IF NOT EXISTS {name} AS SELECT {columns} FROM {target} WITH NO DATA; "
                "COMMENT ON TABLE {name} IS {note}"
            ).format(
                lock=sql.Literal(tag(self.relation.name[-32:])),
                kind=sql.SQL("" if self.logged else "UNLOGGED"),
                name=name,
                columns=columns,
                target=target.quoted,
                note=sql.Literal(note),
            )
        )


def _column(encoding: Encoding) -> sql.Composed:
    name = sql.Identifier(encoding.field.name)
    if encoding.field.name in RESERVED:
        kind = "boolean" if encoding.field.name == DELETED else "bigint"
        return sql.SQL("NULL::{} AS {}").format(sql.SQL(kind), name)
    if encoding.staged_as is None:
        return sql.SQL("{}").format(name)
    return sql.SQL("NULL::{} AS {}").format(sql.SQL(encoding.staged_as), name)  # type: ignore[arg-type] # text, text[] or timestamp[]
