"""A loopback proxy that knows Kafka's frames: it drops, holds or repeats a request, or loses its reply, by api key.

All other frames pass as they are. Clients come to it, for everything, because the broker has a listener that
advertises the proxy's port: see `listener`.
"""

from __future__ import annotations

import contextlib
import enum
import socket
import struct
import threading
from collections import deque
from typing import TYPE_CHECKING, Self

from epochsink_devkit.services.ports import LOOPBACK, free_port

if TYPE_CHECKING:
    from collections.abc import Callable

SECONDS = 30.0


class Api(enum.IntEnum):
    """The requests of a transaction, by the keys that Kafka's protocol gives them."""

    PRODUCE = 0
    INIT_PRODUCER_ID = 22
    ADD_PARTITIONS_TO_TXN = 24
    ADD_OFFSETS_TO_TXN = 25
    END_TXN = 26
    TXN_OFFSET_COMMIT = 28


class Fate(enum.Enum):
    """What becomes of a request that is caught."""

    DROP = "the broker never gets it, and the connection breaks"
    LOSE_REPLY = "the broker carries it out, its reply is lost, and the connection breaks"
    HOLD = "the connection breaks, and the broker gets it when it is delivered"
    STALL = "the connection stays and passes nothing more, and the broker gets it when it is delivered"
    REPEAT = "the broker gets it now, and once more when it is delivered"


class Caught:
    """A request that the proxy is to catch, or has caught: the first one of its kind."""

    def __init__(self, api: Api, fate: Fate, upstream: int) -> None:
        self.api = api
        self.fate = fate
        self._upstream = upstream
        self._frame = b""
        self._done = threading.Event()

    def keep(self, frame: bytes) -> None:
        """Remember the request."""
        self._frame = frame

    @property
    def has_struck(self) -> bool:
        """Whether a request was caught, and its fate has struck."""
        return self._done.is_set()

    @property
    def frame(self) -> bytes:
        """The request, with its length before it."""
        self.wait()
        return self._frame

    def done(self) -> None:
        """Say that its fate has struck."""
        self._done.set()

    def wait(self) -> None:
        """Wait until its fate has struck."""
        assert self._done.wait(SECONDS), f"no {self.api.name} came, or it was not answered"

    def deliver(self) -> int:
        """Send the request to the broker, as a late one comes: outside its connection. Return its error code.

        That of EndTxn: for other requests the number says nothing.
        """
        self.wait()
        with socket.create_connection((LOOPBACK, self._upstream), SECONDS) as late:
            late.sendall(self._frame)
            answer = _read_frame(late)
        assert answer is not None, "the broker refused to read the late request"
        # EndTxn's error code follows throttle_time_ms, and the header's tagged fields in versions from 3 on
        [version] = struct.unpack_from(">h", self._frame, 6)
        [code] = struct.unpack_from(">h", answer, 4 + 4 + (1 if version >= 3 else 0) + 4)
        return int(code)


def listener(port: int, proxy: int) -> dict[str, str | int | bool]:
    """Return the settings of a broker with a listener more, at ``port``, that sends clients to the proxy's port."""
    return {
        "listeners": f"PLAINTEXT://{LOOPBACK}:{{port}},CONTROLLER://{LOOPBACK}:{{controller_port}},"
        f"PROXIED://{LOOPBACK}:{port}",
        "advertised.listeners": f"PLAINTEXT://{LOOPBACK}:{{port}},PROXIED://{LOOPBACK}:{proxy}",
        "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,PROXIED:PLAINTEXT",
    }


class KafkaProxy:
    """Stands before one broker. As a context manager it ends its connections and threads."""

    def __init__(self) -> None:
        self._server = socket.create_server((LOOPBACK, 0))
        self.port: int = self._server.getsockname()[1]
        self._upstream = free_port()
        self._lock = threading.Lock()
        self._wanted: deque[Caught] = deque()
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._closing = False

    @property
    def listener(self) -> dict[str, str | int | bool]:
        """The settings of a broker whose clients come through the proxy, besides those that come directly."""
        return listener(self._upstream, self.port)

    @property
    def bootstrap_servers(self) -> str:
        """For clients that are to come through the proxy."""
        return f"{LOOPBACK}:{self.port}"

    def catch(self, api: Api, fate: Fate) -> Caught:
        """Catch the next request of a kind."""
        caught = Caught(api, fate, self._upstream)
        with self._lock:
            self._wanted.append(caught)
        return caught

    def forget(self) -> None:
        """Catch no more requests."""
        with self._lock:
            self._wanted.clear()

    def __enter__(self) -> Self:
        self._run(self._accept)
        return self

    def __exit__(self, *_error: object) -> None:
        self._closing = True
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        with self._lock:
            sockets = list(self._sockets)
        _break(*sockets)
        for thread in self._threads:
            thread.join(SECONDS)
            assert not thread.is_alive(), "a thread of the proxy does not end"

    # ---- threads

    def _run(self, body: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=body, args=arguments, name="kafka-proxy", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closing:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            try:
                broker = socket.create_connection((LOOPBACK, self._upstream), SECONDS)
            except OSError:
                client.close()
                continue
            broker.settimeout(None)
            with self._lock:
                self._sockets |= {client, broker}
            lost: dict[int, Caught] = {}
            self._run(self._pass_requests, client, broker, lost)
            self._run(self._pass_replies, client, broker, lost)

    def _pass_requests(self, client: socket.socket, broker: socket.socket, lost: dict[int, Caught]) -> None:
        with contextlib.suppress(OSError):
            while (frame := _read_frame(client)) is not None:
                api, _, correlation = struct.unpack_from(">hhi", frame, 4)
                caught = self._match(api)
                if caught is not None:
                    caught.keep(frame)
                    if caught.fate is Fate.LOSE_REPLY:
                        lost[correlation] = caught
                    else:
                        caught.done()
                    if caught.fate is Fate.STALL:
                        while client.recv(1 << 16):
                            pass
                    if caught.fate in (Fate.DROP, Fate.HOLD, Fate.STALL):
                        break
                broker.sendall(frame)
        self._end(client, broker)

    def _pass_replies(self, client: socket.socket, broker: socket.socket, lost: dict[int, Caught]) -> None:
        with contextlib.suppress(OSError):
            while (frame := _read_frame(broker)) is not None:
                [correlation] = struct.unpack_from(">i", frame, 4)
                if correlation in lost:
                    lost[correlation].done()
                    break
                client.sendall(frame)
        self._end(client, broker)

    def _match(self, api: int) -> Caught | None:
        with self._lock:
            for caught in self._wanted:
                if caught.api == api:
                    self._wanted.remove(caught)
                    return caught
        return None

    def _end(self, *ended: socket.socket) -> None:
        _break(*ended)
        with self._lock:
            self._sockets -= set(ended)


def _break(*sockets: socket.socket) -> None:
    for one in sockets:
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        one.close()


def _read_frame(source: socket.socket) -> bytes | None:
    """Return the next frame with its length before it, None at the end of the stream."""
    head = _read(source, 4)
    body = head and _read(source, *struct.unpack(">i", head))
    return head + body if head and body else None


def _read(source: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        piece = source.recv(size - len(data))
        if not piece:
            return None
        data += piece
    return bytes(data)
