"""Sessions: each is named for whom it works, so that whoever takes over can end it."""

from __future__ import annotations

import os
import re
import socket
import threading
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

import psycopg

from epochsink.identity import PREFIX
from epochsink.postgres.deadline import PING_SECONDS, cut, deadline

if TYPE_CHECKING:
    from collections.abc import Iterator

    from epochsink.postgres.server import Connection, Server

DRIVER: Final = "driver"
WATCH_SECONDS: Final = 10.0
"""How often a server is asked whether it still answers, while a statement runs."""
SILENT_TURNS: Final = 2
_ATTEMPT_DIGITS: Final = 16  # the whole name has to fit into PostgreSQL's 63 bytes


@dataclass(frozen=True, slots=True)
class SessionName:
    """An ``application_name``: whose session it is. ``attempt`` is "driver" for the driver's own."""

    key: str
    generation: int
    attempt: str = DRIVER

    def __str__(self) -> str:
        return f"{PREFIX}:{self.key}:{self.generation}:{self.attempt[:_ATTEMPT_DIGITS]}"

    def works_for(self, attempt: str) -> bool:
        """Return whether this is a task's session of ``attempt``."""
        return self.attempt == attempt[:_ATTEMPT_DIGITS]

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return the name that ``text`` is, or None if it is not one of ours."""
        found = re.fullmatch(PREFIX + r":([0-9a-f]{20}):(\d+):(driver|[0-9a-f]{16})", text)
        return cls(found[1], int(found[2]), found[3]) if found else None

    @staticmethod
    def pattern(key: str) -> str:
        """Return the LIKE pattern of all names of one identity."""
        return f"{PREFIX}:{key}:%"


class Session:
    """A connection that is opened when it is needed, and again when it has died."""

    def __init__(self, server: Server, name: str) -> None:
        self._server = server
        self._name = name
        self._connection: Connection | None = None

    def connection(self, retry_seconds: float = 0.0) -> Connection:
        """Return a live connection outside any transaction. Raises `psycopg.OperationalError`."""
        if self._connection is not None:
            try:
                with deadline(self._connection, PING_SECONDS):
                    self._connection.rollback()
                    self._connection.execute("SELECT 1")
            except psycopg.Error:
                self.close()
        if self._connection is None:
            self._connection = self._server.connect(self._name, retry_seconds)
        return self._connection

    def close(self) -> None:
        """Release the connection. The session may be used again."""
        if self._connection is not None:
            with suppress(psycopg.Error):
                self._connection.close()
            self._connection = None


@contextmanager
def watched(connection: Connection, server: Server) -> Iterator[None]:
    """Cut the connection if, while the body runs, the server stops answering; a slow statement may take its time.

    A server that is frozen acknowledges what the network brings, so without this nothing would ever time out.
    """
    done = threading.Event()
    with socket.socket(fileno=os.dup(connection.fileno())) as line:
        watch = threading.Thread(target=_watch, args=(line, server, done), daemon=True)
        watch.start()
        try:
            yield
        finally:
            done.set()
            watch.join()


def _watch(line: socket.socket, server: Server, done: threading.Event) -> None:
    silent = 0
    while not done.wait(WATCH_SECONDS):
        silent = 0 if server.answers() else silent + 1
        if silent == SILENT_TURNS:
            cut(line)
            return
