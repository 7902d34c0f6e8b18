"""Map PostgreSQL's errors, in one table, to epochsink's error, whether to retry, and a hint."""

from __future__ import annotations

import enum
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

import psycopg
import pyarrow as pa
from psycopg import errors

from epochsink.errors import PrepareFailed, RowsRejected

if TYPE_CHECKING:
    from collections.abc import Iterator

_UNREACHABLE: Final = "check that the server runs and is reachable; Spark runs the epoch again when the query restarts"
_PASSING_REFUSALS: Final = ("the database system is", "too many", "connection slots")
"""Parts of messages, because libpq reports a refused connection without an SQLSTATE."""


class Refused(psycopg.OperationalError):
    """The server answered and refused the connection: wrong password, unknown database, pg_hba.conf."""


class SharedSession(Refused):
    """The connection goes through a pooler in transaction mode: session settings would reach other clients."""


class AwaitsStandby(psycopg.OperationalError):
    """A PREPARE or COMMIT was cancelled while it waited for a synchronous standby. It took effect on this server."""


class Blocked(psycopg.OperationalError):
    """A read of the markers waited for the lock of another session, which may itself wait for what is prepared."""


class Retry(enum.Enum):
    """When a retry may help: never, once the server accepts connections, in a new transaction, or in a new attempt."""

    NEVER = enum.auto()
    CONNECTION = enum.auto()
    TRANSACTION = enum.auto()
    ATTEMPT = enum.auto()


class Rule(NamedTuple):
    """What to raise for a server error or its subclasses, whether to retry, and the hint."""

    error: type[psycopg.Error]
    raises: type[PrepareFailed]
    retry: Retry
    hint: str = ""


def _rejects(error: type[psycopg.Error], hint: str = "") -> Rule:
    """Return the rule for rows that no retry can make acceptable."""
    return Rule(error, RowsRejected, Retry.NEVER, hint)


def _fails(error: type[psycopg.Error], hint: str) -> Rule:
    """Return the rule for an epoch that fails until an operator acts."""
    return Rule(error, PrepareFailed, Retry.NEVER, hint)


RULES: Final = (  # the first match counts
    _rejects(
        errors.NotNullViolation, "filter such rows with where=, fill them with coalesce() in select=, or drop NOT NULL"
    ),
    _rejects(errors.CheckViolation, "filter such rows with where=, or change the constraint"),
    _rejects(errors.UniqueViolation, "rows that replace others need key=; else filter the duplicates before the sink"),
    _rejects(
        errors.ForeignKeyViolation,
        "load the referenced table first; if another sink of this query feeds it, give both the same dsn= and "
        "atomic=True, and name that sink first: they share a transaction; or filter such rows with where=",
    ),
    _rejects(
        errors.CharacterNotInRepertoire,
        "PostgreSQL's text cannot hold NUL (0x00): remove it in select=, for example "
        "translate(column, '\\u0000', ''), or store the column as bytea",
    ),
    _rejects(
        errors.UntranslatableCharacter,
        "this character cannot be stored there (\\u0000 in jsonb, or a database that is not UTF8): remove it in "
        "select=",
    ),
    _rejects(errors.StringDataRightTruncation, "cut it in select= with left(column, n), or widen the column"),
    _rejects(errors.NumericValueOutOfRange, "filter such rows with where=, or widen the column"),
    _rejects(
        errors.InvalidTextRepresentation,
        "invalid value for the column type: convert it in select=, for example with try_cast, or filter it with where=",
    ),
    _rejects(errors.IntegrityError),
    _rejects(errors.DataError),
    _fails(
        errors.InsufficientPrivilege, "grant it to the sink's user; ExactlyOnce.check() lists every privilege needed"
    ),
    Rule(
        errors.LockNotAvailable,
        PrepareFailed,
        Retry.TRANSACTION,
        "another transaction holds the lock: see pg_locks and pg_prepared_xacts; what lost attempts of this sink hold "
        "is rolled back before the next attempt; timeout= sets how long to wait",
    ),
    Rule(errors.DeadlockDetected, PrepareFailed, Retry.TRANSACTION),
    Rule(errors.SerializationFailure, PrepareFailed, Retry.TRANSACTION),
    _fails(
        errors.UndefinedTable, "it was dropped or renamed while the query ran: create it again, then restart the query"
    ),
    _fails(errors.UndefinedColumn, "the table changed while the query ran: restart the query, which checks it again"),
    Rule(
        AwaitsStandby,
        PrepareFailed,
        Retry.ATTEMPT,
        "bring the standby back (SELECT * FROM pg_stat_replication), or take it out of synchronous_standby_names",
    ),
    Rule(
        Blocked,
        PrepareFailed,
        Retry.ATTEMPT,
        "change or rewrite the marker table (ALTER TABLE, VACUUM FULL, CLUSTER) only while no query runs",
    ),
    _fails(
        SharedSession,
        "connect to the server itself, or to a pool in session mode (PgBouncer: pool_mode=session): the settings of a "
        "session would reach the pool's other clients, and ending a session that was left behind would end theirs",
    ),
    _fails(
        Refused,
        "set the right user, password (or passfile), sslmode and dbname in dsn= or options=, or allow them in "
        "pg_hba.conf",
    ),
    _fails(
        errors.FeatureNotSupported,
        "a prepared transaction cannot include what the table does (NOTIFY in a trigger, foreign or temporary tables): "
        "use commit='staged'",
    ),
    Rule(
        errors.QueryCanceled,
        PrepareFailed,
        Retry.TRANSACTION,
        "a statement_timeout cancelled it: raise it for this user, or set "
        "options={'options': '-c statement_timeout=0'}",
    ),
    _fails(
        errors.GeneratedAlways, "the table generates this column itself: leave it out of select=, or drop GENERATED"
    ),
    _fails(
        errors.RaiseException,
        "a trigger or function of the table refuses the row: filter such rows with where=, or change the trigger",
    ),
    _fails(errors.DiskFull, "free disk space on the server"),
    Rule(
        errors.ReadOnlySqlTransaction,
        PrepareFailed,
        Retry.ATTEMPT,  # during a failover the new primary is still a standby for a moment
        "connect to the primary; with several hosts, set target_session_attrs=read-write in dsn= or options=",
    ),
    Rule(errors.CannotConnectNow, PrepareFailed, Retry.CONNECTION, _UNREACHABLE),
    Rule(errors.TooManyConnections, PrepareFailed, Retry.CONNECTION, "raise max_connections, or use fewer tasks"),
    Rule(errors.AdminShutdown, PrepareFailed, Retry.CONNECTION, _UNREACHABLE),
    Rule(errors.CrashShutdown, PrepareFailed, Retry.CONNECTION, _UNREACHABLE),
    Rule(errors.IdleSessionTimeout, PrepareFailed, Retry.CONNECTION, _UNREACHABLE),
)
_LOST: Final = Rule(psycopg.OperationalError, PrepareFailed, Retry.CONNECTION, _UNREACHABLE)
_OTHER: Final = Rule(psycopg.Error, PrepareFailed, Retry.ATTEMPT)


