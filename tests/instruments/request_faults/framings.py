"""How the bytes to each server are cut into requests and replies, and what a request is called."""

from __future__ import annotations

import re
import struct
from functools import partial
from typing import TYPE_CHECKING, Final

from request_faults import refusals
from request_faults.wire import Fate, Request, Stream

if TYPE_CHECKING:
    import socket
    from collections import deque
    from collections.abc import Iterator

_SPECIFIC: Final = re.compile(r"""'[^']*'|"[^"]*"|\$\d+| ?-\d+\b|\b\d+\b|[0-9a-f-]{16,}|\bf[0-9a-f]{10}\b""")
_CHANGES: Final = re.compile(
    rb"pg_terminate_backend|pg_cancel_backend|set_config|advisory|FOR (UPDATE|SHARE)|DELETE FROM|INSERT INTO"
)
_READY, _COPY_IN, _LOGIN = b"Z", b"G", b"R"
_WELCOME: Final = bytes(4)


class Postgres:
    """Frontend and backend messages of PostgreSQL 3.0, without TLS. A request ends where the server has to answer.

    A COPY from the client is two requests: the statement, and the end of the data.
    """

    fates: Final = tuple(fate for fate in Fate if fate is not Fate.TWICE)

    def __init__(self) -> None:
        self._statements: dict[bytes, bytes] = {}

    def requests(self, client: socket.socket) -> Iterator[Request]:
        """Yield the start of the session, then each group of messages up to Query, Sync or CopyDone."""
        stream = Stream(client)
        head = stream.exactly(4)
        body = head and stream.exactly(struct.unpack(">i", head)[0] - 4)
        if not head or not body:
            return
        yield Request(head + body, "connect", refuse=partial(refusals.of_login, head + body))
        group, statement = b"", b""
        copying = False
        while (kind := stream.exactly(1)) and (head := stream.exactly(4)):
            body = stream.exactly(struct.unpack(">i", head)[0] - 4) or b""
            group += kind + head + body
            match kind:
                case b"P":
                    name, statement, _ = body.split(b"\0", 2)
                    self._statements[name] = statement
                    continue
                case b"B":
                    statement = self._statements.get(body.split(b"\0", 2)[1], statement)
                    continue
                case b"Q":
                    statement = body[:-1]
                    yield _statement(group, statement)
                case b"S" if copying:
                    # of the statement that began the copy: the answer to the end of the data comes after it
                    copying = False
                    yield Request(group, answered=False)
                case b"S":
                    yield _statement(group, statement)
                case b"c" | b"f":
                    copying = not self._simple
                    yield Request(group, "end of the copied rows", refuse=partial(refusals.of_copy, group))
                case b"d" | b"p" | b"H" | b"X":
                    yield Request(group, answered=False)
                case _:
                    continue
            self._simple = kind == b"Q" or (kind == b"d" and self._simple)
            group = b""

    _simple = True

    def replies(self, server: socket.socket, waiting: deque[Request]) -> Iterator[tuple[bytes, Request | None, bool]]:
        """Yield message by message; a reply ends with ReadyForQuery, or where the server expects copied rows.

        That to a login which the proxy answers itself ends at once.
        """
        stream = Stream(server)
        while (kind := stream.exactly(1)) and (head := stream.exactly(4)):
            body = stream.exactly(struct.unpack(">i", head)[0] - 4) or b""
            request = waiting[0] if waiting else None
            ends = kind in (_READY, _COPY_IN) or (kind == _LOGIN and body[:4] != _WELCOME and _is_unheard(request))
            ends = ends and bool(waiting)
            if ends:
                waiting.popleft()
            yield kind + head + body, request, ends


def _is_unheard(request: Request | None) -> bool:
    # the server asks for the password of a login whose driver is dead, or gets another answer: no further reply comes
    return request is not None and (
        request.refusal is not None or (request.strike is not None and request.strike.fate is Fate.HELD)
    )


def _statement(group: bytes, statement: bytes) -> Request:
    label = label_of(statement)
    reads = label.startswith(("SELECT", "WITH")) and not _CHANGES.search(statement)
    return Request(group, label, reads=reads, refuse=partial(refusals.of_statement, group))


