"""A loopback proxy before one service that lets one request of a driver's life meet one fault, and passes all others.

What a request is, a `Protocol` knows. A request has a label, which says what it does without names that differ from
run to run; a fault is aimed at the n-th request of a label.
"""

from __future__ import annotations

import contextlib
import enum
import socket
import threading
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, Self

from epochsink_devkit.services.ports import LOOPBACK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from request_faults.refusals import Refusal

SECONDS: Final = 30.0


class Fate(enum.Enum):
    """What becomes of a request and of the driver that sent it."""

    DIES_BEFORE = "the driver dies before it is sent"
    DIES_AFTER = "the driver dies when the server has answered"
    REFUSED = "the connection breaks, and the server never gets it"
    REPLY_LOST = "the server carries it out, and the connection breaks before the reply"
    HELD = "the driver dies, and the server gets it after the next driver has taken over"
    SURVIVES = "the driver dies after it, and its connections outlive the next driver"
    PAUSED = "the driver stops before it, and goes on when the next one has done its work"
    TWICE = "the server gets it twice"
    BUSY = "the server answers that it cannot now, and does nothing"
    FORBIDDEN = "the server answers that the client may not, and does nothing"
    FORGETS = "the driver's machine loses power before it is sent, and the target what is prepared"


@dataclass
class Request:
    """A request on its way: its bytes, and its label if a fault may strike it.

    Some get no reply (``answered``), some change nothing at the server (``reads``). ``refuse`` makes what the server
    answers if it does not carry the request out; without it no such answer is played.
    """

    data: bytes
    label: str | None = None
    answered: bool = True
    reads: bool = False
    refuse: Callable[..., Refusal] | None = None
    strike: Strike | None = None
    refusal: Refusal | None = None

    def fates(self, of_server: Sequence[Fate]) -> tuple[Fate, ...]:
        """Return those of a server's fates that the request can meet."""
        return tuple(
            fate
            for fate in of_server
            if (fate in _READS or not self.reads) and (fate not in _REFUSALS or self.refuse is not None)
        )


@dataclass
class Strike:
    """One fault: at which request, what becomes of it, and what the driver or others do then."""

    label: str
    nth: int
    fate: Fate | None
    deed: Callable[[], None] | None = None
    """What somebody else does just before the request."""
    kill: Callable[[], None] = lambda: None
    pause: Callable[[], None] = lambda: None
    resume: Callable[[], None] = lambda: None
    struck: threading.Event = field(default_factory=threading.Event)
    release: threading.Event = field(default_factory=threading.Event)
    delivered: threading.Event = field(default_factory=threading.Event)
    failure: Exception | None = None


_REFUSALS: Final = (Fate.BUSY, Fate.FORBIDDEN)
_READS: Final = (Fate.DIES_BEFORE, Fate.REFUSED, Fate.PAUSED, Fate.FORBIDDEN)
"""The fates of a request that changes nothing: there the others come to the same as one of these."""


class Seen(NamedTuple):
    """A request of a life: its label, its number among those of the label, and what can become of it."""

    label: str
    nth: int
    reads: bool
    fates: tuple[Fate, ...]


class Framing(Protocol):
    """How one connection's bytes are cut into requests and replies. One object for each connection."""

    @property
    def fates(self) -> Sequence[Fate]:
        """What can become of a request: of those to some servers, no client and no network makes two."""

    def requests(self, client: socket.socket) -> Iterator[Request]:
        """Yield what the client sends, cut where a request ends."""

    def replies(self, server: socket.socket, waiting: deque[Request]) -> Iterator[tuple[bytes, Request | None, bool]]:
        """Yield a piece of a reply, the request that it answers, and whether the reply ends with it.

        The request leaves ``waiting`` when its reply has ended.
        """


