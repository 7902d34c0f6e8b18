"""What PostgreSQL's errors mean: which pass, which reject rows for good, and what to do about the rest."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import psycopg
import pyarrow as pa
from psycopg import errors

from epochsink.errors import PrepareFailed, RowsRejected

if TYPE_CHECKING:
    from collections.abc import Iterator

_PASSING: Final = (
    errors.CannotConnectNow,
    errors.TooManyConnections,
    errors.AdminShutdown,
    errors.CrashShutdown,
    errors.IdleSessionTimeout,
)
_REJECTING: Final = (errors.IntegrityError, errors.DataError)

# libpq gives no SQLSTATE for what the server says while a session is being opened, only this text.
_PASSING_REFUSALS: Final = ("the database system is", "too many", "connection slots")


class Refused(psycopg.OperationalError):
    """The server answered and did not let us in: wrong password, no such database, pg_hba.conf."""


_WAYS_OUT: Final[dict[type[psycopg.Error], str]] = {
    errors.NotNullViolation: "filter such rows with where=, fill them with coalesce() in select=, or drop NOT NULL",
    errors.CheckViolation: "filter such rows with where=, or change the constraint",
    errors.UniqueViolation: "rows that replace others need key=; else filter the duplicates before the sink",
    errors.ForeignKeyViolation: "load the referenced table first, or make the constraint NOT VALID or drop it",
    errors.CharacterNotInRepertoire: "PostgreSQL's text cannot hold NUL (0x00): remove it in select=, for example "
    "translate(column, '\\u0000', ''), or store the column as bytea",
    errors.UntranslatableCharacter: "this character cannot be stored there (\\u0000 in jsonb, or a database that is "
    "not UTF8): remove it in select=",
    errors.StringDataRightTruncation: "cut it in select= with left(column, n), or widen the column",
    errors.NumericValueOutOfRange: "filter such rows with where=, or widen the column",
    errors.InvalidTextRepresentation: "the text is no value of the column's type: convert it in select=, for example "
    "with try_cast, or filter it with where=",
    errors.InsufficientPrivilege: "grant it to the sink's user; ExactlyOnce.check() lists every privilege needed",
    errors.LockNotAvailable: "another transaction holds the lock: see pg_locks and pg_prepared_xacts; what lost "
    "attempts of this sink hold is rolled back before the next attempt; lock_timeout= sets how long to wait",
    errors.UndefinedTable: "it was dropped or renamed while the query ran: create it again, then restart the query",
    errors.UndefinedColumn: "the table has changed while the query ran: restart the query, which checks it anew",
    Refused: "give the right user, password= (or passfile=), sslmode= and database, or allow them in pg_hba.conf",
    errors.FeatureNotSupported: "what the table does (NOTIFY in a trigger, foreign or temporary tables) does not go "
    "into a prepared transaction: use commit='staged'",
    errors.QueryCanceled: "a statement_timeout cancelled it: raise it for this user, or give "
    "options='-c statement_timeout=0'",
    errors.DiskFull: "free disk space on the server",
    errors.ReadOnlySqlTransaction: "connect to the primary; with several hosts, target_session_attrs='read-write'",
}


def is_disconnected(error: BaseException) -> bool:
    """Return whether ``error`` says that the connection is gone: what was under way may or may not have happened."""
    if not isinstance(error, psycopg.OperationalError) or isinstance(error, Refused):
        return False
    return error.sqlstate is None or error.sqlstate.startswith(("08", "57P"))


def is_passing(error: BaseException) -> bool:
    """Return whether waiting may help: a server that starts, stops, is out of reach or has no free partition."""
    return isinstance(error, _PASSING) or is_disconnected(error)


def refusal(error: psycopg.OperationalError) -> psycopg.OperationalError:
    """Return what a failed attempt to connect means: `Refused`, or ``error`` itself if waiting may help."""
    text = str(error)
    if "FATAL:" not in text or any(known in text for known in _PASSING_REFUSALS):
        return error
    return Refused(text)


@contextmanager
def translated(doing: str) -> Iterator[None]:
    """Turn what psycopg or pyarrow raise into `PrepareFailed`, or `RowsRejected` where no retry can help."""
    try:
        yield
    except psycopg.Error as error:
        raise failure(error, doing) from error
    except pa.ArrowInvalid as error:
        raise RowsRejected(f"{doing}: {error}", hint="convert the column in select=") from error


def failure(error: psycopg.Error, doing: str) -> PrepareFailed:
    """Return the error of ours that stands for ``error``, with what the server says and the hint."""
    kind = RowsRejected if isinstance(error, _REJECTING) else PrepareFailed
    known = next((text for cls, text in _WAYS_OUT.items() if isinstance(error, cls)), "")
    reachable = "see that the server runs and is reachable; Spark runs the epoch again when the query restarts"
    diagnosis = error.diag
    return kind(
        f"{doing}: {describe(error)}",
        hint=known or (reachable if is_disconnected(error) else ""),
        sqlstate=error.sqlstate,
        constraint=diagnosis.constraint_name,
        column=diagnosis.column_name,
    )


def describe(error: psycopg.Error) -> str:
    """Return the server's message with its detail, constraint and place; never the statement."""
    diagnosis = error.diag
    said = [diagnosis.message_primary or str(error).strip() or type(error).__name__]
    if diagnosis.message_detail:
        said.append(diagnosis.message_detail)
    if diagnosis.constraint_name:
        said.append(f"constraint {diagnosis.constraint_name!r} of table {diagnosis.table_name!r}")
    if diagnosis.context and diagnosis.context.startswith("COPY "):
        said.append(diagnosis.context.splitlines()[0])
    return "; ".join(said) + (f" [{error.sqlstate}]" if error.sqlstate else "")