def rule_of(error: psycopg.Error) -> Rule:
    """Return the rule for an error."""
    found = next((rule for rule in RULES if isinstance(error, rule.error)), None)
    return found or (_LOST if is_disconnected(error) else _OTHER)


def is_disconnected(error: BaseException) -> bool:
    """Return whether the connection is lost, so that the outcome of its last statement is unknown."""
    if not isinstance(error, psycopg.OperationalError) or isinstance(error, (Refused, AwaitsStandby, Blocked)):
        return False
    # libpq's own errors have no SQLSTATE; 08 is a lost connection, 57P a server that ends its sessions
    return error.sqlstate is None or error.sqlstate.startswith(("08", "57P"))


def is_passing(error: BaseException) -> bool:
    """Return whether waiting may help: the server is starting, stopping, unreachable or has no free connection."""
    return isinstance(error, psycopg.Error) and rule_of(error).retry is Retry.CONNECTION


def is_contended(error: BaseException) -> bool:
    """Return whether the same statements may succeed in a new transaction, for example after a deadlock."""
    return isinstance(error, psycopg.Error) and rule_of(error).retry is Retry.TRANSACTION


def refusal(error: psycopg.OperationalError) -> psycopg.OperationalError:
    """Return `Refused` for a failed connection attempt, or ``error`` itself if waiting may help."""
    text = str(error)
    if "FATAL:" not in text or any(known in text for known in _PASSING_REFUSALS):
        return error
    return Refused(text)


@contextmanager
def translated(doing: str) -> Iterator[None]:
    """Turn errors of psycopg and pyarrow into `PrepareFailed`, or `RowsRejected` if no retry can help."""
    try:
        yield
    except psycopg.Error as error:
        raise failure(error, doing) from error
    except pa.ArrowInvalid as error:
        message = f"{doing}: a value does not fit its column"
        raise RowsRejected(message, hint="convert the column in select=", values=str(error)) from error


def failure(error: psycopg.Error, doing: str) -> PrepareFailed:
    """Return epochsink's error for ``error``, with the server's message and the hint."""
    rule = rule_of(error)
    diagnosis = error.diag
    return rule.raises(
        f"{doing}: {describe(error)}",
        hint=rule.hint,
        values=_values(error),
        may_pass=rule.retry is not Retry.NEVER,
        sqlstate=error.sqlstate,
        constraint=diagnosis.constraint_name,
        column=diagnosis.column_name,
    )


def describe(error: psycopg.Error) -> str:
    """Return the server's message with its detail, constraint and place, without the statement and row values."""
    diagnosis = error.diag
    said = [diagnosis.message_primary or str(error).strip() or type(error).__name__]
    if isinstance(error, errors.RaiseException):
        # the message is the author's, and may quote the row
        said = ["a trigger or function of the table raised an exception"]
    elif isinstance(error, errors.DataError):
        # The message quotes the value: invalid input syntax for type integer: "12a"
        said = [re.sub(r'".*"', "(a value)", said[0], flags=re.DOTALL)]
    if diagnosis.message_detail and not isinstance(error, _QUOTES_ROWS):
        said.append(diagnosis.message_detail)
    if diagnosis.constraint_name:
        said.append(f"constraint {diagnosis.constraint_name!r} of table {diagnosis.table_name!r}")
    if place := _place(diagnosis.context or ""):
        said.append(place)
    return "; ".join(said) + (f" [{error.sqlstate}]" if error.sqlstate else "")


_QUOTES_ROWS: Final = (errors.DataError, errors.IntegrityError, errors.RaiseException)


def _place(context: str) -> str:
    """Return the table, line and column, or the function, that refused a row."""
    found = re.match(r"COPY [^:]*|PL/\w+ function .*", context)
    return found[0] if found else ""


def _values(error: psycopg.Error) -> str:
    """Return the parts of the server's message that quote the refused row."""
    if not isinstance(error, _QUOTES_ROWS):
        return ""
    told = (error.diag.message_primary, error.diag.message_detail, (error.diag.context or "").partition("\n")[0])
    return "; ".join(text for text in told if text)
