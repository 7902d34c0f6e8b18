"""The spool's files on HDFS, through its REST interface (WebHDFS, HttpFS): executors need neither libhdfs nor Java.

https://hadoop.apache.org/docs/stable/hadoop-project-dist/hadoop-hdfs/WebHDFS.html
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import ParseResult, quote, urlencode, urlparse

import pyarrow as pa

from epochsink.protocol.storage import Output, SpoolStorage
from epochsink.retry import retrying

_TIMEOUT_SECONDS: Final = 60.0
_IDLE_SECONDS: Final = 10.0
_CHUNK_BYTES: Final = 1 << 20
_READ_ATTEMPTS: Final = 5
_QUOTED: Final = "/%:@!$&'()*+,;=~"


class WebHdfs(SpoolStorage):
    """Files below a folder of one HDFS (see `epochsink.protocol.storage.SpoolStorage`).

    ``addresses`` are the HTTP addresses of its NameNodes, of which one is active; ``user`` is the user name sent to an
    HDFS that does not authenticate its clients.
    """

    def __init__(self, addresses: Sequence[str], user: str, root: str = "") -> None:
        self._addresses = list(addresses)
        self._user = user
        self._root = root.rstrip("/")

    def write(self, name: str) -> HdfsOutput:
        """Begin a file; FileNotFoundError if its folder does not exist."""
        # the NameNode names the DataNode that takes the bytes. Without createparent a late task cannot make the folder
        # of a finished epoch again
        answer = self._ask("PUT", name, op="CREATE", overwrite="false", createparent="false", noredirect="true")
        return HdfsOutput(str(answer["Location"]))

    def open(self, name: str) -> pa.NativeFile:

        def open_at(offset: int) -> http.client.HTTPResponse:
            answer = self._ask("GET", name, op="OPEN", offset=str(offset), noredirect="true")
            return _request("GET", str(answer["Location"]))

        return pa.PythonFile(HdfsInput(open_at), mode="r")

    def names(self, folder: str) -> list[str]:
        return [each["pathSuffix"] for each in self._listed(folder)]

    def make_folder(self, name: str) -> None:
        """Make a folder and those above it by one request; only this user may enter those that it makes."""
        self._ask("PUT", name, op="MKDIRS", permission="700")

    def remove_folder(self, name: str, files: Sequence[str] | None = None) -> None:
        del files
        self._ask("DELETE", name, op="DELETE", recursive="true")

    def size(self, folder: str) -> int:
        return sum(each["length"] for each in self._listed(folder))

    def _listed(self, folder: str) -> list[Any]:
        try:
            answer = self._ask("GET", folder, op="LISTSTATUS")
        except FileNotFoundError:
            return []
        return list(answer["FileStatuses"]["FileStatus"])

    def _ask(self, method: str, name: str, **parameters: str) -> Mapping[str, Any]:
        """Ask the active NameNode, over a connection that stays open. Raises OSError, FileNotFoundError."""
        path, query = f"{self._root}/{name}", urlencode({**parameters, "user.name": self._user})
        url = f"/webhdfs/v1{quote(path.rstrip('/') or '/')}?{query}"
        refused: OSError = OSError("no NameNode's address is known")
        for address in self._addresses:
            try:
                answer: Mapping[str, Any] = json.loads(_asked(method, f"{address}{url}") or b"{}")
            except _Refused as failure:
                if failure.kind != "StandbyException":
                    raise
                refused = failure
            except ConnectionError as failure:
                refused = failure
            else:
                return answer
        raise refused


class HdfsInput:
    """A file that a DataNode sends. If the connection breaks, the rest is requested again, perhaps from another one."""

    closed = False

    def __init__(self, open_at: Callable[[int], http.client.HTTPResponse]) -> None:
        self._open_at = open_at
        self._again = retrying(_breaks_off, attempts=_READ_ATTEMPTS, longest_pause=1.0)
        self._position = 0
        self._response: http.client.HTTPResponse | None = self._again(open_at, 0)

    def read(self, size: int) -> bytes:
        """Return the next bytes: exactly ``size``, except at the end. Raises OSError if the rest cannot be read."""
        read = bytearray()
        while len(read) < size and (piece := self._again(self._piece, size - len(read))):
            read += piece
        return bytes(read)

    def _piece(self, size: int) -> bytes:
        """Return some bytes, none at the end of the file. A body shorter than its announced length is not the end."""
        if self._response is None:
            self._response = self._open_at(self._position)
        response = self._response
        try:
            piece = response.read(size)
        except http.client.IncompleteRead as broken:
            piece = broken.partial
            self.close()
        except OSError:
            self.close()
            raise
        self._position += len(piece)
        if len(piece) < size and response.length:
            self.close()
            if not piece:
                raise ConnectionError(f"the data node stopped {response.length} bytes before the end of the file")
        return piece

    def close(self) -> None:
        """End the requests."""
        if self._response is not None:
            self._response.close()
        self._response = None


class HdfsOutput(Output):
    """A file that is being sent to a DataNode, which passes it on to the others."""

    def __init__(self, location: str) -> None:
        self._location = location
        self._waiting = bytearray()
        target = urlparse(location)
        self._connection = _connection(location)
        self._connection.putrequest("PUT", _target(target))
        self._connection.putheader("Content-Type", "application/octet-stream")
        self._connection.putheader("Transfer-Encoding", "chunked")
        self._connection.endheaders()

    def write(self, data: Any) -> None:
        self._waiting += data
        if len(self._waiting) >= _CHUNK_BYTES:
            self._send()

    def close(self) -> None:
        """Finish the file; OSError unless HDFS has it."""
        # a DataNode that refuses answers and closes: the answer tells more than the broken connection
        with suppress(BrokenPipeError, ConnectionResetError):
            if self._waiting:
                self._send()
            self._connection.send(b"0\r\n\r\n")
        response = self._connection.getresponse()
        with response:
            _raise_refusal(response, self._location, response.read())
        self._connection.close()

    def _send(self) -> None:
        self._connection.send(b"%x\r\n%b\r\n" % (len(self._waiting), bytes(self._waiting)))
        self._waiting.clear()


def _breaks_off(failure: BaseException) -> bool:
    return isinstance(failure, OSError) and not isinstance(failure, (FileNotFoundError, _Refused))


class _Refused(OSError):
    """HDFS has refused a request."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class _Kept(threading.local):
    """Each thread's connections to NameNodes, by scheme and address, and when they were used last."""

    def __init__(self) -> None:
        self.connections: dict[tuple[str, str], tuple[http.client.HTTPConnection, float]] = {}


