"""What the ledger says about a PostgreSQL epoch: frozen values, and their JSON form with its version."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

from epochsink.errors import LedgerCorrupt
from epochsink.postgres.answers import STREAM, AnsweredTask
from epochsink.postgres.place import Place
from epochsink.postgres.relation import Relation

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from epochsink.sink import Committable

MEMBERS: Final = "members"
VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Merge:
    """What to merge and how, recorded so that a later start merges it as it was meant.

    ``columns`` has the type of each column of the target that is written, ``casts`` that of each that is staged as
    another one. Without ``key`` rows are appended. With it they replace the target's row of that key, or delete it
    where ``deletes`` and the row says so. ``ranks`` is the number of staged columns that decide between rows of a key.
    ``equals`` is the operator that compares each key column, with its schema. ``unique`` describes the indexes behind
    the key, see `epochsink.postgres.catalog.Target`.
    """

    target: Relation
    columns: Mapping[str, str] = field(hash=False)
    casts: Mapping[str, str] = field(hash=False)
    key: tuple[str, ...]
    deletes: bool
    ranks: int = 0
    equals: Mapping[str, str] = field(default_factory=dict, hash=False)
    unique: Sequence[Mapping[str, str]] = field(default_factory=list, hash=False)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self) | {"target": list(self.target), "key": list(self.key)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Return the merge that `to_json` described."""
        return cls(**{**values, "key": tuple(values["key"]), "target": Relation(*values["target"])})


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

    ``merge`` is how its rows are prepared again, should it be lost.
    """

    gid: str
    attempt: str
    tasks: tuple[str, ...]
    rows: int
    merge: Merge
    table: str | None = None
    place: Place | None = None

    @property
    def tables(self) -> set[str]:
        """The staging table, if it has one."""
        return {self.table} if self.table is not None else set()

    def to_json(self) -> Committable:
        """Return it as JSON values."""
        fields = {name: value for name, value in asdict(self).items() if value is not None}
        return fields | {"merge": self.merge.to_json(), "tasks": list(self.tasks), "version": VERSION}


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
        return {"gid": self.gid, "attempt": self.attempt, MEMBERS: members, "place": place, "version": VERSION}


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
    return PreparedPart(**_merged(fields) | {"place": Place.from_json(fields.get("place"))})


def _fields(values: Committable) -> dict[str, Any]:
    fields = dict(values)
    version = fields.pop("version", None)
    if version != VERSION:
        raise LedgerCorrupt(
            f"a committable of PostgreSQL has version {version}, and this epochsink reads version {VERSION}",
            hint="another version of epochsink prepared this epoch: start the query with that one",
        )
    return fields
