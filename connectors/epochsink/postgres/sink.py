"""What a user says about a PostgreSQL destination."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from epochsink.errors import ConfigurationError
from epochsink.postgres.committer import PostgresCommitter
from epochsink.postgres.relation import Relation, identifier
from epochsink.postgres.row_mapping import is_nested
from epochsink.postgres.server import Server
from epochsink.postgres.staging import DELETED, RESERVED
from epochsink.postgres.writer import make_writer

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

    from epochsink.sink import SinkCommitter, SinkWriter, Task

_COMMITS: Final = ("auto", "prepared", "staged")
Commit = Literal["auto", "prepared", "staged"]


@dataclass(frozen=True, init=False, repr=False)
class Postgres:
    """A PostgreSQL table (14 or newer) that each epoch's rows are appended to, or upserted into, exactly once.

    ``dsn`` is a libpq URL or key=value string; every libpq parameter may also be given by name (``password=``,
    ``sslmode=``, ``sslrootcert=``, ...). A host that is not this machine needs an explicit ``sslmode``. Connect
    to the server itself or to a pooler in session mode.

    ``table`` is ``"table"``, ``"schema.table"``, or a tuple of one or two names if they contain dots. Names are
    literal: case counts, nothing is folded, everything is quoted.

    ``key`` names the columns of a primary key or unique constraint: rows replace the row of their key. Without
    it rows are appended. ``order_by``: one or more SQL expressions over the table's columns; of several rows of a
    key in one epoch the one with the largest value wins (nulls lose). Without it such an epoch is refused.
    ``delete_when``: a Spark SQL predicate; rows for which it is true delete their key instead.

    ``select`` and ``where`` are Spark SQL: the row, column by column named as in the table, and which rows.
    Columns of the table that the row lacks keep their default, or their value. Structs and maps become JSON.

    ``atomic=True``: readers see all of an epoch or none of it. ``atomic=False``: each task commits on its own,
    faster; an epoch becomes visible task by task.

    ``commit="prepared"``: constraints are checked before Spark's checkpoint decides, by PREPARE TRANSACTION
    (needs ``max_prepared_transactions`` > 0). ``"staged"``: rows wait in a logged table and are merged after the
    decision: types, NOT NULL and CHECK are checked before it (the latter two not with ``delete_when``), but a row
    that breaks a unique or foreign key stops the query with the epoch pending. ``"auto"``: prepared
    if the server can. ``atomic=False`` is always prepared.

    ``schema_for_markers`` holds the marker table and the staging tables; it is created if the user may.
    ``lock_timeout`` bounds each wait for a lock, in seconds. ``spool`` keeps a durable copy of the rows until the
    epoch is done, from which it can be prepared again if somebody rolls a prepared transaction back.

    Raises `ConfigurationError`; nothing is connected to.
    """

    server: Server
    relation: Relation
    key: tuple[str, ...]
    order_by: tuple[str, ...]
    select: tuple[str, ...]
    where: str | None
    delete_when: str | None
    atomic: bool
    commit: Commit
    marker_schema: str
    spool: bool

    def __init__(
        self,
        dsn: str = "",
        *,
        table: str | Sequence[str],
        key: str | Sequence[str] | None = None,
        order_by: str | Sequence[str] | None = None,
        select: str | Sequence[str] = ("*",),
        where: str | None = None,
        delete_when: str | None = None,
        atomic: bool = True,
        commit: Commit = "auto",
        schema_for_markers: str = "epochsink",
        lock_timeout: float = 60.0,
        spool: bool = True,
        **options: str | int,
    ) -> None:
        _refuse_senseless(
            key=key, order_by=order_by, delete_when=delete_when, atomic=atomic, commit=commit, lock_timeout=lock_timeout
        )
        values = {
            "server": Server.parse(dsn, options, lock_timeout),
            "relation": Relation.parse(table),
            "key": tuple(identifier(name, "key=") for name in _many(key)),
            "order_by": _many(order_by),
            "select": _many(select),
            "where": where,
            "delete_when": delete_when,
            "atomic": atomic,
            "commit": commit,
            "marker_schema": identifier(schema_for_markers, "schema_for_markers="),
            "spool": spool,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def distribute_by(self) -> Sequence[str]:
        """The key, as expressions over the stream, where tasks merge on their own and must not share keys."""
        return () if self.atomic else tuple(self._origin(name) for name in self.key)

    def _origin(self, column: str) -> str:
        """Return the expression that ``select`` calls ``column``."""
        for expression in self.select:
            named = re.fullmatch(r"(.+)\s+as\s+(`?)(.+?)\2\s*", expression, re.IGNORECASE | re.DOTALL)
            if named and named[3].replace("``", "`") == column:
                return named[1]
        return _quoted(column)

    def columns(self, row: str, schema: pa.Schema) -> Sequence[str]:
        """Return the row's columns, structs and maps as JSON, and whether to delete. Raises `ConfigurationError`."""
        for name in RESERVED:
            if name in schema.names:
                raise ConfigurationError(
                    f"the row has a column {name!r}, a name that epochsink uses itself",
                    hint="select it under another name with AS",
                )
        columns = [_rendered(row, field) for field in schema]
        if self.delete_when is not None:
            columns.append(f"coalesce({self.delete_when}, false) AS `{DELETED}`")
        return columns

    def mode(self, max_prepared_transactions: int) -> Literal["prepared", "staged"]:
        """Return how an epoch waits for the decision on a server with this limit."""
        if self.commit == "auto":
            return "prepared" if max_prepared_transactions > 0 or not self.atomic else "staged"
        return self.commit

    def writer(self, task: Task) -> SinkWriter:
        """Make the writer of one task attempt; connects. Raises `PrepareFailed`."""
        return make_writer(self, task, atomic=self.atomic)

    def committer(self) -> SinkCommitter:
        """Make the driver's side; does not connect yet."""
        return PostgresCommitter(self)

    def __repr__(self) -> str:
        key = f", key={list(self.key)}" if self.key else ""
        return f"Postgres({self.server!r}, table={self.relation}{key}, atomic={self.atomic}, commit={self.commit!r})"


def _rendered(row: str, field: pa.Field) -> str:
    name = _quoted(field.name)
    return f"to_json({row}.{name}) AS {name}" if is_nested(field.type) else f"{row}.{name} AS {name}"


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _many(value: str | Sequence[str] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)


def _refuse_senseless(
    *, key: object, order_by: object, delete_when: object, atomic: bool, commit: str, lock_timeout: float
) -> None:
    if commit not in _COMMITS:
        raise ConfigurationError(f"commit={commit!r} is none of {', '.join(_COMMITS)}", hint="leave it at 'auto'")
    if not atomic and commit == "staged":
        raise ConfigurationError(
            "atomic=False with commit='staged': staged rows are merged by the driver after the decision, so "
            "splitting that into one transaction for each task would show epochs half and gain no speed",
            hint="use atomic=True with commit='staged', or atomic=False with commit='prepared'",
        )
    for name, value in (("order_by", order_by), ("delete_when", delete_when)):
        if value and not key:
            raise ConfigurationError(
                f"{name}= is given without key=: only rows with a key replace or delete others",
                hint=f"give key=, or leave {name}= out",
            )
    if lock_timeout <= 0:
        raise ConfigurationError(
            f"lock_timeout={lock_timeout!r}: a wait without an end would hang the query silently",
            hint="give seconds above 0",
        )
