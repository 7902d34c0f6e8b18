"""Check the connection options of a sink, mask their secrets, and open sessions."""

from __future__ import annotations

import difflib
import math
import os
import re
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

import psycopg
from psycopg import conninfo, pq, sql

from epochsink.credentials import ENCODE, is_loopback, masked
from epochsink.errors import ConfigurationError
from epochsink.postgres.config import PostgresConfig
from epochsink.postgres.errors import SharedSession, is_passing, refusal
from epochsink.retry import retrying

# A peer that vanished is noticed within half a minute, whatever the system's defaults are.
DEFAULTS: Final = {
    "connect_timeout": "10",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
}
_ADDRESS: Final = ("host", "hostaddr", "port", "dbname", "user", "service", "options")
_ROUNDS: Final = 5
PINNED: Final = {
    # a point in time in a column without time zone is stored as UTC
    "TimeZone": "UTC",
    "timezone_abbreviations": "Default",
    # how the server reads text that the merge casts (ranges, intervals, arrays, xml), and writes what letters keep
    "DateStyle": "ISO, MDY",
    "IntervalStyle": "postgres",
    "extra_float_digits": "1",
    "bytea_output": "hex",
    "array_nulls": "on",
    "xmloption": "content",
    # how it reads the SQL of ours and of accumulate=, and names types and operators in its catalog
    "standard_conforming_strings": "on",
    "transform_null_equals": "off",
    "quote_all_identifiers": "off",
    # a statement that stands alone is a transaction of its own, for which `begin` says nothing
    "default_transaction_read_only": "off",
    "default_transaction_isolation": "read committed",
    # a row that is refused must not cost the session
    "exit_on_error": "off",
}
"""Settings that change a value or the meaning of a statement. A role, a database or options= may have any."""
_SET: Final = ("search_path", "lock_timeout", "synchronous_commit", *PINNED)
"""Settings that `Server.connect` changes for a whole session. All others are set for one transaction."""
_PIN: Final = "; ".join(f"SET {name} = '{value}'" for name, value in PINNED.items())
_SETTINGS: Final = "SELECT name, pg_catalog.current_setting(name) FROM pg_catalog.unnest(%s::pg_catalog.text[]) AS name"
_EXCLUSIVE: Final = """
SELECT pg_catalog.string_agg(
    pg_catalog.concat(a.pid, ' (', a.usename, ': ', pg_catalog.substring(a.query, '[A-Za-z]+ [A-Za-z]+'), ')'), ', '
)
FROM pg_catalog.pg_locks l JOIN pg_catalog.pg_stat_activity a ON a.pid OPERATOR(pg_catalog.=) l.pid
WHERE l.relation OPERATOR(pg_catalog.=) pg_catalog.to_regclass(%s)
  AND l.mode OPERATOR(pg_catalog.=) 'AccessExclusiveLock'
"""
"""The sessions that readers of a table wait for, with the first two words of their statements: others may be values."""
_own_sessions: Final[set[tuple[str | None, ...]]] = set()
"""Addresses of poolers known to be in session mode, so that each process checks only once."""
OURS: Final = ("application_name", "fallback_application_name", "client_encoding", "replication")


class Connection(psycopg.Connection[tuple[Any, ...]]):
    """A session whose search path holds only pg_catalog, so that no user-defined function or operator is called.

    ``search_path`` is the original one. Transactions that touch the target restore it (see `begin`) because its
    triggers may need it. ``schemas`` are the schemas on it. ``place`` identifies the database (see
    `epochsink.postgres.place`) and is None until it is read. ``backend`` is the process id of the server's session,
    ``durability`` its synchronous_commit, ``borrowed`` the settings to restore before a pooler gets the session back.
    """

    search_path: str = ""
    schemas: Sequence[str] = ()
    place: Mapping[str, Any] | None = None
    backend: int = 0
    durability: str = "on"
    borrowed: Sequence[tuple[str, str]] = ()

    def close(self) -> None:
        """Restore the session's settings and close: not every pooler resets them before the next client gets it."""
        if self.borrowed and not self.closed:
            again = sql.SQL(", ").join(
                sql.SQL("pg_catalog.set_config({}, {}, false)").format(*map(sql.Literal, setting))
                for setting in self.borrowed
            )
            with suppress(psycopg.Error), deadline(self, PING_SECONDS):
                self.rollback()
                self.execute(sql.SQL("SELECT {}").format(again))
        super().close()


