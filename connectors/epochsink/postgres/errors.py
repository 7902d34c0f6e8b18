"""Map PostgreSQL's errors, in one table, to epochsink's error, whether to retry, and a hint."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

import psycopg
import pyarrow as pa
from psycopg import errors

from epochsink.errors import PrepareFailed, RowsRejected

_UNREACHABLE: Final = "check that the server runs, and that every executor and this machine can reach it"
"""Of checks too, in which no epoch has begun: what becomes of an epoch is in the notes of its error."""
_PASSING_REFUSALS: Final = ("the database system is", "too many", "connection slots")
"""Parts of messages, because libpq reports a refused connection without an SQLSTATE."""


class ConnectionRefused(psycopg.OperationalError):
    """The server answered and refused the connection: wrong password, unknown database, pg_hba.conf."""


class SharedSession(ConnectionRefused):
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
        "if the byte is 0x00 (NUL), remove it in select=, for example translate(column, '\\u0000', ''); any other byte "
        "is text that is not UTF-8: correct it with make_valid_utf8(column); or store the column as bytea",
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
    _rejects(errors.IntegrityError, "filter such rows with where=, or change the constraint"),
    _rejects(errors.DataError, "convert the column in select=, filter such rows with where=, or change the column"),
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
    Rule(
        errors.DeadlockDetected,
        PrepareFailed,
        Retry.TRANSACTION,
        "another transaction writes the same rows in another order: the server's log names its statements",
    ),
    Rule(
        errors.SerializationFailure,
        PrepareFailed,
        Retry.TRANSACTION,
        "another transaction has changed the same rows at the same time; Spark runs the epoch again",
    ),
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
        ConnectionRefused,
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
    _fails(errors.DuplicateColumn, "two columns have one name: select one of them under another name with AS"),
    _fails(
        errors.TooManyColumns,
        "leave columns out with select=, or combine some: a struct or map becomes one column of JSON; one that was "
        "dropped counts too",
    ),
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
_OTHER: Final = Rule(
    psycopg.Error,
    PrepareFailed,
    Retry.ATTEMPT,
    "the server's log says more; appendix A of PostgreSQL's manual explains the code in brackets",
)


def rule_of(error: psycopg.Error) -> Rule:
    """Return the rule for an error."""
    matching = next((rule for rule in RULES if isinstance(error, rule.error)), None)
    return matching or (_LOST if is_disconnected(error) else _OTHER)


_PASSING_CLASSES: Final = ("08", "40", "53", "57", "58", "XX")
"""Connection, rollback, resources, shutdown, and the server's own faults: none of them is about a row."""


def may_be_refusal(error: BaseException) -> bool:
    """Return whether a row may be the reason: unless waiting may help, or the server or the session is at fault.

    Any code may be a refusal, because triggers, policies, casts and indexes raise all of them. Whether it is one is
    found out by trying the same statement without rows.
    """
    if isinstance(error, (RowsRejected, pa.ArrowInvalid, UnfitValue)):
        return True
    if not isinstance(error, psycopg.Error) or error.sqlstate is None:
        return False
    rule = rule_of(error)
    return not error.sqlstate.startswith(_PASSING_CLASSES) and (rule is _OTHER or rule.retry is Retry.NEVER)


def is_known_refusal(error: BaseException) -> bool:
    """Return whether the code alone says that a row is refused."""
    return not isinstance(error, psycopg.Error) or rule_of(error).raises is RowsRejected


_MISSING: Final = (
    errors.UndefinedTable,
    errors.UndefinedColumn,
    errors.UndefinedFunction,
    errors.UndefinedObject,
    errors.InvalidSchemaName,
    errors.InsufficientPrivilege,
)


def is_missing(error: BaseException) -> bool:
    """Return whether what a trigger, function or default uses does not exist, or may not be used.

    That may follow from a row, as in a trigger that makes a table's name of a value. If all rows meet it, it does not.
    """
    if not isinstance(error, _MISSING) or is_author(error):
        return False
    # A policy that refuses a row has the code of a privilege that is lacking; no other word tells them apart in every
    # language.
    return error.diag.source_function != "ExecWithCheckOptions"


def is_disconnected(error: BaseException) -> bool:
    """Return whether the connection is lost, so that the outcome of its last statement is unknown."""
    if not isinstance(error, psycopg.OperationalError) or isinstance(
        error, (ConnectionRefused, AwaitsStandby, Blocked)
    ):
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
    """Return `ConnectionRefused` for a failed connection attempt, or ``error`` itself if waiting may help."""
    text = str(error)
    if "FATAL:" not in text or any(known in text for known in _PASSING_REFUSALS):
        return error
    return ConnectionRefused(text)


