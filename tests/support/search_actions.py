"""What a search sink makes its server do: the names of the actions, by which roles and permissions allow requests.

The development servers have no security. They log the name of each action that they run.
"""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from elasticsearch_rig import Rig, keyless, rendered

from epochsink.sink import Outcome

if TYPE_CHECKING:
    from elasticsearch_rig import Document
    from fix_services import FreshName

    from epochsink import Elasticsearch
    from epochsink_devkit.services import ElasticsearchService

OWN: Final = {"indices:admin/index_template/put", "indices:admin/rollover", "indices:monitor/stats"}
"""What the test itself asks for; a rollover looks at statistics."""


def actions(kind: type[Elasticsearch], server: ElasticsearchService, fresh_index: FreshName) -> set[str]:
    """Run sinks of this class in each of their ways; return what that made the server do, without what is its own."""
    log = Path(server.log_path)
    index, other, letters, pipeline = fresh_index(), fresh_index(), fresh_index(), "epochsink-test-rights"
    common: dict[str, Any] = {"hosts": server.url, "key": "id", "create": {"number_of_replicas": 0}}
    dead: dict[str, Any] = {"on_rejected": "dead_letter", "dead_letter_index": letters}
    stream = kind(server.url, index=fresh_index())
    trace = f"logger.org.{server.name}.tasks.TaskManager"
    ask(stream, "PUT", f"/_ingest/pipeline/{pipeline}", {"processors": []})
    ask(stream, "PUT", "/_cluster/settings", {"persistent": {trace: "TRACE"}})
    begin = log.stat().st_size
    try:
        live(kind(**common, index=index, delete_when="n IS NULL", validate=True))
        append(stream)
        live(kind(**common, **dead, index=other, pipeline=pipeline), ("c", {"n": "no number"}))
    finally:
        done = log.read_bytes()[begin:].decode()
        ask(stream, "PUT", "/_cluster/settings", {"persistent": {trace: None}})
    named = set(re.findall(r"TaskManager.*? register \d+ \[(?:transport|direct)\] \[([\w:/]+)", done))
    return {name for name in named if re.match(r"(cluster|indices):", name) and "/seq_no/" not in name} - OWN


def ask(sink: Elasticsearch, method: str, target: str, body: dict[str, Any] | bytes | None = None) -> Any:
    """Send a request of the test's own; return the answer."""
    with closing(sink.connected()) as server:
        return server.client.request(method, target, body, once=True).body


def live(sink: Elasticsearch, *odd: Document) -> None:
    """Let a sink check, write, delete, apply an epoch of an earlier driver, and look for what is left."""
    with closing(Rig.joining(sink)) as rig:
        rig.apply(0, [rendered([("a", {"n": 1}), ("b", {"n": 2}), *odd])])
        rig.apply(1, [rendered([("a", None), ("b", {"n": 3})])])
        prepared = rig.prepare(2, [rendered([("b", {"n": 4})])])
        with closing(rig.another_driver()) as other:
            assert other.commit(prepared).outcome is Outcome.COMMITTED
            assert other.commit(prepared).outcome is Outcome.COMMITTED
            assert other.committer.newest() == 2


def append(sink: Elasticsearch) -> None:
    """Let a sink append to a data stream, also after a rollover."""
    name = sink.index
    ask(sink, "PUT", f"/_index_template/{name}", {"index_patterns": [name], "data_stream": {}})
    ask(sink, "POST", f"/{name}/_bulk", b'{"create": {}}\n{"@timestamp": "2026-11-22T06:30:00Z"}\n')
    batch = keyless([{"@timestamp": "2026-11-22T06:30:00Z"}])
    with closing(Rig.joining(sink, pa.schema([("@timestamp", pa.timestamp("us", tz="UTC"))]))) as rig:
        prepared = rig.prepare(0, [batch])
        ask(sink, "POST", f"/{name}/_rollover")
        assert rig.commit(prepared).outcome is Outcome.COMMITTED
