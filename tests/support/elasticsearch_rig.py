"""Driving the Elasticsearch sink without Spark, with rows in lists."""

from __future__ import annotations

import contextlib
import json
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from epochsink.errors import SpoolMissing
from epochsink.sink import Epoch, Identity, Joining, LastDone, Outcome, Task, Verdict, identity_key, write_all
from epochsink.testing.sink_rig import OneSink, SinkRig

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from epochsink.elasticsearch import Elasticsearch
    from epochsink.sink import Committable, Rows

Document = tuple[str, dict[str, Any] | None]
DONE: dict[str, LastDone] = {}
"""The newest epoch that the ledger of each sink calls done, by `identity_key`."""
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

    def verify(self) -> None:
        """Have no file to compare."""

    def gone(self) -> ListedRows:
        """Return the same epoch after its spool was removed."""
        return ListedRows({})


def rendered(
    documents: Sequence[Document],
    ranks: Sequence[int | None] | None = None,
    routings: Sequence[str] | None = None,
    indices: Sequence[str | None] | None = None,
) -> pa.RecordBatch:
    """Return a record batch as the JVM renders it; a document of None is deleted."""
    columns: dict[str, pa.Array] = {
        "id": pa.array(
            [json.dumps({"_id": document_id}, separators=(",", ":"))[1:] for document_id, _ in documents], pa.string()
        ),
        "source": sources([document for _, document in documents]),
    }
    if routings is not None:
        columns["routing"] = pa.array([json.dumps({"routing": each}, separators=(",", ":")) for each in routings])
    if indices is not None:
        columns["index"] = pa.array(indices, pa.string())
    if ranks is not None:
        columns["rank"] = pa.array(ranks, pa.int64())
    return pa.RecordBatch.from_pydict(columns)


def keyless(documents: Sequence[dict[str, Any]]) -> pa.RecordBatch:
    """Return a record batch of rows without a key."""
    return pa.RecordBatch.from_pydict({"source": sources(documents)})


def documents_of(sink: Elasticsearch, index: str | None = None) -> dict[str, dict[str, Any]]:
    """Return every document of an index by its id."""
    name = index or sink.index
    with contextlib.closing(sink.connected()) as server:
        server.refresh(name)
        hits = server.search(name, {"match_all": {}}, 10_000).hits
        assert server.count(name, {"match_all": {}}) == len(hits)
        return {hit["_id"]: hit["_source"] for hit in hits}


class SearchRig(SinkRig):
    """Append-only documents. What is prepared is the spool, which the coordinator keeps, not the target."""

    loses = False

    sink: Elasticsearch

    def __init__(self, sink: Elasticsearch, folder: Path) -> None:
        super().__init__(sink, folder)

    def open(self, query: str, generation: int) -> OneSink:
        opened = WithLedger.of(self.sink, self.name)
        opened.open(self.identity(query, generation))
        self._opened.append(opened)
        return opened

    def batch(self, rows: list[int]) -> pa.RecordBatch:
        return keyless([{"n": number} for number in rows])

    def schema(self) -> pa.Schema:
        return pa.schema([("n", pa.int64())])

    def visible(self) -> list[int]:
        with contextlib.closing(self.sink.connected()) as server:
            if not server.exists(self.sink.index):
                return []
        return sorted(document["n"] for document in documents_of(self.sink).values())

    def leftovers(self) -> list[str]:
        return []


