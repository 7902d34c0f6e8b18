"""What the ledger says about a PostgreSQL epoch: frozen values, and their JSON form with its version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Self

from psycopg import sql

from epochsink.errors import LedgerCorrupt
from epochsink.identity import PreparedName
from epochsink.postgres.config import AGGREGATES
from epochsink.postgres.place import Place
from epochsink.sink import Committable
from epochsink.sink.values import fields_of

VERSION: Final = 1
WHOLE: Final = "all"
"""What the marker of a whole epoch calls its part."""


@dataclass(frozen=True, slots=True)
class Merge:
    """What to merge and how, recorded so that a later start merges it as it was meant.

    ``columns`` has the type of each column of the target that is written, ``casts`` that of each that is staged as
    another one. Without ``key`` rows are appended. With it they replace the target's row of that key, or delete it
    where ``deletes`` and the row says so. ``ranks`` is the number of staged columns that decide between rows of a key.
    ``equals`` is the operator that compares each key column, with its schema. ``unique`` describes the indexes behind
    the key, see `epochsink.postgres.catalog.TargetTable`. ``newer_wins``, ``skip_unchanged`` and ``accumulate`` are
    those of `epochsink.postgres.sink.Postgres`. ``sets_aside``: rows that the target refuses become dead letters.
    """

    target: Relation
    columns: Mapping[str, str] = field(hash=False)
    casts: Mapping[str, str] = field(hash=False)
    key: tuple[str, ...]
    deletes: bool
    ranks: int = 0
    equals: Mapping[str, str] = field(default_factory=dict, hash=False)
    unique: Sequence[Mapping[str, str]] = field(default_factory=list, hash=False)
    newer_wins: str | None = None
    skip_unchanged: bool = False
    accumulate: Mapping[str, str] = field(default_factory=dict, hash=False)
    sets_aside: bool = False

    @property
    def replaced(self) -> list[str]:
        """The columns whose stored value the newest row replaces."""
        return [name for name in self.columns if name not in self.key and name not in self.accumulate]

    @property
    def expressions(self) -> dict[str, str]:
        """The SQL expressions of ``accumulate``, by their columns."""
        return {name: how for name, how in self.accumulate.items() if how not in AGGREGATES}

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return fields_of(self) | {"target": list(self.target), "key": list(self.key)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Return the merge that `to_json` described."""
        return cls(**{**values, "key": tuple(values["key"]), "target": Relation(*values["target"])})


@dataclass(frozen=True, slots=True)
class Member:
    """One sink's rows in a part. ``key`` is the sink's in names, ``schema`` holds its markers and its staging tables.

    ``tasks`` are the accepted ones, whose rows the spool keeps under these uuids. ``merge`` says how the rows go into
    the table, and how they are prepared again if the part is lost. ``table`` is the staging table; None if the rows
    went straight into the target. ``logged``: it survives a crash, and so can wait for the decision. Of its rows,
    ``unfit`` are known to become dead letters as the staging table cannot hold them; ``letters`` are in the prepared
    transaction, None if that is not known or there can be none.
    """

    key: str
    schema: str
    table: str | None
    tasks: tuple[str, ...]
    rows: int
    merge: Merge
    logged: bool = False
    unfit: int = 0
    letters: int | None = None

    @property
    def staging(self) -> Relation:
        """The staging table."""
        if self.table is None:
            raise ValueError(f"the rows for {self.merge.target} are not staged")
        return Relation(self.schema, self.table)


@dataclass(frozen=True, slots=True)
class Part:
    """What one transaction commits: an epoch of one or several sinks or, with ``atomic=False``, the rows of one task.

    With ``atomic=False`` the first part is the epoch's *seal*: the marker of the whole epoch, and no rows.
    It is prepared as ``gid``, or (None) merged after the decision out of logged staging tables. ``members`` are in the
    order in which they are merged.
    """

    attempt: str
    members: Mapping[str, Member] = field(hash=False)
    gid: str | None = None
    place: Place | None = None

    @property
    def name(self) -> str:
        """What markers call it: "all", or the uuid of its only task."""
        name = PreparedName.parse(self.gid) if self.gid else None
        return name.part if name else WHOLE

    @property
    def is_seal(self) -> bool:
        """Whether it stands for parts of which each holds the rows of one task."""
        return not any(member.tasks for member in self.members.values())

    @property
    def tables(self) -> set[str]:
        """The staging tables."""
        return {member.table for member in self.members.values() if member.table is not None}

    def to_json(self) -> Committable:
        """Return it as JSON values."""
        members = {
            name: fields_of(member) | {"tasks": list(member.tasks), "merge": member.merge.to_json()}
            for name, member in self.members.items()
        }
        place = self.place.to_json() if self.place is not None else None
        return {"gid": self.gid, "attempt": self.attempt, "members": members, "place": place, "version": VERSION}


def read_part(values: Committable) -> Part:
    """Return a part of a recorded epoch. Raises `LedgerCorrupt`."""
    fields = _fields(values)
    members = {name: _member(member) for name, member in fields["members"].items()}
    return Part(**fields | {"members": members, "place": Place.from_json(fields["place"])})


def _member(fields: Mapping[str, Any]) -> Member:
    return Member(**{**fields, "tasks": tuple(fields["tasks"]), "merge": Merge.from_json(fields["merge"])})


def _fields(values: Committable) -> dict[str, Any]:
    fields = dict(values)
    version = fields.pop("version", None)
    if version != VERSION:
        raise LedgerCorrupt(
            f"a committable of PostgreSQL has version {version}, and this epochsink reads version {VERSION}",
            hint="another version of epochsink prepared this epoch: start the query with that one",
        )
    return fields


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
