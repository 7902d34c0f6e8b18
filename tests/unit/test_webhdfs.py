"""WebHDFS without a cluster: what is said when no NameNode answers. With one: test_checkpoint_stores.py."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import accumulate
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlparse

import pytest

from epochsink.protocol import webhdfs
from epochsink.protocol.webhdfs import WebHdfs
from epochsink_devkit.services.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator


def test_without_an_address_nothing_is_asked() -> None:
    with pytest.raises(OSError, match="no NameNode's address is known"):
        WebHdfs([], "etl").size("a")


def test_each_address_is_tried_and_the_last_refusal_is_told() -> None:
    addresses = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
    with pytest.raises(ConnectionError):
        WebHdfs(addresses, "etl").size("a")


class NameNode(BaseHTTPRequestHandler):
    """Answers everything with {}, and notes from where it was asked, and for what."""

    protocol_version = "HTTP/1.1"
    asked: list[tuple[str, int]]
    paths: list[str]
    ends_silently = False

    def _answer(self) -> None:
        self.asked.append(self.client_address)
        self.paths.append(self.path)
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")
        # without a word in the answer: the client learns it by its next request
        self.close_connection = self.ends_silently

    do_GET = do_PUT = do_DELETE = _answer  # noqa: N815 - the base class's names

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        pass


@contextmanager
def served(handler: type[BaseHTTPRequestHandler]) -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def name_node() -> Iterator[ThreadingHTTPServer]:
    class Handler(NameNode):
        asked: list[tuple[str, int]] = []  # noqa: RUF012 - this server's own
        paths: list[str] = []  # noqa: RUF012 - likewise

    with served(Handler) as server:
        yield server


def ask_three_times(server: ThreadingHTTPServer) -> int:
    """Return over how many connections a NameNode was asked."""
    files = WebHdfs([f"http://127.0.0.1:{server.server_port}"], "etl", "/spool")
    files.make_folder("a")
    files.make_folder("b")
    files.remove_folder("a")
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


def test_a_file_is_made_once_and_its_folder_never(name_node: ThreadingHTTPServer) -> None:
    """A late task of a finished epoch must not make the folder again, nor write over what another has written."""
    with pytest.raises(KeyError, match="Location"):
        WebHdfs([f"http://127.0.0.1:{name_node.server_port}"], "etl", "/spool").write("a/rows")
    handler: type[NameNode] = name_node.RequestHandlerClass  # type: ignore[assignment]
    (path,) = handler.paths
    asked = parse_qs(urlparse(path).query)
    assert (asked["op"], asked["overwrite"], asked["createparent"]) == (["CREATE"], ["false"], ["false"])


CONTENT = bytes(range(256)) * 40


class DataNode(BaseHTTPRequestHandler):
    """Is the NameNode too; cuts the connection within the first answers, though it has said how long each is."""

    cuts: list[int]
    offsets: list[int]

    def do_GET(self) -> None:
        asked = parse_qs(urlparse(self.path).query)
        if "data" not in asked:
            place = f"http://{self.headers['Host']}/file?data=1&offset={asked['offset'][0]}"
            self._answer(json.dumps({"Location": place}).encode())
            return
        offset = int(asked["offset"][0])
        self.offsets.append(offset)
        self._answer(CONTENT[offset:], self.cuts.pop(0) if self.cuts else len(CONTENT))

    def _answer(self, body: bytes, most: int = len(CONTENT)) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[:most])

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        pass


@pytest.mark.parametrize("cuts", [[], [100], [100, 0, 700], [0, 0]])
def test_a_read_that_is_cut_goes_on_where_it_was_cut(cuts: list[int]) -> None:
    class Handler(DataNode):
        offsets: list[int] = []  # noqa: RUF012 - this server's own

    Handler.cuts = list(cuts)
    with served(Handler) as server, WebHdfs([f"http://127.0.0.1:{server.server_port}"], "etl").open("file") as file:
        assert file.read(5_000) + file.read(50_000) == CONTENT
    assert Handler.offsets == [0, *accumulate(cuts)]


def test_a_read_that_is_cut_again_and_again_is_an_error_of_the_store() -> None:
    class Handler(DataNode):
        offsets: list[int] = []  # noqa: RUF012 - this server's own

    Handler.cuts = [100, *[0] * 20]
    with (
        served(Handler) as server,
        WebHdfs([f"http://127.0.0.1:{server.server_port}"], "etl").open("file") as file,
        pytest.raises(ConnectionError, match="10140 bytes before the end of the file"),
    ):
        file.read(50_000)
