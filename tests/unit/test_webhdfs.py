"""WebHDFS without a cluster: what is said when no NameNode answers. With one: test_checkpoint_stores.py."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import pytest

from epochsink.devkit.services.ports import free_port
from epochsink.protocol import webhdfs
from epochsink.protocol.webhdfs import WebHdfs

if TYPE_CHECKING:
    from collections.abc import Iterator


def test_without_an_address_nothing_is_asked() -> None:
    with pytest.raises(OSError, match="no NameNode's address is known"):
        WebHdfs([], "etl").check()


def test_each_address_is_tried_and_the_last_refusal_is_told() -> None:
    addresses = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
    with pytest.raises(ConnectionError):
        WebHdfs(addresses, "etl").check()


class NameNode(BaseHTTPRequestHandler):
    """Answers everything with {}, and notes from where it was asked."""

    protocol_version = "HTTP/1.1"
    asked: list[tuple[str, int]]
    ends_silently = False

    def _answer(self) -> None:
        self.asked.append(self.client_address)
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")
        # without a word in the answer: the client learns it by its next request
        self.close_connection = self.ends_silently

    do_GET = do_PUT = do_DELETE = _answer  # noqa: N815 - the base class's names

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        pass


@pytest.fixture
def name_node() -> Iterator[ThreadingHTTPServer]:
    class Handler(NameNode):
        asked: list[tuple[str, int]] = []  # noqa: RUF012 - this server's own

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def ask_three_times(server: ThreadingHTTPServer) -> int:
    """Return over how many connections a NameNode was asked."""
    files = WebHdfs([f"http://127.0.0.1:{server.server_port}"], "etl")
    files.make_folder("/spool", "a")
    files.check()
    files.remove_folder("/spool/a")
    handler: type[NameNode] = server.RequestHandlerClass  # type: ignore[assignment]
    assert len(handler.asked) == 3
    return len(set(handler.asked))


def test_a_name_node_is_asked_over_one_connection(name_node: ThreadingHTTPServer) -> None:
    assert ask_three_times(name_node) == 1


def test_a_connection_that_the_name_node_has_closed_is_opened_again(name_node: ThreadingHTTPServer) -> None:
    handler: type[NameNode] = name_node.RequestHandlerClass  # type: ignore[assignment]
    handler.ends_silently = True
    assert ask_three_times(name_node) == 3


def test_a_connection_that_was_idle_for_long_is_not_used_again(
    name_node: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A firewall may have forgotten it, and say so to nobody."""
    monkeypatch.setattr(webhdfs, "_IDLE_SECONDS", 0.0)
    assert ask_three_times(name_node) == 3
