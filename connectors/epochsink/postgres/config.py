"""Hold the arguments of a PostgreSQL sink, and check them without a server."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from epochsink import arguments
from epochsink.credentials import Secret
from epochsink.errors import ConfigurationError

MAX_BYTES: Final = 63
"""PostgreSQL cuts longer identifiers off without an error (NAMEDATALEN - 1)."""

Commit = Literal["auto", "prepared", "staged"]
Mode = Literal["prepared", "staged"]
Rejected = Literal["stop", "dead_letter"]
AGGREGATES: Final = ("sum", "min", "max")
"""Of these it does not matter in which order, and in how many epochs, values are combined. What else accumulate= has is
an SQL expression."""


@dataclass(frozen=True, kw_only=True, repr=False)
class PostgresConfig:
    """The arguments of `epochsink.Postgres`, which describes them; names and expressions are tuples here."""

    dsn: Secret
    table: tuple[str, ...]
    key: tuple[str, ...] = ()
    select: tuple[str, ...] = ("*",)
    where: str | None = None
    order_by: tuple[str, ...] = ()
    delete_when: str | None = None
    newer_wins: str | None = None
    skip_unchanged: bool = False
    accumulate: Mapping[str, str] = field(default_factory=dict, hash=False)
    atomic: bool = True
    commit: Commit = "auto"
    marker_schema: str = "epochsink"
    validate: bool = False
    on_rejected: Rejected = "stop"
    letters_limit: float = 1.0
    spool: bool = True
    create: bool = False
    add_columns: bool = False
    timeout: float = 60.0
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    allow_insecure: bool = False

    def __post_init__(self) -> None:
        for name in ("where", "delete_when"):
            arguments.optional_text(name, getattr(self, name))
        for name in ("skip_unchanged", "atomic", "validate", "spool", "create", "add_columns", "allow_insecure"):
            arguments.flag(name, getattr(self, name))
        arguments.choice("commit", self.commit, ("auto", "prepared", "staged"))
        arguments.choice("on_rejected", self.on_rejected, ("stop", "dead_letter"))
        arguments.share("letters_limit", self.letters_limit)
        arguments.seconds("timeout", self.timeout)
        arguments.mapping("options", self.options)
        identifier(self.marker_schema, "marker_schema=")
        if self.newer_wins is not None:
            identifier(self.newer_wins, "newer_wins=")
        for column, how in arguments.mapping("accumulate", self.accumulate).items():
            identifier(column, "accumulate=")
            _refuse_unless_combines(column, how)
        self._refuse_contradictions()
        self._refuse_inexact_letters()

    @property
    def sets_aside(self) -> bool:
        """Whether rows that the target refuses become dead letters."""
        return self.on_rejected == "dead_letter"

    @property
    def is_direct(self) -> bool:
        """Whether tasks copy straight into the target, with no merge that could cast values or obey rules."""
        return not self.atomic and not self.key

    @property
    def writers_read(self) -> bool:
        """True if tasks write: a delete does not see a prepared row, nor a foreign key its parent."""
        return not self.atomic

    def mode(self, max_prepared_transactions: int) -> Mode:
        """Return how an epoch waits for the decision on a server with this limit."""
        if self.commit == "auto":
            return "prepared" if max_prepared_transactions > 0 or not self.atomic else "staged"
        return self.commit

    def without(self, columns: Collection[str]) -> PostgresConfig:
        """Return it as if ``newer_wins`` and ``accumulate`` named none of some columns."""
        given = {item.name: getattr(self, item.name) for item in dataclasses.fields(PostgresConfig)}
        given["newer_wins"] = None if self.newer_wins in columns else self.newer_wins
        given["accumulate"] = {name: how for name, how in self.accumulate.items() if name not in columns}
        return PostgresConfig(**given)

    def __repr__(self) -> str:
        said = [
            f"{item.name}={getattr(self, item.name)!r}"
            for item in dataclasses.fields(self)
            if item.name not in ("dsn", "options") and getattr(self, item.name) not in (item.default, {})
        ]
        return f"{type(self).__name__}({', '.join(said)})"

    def _refuse_contradictions(self) -> None:
        if not self.atomic and self.commit == "staged":
            raise ConfigurationError(
                "atomic=False with commit='staged': the driver merges staged rows after the decision, so one "
                "transaction for each task would show half epochs and would not be faster",
                hint="use atomic=True with commit='staged', or atomic=False with commit='prepared'",
            )
        if self.atomic and not self.spool:
            raise ConfigurationError(
                "spool=False with atomic=True: the driver copies the rows of an epoch out of the spool, into the one "
                "transaction that makes them visible together",
                hint="leave spool=False out; or set atomic=False, so that each task writes and commits its own rows",
            )
        for name in ("order_by", "delete_when", "newer_wins", "skip_unchanged", "accumulate"):
            if getattr(self, name) and not self.key:
                raise ConfigurationError(
                    f"{name}= is given without key=: only rows with a key replace or delete others",
                    hint=f"give key=, or leave {name}= out",
                )
        for name, columns in (("newer_wins", [self.newer_wins]), ("accumulate", self.accumulate)):
            for column in filter(self.key.__contains__, columns):
                raise ConfigurationError(
                    f"{name}= names {column!r}, a column of the key, which is the same in both rows",
                    hint="name a column that is not in key=",
                )
        if self.accumulate and self.delete_when is not None:
            raise ConfigurationError(
                "accumulate= with delete_when=: rows before the delete of their key must not be added, and combined "
                "rows do not show which came before it",
                hint="add a negative value, or delete by another sink of this query on the same table",
            )
        if self.accumulate and self.newer_wins is not None:
            raise ConfigurationError(
                f"accumulate= with newer_wins={self.newer_wins!r}: an older row would not be added, so that the result "
                "would depend on the order in which rows come",
                hint=f"leave newer_wins= out; accumulate={{{self.newer_wins!r}: 'max'}} keeps the newest time",
            )

    def _refuse_inexact_letters(self) -> None:
        if self.on_rejected == "stop" and self.letters_limit != 1.0:
            raise ConfigurationError(
                f"letters_limit={self.letters_limit!r} without on_rejected='dead_letter': no row becomes a dead letter",
                hint="give on_rejected='dead_letter', or leave letters_limit= out",
            )
        for name, (needed, reason) in _LETTERS_NEED.items():
            if self.on_rejected == "dead_letter" and getattr(self, name) != needed:
                raise ConfigurationError(
                    f"on_rejected='dead_letter' with {name}={getattr(self, name)!r}: {reason}",
                    hint=f"leave {name}= out, or on_rejected=",
                )


_LETTERS_NEED: Final[Mapping[str, tuple[Any, str]]] = {
    "atomic": (True, "refused rows are found in the epoch's one transaction, and its tasks have none of their own"),
    "accumulate": ({}, "a refused value is made of several rows, and which of them is wrong is not known"),
}


def _refuse_unless_combines(column: str, how: object) -> None:
    if how in AGGREGATES:
        return
    # what does not look at the stored value replaces it; most often it is the name of another aggregate
    if not isinstance(how, str) or "\x00" in how or not re.search(r"\bstored\b", how, re.IGNORECASE):
        raise ConfigurationError(
            f"invalid accumulate={{{column!r}: {how!r}}}: expected 'sum', 'min', 'max', or an SQL expression over "
            "stored, the stored value, and new, the row's",
            hint=f"for example 'stored || new'. To count rows, write select=[..., '1L AS {column}'] and "
            f"accumulate={{{column!r}: 'sum'}}; for an average, accumulate its sum and its count",
        )


def connection_string(dsn: str) -> Secret:
    """Return the dsn, which may hold a password. Raises `ConfigurationError`."""
    if not isinstance(dsn, str):
        raise ConfigurationError(
            f"invalid dsn: expected a string, not {type(dsn).__name__}",
            hint="for example postgresql://user@host:5432/database?sslmode=verify-full",
        )
    return Secret(dsn)


def table_name(table: str | Sequence[str]) -> tuple[str, ...]:
    """Return a table's name as (name,) or (schema, name). Raises `ConfigurationError`."""
    parts = tuple(table.split(".")) if isinstance(table, str) else arguments.expressions("table", table)
    if not parts:
        raise ConfigurationError("invalid table=None: expected a table's name", hint="for example table='orders'")
    if len(parts) not in (1, 2):
        raise ConfigurationError(
            f"invalid table={table!r}: it has {len(parts)} parts, and a table's name has one or two",
            hint='write "table", "schema.table", or for names with dots ("my.schema", "my.table")',
        )
    return tuple(identifier(part, f"table={table!r}") for part in parts)


def column_names(name: str, value: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return one or several columns' names as a tuple. Raises `ConfigurationError`."""
    return tuple(identifier(column, f"{name}=") for column in arguments.expressions(name, value))


def identifier(name: str, option: str) -> str:
    """Return ``name`` if PostgreSQL can have it as an identifier. Raises `ConfigurationError` naming ``option``."""
    if not isinstance(name, str) or not name or "\x00" in name:
        raise ConfigurationError(
            f"{option}: {name!r} is not a valid name", hint="give a name of at least one character, without NUL"
        )
    if len(name.encode()) > MAX_BYTES:
        raise ConfigurationError(
            f"{option}: {name!r} has {len(name.encode())} bytes in UTF-8, and PostgreSQL keeps only {MAX_BYTES}",
            hint="give the name that the table really has: pg_class.relname, pg_attribute.attname",
        )
    return name