@contextmanager
def translated(doing: str) -> Iterator[None]:
    """Turn errors of psycopg and pyarrow into `PrepareFailed`, or `RowsRejected` if no retry can help."""
    try:
        yield
    except psycopg.Error as error:
        raise failure(error, doing) from error
    except (pa.ArrowInvalid, UnfitValue) as error:
        raise RowsRejected(
            f"{doing}: {describe_unfit(error)}", hint="convert the column in select=", values=str(error)
        ) from error


class UnfitValue(ValueError):
    """A value that a column's encoding cannot hold."""

    def __init__(self, column: str, reason: str) -> None:
        super().__init__(reason)
        self.column = column


def describe_unfit(error: BaseException) -> str:
    """Return what is wrong with a value that cannot be encoded, without the value."""
    return f"a value does not fit column {error.column!r}" if isinstance(error, UnfitValue) else "a value does not fit"


def failure(error: psycopg.Error, doing: str, *, is_refusal: bool = False) -> PrepareFailed:
    """Return epochsink's error for ``error``, with the server's message and the hint.

    ``is_refusal``: it was found out that a row is the reason, whatever the code says.
    """
    rule = rule_of(error)
    if is_refusal and rule.raises is not RowsRejected:
        rule = Rule(psycopg.Error, RowsRejected, Retry.NEVER, rule.hint if is_author(error) else _REFUSED)
    diagnosis = error.diag
    return rule.raises(
        f"{doing}: {describe(error, is_refusal=is_refusal)}",
        hint=rule.hint,
        values=_values(error, is_refusal=is_refusal),
        may_pass=rule.retry is not Retry.NEVER,
        sqlstate=error.sqlstate,
        constraint=None if is_author(error) else diagnosis.constraint_name,
        column=None if is_author(error) else diagnosis.column_name,
    )


_REFUSED: Final = (
    "filter such rows with where=, or change what refuses them: a trigger, policy, index or type of the table"
)


def is_author(error: psycopg.Error) -> bool:
    """Return whether the message is that of the author of a trigger or function, who may quote the row.

    By the place in the server's source, as the context is in the language of ``lc_messages``.
    """
    if (error.sqlstate or "").startswith("P0") or error.diag.source_function in _RAISES:
        return True
    return bool(
        _OTHER_LANGUAGES.match(error.diag.source_file or "")
        or re.search(r"PL/(?!pgSQL)\w", _first_line(error.diag.context))
    )


_RAISES: Final = {"exec_stmt_raise", "exec_stmt_assert"}
"""What carries out RAISE and ASSERT of PL/pgSQL."""
_OTHER_LANGUAGES: Final = re.compile("pl(py|perl|tcl|v8)")


def describe(error: psycopg.Error, *, is_refusal: bool = False) -> str:
    """Return the server's message with its detail, constraint and place, without the statement and row values."""
    diagnosis = error.diag
    said = [diagnosis.message_primary or str(error).strip() or type(error).__name__]
    if is_author(error):
        said = ["a trigger or function of the table raised an exception"]
    elif isinstance(error, errors.DataError) or (is_refusal and not isinstance(error, errors.IntegrityError)):
        # The message quotes the value: invalid input syntax for type integer: "12a"
        said = [re.sub(r'".*"', "(a value)", said[0], flags=re.DOTALL)]
    if diagnosis.message_detail and not _quotes_rows(error, is_refusal=is_refusal):
        said.append(diagnosis.message_detail)
    name = diagnosis.constraint_name
    if name and f'"{name}"' not in said[0] and not is_author(error):
        said.append(f"constraint {name!r} of table {diagnosis.table_name!r}")
    if place := _place(diagnosis.context or ""):
        said.append(place)
    return "; ".join(said) + (f" [{error.sqlstate}]" if error.sqlstate else "")


def _quotes_rows(error: psycopg.Error, *, is_refusal: bool) -> bool:
    return is_refusal or is_author(error) or isinstance(error, (errors.DataError, errors.IntegrityError))


def _first_line(text: str | None) -> str:
    return (text or "").partition("\n")[0]


def _place(context: str) -> str:
    """Return the table, line and column, or the function, that refused a row."""
    match = re.match(r"COPY [^:]*|PL/\w+ function .*", context)
    return match[0] if match else ""


def _values(error: psycopg.Error, *, is_refusal: bool) -> str:
    """Return the parts of the server's message that quote the refused row."""
    if not _quotes_rows(error, is_refusal=is_refusal):
        return ""
    texts = (error.diag.message_primary, error.diag.message_detail, _first_line(error.diag.context))
    return "; ".join(text for text in texts if text)