class Wire:
    """Stands before one server. As a context manager it ends its connections and threads."""

    def __init__(self, upstream: int, framing: Callable[[], Framing], port: int = 0) -> None:
        self._server = socket.create_server((LOOPBACK, port))
        self.port: int = self._server.getsockname()[1]
        self.upstream = upstream
        self._framing = framing
        self._lock = threading.Lock()
        self._seen: Counter[str] = Counter()
        self._strikes: list[Strike] = []
        self.log: list[Seen] = []
        """The requests since `arm`."""
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._keeps = False

    def __enter__(self) -> Self:
        self._run(self._accept)
        return self

    def __exit__(self, *_error: object) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.let_go()

    def arm(self, *strikes: Strike) -> None:
        """Count requests anew, and strike these."""
        with self._lock:
            self._seen.clear()
            self.log.clear()
            self._strikes = list(strikes)

    def let_go(self) -> None:
        """End every connection that is left, the server's side of dead drivers' too."""
        with self._lock:
            left, self._sockets, self._strikes, self._keeps = self._sockets, set(), [], False
        _break(*left)
        for thread in self._threads[1:] if self._server.fileno() >= 0 else self._threads:
            thread.join(SECONDS)
            assert not thread.is_alive(), "a thread of the proxy does not end"
        del self._threads[1:]

    # ---- threads

    def _run(self, body: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=body, args=arguments, name="wire", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                server = self._connect()
            except OSError:
                client.close()
                continue
            framing, waiting = self._framing(), deque[Request]()
            with self._lock:
                self._sockets |= {client, server}
            self._run(self._pass_requests, client, server, framing, waiting)
            self._run(self._pass_replies, client, server, framing, waiting)

    def _connect(self) -> socket.socket:
        server = socket.create_connection((LOOPBACK, self.upstream), SECONDS)
        server.settimeout(None)
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return server

    def _pass_requests(
        self, client: socket.socket, server: socket.socket, framing: Framing, waiting: deque[Request]
    ) -> None:
        with contextlib.suppress(OSError):
            for request in framing.requests(client):
                strike = self._match(request, framing)
                if strike is not None and not self._meets(strike, request, server, waiting):
                    break
                _send(request, server, waiting)
        self._end(client, server)

    def _meets(self, strike: Strike, request: Request, server: socket.socket, waiting: deque[Request]) -> bool:
        """Let the request meet its fate as far as it lies before the server; return whether it still goes there."""
        if strike.deed is not None:
            try:
                strike.deed()
            except Exception as failure:  # noqa: BLE001 - the plan raises it
                strike.failure = failure
        match strike.fate:
            case None:
                strike.struck.set()
            case Fate.DIES_BEFORE | Fate.FORGETS | Fate.REFUSED | Fate.HELD:
                if strike.fate is not Fate.REFUSED:
                    strike.kill()
                strike.struck.set()
                if strike.fate is Fate.HELD:
                    _deliver(strike, request, server, waiting)
                return False
            case Fate.BUSY | Fate.FORBIDDEN:
                assert request.refuse is not None, request.label
                request.strike, request.refusal = strike, request.refuse(forbidden=strike.fate is Fate.FORBIDDEN)
            case Fate.PAUSED:
                strike.pause()
                strike.struck.set()
                strike.release.wait(SECONDS)
                strike.resume()
            case _ if request.answered:
                request.strike = strike
            case _:
                self._strike_after(strike)
                return strike.fate is Fate.TWICE
        return True

    def _pass_replies(
        self, client: socket.socket, server: socket.socket, framing: Framing, waiting: deque[Request]
    ) -> None:
        with contextlib.suppress(OSError):
            for piece, request, ends in framing.replies(server, waiting):
                strike = request.strike if request is not None else None
                refusal = request.refusal if request is not None else None
                told = refusal is not None and refusal.reply is None
                if strike is None or strike.fate is Fate.TWICE or told:
                    client.sendall(piece)
                if strike is not None and request is not None and ends:
                    if strike.fate is Fate.TWICE:
                        self._send_again(request)
                    elif refusal is not None and refusal.reply is not None:
                        client.sendall(refusal.reply)
                    self._strike_after(strike)
                    if strike.fate is not Fate.TWICE and (refusal is None or refusal.ends):
                        break
        # whoever waits for the reply of a request that was held: the server has ended its connection
        for request in waiting.copy():
            if request.strike is not None:
                request.strike.delivered.set()
        self._end(client, server)

    def _strike_after(self, strike: Strike) -> None:
        if strike.fate is Fate.HELD:
            strike.delivered.set()
            return
        if strike.fate is Fate.SURVIVES:
            self._keeps = True
        if strike.fate in (Fate.DIES_AFTER, Fate.SURVIVES):
            strike.kill()
        strike.struck.set()

    def _send_again(self, request: Request) -> None:
        """Send a request once more, in a connection of its own, and wait for its reply."""
        with contextlib.suppress(OSError), self._connect() as server:
            server.settimeout(SECONDS)
            again = Request(request.data)
            waiting = deque([again])
            server.sendall(request.data)
            for _, _, ends in self._framing().replies(server, waiting):
                if ends:
                    return

    def _match(self, request: Request, framing: Framing) -> Strike | None:
        label = request.label
        if label is None:
            return None
        with self._lock:
            nth = self._seen[label]
            self._seen[label] += 1
            self.log.append(Seen(label, nth, request.reads, request.fates(framing.fates)))
            strike = next((one for one in self._strikes if (one.label, one.nth) == (label, nth)), None)
            if strike is not None:
                self._strikes.remove(strike)
            return strike

    def _end(self, client: socket.socket, server: socket.socket) -> None:
        _break(client)
        with self._lock:
            self._sockets.discard(client)
            if self._keeps:
                return
            self._sockets.discard(server)
        _break(server)


def _deliver(strike: Strike, request: Request, server: socket.socket, waiting: deque[Request]) -> None:
    """Send what was held when it is let go, to whatever the server has made of the connection meanwhile."""
    if strike.release.wait(SECONDS):
        with contextlib.suppress(OSError):
            request.strike = strike
            _send(request, server, waiting)
            if request.answered:
                strike.delivered.wait(SECONDS)
    strike.delivered.set()


def _send(request: Request, server: socket.socket, waiting: deque[Request]) -> None:
    if request.answered:
        waiting.append(request)
    server.sendall(request.data if request.refusal is None else request.refusal.data)


def _break(*sockets: socket.socket) -> None:
    for one in sockets:
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        one.close()


class Stream:
    """Reads whole pieces from a socket."""

    def __init__(self, source: socket.socket) -> None:
        self._source = source
        self._buffer = bytearray()

    def exactly(self, size: int) -> bytes | None:
        """Return so many bytes; None if the stream ends before."""
        while len(self._buffer) < size:
            if not self._more():
                return None
        return self._take(size)

    def until(self, mark: bytes) -> bytes | None:
        """Return all bytes up to a mark, with it; None if the stream ends before."""
        while (at := self._buffer.find(mark)) < 0:
            if not self._more():
                return None
        return self._take(at + len(mark))

    def _more(self) -> bool:
        piece = self._source.recv(1 << 16)
        self._buffer += piece
        return bool(piece)

    def _take(self, size: int) -> bytes:
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data