@dataclass(frozen=True, slots=True, repr=False)
class Server:
    """libpq's connection parameters. It is pickled for the executors; its text form shows no secret."""

    parameters: Mapping[str, str] = field(default_factory=dict)
    timeout: float = 60.0

    @classmethod
    def of(cls, config: PostgresConfig) -> Server:
        """Merge ``dsn`` (URL or key=value) with ``options``, which take precedence. No I/O.

        Raises `ConfigurationError`. Its text never quotes the dsn, which may hold a password.
        """
        for name in config.options:
            _refuse_unknown(name)
        try:
            given = conninfo.conninfo_to_dict(config.dsn, **config.options)
        except psycopg.ProgrammingError:
            raise _unreadable() from None
        parameters = {name: str(value) for name, value in given.items() if value is not None}
        if _is_misread(config.dsn, parameters):
            raise _unreadable()
        for name in OURS:
            if name in parameters:
                raise ConfigurationError(
                    f"{name}={parameters[name]!r} cannot be set: epochsink sets it itself",
                    hint=f"leave {name} out; sessions are named epochsink:... in pg_stat_activity",
                )
        if not config.allow_insecure:
            _refuse_plaintext(parameters)
        return cls(DEFAULTS | parameters, config.timeout)

    def connect(self, application: str, retry_seconds: float = 0.0) -> Connection:
        """Open a session in autocommit mode, named ``application``, in which values and SQL mean the same as in any.

        If the server does not answer or has no free connection, retries for ``retry_seconds`` seconds. Raises
        `psycopg.OperationalError`.
        """
        again = retrying(is_passing, seconds=retry_seconds, longest_pause=2.0)
        return again(self._connect, application)

    def _connect(self, application: str) -> Connection:
        try:
            connection = Connection.connect(
                **self.parameters,  # type: ignore[arg-type] # libpq's names are checked by `of`
                application_name=application,
                client_encoding="UTF8",
                # transactions are begun by `begin`, with the level and the search path that they need
                autocommit=True,
                prepare_threshold=None,
            )
        except psycopg.OperationalError as error:
            raise refusal(error) from None
        connection.backend = _backend(connection)
        # Before anything is set: a pooler in transaction mode would pass a setting on to other clients.
        if not _is_direct(connection):
            if self.address not in _own_sessions:
                self._refuse_shared(connection)
            connection.borrowed = connection.execute(_SETTINGS, [list(_SET)]).fetchall()
        # synchronous_commit: it may be off for the role or database, and a committed epoch must survive a crash.
        original = connection.execute(
            "SELECT pg_catalog.current_setting('search_path'), pg_catalog.current_schemas(true), "
            "CASE WHEN pg_catalog.current_setting('synchronous_commit') OPERATOR(pg_catalog.=) 'remote_apply' "
            "THEN 'remote_apply' ELSE 'on' END; "
            "SET search_path = pg_catalog, pg_temp; "
            f"{_PIN}; SET lock_timeout = {math.ceil(self.timeout * 1000)}; "
            "SELECT pg_catalog.set_config('synchronous_commit', 'on', false) "
            "WHERE pg_catalog.current_setting('synchronous_commit') <> 'remote_apply'"
        )
        connection.search_path, connection.schemas, connection.durability = original.fetchone() or ("", (), "on")
        return connection

    def _refuse_shared(self, connection: Connection) -> None:
        """Raise `SharedSession` if a pooler gives one server session to several clients."""
        with Connection.connect(**self.parameters, autocommit=True, prepare_threshold=None) as other:  # type: ignore[arg-type] # as in `_connect`
            if is_lent_to_both(connection, other):
                connection.close()
                raise SharedSession(f"a pooler at {self.database} gives each transaction a different session")
        _own_sessions.add(self.address)

    def look(self, backend: int) -> str | None:
        """Return the wait event of session ``backend``: "" if none is known, None if the server does not answer."""
        return self._beside("SELECT wait_event FROM pg_catalog.pg_stat_activity WHERE pid = %s", backend)

    def cancel(self, backend: int) -> str:
        """Cancel the statement of the session ``backend``; return the server's synchronous_standby_names."""
        query = "SELECT current_setting('synchronous_standby_names') WHERE pg_catalog.pg_cancel_backend(%s)"
        return self._beside(query, backend) or ""

    def lockers(self, table: str) -> str:
        """Return the sessions that have locked a table against readers, or wait for that lock; "" if none is known."""
        return self._beside(_EXCLUSIVE, table) or ""

    def _beside(self, query: str, value: object) -> str | None:
        """Run ``query`` in a new session. Return None if nothing answers; a refusal counts as an answer, ""."""
        try:
            other = Connection.connect(**self.parameters, autocommit=True, prepare_threshold=None)  # type: ignore[arg-type] # as in `_connect`
            with closing(other), deadline(other, PING_SECONDS):
                # A role set by options= may not see the other session; the login user does.
                row = other.execute("SET ROLE NONE").execute(query, [value]).fetchone()
        except psycopg.OperationalError as error:
            return "" if "FATAL:" in str(error) else None
        return str(row[0] or "") if row else ""

    @property
    def address(self) -> tuple[str | None, ...]:
        """Server, database, user and initial settings as configured. Sinks with equal addresses share a transaction.

        The user counts because only the role that prepared a transaction may end it. The initial settings (search_path,
        role) count because triggers, defaults and policies may read them.
        """
        return tuple(self.parameters.get(name) for name in _ADDRESS)

    @property
    def database(self) -> str:
        """The database, host and port, for messages."""
        host = self.parameters.get("host") or self.parameters.get("hostaddr") or "the local socket"
        port = self.parameters.get("port", "5432")
        return f"database {self.parameters.get('dbname', '(default)')!r} at {host}:{port}"

    def __repr__(self) -> str:
        shown = {name: value for name, value in self.parameters.items() if DEFAULTS.get(name) != value}
        return " ".join(f"{name}={value}" for name, value in masked(shown, secret_options()).items())


