"""Driving the Elasticsearch sink without Spark: rows in lists, and a proxy that answers badly on purpose."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import threading
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

import pyarrow as pa

from epochsink.errors import SpoolMissing
from epochsink.protocol import Epoch, Identity, Task, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from epochsink.elasticsearch import Elasticsearch
    from epochsink.elasticsearch.committer import ElasticsearchCommitter
    from epochsink.protocol import Committable

Document = tuple[str, dict[str, Any] | None]
SCHEMA = pa.schema([("id", pa.string()), ("n", pa.int64()), ("at", pa.timestamp("us", tz="UTC"))])


class ListedRows:
    """Rows of one epoch in lists."""

    def __init__(self, batches: Mapping[str, Sequence[pa.RecordBatch]]) -> None:
        self._batches = dict(batches)

    def tasks(self) -> Sequence[str]:
        return list(self._batches)

    def read(self, task: str) -> Iterator[pa.RecordBatch]:
        if task not in self._batches:
            raise SpoolMissing(f"task {task} has no file")
        yield from self._batches[task]

    def gone(self) -> ListedRows:
        """Return the same epoch after its spool was removed."""
        return ListedRows({})


def rendered(documents: Sequence[Document], ranks: Sequence[int | None] | None = None) -> pa.RecordBatch:
    """Return a record batch as the JVM renders it; a document of None is deleted."""
    columns: dict[str, pa.Array] = {
        "id": pa.array(
            [json.dumps({"_id": document_id}, separators=(",", ":"))[1:] for document_id, _ in documents], pa.string()
        ),
        "source": sources([document for _, document in documents]),
    }
    if ranks is not None:
        columns["rank"] = pa.array(ranks, pa.int64())
    return pa.RecordBatch.from_pydict(columns)


def keyless(documents: Sequence[dict[str, Any]]) -> pa.RecordBatch:
    """Return a record batch of rows without a key."""
    return pa.RecordBatch.from_pydict({"source": sources(documents)})


def sources(documents: Sequence[dict[str, Any] | None]) -> pa.Array:
    return pa.array([None if each is None else json.dumps(each) for each in documents], pa.string())


@dataclass(frozen=True)
class Prepared:
    """An epoch after its vote."""

    epoch: Epoch
    part: Committable
    rows: ListedRows


@dataclass
class Rig:
    """One sink with its committer, as one driver has them."""

    sink: Elasticsearch
    identity: Identity
    committer: ElasticsearchCommitter = field(init=False)

    def __post_init__(self) -> None:
        self.committer = self.sink.committer()
        self.committer.open(self.identity)

    @classmethod
    def joining(cls, sink: Elasticsearch, schema: pa.Schema = SCHEMA) -> Rig:
        """Return a sink of a new query: checked, with a version base of its own."""
        committer = sink.committer()
        with contextlib.closing(committer):
            assert committer.check(schema) == []
            origin = committer.found()
        return cls(sink, Identity(uuid.uuid4().hex, "search", 1, origin))

    def another_driver(self) -> Rig:
        """Return the same sink of the same query, as the next driver opens it."""
        return Rig(self.sink, self.identity)

    def prepare(self, number: int, *tasks: Sequence[pa.RecordBatch]) -> Prepared:
        """Write tasks of record batches as one epoch, and vote."""
        epoch = Epoch(number, uuid.uuid4().hex)
        rows = ListedRows({uuid.uuid4().hex: batches for batches in tasks})
        written = []
        for slot, task in enumerate(rows.tasks()):
            writer = self.sink.writer(Task(self.identity, epoch, slot, task))
            for batch in rows.read(task):
                writer.write(batch)
            written.append(writer.prepare())
        (part,) = self.committer.vote(epoch, written, rows)
        return Prepared(epoch, json.loads(json.dumps(part)), rows)

    def commit(self, prepared: Prepared) -> Verdict:
        return self.committer.commit(prepared.epoch, prepared.part, prepared.rows)

    def apply(self, number: int, *tasks: Sequence[pa.RecordBatch]) -> Prepared:
        """Prepare and commit an epoch."""
        prepared = self.prepare(number, *tasks)
        assert self.commit(prepared).outcome.value == "committed"
        return prepared

    def stored(self, index: str | None = None) -> dict[str, dict[str, Any]]:
        """Every document of the index by its id."""
        client = self.sink.connect()
        with contextlib.closing(client):
            name = index or self.sink.index
            client.indices.refresh(index=name)
            found = client.search(index=name, size=10_000)["hits"]
            assert found["total"]["value"] == len(found["hits"])
            return {hit["_id"]: hit["_source"] for hit in found["hits"]}

    def close(self) -> None:
        self.committer.close()


@dataclass(frozen=True)
class Answer:
    """What the proxy says instead of the server."""

    status: int
    body: bytes = b"{}"
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Lost:
    """The server gets the request, the client no answer."""


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
    def ids(self) -> list[str]:
        """The ids of a bulk request's operations."""
        actions = [json.loads(line) for line in self.body.splitlines() if b'"version_type"' in line]
        return [fields["_id"] for action in actions for fields in action.values()]


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
        assert self._behind is not None
        assert self._behind.hostname is not None
        connection = http.client.HTTPConnection(self._behind.hostname, self._behind.port, timeout=60)
        with contextlib.closing(connection):
            headers = {name: value for name, value in seen.headers.items() if name not in {"host", "content-length"}}
            connection.request(seen.method, seen.path, seen.body or None, headers)
            answer = connection.getresponse()
            body = answer.read()
            kept = {name.lower(): value for name, value in answer.getheaders() if name.lower() in _KEPT}
            return Answer(answer.status, body, kept)

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _handle(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                seen = Seen(self.command, self.path, dict(self.headers.items()), body)
                proxy.seen.append(seen)
                answer = proxy.behave(seen)
                if answer is None or isinstance(answer, Lost):
                    lost, answer = answer is not None, proxy.forward(seen)
                    if lost:
                        self.close_connection = True
                        return
                self._reply(answer)

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


_KEPT = {"content-type", "x-elastic-product", "content-encoding"}
_USUAL = {"content-type": "application/json", "x-elastic-product": "Elasticsearch"}


def refuse_some(proxy: Proxy, seen: Seen, refused: Callable[[str], bool], error: Mapping[str, Any]) -> Answer:
    """Forward the operations that are not refused, and answer as the server would for all of them."""
    lines = seen.body.splitlines(keepends=True)
    operations = list(zip(seen.ids, lines[::2], lines[1::2], strict=True))
    kept = b"".join(action + document for document_id, action, document in operations if not refused(document_id))
    if kept:
        proxy.forward(Seen(seen.method, seen.path, {**seen.headers, "content-encoding": "identity"}, kept))
    if "items" not in seen.path:
        return Answer(200, json.dumps({"errors": len(kept) < len(seen.body)}).encode())
    items = [{"index": dict(error) if refused(document_id) else {"status": 200}} for document_id in seen.ids]
    return Answer(200, json.dumps({"errors": len(kept) < len(seen.body), "items": items}).encode())