class DataStreamRig(SearchRig):
    """A data stream, which rolls over at each look: what is committed again meets another backing index."""

    def batch(self, rows: list[int]) -> pa.RecordBatch:
        return keyless([{"n": number, "@timestamp": "2026-11-22T06:30:00Z"} for number in rows])

    def schema(self) -> pa.Schema:
        return pa.schema([("n", pa.int64()), ("@timestamp", pa.timestamp("us", tz="UTC"))])

    def make(self) -> None:
        """Make the stream by a document that it refuses, as Elasticsearch's development server has no API for that."""
        name = self.sink.index
        template = {"settings": {"number_of_replicas": 0}, "mappings": {"properties": {"n": {"type": "long"}}}}
        described = {"index_patterns": [name], "data_stream": {}, "template": template}
        self._send("PUT", f"/_index_template/{name}", described)
        self._send("PUT", f"/{name}/_bulk", b'{"create":{}}\n{"n":"no number"}\n')

    def visible(self) -> list[int]:
        self._send("POST", f"/{self.sink.index}/_rollover", None)
        return super().visible()

    def _send(self, method: str, target: str, body: dict[str, Any] | bytes | None) -> None:
        with contextlib.closing(self.sink.connected()) as server:
            server.client.request(method, target, body, once=True)


def sources(documents: Sequence[dict[str, Any] | None]) -> pa.Array:
    return pa.array([None if each is None else json.dumps(each) for each in documents], pa.string())


class WithLedger(OneSink):
    """A committer that is told, as a coordinator tells it, which epoch before its own is done."""

    key = ""

    def open(self, identity: Identity) -> Joining:
        self.key = identity_key(identity)
        return super().open(identity)

    def commit_all(
        self, epoch: Epoch, parts: Sequence[Committable], rows: Rows, after: LastDone | None = None
    ) -> Sequence[Verdict]:
        known = DONE.get(self.key)
        verdicts = super().commit_all(epoch, parts, rows, after or (known if _is_before(known, epoch) else None))
        is_committed = all(verdict.outcome is Outcome.COMMITTED for verdict in verdicts)
        if is_committed and (known is None or _is_before(known, epoch)):
            DONE[self.key] = LastDone(epoch.number, epoch.attempt, tuple(parts))
        return verdicts


def _is_before(done: LastDone | None, epoch: Epoch) -> bool:
    return done is not None and done.epoch < epoch.number


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
    committer: OneSink = field(init=False)

    def __post_init__(self) -> None:
        self.committer = WithLedger.of(self.sink, self.identity.sink)
        self.committer.open(self.identity)

    @classmethod
    def joining(cls, sink: Elasticsearch, schema: pa.Schema = SCHEMA) -> Rig:
        """Return a sink of a new query: checked, with a version base of its own."""
        committer = OneSink.of(sink)
        with contextlib.closing(committer):
            assert committer.check(schema) == [], committer.check(schema)
            origin = committer.open(Identity(uuid.uuid4().hex, "sink")).origin
        return cls(sink, Identity(uuid.uuid4().hex, "search", 1, origin))

    def another_driver(self) -> Rig:
        """Return the same sink of the same query, as the next driver opens it."""
        return Rig(self.sink, self.identity)

    def prepare(self, number: int, *tasks: Sequence[pa.RecordBatch], after: LastDone | None = None) -> Prepared:
        """Write tasks of record batches as one epoch, and vote."""
        epoch = Epoch(number, uuid.uuid4().hex)
        rows = ListedRows({uuid.uuid4().hex: batches for batches in tasks})
        written = []
        for partition, task in enumerate(rows.tasks()):
            writer = self.sink.writer(Task(self.identity, epoch, partition, task))
            written.append(write_all(writer, rows.read(task)))
        (part,) = self.committer.vote(epoch, written, rows, after)
        return Prepared(epoch, json.loads(json.dumps(part)), rows)

    def commit(self, prepared: Prepared, after: LastDone | None = None) -> Verdict:
        return self.committer.commit(prepared.epoch, prepared.part, prepared.rows, after)

    def apply(self, number: int, *tasks: Sequence[pa.RecordBatch]) -> Prepared:
        """Prepare and commit an epoch."""
        prepared = self.prepare(number, *tasks)
        assert self.commit(prepared).outcome.value == "committed"
        return prepared

    def stored(self, index: str | None = None) -> dict[str, dict[str, Any]]:
        """Every document of the index by its id."""
        return documents_of(self.sink, index)

    def close(self) -> None:
        self.committer.close()