def _is_direct(connection: Connection) -> bool:
    # A pooler tells its clients a made-up process id.
    return connection.info.backend_pid == connection.backend


def is_lent_to_both(one: Connection, other: Connection) -> bool:
    """Return whether a pooler gives the session of one open connection to another.

    In session mode each connection keeps its own session. In transaction mode the first one's session is free between
    statements: the other connection gets it, or the first one gets a different session for its next statement.
    """
    for _ in range(_ROUNDS):
        first = _backend(one)
        with other.transaction():
            # In this order: if the pool has one session and `other` holds it, asking `one` would wait forever.
            if _backend(other) == first or _backend(one) != first:
                return True
    return False


def _backend(connection: Connection) -> int:
    row = connection.execute("SELECT pg_catalog.pg_backend_pid()").fetchone()
    return int(row[0]) if row else 0


def _is_misread(dsn: str, parameters: Mapping[str, str]) -> bool:
    """Return whether a part of a password in a URL may have become the host, the port or the database.

    libpq ends the credentials at the first "@", and takes for none what comes after a "/".
    """
    _, is_url, rest = dsn.partition("://")
    host = rest.partition("/")[0].partition("@")[2].partition("?")[0]
    path = rest.partition("/")[2].partition("?")[0]
    return bool(is_url and ("@" in host or "@" in path)) or not re.fullmatch(r"[\d,\s]*", parameters.get("port", ""))


def _unreadable() -> ConfigurationError:
    return ConfigurationError(
        "invalid dsn= (not shown, it may hold a password): it is neither a URL nor names with values, or the port is "
        "not a number",
        hint=f"write postgresql://user@host:5432/database or 'host=... dbname=...'; {ENCODE}",
    )


def secret_options() -> frozenset[str]:
    """Return the libpq options that hold secrets, as libpq itself marks them."""
    marked = {option.keyword.decode() for option in pq.Conninfo.get_defaults() if option.dispchar == b"*"}
    return frozenset(marked | {"scram_client_key", "scram_server_key"})


def _refuse_unknown(name: str) -> None:
    known = [option.keyword.decode() for option in pq.Conninfo.get_defaults()]
    if name in known:
        return
    near = difflib.get_close_matches(name, known, 1)
    raise ConfigurationError(
        f"options={{{name!r}: ...}}: libpq has no connection parameter of this name",
        hint=f"did you mean {near[0]!r}?" if near else "see 'Parameter Key Words' in PostgreSQL's libpq manual",
    )


def _refuse_plaintext(parameters: Mapping[str, str]) -> None:
    if "sslmode" in parameters:
        return
    hosts = parameters.get("hostaddr") or parameters.get("host") or os.environ.get("PGHOST", "")
    remote = [host for host in hosts.split(",") if host and not host.startswith(("/", "@")) and not is_loopback(host)]
    if remote:
        raise ConfigurationError(
            f"host {remote[0]!r} is not this machine and no sslmode is given: libpq would fall back to plaintext "
            "and send credentials and rows unencrypted",
            hint="set options={'sslmode': 'verify-full', 'sslrootcert': ...}; or allow_insecure=True if the network is "
            "trusted",
        )


PING_SECONDS: Final = 5.0
"""Limit for a statement that a healthy server answers at once."""


@contextmanager
def deadline(connection: psycopg.Connection[Any], seconds: float) -> Iterator[None]:
    """Cut the connection if the body takes longer than ``seconds``: a frozen server keeps its side open forever.

    The body then raises `psycopg.OperationalError`, as for any lost connection.
    """
    with socket.socket(fileno=os.dup(connection.fileno())) as line:
        timer = threading.Timer(seconds, cut, [line])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()


def cut(line: socket.socket) -> None:
    """Cut a connection at once, like a network failure: every wait on it ends with an error."""
    with suppress(OSError):  # the server may have closed it at the same moment
        line.shutdown(socket.SHUT_RDWR)
