"""What the ledger says about a PostgreSQL epoch: frozen values, their JSON form and its version.

| version | differs in |
|---|---|
| 1 | no ``version`` key; ``order_by`` of a merge is SQL over the table's columns, evaluated by the server |
| 2 | ``ranks`` of a merge: so many staged columns, computed by Spark, decide between rows of a key |
| 3 | ``place`` of a part: the database that it was prepared in; ``merge`` of a prepared transaction |
| 4 | ``members``: one transaction of several sinks, each of which records the same value. Only these have version 4 |

A version is read for as long as an epoch that it describes may be pending: an upgrade between prepare and commit.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

from epochsink.errors import LedgerCorrupt
from epochsink.postgres.answers import STREAM, AnsweredTask
from epochsink.postgres.place import Place
from epochsink.postgres.relation import Relation
from epochsink.sink import MEMBERS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from epochsink.sink import Committable

VERSION: Final = 3
SHARED_VERSION: Final = 4


@dataclass(frozen=True, slots=True)
class Merge:
    """What to merge and how, recorded so that a later start merges it as it was meant.

    ``casts`` has the type of each column that is staged as another one. Without ``key`` rows are appended; with
    it they replace the target's row of that key, or delete it where ``deletes`` and the row says so. ``order_by`` is
    SQL of version 1, ``ranks`` the number of staged columns that took its place. ``equals`` is the operator that
    compares each key column, with its schema.
    """

    target: Relation
    columns: tuple[str, ...]
    casts: Mapping[str, str] = field(hash=False)
    key: tuple[str, ...]
    deletes: bool
    ranks: int = 0
    equals: Mapping[str, str] = field(default_factory=dict, hash=False)
    order_by: tuple[str, ...] = ()

    @property
    def is_ordered(self) -> bool:
        """Whether something decides between rows of a key."""
        return self.ranks > 0 or bool(self.order_by)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        lists = ("target", "columns", "key", "order_by")
        return asdict(self) | {name: list(getattr(self, name)) for name in lists}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Return the merge that `to_json` described."""
        tuples = {name: tuple(values[name]) for name in ("columns", "key", "order_by")}
        return cls(**{**values, **tuples, "target": Relation(*values["target"])})


@dataclass(frozen=True, slots=True)
class StagedTask:
    """One task's rows in the attempt's staging table; the vote makes a `PreparedPart` or a `StagedEpoch` of all."""

    table: str
    logged: bool
    task: str
    rows: int
    merge: Merge

    def to_json(self) -> Committable:
        """Return it as JSON values."""
        return asdict(self) | {"merge": self.merge.to_json(), "version": VERSION}


@dataclass(frozen=True, slots=True)
class Member:
    """One sink's rows of an epoch, staged: what a transaction merges. ``schema`` holds its staging and its markers."""

    key: str
    schema: str
    table: str
    tasks: tuple[str, ...]
    rows: int
    merge: Merge

    @property
    def staging(self) -> Relation:
        """The staging table."""
        return Relation(self.schema, self.table)


@dataclass(frozen=True, slots=True)
class StagedEpoch:
    """An epoch's rows in a logged staging table, merged after the decision."""

    attempt: str
    tasks: tuple[str, ...]
    rows: int
    table: str
    merge: Merge
    place: Place | None = None

    gid: ClassVar[None] = None

    @property
    def tables(self) -> set[str]:
        """The staging table."""
        return {self.table}

    def to_json(self) -> Committable:
        """Return it as JSON values."""
        return asdict(self) | {"tasks": list(self.tasks), "merge": self.merge.to_json(), "version": VERSION}


@dataclass(frozen=True, slots=True)
class PreparedPart:
    """A prepared transaction: of a whole epoch or, with ``atomic=False``, of one task. ``table`` is its staging.

    ``merge`` is how its rows are prepared again, should it be lost; None in versions before.
    """

    gid: str
    attempt: str
    tasks: tuple[str, ...]
    rows: int
    table: str | None = None
    place: Place | None = None
    merge: Merge | None = None

    @property
    def tables(self) -> set[str]:
        """The staging table, if it has one."""
        return {self.table} if self.table is not None else set()

    def to_json(self) -> Committable:
        """Return it as JSON values."""
        fields = {name: value for name, value in asdict(self).items() if value is not None}
        merge = {} if self.merge is None else {"merge": self.merge.to_json()}
        return fields | merge | {"tasks": list(self.tasks), "version": VERSION}


@dataclass(frozen=True, slots=True)
class SharedPart:
    """One transaction of several sinks, by their names, in the order in which they are merged.

    Prepared as ``gid``, or (None) merged after the decision out of logged staging tables.
    """

    attempt: str
    members: Mapping[str, Member] = field(hash=False)
    gid: str | None = None
    place: Place | None = None

    @property
    def tables(self) -> set[str]:
        """The staging tables."""
        return {member.table for member in self.members.values()}

    def to_json(self) -> Committable:
        """Return it as JSON values."""
        members = {
            name: asdict(member) | {"tasks": list(member.tasks), "merge": member.merge.to_json()}
            for name, member in self.members.items()
        }
        place = self.place.to_json() if self.place is not None else None
        return {"gid": self.gid, "attempt": self.attempt, MEMBERS: members, "place": place, "version": SHARED_VERSION}


Part = PreparedPart | StagedEpoch | SharedPart


def read_written(values: Committable) -> PreparedPart | StagedTask | AnsweredTask:
    """Return what a task's writer answered. Raises `LedgerCorrupt`."""
    if STREAM in values:
        return AnsweredTask.from_json(values)
    fields = _fields(values)
    return _prepared(fields) if "gid" in fields else StagedTask(**fields | {"merge": Merge.from_json(fields["merge"])})


def read_part(values: Committable) -> Part:
    """Return a part of a recorded epoch. Raises `LedgerCorrupt`."""
    fields = _fields(values)
    if MEMBERS in fields:
        members = {name: Member(**_merged(member)) for name, member in fields[MEMBERS].items()}
        return SharedPart(**fields | {MEMBERS: members, "place": Place.from_json(fields["place"])})
    if "gid" in fields:
        return _prepared(fields)
    return StagedEpoch(**_merged(fields) | {"place": Place.from_json(fields.get("place"))})


def _merged(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {**fields, "tasks": tuple(fields["tasks"]), "merge": Merge.from_json(fields["merge"])}


def _prepared(fields: dict[str, Any]) -> PreparedPart:
    merge = Merge.from_json(fields["merge"]) if "merge" in fields else None
    place = Place.from_json(fields.get("place"))
    return PreparedPart(**fields | {"tasks": tuple(fields["tasks"]), "place": place, "merge": merge})


def _fields(values: Committable) -> dict[str, Any]:
    fields = dict(values)
    version = fields.pop("version", 1)
    if not 1 <= version <= SHARED_VERSION:
        raise LedgerCorrupt(
            f"a committable of PostgreSQL has version {version}, and this epochsink reads 1 to {SHARED_VERSION}",
            hint="a newer epochsink prepared this epoch: start the query with that one",
        )
    return fields