_kept = _Kept()


def _asked(method: str, url: str) -> bytes:
    """Return the body of an answer. Every request may be repeated, if a closed connection has lost it."""
    target = urlparse(url)
    connection, used = _kept.connections.pop((target.scheme, target.netloc), (None, 0.0))
    if connection is not None:
        # a long idle connection may be dead without a sign, and the request would wait until its time-out
        if time.monotonic() - used < _IDLE_SECONDS:
            with suppress(ConnectionError):
                return _answered(connection, method, url)
        connection.close()
    return _answered(_connection(url), method, url)


def _answered(connection: http.client.HTTPConnection, method: str, url: str) -> bytes:
    target = urlparse(url)
    response = _sent(connection, method, url)
    with response:
        body = response.read()
    if not response.will_close:
        _kept.connections[target.scheme, target.netloc] = (connection, time.monotonic())
    _raise_refusal(response, url, body)
    return body


def _request(method: str, url: str) -> http.client.HTTPResponse:
    response = _sent(_connection(url), method, url)
    if response.status >= HTTPStatus.MULTIPLE_CHOICES:
        with response:
            _raise_refusal(response, url, response.read())
    return response


def _sent(connection: http.client.HTTPConnection, method: str, url: str) -> http.client.HTTPResponse:
    target = urlparse(url)
    try:
        # with a length of 0: otherwise a NameNode waits for a body
        connection.request(method, _target(target), headers={"Content-Length": "0"})
        return connection.getresponse()
    except http.client.RemoteDisconnected:
        raise
    except http.client.HTTPException as broken:
        raise ConnectionError(f"{target.netloc} does not answer as WebHDFS does: {broken!r}") from broken


def _target(url: ParseResult) -> str:
    # HDFS quotes spaces in its redirects, and leaves letters beyond ASCII as they are
    return f"{quote(url.path, safe=_QUOTED)}?{quote(url.query, safe=_QUOTED)}"


def _connection(url: str) -> http.client.HTTPConnection:
    target = urlparse(url)
    kind = http.client.HTTPSConnection if target.scheme == "https" else http.client.HTTPConnection
    return kind(target.netloc, timeout=_TIMEOUT_SECONDS)


def _raise_refusal(response: http.client.HTTPResponse, url: str, body: bytes) -> None:
    if response.status < HTTPStatus.MULTIPLE_CHOICES:
        return
    try:
        said = json.loads(body)["RemoteException"]
    except (ValueError, KeyError, TypeError):
        raise _Refused(f"HTTP {response.status}", f"{urlparse(url).netloc}: {response.reason}") from None
    message = str(said["message"]).partition("\n")[0]
    if said["exception"] == "FileNotFoundException":
        raise FileNotFoundError(message)
    raise _Refused(str(said["exception"]), message)
