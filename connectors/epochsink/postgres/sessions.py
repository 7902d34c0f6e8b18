"""Name sessions after their sink and attempt, so that a later driver can end them, and watch long statements."""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Self

import psycopg
from psycopg import errors

from epochsink.identity import PREFIX
from epochsink.postgres.errors import AwaitsStandby, Blocked
from epochsink.postgres.server import Connection, Server, cut, deadline

_log = logging.getLogger(__name__)

DRIVER: Final = "driver"
WATCH_SECONDS: Final = 10.0
"""Pause between two checks, in seconds, that the server still answers while a statement runs."""
SILENT_TURNS: Final = 2
SYNC_REP: Final = "SyncRep"
"""The wait event of a session that waits for a synchronous standby."""
_ATTEMPT_DIGITS: Final = 16  # the whole name must fit into PostgreSQL's 63 bytes


@dataclass(frozen=True, slots=True)
class SessionName:
    """The owner of a session, as its ``application_name``. ``attempt`` is "driver" for the driver's own session."""

    key: str
    generation: int
    attempt: str = DRIVER

    def __str__(self) -> str:
        return f"{PREFIX}:{self.key}:{self.generation}:{self.attempt[:_ATTEMPT_DIGITS]}"

    def works_for(self, attempt: str) -> bool:
        """Return whether this is a session of a task of ``attempt``."""
        return self.attempt == attempt[:_ATTEMPT_DIGITS]

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return the parsed name, or None if ``text`` is not the name of an epochsink session."""
        match = re.fullmatch(PREFIX + r":([0-9a-f]{20}):(\d+):(driver|[0-9a-f]{16})", text)
        return cls(match[1], int(match[2]), match[3]) if match else None

    @staticmethod
    def pattern(key: str) -> str:
        """Return the LIKE pattern of all names of one identity."""
        return f"{PREFIX}:{key}:%"


@contextmanager
def unblocked(connection: Connection, server: Server, table: str, seconds: float) -> Iterator[None]:
    """Like `deadline`, for statements that read ``table``. Raises `Blocked` if they waited for other sessions.

    Prepared transactions lock the table of markers. A statement that rewrites it waits for them, and every reader
    waits for the statement. The comparison before the commit is such a reader: the three would wait for each other.
    """
    began = time.monotonic()
    try:
        with deadline(connection, seconds):
            yield
    except psycopg.OperationalError as failure:
        waited = time.monotonic() - began
        if not isinstance(failure, errors.LockNotAvailable) and waited < seconds:
            raise
        lockers = server.lockers(table)
        if not lockers:
            raise
        raise Blocked(
            f"waited {waited:.0f} s for table {table}, which is locked, or about to be, by session {lockers}; that may "
            "wait itself for what this query has prepared: cancel it by SELECT pg_cancel_backend(PID)"
        ) from failure


@contextmanager
def watched(connection: Connection, server: Server, limit: float | None = None) -> Iterator[None]:
    """Cut the session if the server stops answering while the body runs. A slow statement is left alone.

    The kernel of a frozen server still acknowledges packets, so TCP does not notice. The watch therefore opens a second
    session from time to time. If that gets no answer twice in a row, or after ``limit`` seconds, it cuts the
    connection. A wait for a synchronous standby has no limit in PostgreSQL: it is logged, and cancelled after the
    server's ``timeout`` seconds.

    Raises `AwaitsStandby` then: the statement took effect on this server, and perhaps on no standby.
    """
    watch = _Watch(connection, server, limit)
    watch.start()
    try:
        yield
    finally:
        watch.end()
        if watch.gave_up:
            raise AwaitsStandby(watch.gave_up)


class _Watch(threading.Thread):
    """Watches a session from a second one. ``gave_up`` says why the statement was cancelled."""

    def __init__(self, connection: Connection, server: Server, limit: float | None) -> None:
        super().__init__(daemon=True)
        # a descriptor of its own: the number of a closed connection may soon be that of another one
        self._line = socket.socket(fileno=os.dup(connection.fileno()))
        self._backend = connection.backend
        self._server = server
        self._limit = limit
        self._done = threading.Event()
        self.gave_up = ""

    def end(self) -> None:
        """Stop watching."""
        self._done.set()
        self.join()
        self._line.close()

    def run(self) -> None:
        """Check every `WATCH_SECONDS` until the statement ends or the connection is cut."""
        began = time.monotonic()
        silent, awaits_since = 0, None
        while not self._done.wait(self._pause(awaits_since)):
            event = self._server.look(self._backend)
            if event == SYNC_REP:
                # the server answers, so this is no silence; the wait has a limit of its own
                awaits_since = awaits_since or time.monotonic()
                if self._awaits_standby(awaits_since):
                    return
                continue
            awaits_since = None
            silent = silent + 1 if event is None else 0
            if silent == SILENT_TURNS or (self._limit is not None and time.monotonic() - began >= self._limit):
                cut(self._line)
                return

    def _pause(self, awaits_since: float | None) -> float:
        if awaits_since is not None:
            return min(WATCH_SECONDS, max(0.0, awaits_since + self._server.timeout - time.monotonic()))
        return WATCH_SECONDS if self._limit is None else min(WATCH_SECONDS, self._limit)

    def _awaits_standby(self, since: float) -> bool:
        """Log a wait for a standby, or cancel it after the timeout. Return whether it was cancelled."""
        waited = time.monotonic() - since
        if waited < self._server.timeout:
            _log.warning(
                "%s waits for a synchronous standby (wait event SyncRep): see synchronous_standby_names and "
                "pg_stat_replication. The wait is cancelled in %.0f s (timeout=)",
                self._server.database,
                self._server.timeout - waited,
            )
            return False
        names = self._server.cancel(self._backend)
        self.gave_up = (
            f"the server has waited for a synchronous standby for {waited:.0f} s (wait event SyncRep, "
            f"synchronous_standby_names = {names!r}): the statement took effect on this server, and perhaps on no "
            "standby"
        )
        return True
