"""A limit in time for what is asked of a server that may be frozen."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psycopg

PING_SECONDS: Final = 5.0
"""For an answer that takes a healthy server no time."""


@contextmanager
def deadline(connection: psycopg.Connection[Any], seconds: float) -> Iterator[None]:
    """Cut the connection if the body takes longer: a server that is frozen keeps its side open for ever.

    The body then raises `psycopg.OperationalError`, as for any connection that is lost.
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
    """End a connection at once, as if the network had: whoever waits for it gets an error."""
    with suppress(OSError):  # the server may have closed it at the same moment
        line.shutdown(socket.SHUT_RDWR)
