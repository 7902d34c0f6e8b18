"""The staging table of one attempt: rows are copied into it, the merge reads it, and dropping it fences zombies.

Each row has the tag of its task, so that rows of attempts that Spark did not accept are never merged. The table is
unlogged if the merge is prepared before the checkpoint decides, and logged if it has to survive a crash. Its comment
names the generation that made it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

import pyarrow as pa
from psycopg import sql

from epochsink import arrow_buffers
from epochsink.identity import identity_label
from epochsink.postgres.committable import Relation
from epochsink.postgres.prepared_transaction import LOCAL
from epochsink.postgres.server import Connection
from epochsink.postgres.types import row_encoding
from epochsink.sink import Epoch, Identity

TAG: Final = "epochsink_task"
DELETED: Final = "epochsink_delete"
REFUSED: Final = "epochsink_refused"
"""The column of a row that the staging table cannot hold: SQLSTATE and error, as JSON; null for all other rows."""
NUMBER: Final = "epochsink_number"
"""The column that numbers an epoch's rows, in place of `TAG`, if those that are refused are set aside."""
_RANK: Final = "epochsink_order_"

TAG_ENCODING: Final = row_encoding(TAG, pa.int64())
NUMBER_ENCODING: Final = row_encoding(NUMBER, pa.int64())
DELETED_ENCODING: Final = row_encoding(DELETED, pa.bool_())


def rank_column(place: int) -> str:
    """Return the name of the staged column that holds the value of an ``order_by`` expression."""
    return f"{_RANK}{place}"


def is_rank(name: str) -> bool:
    """Return whether a column is one of `rank_column`."""
    return name.startswith(_RANK)


def is_reserved(name: str) -> bool:
    """Return whether a column of the row would clash with one of ours."""
    return name in (TAG, DELETED, REFUSED, NUMBER) or is_rank(name)


def tag_value(task: str) -> pa.Scalar:
    """Return `tag` as a value of a record batch."""
    return arrow_buffers.number(tag(task), "int64")


def tag(task: str) -> int:
    """Return the number that marks each row of a task: the first 8 bytes of its uuid."""
    return int.from_bytes(bytes.fromhex(task)[:8], signed=True)


@dataclass(frozen=True, slots=True)
class Note:
    """The comment of a staging table: who made it. ``label`` is that of `identity_label`."""

    generation: int
    epoch: int
    label: str

    def __str__(self) -> str:
        return f"epochsink generation {self.generation} epoch {self.epoch} of {self.label}"

    @classmethod
    def of(cls, identity: Identity, epoch: Epoch) -> Self:
        """Return the note of an attempt's table."""
        return cls(identity.generation, epoch.number, identity_label(identity))

    @classmethod
    def parse(cls, text: str | None) -> Self | None:
        """Return the note that ``text`` is, or None if it is not one of ours."""
        match = re.fullmatch(r"epochsink generation (\d+) epoch (\d+) of (\S+)", text or "")
        return cls(int(match[1]), int(match[2]), match[3]) if match else None


@dataclass(frozen=True, slots=True)
class Staging:
    """The table in which one attempt's rows are staged."""

    relation: Relation
    logged: bool

    def relax(self, connection: Connection) -> None:
        """Let the transaction under way, which fills the table, commit without waiting for the disk if that is safe."""
        if not self.logged:
            # a crash that loses unlogged rows, or their commit, fails the vote
            connection.execute("SET LOCAL synchronous_commit = off")

    def clear(self, connection: Connection, task: str | None = None) -> None:
        """Delete the rows, or those of one task, in the transaction under way, which then copies them anew.

        Call this before a COPY is repeated: the server may have committed the first one, or is about to.
        """
        # waits for a COPY that is about to be committed, and lets none begin
        lock = sql.SQL("LOCK TABLE {} IN SHARE ROW EXCLUSIVE MODE").format(self.relation.quoted)
        connection.execute(lock)
        statement = sql.SQL("DELETE FROM {}").format(self.relation.quoted)
        if task is not None:
            statement = sql.SQL("{} WHERE {} OPERATOR(pg_catalog.=) {}").format(
                statement, sql.Identifier(TAG), sql.Literal(tag(task))
            )
        connection.execute(statement)

    def ensure(self, connection: Connection, columns: Mapping[str, str], checks: Mapping[str, str], note: Note) -> bool:
        """Create the table if no other task has: columns with their SQL types, CHECK constraints by name.

        Return whether there was none. Raises `psycopg.Error`.
        """
        name = self.relation.quoted
        row = connection.execute("SELECT to_regclass(%s)", [str(self.relation)]).fetchone()
        if row and row[0]:
            return False
        definitions = sql.SQL(", ").join(
            [sql.SQL("{} {}").format(sql.Identifier(column), sql.SQL(kind)) for column, kind in columns.items()]
            + [
                sql.SQL("CONSTRAINT {} CHECK ({})").format(sql.Identifier(check), sql.SQL(expression))
                for check, expression in checks.items()
            ]
        )
        # The lock lets one task create while the others wait: CREATE ... IF NOT EXISTS alone fails in races.
        connection.execute(
            LOCAL
            + sql.SQL(
                "SELECT pg_advisory_xact_lock({lock}); "
                # no autovacuum: the table is read once, and dropped
                "CREATE {kind} TABLE IF NOT EXISTS {name} ({definitions}) WITH (autovacuum_enabled = false); "
                "COMMENT ON TABLE {name} IS {note}"
            ).format(
                # a lock for each attempt: the name ends with its uuid
                lock=sql.Literal(tag(self.relation.name[-32:])),
                kind=sql.SQL("" if self.logged else "UNLOGGED"),
                name=name,
                definitions=definitions,
                note=sql.Literal(str(note)),
            )
        )
        return True