def label_of(statement: bytes) -> str:
    """Return what a statement does, without names and values that differ from run to run."""
    return " ".join(_SPECIFIC.sub("?", statement.decode(errors="replace")).split())[:90]


APIS: Final = {
    0: "Produce",
    1: "Fetch",
    2: "ListOffsets",
    9: "OffsetFetch",
    10: "FindCoordinator",
    16: "ListGroups",
    19: "CreateTopics",
    22: "InitProducerId",
    23: "OffsetForLeaderEpoch",
    24: "AddPartitionsToTxn",
    25: "AddOffsetsToTxn",
    26: "EndTxn",
    28: "TxnOffsetCommit",
    32: "DescribeConfigs",
    60: "DescribeCluster",
    61: "DescribeProducers",
    65: "DescribeTransactions",
    66: "ListTransactions",
}
"""Kafka's requests that a fault may strike, by their keys.

Clients send the others by themselves, at any time: Metadata, ApiVersions, logins, GetTelemetrySubscriptions.
"""

_WRITES: Final = frozenset({"Produce", "CreateTopics", "InitProducerId", "EndTxn", "TxnOffsetCommit"}) | {
    "AddPartitionsToTxn",
    "AddOffsetsToTxn",
}


class Kafka:
    """Frames with their length before them. Replies bear the number of their request."""

    fates: Final = tuple(Fate)

    def requests(self, client: socket.socket) -> Iterator[Request]:
        """Yield frame by frame."""
        stream = Stream(client)
        while (head := stream.exactly(4)) and (body := stream.exactly(struct.unpack(">i", head)[0])):
            (key,) = struct.unpack_from(">h", body)
            label = APIS.get(key)
            refuse = partial(refusals.of_frame, head + body) if key in refusals.KAFKA else None
            yield Request(head + body, label, reads=label not in _WRITES, refuse=refuse)

    def replies(self, server: socket.socket, waiting: deque[Request]) -> Iterator[tuple[bytes, Request | None, bool]]:
        """Yield frame by frame."""
        stream = Stream(server)
        while (head := stream.exactly(4)) and (body := stream.exactly(struct.unpack(">i", head)[0])):
            # of a copy: the requests' thread appends meanwhile
            request = next((one for one in waiting.copy() if one.data[8:12] == body[:4]), None)
            if request is not None:
                waiting.remove(request)
            yield head + body, request, True


class Http:
    """HTTP/1.1, one request after another in a connection."""

    fates: Final = tuple(Fate)

    def requests(self, client: socket.socket) -> Iterator[Request]:
        """Yield requests, whose bodies have a length."""
        stream = Stream(client)
        while head := stream.until(b"\r\n\r\n"):
            body = stream.exactly(int(_header(head, "content-length") or 0))
            if body is None:
                return
            method, path, _ = head.decode("latin-1").split(" ", 2)
            path = path.partition("?")[0]
            label = f"{method} {_SPECIFIC.sub('?', path)}"
            # a refresh shows what was written, and changes nothing
            reads = method in ("GET", "HEAD") or path.endswith(("_search", "_refresh"))
            yield Request(head + body, label, reads=reads, refuse=partial(refusals.of_http, head))

    def replies(self, server: socket.socket, waiting: deque[Request]) -> Iterator[tuple[bytes, Request | None, bool]]:
        """Yield whole replies."""
        stream = Stream(server)
        while head := stream.until(b"\r\n\r\n"):
            request = waiting.popleft() if waiting else None
            body: bytes | None = b""
            if request is None or not request.data.startswith(b"HEAD "):
                chunked = _header(head, "transfer-encoding") == "chunked"
                body = _chunks(stream) if chunked else stream.exactly(int(_header(head, "content-length") or 0))
            if body is None:
                return
            yield head + body, request, True


def _header(head: bytes, name: str) -> str | None:
    found = re.search(rf"\r\n{name}: *([^\r]*)", head.decode("latin-1"), re.IGNORECASE)
    return found[1] if found else None


def _chunks(stream: Stream) -> bytes | None:
    data = b""
    while line := stream.until(b"\r\n"):
        chunk = stream.exactly(int(line, 16) + 2)
        if chunk is None:
            return None
        data += line + chunk
        if chunk == b"\r\n":
            return data
    return None
