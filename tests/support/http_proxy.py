"""A proxy before Elasticsearch that answers badly on purpose, or lets the server have a part of a request only."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


_ACTION: Final = b'"version_type"'
_KEPT: Final = frozenset({"content-type", "x-elastic-product", "content-encoding"})
_USUAL: Final = {"content-type": "application/json", "x-elastic-product": "Elasticsearch"}


@dataclass(frozen=True)
class Answer:
    """What the proxy says instead of the server."""

    status: int
    body: bytes = b"{}"
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Lost:
    """The client gets no answer. ``share`` of the body reaches the server before the connection breaks."""

    share: float = 1.0


class Seen:
    """One request as the proxy saw it."""

    def __init__(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> None:
        self.method = method
        self.path = path
        self.headers = {name.lower(): value for name, value in headers.items()}
        self.body = body

    @property
    def is_bulk(self) -> bool:
        return self.path.partition("?")[0].endswith("/_bulk")

    @property
    def forwarded_headers(self) -> dict[str, str]:
        """The headers without those that the connection makes itself."""
        return {name: value for name, value in self.headers.items() if name not in {"host", "content-length"}}

    @property
    def ids(self) -> list[str]:
        """The ids of a bulk request's operations."""
        return [action["_id"] for action in self._actions()]

    @property
    def versions(self) -> set[int]:
        """The versions of a bulk request's operations."""
        return {action["version"] for action in self._actions()}

    @property
    def operations(self) -> list[bytes]:
        """The operations of a bulk request, each with its document's line if it has one."""
        found: list[bytes] = []
        for line in self.body.splitlines(keepends=True):
            if _ACTION in line:
                found.append(line)
            else:
                found[-1] += line
        return found

    def only(self, operations: Sequence[bytes]) -> Seen:
        """Return the same request with some of its operations only."""
        return Seen(self.method, self.path, {**self.headers, "content-encoding": "identity"}, b"".join(operations))

    def _actions(self) -> list[dict[str, Any]]:
        actions = [json.loads(line) for line in self.body.splitlines() if _ACTION in line]
        return [fields for action in actions for fields in action.values()]


class Proxy:
    """An HTTP server before Elasticsearch (or alone): ``behave`` answers a request, or lets it through with None."""

    def __init__(self, behind: str | None, behave: Callable[[Seen], Answer | Lost | None]) -> None:
        self.seen: list[Seen] = []
        self.wake = threading.Event()
        self.behave = behave
        self._behind = urlsplit(behind) if behind else None
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.server.daemon_threads = True
        self.server.handle_error = lambda *_: None  # type: ignore[method-assign]
        self._thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02})

    @property
    def port(self) -> int:
        return self.server.server_address[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def bulks(self) -> list[Seen]:
        return [seen for seen in self.seen if seen.is_bulk]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self._thread.join()
        self.server.server_close()

    def forward(self, seen: Seen) -> Answer:
        """Ask the server behind."""
        with contextlib.closing(self._connect()) as connection:
            connection.request(seen.method, seen.path, seen.body or None, seen.forwarded_headers)
            answer = connection.getresponse()
            body = answer.read()
            kept = {name.lower(): value for name, value in answer.getheaders() if name.lower() in _KEPT}
            return Answer(answer.status, body, kept)

    def lose(self, seen: Seen, share: float) -> None:
        """Send the server a share of a request, and take no notice of its answer."""
        if share == 1:
            self.forward(seen)
        elif share > 0:
            self._break_off(seen, share)

    def _break_off(self, seen: Seen, share: float) -> None:
        with contextlib.closing(self._connect()) as connection:
            connection.putrequest(seen.method, seen.path, skip_accept_encoding=True)
            for name, value in {**seen.forwarded_headers, "content-length": str(len(seen.body))}.items():
                connection.putheader(name, value)
            connection.endheaders(seen.body[: int(share * len(seen.body))])

    def _connect(self) -> http.client.HTTPConnection:
        assert self._behind is not None
        assert self._behind.hostname is not None
        return http.client.HTTPConnection(self._behind.hostname, self._behind.port, timeout=60)

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _handle(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                seen = Seen(self.command, self.path, dict(self.headers.items()), body)
                proxy.seen.append(seen)
                answer = proxy.behave(seen)
                if isinstance(answer, Lost):
                    self.close_connection = True
                    proxy.lose(seen, answer.share)
                else:
                    self._reply(answer or proxy.forward(seen))

            do_GET = do_POST = do_PUT = do_HEAD = do_DELETE = _handle  # noqa: N815 - the base class's names

            def _reply(self, answer: Answer) -> None:
                self.send_response(answer.status)
                for name, value in {**_USUAL, **answer.headers}.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(answer.body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(answer.body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
                pass

        return Handler


def refuse_some(proxy: Proxy, seen: Seen, refused: Callable[[str], bool], error: Mapping[str, Any]) -> Answer:
    """Forward the operations that are not refused, and answer as the server would for all of them."""
    each = zip(seen.ids, seen.operations, strict=True)
    kept = [operation for document_id, operation in each if not refused(document_id)]
    errors = len(kept) < len(seen.ids)
    if kept:
        proxy.forward(seen.only(kept))
    if "items" not in seen.path:
        return Answer(200, json.dumps({"errors": errors}).encode())
    items = [{"index": dict(error) if refused(document_id) else {"status": 200}} for document_id in seen.ids]
    return Answer(200, json.dumps({"errors": errors, "items": items}).encode())
