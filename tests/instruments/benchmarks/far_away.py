"""A store that is far away: a proxy that passes bytes on later, so that each round trip takes so much longer."""

from __future__ import annotations

import queue
import socket
import threading
import time
from contextlib import suppress
from typing import Self

_CHUNK = 1 << 16


class FarAway:
    """Stands before a port on the loopback; what the server answers arrives ``seconds`` later, in its order."""

    def __init__(self, port: int, seconds: float) -> None:
        self._target = port
        self._seconds = seconds
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                for each in (client, server):
                    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=_pass_on, args=(client, server), daemon=True).start()
                waiting: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
                threading.Thread(target=self._receive, args=(server, waiting), daemon=True).start()
                threading.Thread(target=_deliver, args=(waiting, client), daemon=True).start()

    def _receive(self, server: socket.socket, waiting: queue.SimpleQueue[tuple[float, bytes]]) -> None:
        data = b"-"
        while data:
            try:
                data = server.recv(_CHUNK)
            except OSError:
                data = b""
            waiting.put((time.monotonic() + self._seconds, data))


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(_CHUNK):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


def _deliver(waiting: queue.SimpleQueue[tuple[float, bytes]], client: socket.socket) -> None:
    with suppress(OSError), client:
        while True:
            due, data = waiting.get()
            time.sleep(max(0.0, due - time.monotonic()))
            if not data:
                return
            client.sendall(data)
